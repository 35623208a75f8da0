"""`--plan here`: what this machine takes, measured: parts of the model, messages, processes side by side."""

import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from colossal_vit import typed_json
from colossal_vit.config.load import plain
from colossal_vit.config.schema import GROUPS
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.reduction import reduce_to_owner
from colossal_vit.errors import UserError
from colossal_vit.files import write_text
from colossal_vit.launch.startup import find_output
from colossal_vit.plan.enumeration import Choice, divisors
from colossal_vit.plan.machines import HERE, RESERVED_GB
from colossal_vit.plan.meter import SENT_SHARE
from colossal_vit.plan.report import in_fork, in_forks
from colossal_vit.plan.request import Request
from colossal_vit.plan.trace import KINDS, PARTS, Message, Pass, TensorParallel, mark_parts
from colossal_vit.provenance import hardware
from colossal_vit.typed_json import RECORD, Count
from pydantic import AfterValidator, AwareDatetime, Field
from torch import Tensor
from typing_extensions import TypedDict

VALID_DAYS = 7
QUIET = 0.1  # share of the cores that other processes may use, and by which rounds may differ
QUIET_WAIT_S = 60.0  # for a busy machine to become quiet
LOOK_S = 1.0  # at who uses the cores
REPEATS = 3  # of what is timed in a round; the median counts
MOST_SIZES = 4  # of micro-batches that are timed; times in between are on lines between them
BESIDE_S = 1.0  # for which processes compute side by side
ROUNDS = 5  # spread over time; the medians count
MESSAGE_CALLS = 8  # of a collective, one after the other
MESSAGES = (2**12, 2**22)  # bytes; the time in between is taken to be linear
# Config keys on which the times of a model's parts depend: not the number of blocks, of which two are timed.
MODEL = (*(key for key in GROUPS["Model"] if key not in ("DEPTH", "CHECKPOINT")), "OPTIMIZER", "fp16", "TF32")


def _growing(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    images = [number for number, _ in points]
    if images != sorted(set(images)):
        raise ValueError("numbers of images must grow")
    return points


# What a calibration may have in its fields. All figures have an upper limit, so that sums of them stay finite.
Above0 = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1e6)]
NotNegative = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1e6)]
Points = Annotated[list[tuple[Count, Above0]], Field(min_length=1), AfterValidator(_growing)]
KindAndSize = Annotated[str, Field(pattern=r"^[a-z_]+ [1-9]\d{0,9}$")]
NumRanks = Annotated[int, Field(ge=1)]


class Origin(TypedDict):
    """When a calibration was made, and what else it is valid for, see `origin`."""

    __pydantic_config__ = RECORD
    date: AwareDatetime


