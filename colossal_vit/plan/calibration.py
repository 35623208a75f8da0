"""`--plan here`: what this machine takes, measured: parts of the model, messages, processes side by side."""

import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from colossal_vit.main import find_output
from colossal_vit.plan.enumeration import Choice, divisors
from colossal_vit.plan.machines import HERE, RESERVED_GB
from colossal_vit.plan.memory import rank_memory
from colossal_vit.plan.meter import SENT_SHARE
from colossal_vit.plan.report import in_fork, in_forks
from colossal_vit.plan.request import Request
from colossal_vit.plan.trace import KINDS, PARTS, Message, Pass, TensorParallel, Trace, mark_parts
from colossal_vit.provenance import hardware
from colossal_vit.typed_json import RECORD, Count
from pydantic import AfterValidator, AwareDatetime, Field
from torch import Tensor
from typing_extensions import TypedDict

VALID_DAYS = 7
QUIET = 0.1  # share of the cores that other processes may use, and by which rounds may differ
QUIET_WAIT_S = 60.0  # how long to wait for a busy machine to become quiet
LOOK_S = 1.0  # how long each look at the use of the cores takes
REPEATS = 3  # steps that a round times; their median counts
MOST_SIZES = 4  # sizes of micro-batches that are timed; other times are on lines between these
BESIDE_S = 1.0  # how long processes compute side by side
ROUNDS = 5  # of all measurements, since the speed of a machine changes from second to second; the medians count
MESSAGE_CALLS = 8  # calls of a collective that are timed together
MESSAGES = (2**12, 2**22)  # bytes of a short and a long message; the time in between is taken to be linear
# Config keys on which the times of a model's parts depend: not the number of blocks, of which two are timed.
MODEL = (*(key for key in GROUPS["Model"] if key not in ("DEPTH", "CHECKPOINT")), "OPTIMIZER", "fp16", "TF32")