@dataclass
class Here:
    """A `Machine` by measurements. Seconds are those of a process that computes alone, unless it says otherwise.

    Attributes:
        made: when, on which machine, with which torch, for how many processes, and for which model.
        memory_gb: of this machine for each process.
        reserved_gb: of that, what a process takes beside its tensors.
        busy: share of the cores that other processes used meanwhile.
        spread: by how much the rounds differ, as a share.
        parts: by tensor parallelism, part and pass: images of a micro-batch, and seconds.
        updates: by tensor parallelism: of an optimizer step for each element, and what a step takes beside its parts.
        messages: by kind of collective and size of the group: latency, and seconds per byte, while all processes send.
        speeds: by number of processes that compute: of each, relative to one alone.
    """

    made: Origin
    memory_gb: Above0
    reserved_gb: NotNegative
    busy: NotNegative
    spread: NotNegative
    parts: dict[str, Points] = field(default_factory=dict)
    updates: dict[str, tuple[Above0, NotNegative]] = field(default_factory=dict)
    messages: dict[KindAndSize, tuple[NotNegative, NotNegative]] = field(default_factory=dict)
    speeds: dict[NumRanks, Above0] = field(default_factory=dict)
    ranks_per_node = 2**30

    @property
    def overlap(self) -> bool:
        """On CPUs messages take the cores' time."""
        return bool(self.made["gpus"])

    @property
    def noise(self) -> float:
        """Predicted times that differ by less, as a share, may be equal."""
        return max(self.busy, self.spread)

    @property
    def warning(self) -> str | None:
        """What is to be said of a calibration on a machine that was not quiet."""
        if self.noise <= QUIET:
            return None
        return (
            f"warning: on {self.made['date'].astimezone():%F %R}, when this machine was measured, other processes used "
            f"{self.busy:.0%} of its cores, and rounds differed by {self.spread:.0%}: repeat --plan here when it is "
            f"quiet"
        )

    def compute(self, part: tuple, record: Pass) -> float:
        tensor, name, kind, images = part
        return float(np.interp(images, *zip(*self.parts[f"{tensor} {name} {kind}"], strict=True)))

    def send(self, message: Message, on_node: int) -> float:
        if message.size == 1 or not self.messages:
            return 0.0
        sizes = [int(key.split()[1]) for key in self.messages if key.split()[0] == message.kind]
        nearest = min((size for size in sizes if size >= message.size), default=max(sizes))
        latency, per_byte = self.messages[f"{message.kind} {nearest}"]
        return latency + per_byte * message.nbytes

    def update(self, part: tuple, num_bytes: float, elements: float) -> float:
        per_element, rest = self.updates[str(part[0])]
        return per_element * elements + rest

    def speed(self, num_active: int) -> float:
        counts = sorted(self.speeds)
        return float(np.interp(num_active, counts, [n * self.speeds[n] for n in counts])) / num_active


def _synchronize() -> float:
    """The time, when the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock(engine: Engine, batches: Iterable, sizes: Sequence[int], barrier: Any) -> dict[str, list[float]]:
    """Time the parts of a model of two blocks, and the update, beside the processes that wait at the same barrier.

    Args:
        engine: without data parallelism and pipeline; messages to other ranks go nowhere.
        batches: of images and labels; the first is used.
        sizes: of micro-batches, at most that of the batch.
        barrier: of all processes.

    Returns:
        By part and pass: seconds with a micro-batch of each size. And as "update" what is in `Here.updates`.
    """
    images, labels = next(iter(batches))
    found: dict[str, list[float]] = {}
    spans: list[tuple[str, float]] = []
    handles = mark_parts(engine.bare_model, lambda part, kind: spans.append((f"{part} {kind}", _synchronize())))
    engine.train()
    updates, wholes = [], []

    def step(size: int) -> None:
        spans.append(("embed forward", _synchronize()))
        loss = engine.criterion(engine(images[:size]), labels[:size])
        spans.append(("head backward", _synchronize()))
        engine.backward(loss)
        spans.append(("update", _synchronize()))
        engine.step()
        spans.append(("", _synchronize()))
        engine.zero_grad()

    step(sizes[-1])
    barrier.wait()
    for size in sizes:
        runs: dict[str, list[float]] = {}
        for number in range(1 + REPEATS):
            spans.clear()
            step(size)
            for (name, start), (_, end) in pairwise(spans):
                if number:
                    runs.setdefault(name, []).append(end - start)
        updates += runs.pop("update")
        for name, seconds in runs.items():
            found.setdefault(name, []).append(statistics.median(seconds))
    for handle in handles:
        handle.remove()
    for _ in range(1 + REPEATS):  # what a step takes beside its parts
        started = _synchronize()
        engine.zero_grad()
        engine.execute_schedule(iter([(images[: sizes[-1]], labels[: sizes[-1]])]))
        engine.step()
        wholes.append(_synchronize() - started)
    update = statistics.median(updates)
    rest = statistics.median(wholes[1:]) - update - sum(seconds[-1] for seconds in found.values())
    found["update"] = [update / sum(p.numel() for p in engine.bare_model.parameters()), max(rest, 0.0)]
    return found


def work(engine: Engine, batches: Iterable, barrier: Any) -> float:
    """Forward and backward passes per second, beside the processes that wait at the same barrier."""
    images, labels = next(iter(batches))
    engine.train()

    def step() -> None:
        engine.backward(engine.criterion(engine(images), labels))
        engine.zero_grad()

    step()
    barrier.wait()
    started, count = _synchronize(), 0
    while _synchronize() - started < BESIDE_S:
        step()
        count += 1
    return count / (_synchronize() - started)


def _collectives(size: int, group: Any, ranks: list[int]) -> dict[str, Callable[[Tensor], Any]]:
    """By kind: a collective on a message; of all-gather and reduce-scatter, the message is the full tensor."""
    place = ranks.index(dist.get_rank())

    def send(message: Tensor) -> None:
        if place < 2:
            other = ranks[1 - place]
            dist.send(message, other, group) if place == 0 else dist.recv(message, other, group)

    def in_parts(start: Callable[[Tensor, int, Any], Any]) -> Callable[[Tensor], None]:
        """As of gradients and weights, each part has another owner."""

        def collective(message: Tensor) -> None:
            for part in [start(part, owner, group) for owner, part in enumerate(message.chunk(size))]:
                part.wait()

        return collective

    def broadcast(part: Tensor, owner: int, group: Any) -> dist.Work:
        return dist.broadcast(part, group=group, group_src=owner, async_op=True)

    return {
        "all_reduce": lambda message: dist.all_reduce(message, group=group),
        "all_gather": lambda message: dist.all_gather(list(message.chunk(size)), message.chunk(size)[0].clone(), group),
        "reduce_scatter": lambda message: dist.reduce_scatter(
            message.chunk(size)[0].clone(), list(message.chunk(size)), group=group
        ),
        "broadcast": in_parts(broadcast),
        "reduce": in_parts(reduce_to_owner),
        "send": send,
    }


def time_messages(rank: int, world_size: int, store: str, device: str, backend: str) -> dict[str, tuple[float, float]]:
    """On each rank: latency and seconds per byte of each collective, in groups of each size, all of them at a time."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    found = {}
    matrix = torch.ones(256, 256, device=device)

    def timed(collective: Callable[[Tensor], Any] | None, num_bytes: int) -> float:
        """Seconds of a call, between operators as in a model: ranks that share cores do not come to it together."""
        message = torch.zeros(num_bytes // 4, device=device)
        for calls in (1, MESSAGE_CALLS):
            dist.barrier()
            started = _synchronize()
            for _ in range(calls):
                matrix.mm(matrix)
                if collective:
                    collective(message)
        seconds = (_synchronize() - started) / MESSAGE_CALLS
        return max(seconds - computing, 0.0)  # a busy machine may have computed slower before

    computing = 0.0
    computing = timed(None, 4)
    for size in (n for n in range(2, world_size + 1) if world_size % n == 0):
        members = [list(range(first, first + size)) for first in range(0, world_size, size)]
        groups = [dist.new_group(ranks) for ranks in members]
        ranks, group = members[rank // size], groups[rank // size]
        for kind, collective in _collectives(size, group, ranks).items():
            small, large = (timed(collective, num_bytes) for num_bytes in MESSAGES)
            found[f"{kind} {size}"] = (small, max(large - small, 0.0) / (MESSAGES[1] - MESSAGES[0]))
    dist.destroy_process_group()
    return found


def origin(world_size: int, model: Mapping[str, Any]) -> Origin:
    """What a calibration is valid for, and when it was made."""
    place = {"host": platform.node(), **hardware(), "torch": torch.__version__}
    date = datetime.now(UTC).replace(microsecond=0)
    return {"date": date, **place, "ranks": world_size, "model": dict(model)}


def _gpu_memory(num_gpus: int) -> float:
    """Bytes that are free on the fullest of the first GPUs."""
    return min(torch.cuda.mem_get_info(index)[0] for index in range(num_gpus))


def _memory(world_size: int, gpus: Sequence[str]) -> tuple[float, float]:
    """GB for each process, and of that what it takes beside its tensors."""
    if gpus:  # who asks for their memory starts CUDA, and no fork of a process that has done so can use a GPU
        return in_fork(partial(_gpu_memory, world_size)) / 1e9, RESERVED_GB
    return psutil.virtual_memory().total / 1e9 / world_size, psutil.Process().memory_full_info().uss / 1e9


def _cpu_seconds() -> np.ndarray:
    """So far: of the clock, of this process's cores at work for anybody, and of this process and its ended children."""
    percpu = psutil.cpu_times(percpu=True)
    cores = [percpu[core] for core in os.sched_getaffinity(0) if core < len(percpu)]
    at_work = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
    return np.array([time.monotonic(), at_work, sum(os.times()[:4])])


def _busy(since: np.ndarray) -> float:
    """Share of the cores that other processes have used."""
    clock, at_work, own = _cpu_seconds() - since
    return max(at_work - own, 0.0) / (clock * len(os.sched_getaffinity(0)))


def _wait_until_quiet() -> None:
    """Wait, up to a limit, until other processes leave the cores alone."""
    until, waiting = time.monotonic() + QUIET_WAIT_S, False
    while time.monotonic() < until:
        since = _cpu_seconds()
        time.sleep(LOOK_S)
        if (busy := _busy(since)) <= QUIET:
            return
        if not waiting:
            print(
                f"other processes use {busy:.0%} of this machine's cores: waiting up to {QUIET_WAIT_S:.0f} s for it to "
                f"become quiet",
                flush=True,
            )
        waiting = True


def _some(sizes: Iterable[int]) -> list[int]:
    """Up to `MOST_SIZES` of some sizes, the least and the largest among them."""
    ordered = sorted(set(sizes))
    places = np.linspace(0, len(ordered) - 1, min(MOST_SIZES, len(ordered)))
    return [ordered[round(place)] for place in places]


def calibrate(request: Request, images: Mapping[TensorParallel, Iterable[int]], made: Origin) -> Here:
    """Measure this machine, once it is quiet.

    Args:
        request: has the model and the number of processes.
        images: by tensor parallelism, the sizes of micro-batches that matter.
        made: of `origin`.
    """
    fork, world_size = get_context("fork"), request.world_size
    cores = 1 if made["gpus"] else len(os.sched_getaffinity(0))
    beside = min(cores, world_size)  # so many are timed at a time, as they will compute
    some, most = next((tensor, max(sizes)) for tensor, sizes in images.items())
    found: dict[tuple, list] = {}  # by what is measured: of each round
    _wait_until_quiet()
    since = _cpu_seconds()
    for _ in range(ROUNDS):  # the speed of a machine changes from second to second
        for count in sorted({1, beside, world_size}):
            observe = partial(work, barrier=fork.Barrier(count))
            runs = [request.model(some, observe, most, device) for device in range(count)]
            found.setdefault(("rate", count), []).append(statistics.fmean(in_forks(runs)))
        for tensor, sizes in images.items():
            timed = _some(sizes)
            observe = partial(clock, sizes=timed, barrier=fork.Barrier(beside))
            runs = [request.model(tensor, observe, timed[-1], device) for device in range(beside)]
            for of_process in in_forks(runs):
                for name, seconds in of_process.items():
                    found.setdefault((name, tensor), []).append(seconds)
        for of_process in _messages(world_size, made["gpus"]):
            for name, seconds in of_process.items():
                found.setdefault(("message", name), []).append(seconds)

    medians = {key: np.median(values, axis=0) for key, values in found.items()}
    spread = max(np.ptp(found[key]) / 2 / rate for key, rate in medians.items() if key[0] == "rate")
    here = Here(made, *_memory(world_size, made["gpus"]), _busy(since), float(spread))
    here.speeds = {count: float(rate / medians["rate", 1]) for (kind, count), rate in medians.items() if kind == "rate"}
    for (name, of), seconds in medians.items():
        if name == "message":
            here.messages[of] = tuple(seconds.tolist())
        elif name == "update":
            here.updates[str(of)] = tuple((here.speeds[beside] * seconds).tolist())
        elif name != "rate":
            alone = (here.speeds[beside] * seconds).tolist()
            here.parts[f"{of} {name}"] = list(zip(_some(images[of]), alone, strict=True))
    return here


def _messages(world_size: int, gpus: Sequence[str]) -> list[dict[str, tuple[float, float]]]:
    """What `time_messages` returns on each of so many ranks."""
    if world_size == 1:
        return []
    device, backend = ("cuda", "nccl") if gpus else ("cpu", "gloo")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            partial(time_messages, rank, world_size, f"{folder}/store", device, backend) for rank in range(world_size)
        ]
        return in_forks(ranks)


def measured(request: Request, choices: Iterable[Choice]) -> Here:
    """This machine, measured, or read from the file that `--plan` names.

    Raises:
        UserError: if it has fewer GPUs than ranks, or the file is not usable.
    """
    name, config, output = request.args.plan, request.config, find_output(request.args)
    model = plain({key: config.get(key) for key in MODEL})
    made = origin(request.world_size, model | {"script": request.args.script, "images of a step": request.images})
    if (num_gpus := len(made["gpus"])) and request.world_size > num_gpus:
        raise UserError(
            f"--plan {name}: --world_size {request.world_size}, but this machine has {num_gpus} GPU(s): at most one "
            f"process per GPU can be timed here"
        )
    images: dict[TensorParallel, set[int]] = {}
    for choice in choices:
        images.setdefault(choice.tensor, set()).add(choice.images)
    if name != HERE:
        return load(Path(name), made, images)
    here = calibrate(request, images, made)
    save(here, output / "calibration.json")
    return here


def save(here: Here, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(dataclasses.asdict(here), indent=2, default=datetime.isoformat) + "\n")


def load(path: Path, wanted: Origin, tensors: Iterable[tuple]) -> Here:
    """A calibration from a file.

    Args:
        path: that `save` wrote.
        wanted: `origin` of the plan to be made.
        tensors: the kinds of tensor parallelism that it is needed for.

    Raises:
        UserError: if it cannot be read, is damaged, of another machine, torch, model or number of ranks, or too old.
    """
    try:
        here = typed_json.read(path, Here)
    except UserError as error:
        raise UserError(f"--plan {error}; --plan here writes one") from None
    for key, value in wanted.items():
        if key != "date" and here.made.get(key) != value:
            raise UserError(
                f"--plan {path}: was made with {key} = {here.made.get(key)!r}, here it is {value!r}: use --plan here"
            )
    ranks, tensors = wanted["ranks"], list(tensors)
    needed = {
        "parts": {f"{tensor} {part} {kind}" for tensor in tensors for part in PARTS for kind in KINDS},
        "updates": set(map(str, tensors)),
        "messages": {f"{kind} {size}" for kind in SENT_SHARE for size in divisors(ranks)[1:]},
        "speeds": {1, ranks},
    }
    for name, keys in needed.items():
        if missing := keys - getattr(here, name).keys():
            raise UserError(f"--plan {path}: {name} lacks {min(missing)!r}; --plan here writes one")
    age = wanted["date"] - here.made["date"]
    if age > timedelta(days=VALID_DAYS):
        raise UserError(
            f"--plan {path}: was made on {here.made['date']:%F}, over {VALID_DAYS} days ago: use --plan here"
        )
    if age < timedelta(minutes=-1):
        raise UserError(f"--plan {path}: made.date = {here.made['date']:%F %R} is in the future: use --plan here")
    return here