def _growing(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    images = [number for number, _ in points]
    if images != sorted(set(images)):
        raise ValueError("numbers of images must grow")
    return points


# The types of a calibration's fields. All figures have an upper limit, so that sums of them stay finite.
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
        memory_gb: each process's share of this machine's memory.
        reserved_gb: the part of it that a process takes beside its tensors.
        busy: share of the cores that other processes used during the measurements.
        spread: by how much the rounds differ, as a share.
        parts: images of a micro-batch and seconds, by tensor parallelism, part and pass.
        updates: seconds of the update per element, and seconds of a step beside its parts, by tensor parallelism.
        messages: latency, and seconds per byte, while all processes send, by kind of collective and size of the group.
        speeds: the speed of each process, relative to one alone, by number of processes that compute.
    """

    made: Origin
    memory_gb: Above0
    reserved_gb: NotNegative
    busy: NotNegative
    spread: NotNegative
    parts: dict[str, Points]
    updates: dict[str, tuple[Above0, NotNegative]]
    messages: dict[KindAndSize, tuple[NotNegative, NotNegative]]
    speeds: dict[NumRanks, Above0]
    ranks_per_node = 2**30

    @property
    def overlap(self) -> bool:
        """Whether messages are sent while something is computed: on CPUs they take the cores' time."""
        return bool(self.made["gpus"])

    @property
    def noise(self) -> float:
        """The share by which predicted times have to differ to be told apart."""
        return max(self.busy, self.spread)

    @property
    def warning(self) -> str | None:
        """A line about a machine that was not quiet, or None."""
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

    def update(self, tensor: TensorParallel, num_bytes: float, elements: float) -> float:
        per_element, rest = self.updates[str(tensor)]
        return per_element * elements + rest

    def speed(self, num_active: int) -> float:
        counts = sorted(self.speeds)
        return float(np.interp(num_active, counts, [n * self.speeds[n] for n in counts])) / num_active


def _synchronize() -> float:
    """Wait until the device has done everything; returns the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock(engine: Engine, batches: Iterable, sizes: Sequence[int], barrier: Any) -> dict[str, list[float]]:
    """Time the parts of a model of two blocks, and the update, at the same time as the processes at the same barrier.

    Args:
        engine: without data parallelism and pipeline; messages to other ranks go nowhere.
        batches: of images and labels; the first is used.
        sizes: of micro-batches, in ascending order, at most that of the batch.
        barrier: of all processes that compute at the same time.

    Returns:
        Seconds with a micro-batch of each size, by part and pass, such as "block forward". Under "update" the two
        figures of `Here.updates`.
    """
    images, labels = next(iter(batches))
    spans: list[tuple[str, float]] = []

    def begin(name: str) -> None:
        spans.append((name, _synchronize()))

    def step(size: int) -> dict[str, float]:
        """The seconds of each span of a step."""
        spans.clear()
        begin("embed forward")
        loss = engine.criterion(engine(images[:size]), labels[:size])
        begin("head backward")
        engine.backward(loss)
        begin("update")
        engine.step()
        begin("end")
        engine.zero_grad()
        return {name: end - start for (name, start), (_, end) in pairwise(spans)}

    def whole_step() -> float:
        started = _synchronize()
        engine.zero_grad()
        engine.execute_schedule(iter([(images[: sizes[-1]], labels[: sizes[-1]])]))
        engine.step()
        return _synchronize() - started

    handles = mark_parts(engine.bare_model, lambda part, kind: begin(f"{part} {kind}"))
    engine.train()
    step(sizes[-1])
    barrier.wait()
    steps = [[step(size) for _ in range(1 + REPEATS)][1:] for size in sizes]
    for handle in handles:
        handle.remove()
    wholes = [whole_step() for _ in range(1 + REPEATS)][1:]
    found = {name: [statistics.median(each[name] for each in of_size) for of_size in steps] for name in steps[0][0]}
    update = statistics.median(each["update"] for of_size in steps for each in of_size)
    parts = sum(seconds[-1] for name, seconds in found.items() if name != "update")
    beside_parts = max(statistics.median(wholes) - update - parts, 0.0)
    found["update"] = [update / sum(p.numel() for p in engine.bare_model.parameters()), beside_parts]
    return found


def work(engine: Engine, batches: Iterable, barrier: Any) -> float:
    """Forward and backward passes per second, at the same time as the processes at the same barrier."""
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


def _communicate(kind: str, message: Tensor, ranks: list[int], group: Any) -> None:
    """Take part in a collective of some ranks; in all-gather and reduce-scatter, the message is the full tensor."""
    place, parts = ranks.index(dist.get_rank()), list(message.chunk(len(ranks)))
    match kind:
        case "all_reduce":
            dist.all_reduce(message, group=group)
        case "all_gather":
            dist.all_gather(parts, parts[0].clone(), group)
        case "reduce_scatter":
            dist.reduce_scatter(parts[0].clone(), parts, group=group)
        case "broadcast" | "reduce":  # as with weights and gradients, each part has another owner
            started = [
                dist.broadcast(part, group=group, group_src=owner, async_op=True)
                if kind == "broadcast"
                else reduce_to_owner(part, owner, group)
                for owner, part in enumerate(parts)
            ]
            for call in started:
                call.wait()
        case "send" if place == 0:
            dist.send(message, ranks[1], group)
        case "send" if place == 1:
            dist.recv(message, ranks[0], group)


def time_messages(rank: int, world_size: int, store: str, device: str, backend: str) -> dict[str, tuple[float, float]]:
    """Latency and seconds per byte of each collective, in groups of each size, all groups at a time. On each rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    found = {}
    matrix = torch.ones(256, 256, device=device)

    def timed(communicate: Callable[[], Any]) -> float:
        """Seconds of a call and an operator before it, so that ranks which share cores arrive at different times."""
        for calls in (1, MESSAGE_CALLS):
            dist.barrier()
            started = _synchronize()
            for _ in range(calls):
                matrix.mm(matrix)
                communicate()
        return (_synchronize() - started) / MESSAGE_CALLS

    computing = timed(lambda: None)
    for size in divisors(world_size)[1:]:
        members = [list(range(first, first + size)) for first in range(0, world_size, size)]
        groups = [dist.new_group(ranks) for ranks in members]
        ranks, group = members[rank // size], groups[rank // size]
        for kind in SENT_SHARE:
            elements = (num_bytes // 4 // size * size for num_bytes in MESSAGES)  # each rank's part is as large
            messages = (torch.zeros(number, device=device) for number in elements)
            timings = (timed(partial(_communicate, kind, message, ranks, group)) for message in messages)
            small, large = (max(seconds - computing, 0.0) for seconds in timings)  # it may have computed slower before
            found[f"{kind} {size}"] = (small, max(large - small, 0.0) / (MESSAGES[1] - MESSAGES[0]))
    dist.destroy_process_group()
    return found


def origin(world_size: int, model: Mapping[str, Any]) -> Origin:
    """What a calibration is valid for, and when it was made."""
    place = {"host": platform.node(), **hardware(), "torch": torch.__version__}
    date = datetime.now(UTC).replace(microsecond=0)
    return {"date": date, **place, "ranks": world_size, "model": dict(model)}


def _memory(world_size: int, gpus: Sequence[str]) -> tuple[float, float]:
    """GB for each process, which on GPUs is what the fullest has left; and what a process takes beside its tensors."""
    if gpus:  # who asks for their memory starts CUDA, and no fork of a process that has done so can use a GPU
        free = in_fork(lambda: [torch.cuda.mem_get_info(index)[0] for index in range(world_size)])
        return min(free) / 1e9, RESERVED_GB
    return psutil.virtual_memory().total / 1e9 / world_size, psutil.Process().memory_full_info().uss / 1e9


def _cpu_seconds() -> np.ndarray:
    """Seconds so far: on the clock, of this process's cores at work, and of this process and its ended children."""
    percpu = psutil.cpu_times(percpu=True)
    cores = [percpu[core] for core in os.sched_getaffinity(0) if core < len(percpu)]
    at_work = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
    return np.array([time.monotonic(), at_work, sum(os.times()[:4])])


def _busy(since: np.ndarray) -> float:
    """Share of the cores that other processes have used since `_cpu_seconds` was called."""
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


def _sizes_to_time(sizes: Iterable[int]) -> list[int]:
    """Up to `MOST_SIZES` of the sizes, in ascending order, the smallest and the largest among them."""
    ordered = sorted(set(sizes))
    places = np.linspace(0, len(ordered) - 1, min(MOST_SIZES, len(ordered)))
    return [ordered[round(place)] for place in places]


def calibrate(request: Request, images: Mapping[TensorParallel, Iterable[int]], made: Origin) -> Here:
    """Measure this machine, once it is quiet.

    Args:
        request: has the model and the number of processes.
        images: the sizes of micro-batches that matter, by tensor parallelism.
        made: see `origin`.
    """
    fork, world_size = get_context("fork"), request.world_size
    cores = 1 if made["gpus"] else len(os.sched_getaffinity(0))
    beside = min(cores, world_size)  # processes that are timed at a time, as they will compute
    timed = {tensor: _sizes_to_time(sizes) for tensor, sizes in images.items()}
    first = next(iter(timed))
    # The measurements of all rounds and processes.
    rates: dict[int, list[float]] = {}
    parts: dict[tuple[TensorParallel, str], list[list[float]]] = {}
    messages: dict[str, list[tuple[float, float]]] = {}
    _wait_until_quiet()
    since = _cpu_seconds()
    for _ in range(ROUNDS):
        for count in sorted({1, beside, world_size}):
            observe = partial(work, barrier=fork.Barrier(count))
            runs = [request.model(first, observe, timed[first][-1], device) for device in range(count)]
            rates.setdefault(count, []).append(statistics.fmean(in_forks(runs)))
        for tensor, sizes in timed.items():
            observe = partial(clock, sizes=sizes, barrier=fork.Barrier(beside))
            runs = [request.model(tensor, observe, sizes[-1], device) for device in range(beside)]
            for of_process in in_forks(runs):
                for name, seconds in of_process.items():
                    parts.setdefault((tensor, name), []).append(seconds)
        for of_process in _messages(world_size, made["gpus"]):
            for name, seconds in of_process.items():
                messages.setdefault(name, []).append(seconds)

    rate = {count: statistics.median(found) for count, found in rates.items()}
    alone = {key: (rate[beside] / rate[1] * np.median(seconds, axis=0)).tolist() for key, seconds in parts.items()}
    return Here(
        made,
        *_memory(world_size, made["gpus"]),
        busy=_busy(since),
        spread=float(max(np.ptp(found) / 2 / rate[count] for count, found in rates.items())),
        parts={
            f"{tensor} {name}": list(zip(timed[tensor], seconds, strict=True))
            for (tensor, name), seconds in alone.items()
            if name != "update"
        },
        updates={str(tensor): tuple(seconds) for (tensor, name), seconds in alone.items() if name == "update"},
        messages={name: tuple(np.median(seconds, axis=0).tolist()) for name, seconds in messages.items()},
        speeds={count: each / rate[1] for count, each in rate.items()},
    )


def _messages(world_size: int, gpus: Sequence[str]) -> list[dict[str, tuple[float, float]]]:
    """What `time_messages` returns on each rank."""
    if world_size == 1:
        return []
    device, backend = ("cuda", "nccl") if gpus else ("cpu", "gloo")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            partial(time_messages, rank, world_size, f"{folder}/store", device, backend) for rank in range(world_size)
        ]
        return in_forks(ranks)


def measured(request: Request, choices: Iterable[Choice], trace: Callable[[TensorParallel], Trace]) -> Here:
    """This machine, measured, or read from the file that `--plan` names.

    Args:
        request: what is asked for.
        choices: layouts; those that do not fit the memory are not timed.
        trace: see `Predictor`.

    Raises:
        UserError: if it has fewer GPUs than ranks, no layout fits, or the file is not usable.
    """
    name, config, output = request.args.plan, request.config, find_output(request.args)
    model = plain({key: config.get(key) for key in MODEL})
    made = origin(request.world_size, model | {"script": request.args.script, "images of a step": request.images})
    if (num_gpus := len(made["gpus"])) and request.world_size > num_gpus:
        raise UserError(
            f"--plan {name}: --world_size {request.world_size}, but this machine has {num_gpus} GPU(s): at most one "
            f"process per GPU can be timed here"
        )
    memory_gb, reserved_gb = _memory(request.world_size, made["gpus"])
    images: dict[TensorParallel, set[int]] = {}
    for choice in choices:
        if rank_memory(config, choice, trace(choice.tensor)) <= (memory_gb - reserved_gb) * 1e9:
            images.setdefault(choice.tensor, set()).add(choice.images)
    if not images:
        raise UserError(f"--plan {name}: no layout fits the memory of a rank, {memory_gb - reserved_gb:.1f} GB")
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
        tensors: the tensor parallelism of the layouts to be predicted.

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
