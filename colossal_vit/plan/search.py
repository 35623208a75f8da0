"""`--plan MACHINE`: the step time and memory of every layout, predicted, and the best ones."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from colossal_vit.config.load import plain
from colossal_vit.config.settings import HYBRID
from colossal_vit.engine.reduction import BUCKET_BYTES
from colossal_vit.errors import UserError
from colossal_vit.launch.flags import Arguments
from colossal_vit.launch.launchers import planned_rendezvous
from colossal_vit.launch.startup import find_output, read_config
from colossal_vit.models import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.partition import partition_blocks
from colossal_vit.plan import calibration, pictures, report
from colossal_vit.plan.enumeration import Choice, enumerate_layouts, global_batch
from colossal_vit.plan.fakes import on_fake_tensors, on_real_tensors
from colossal_vit.plan.machines import HERE, Machine, find_machine
from colossal_vit.plan.memory import Chunk, cut, owned_share, rank_memory, sizes_of
from colossal_vit.plan.simulation import Cost, Event, finish, simulate
from colossal_vit.plan.trace import Message, Trace, trace
from colossal_vit.results import format_table
from colossal_vit.run import Observe
from colossalai.context import Config
from matplotlib.figure import Figure

SHOWN = 10  # layouts in the table
TRACED_IMAGES = 8  # per part of a batch; traces have half of it, too
TensorParallel = tuple[str | None, int, int | None]  # mode, size, depth


class Prediction(NamedTuple):
    """What is predicted of a layout.

    Attributes:
        choice: the layout.
        seconds: of an optimizer step.
        memory: bytes of the fullest rank, in PyTorch's tensors.
        computing, communicating, bubble: shares of the step, on average over the stages. Communicating is what nothing
            is computed beside; the bubble is waiting for other stages.
        events: of the step.
    """

    choice: Choice
    seconds: float
    memory: float
    computing: float
    communicating: float
    bubble: float
    events: list[Event]


class _Stage(NamedTuple):
    """Seconds of a stage: of its chunks, tensor-parallel messages included; and those messages alone, per pass."""

    costs: list[Cost]
    messages: float
    reduction: float
    broadcast: float
    num_buckets: int
    update: float

    def least(self, passes: int) -> float:
        return passes * sum(map(sum, self.costs)) + self.update


class Predictor:
    """Predicts layouts of one model on one machine.

    Args:
        config: of the run.
        machine: that it is to run on.
        traces: of the model, by tensor parallelism.
    """

    def __init__(self, config: Config, machine: Machine, traces: Mapping[TensorParallel, Trace]):
        self.config, self.machine, self.traces = config, machine, traces
        self.image_bytes = 3 * 4 * config.IMG_SIZE**2
        self._part = cache(self._part)
        self._chunks = cache(self._chunks)

    def _part(self, tensor: TensorParallel, part: str, kind: str, images: int) -> tuple[float, float]:
        """Seconds of computing and of messages of a part's pass."""
        record = self.traces[tensor].part(part, kind, images)
        on_node = self.machine.ranks_per_node if tensor[1] <= self.machine.ranks_per_node else 1
        sent = sum(self.machine.send(message, on_node) for message in record.messages)
        return self.machine.compute((tensor, part, kind, images), record), sent

    def _ranks_on_node(self, layout: Layout) -> int:
        """How many ranks share a node; all of them compute in updates, and while messages are timed."""
        return min(layout.data * layout.pipeline * layout.tensor, self.machine.ranks_per_node)

    def _chunks(self, num_stages: int, num_chunks: int) -> list[list[Chunk]]:
        return cut(partition_blocks(self.config, num_stages * num_chunks), num_stages)

    def _stage(self, choice: Choice, chunks: list[Chunk]) -> _Stage:
        costs, messages = [], 0.0
        all_busy = self.machine.speed(self._ranks_on_node(choice.layout))
        for chunk in chunks:
            seconds = {"forward": 0.0, "backward": 0.0}
            for part, count in chunk.parts():
                for kind in seconds:
                    again = ["forward"] if kind == "backward" and choice.checkpoint and part == "block" else []
                    for each in (kind, *again):
                        computing, sent = self._part(choice.tensor, part, each, choice.images)
                        sent *= all_busy
                        seconds[kind] += count * (computing + sent)
                        messages += count * sent
            costs.append(Cost(**seconds))
        layout, traced = choice.layout, self.traces[choice.tensor]
        sizes = sizes_of(chunks, traced)
        share = owned_share(sizes, layout.data) if choice.zero else 1.0
        num_bytes = traced.weight_bytes * sum(sizes)
        on_node = max(self.machine.ranks_per_node // (layout.pipeline * layout.tensor), 1)
        num_buckets = -(-num_bytes // BUCKET_BYTES) if layout.data > 1 else 0

        def send(kind: str) -> float:
            if not num_buckets:
                return 0.0
            return num_buckets * self.machine.send(Message(kind, layout.data, num_bytes / num_buckets), on_node)

        elements = share * sum(sizes)
        update = self.machine.update((choice.tensor, sum(sizes)), traced.update_bytes * elements, elements)
        world = layout.data * layout.pipeline * layout.tensor
        update += self.machine.send(Message("all_reduce", world, 4), self.machine.ranks_per_node)  # of the norm
        reduction, broadcast = (send("reduce"), send("broadcast")) if choice.zero else (send("all_reduce"), 0.0)
        return _Stage(costs, messages, reduction, broadcast, int(num_buckets), update)

    def stages(self, choice: Choice) -> list[_Stage]:
        done: dict[tuple[Chunk, ...], _Stage] = {}  # most stages are alike
        all_chunks = self._chunks(choice.layout.pipeline, choice.chunks)
        for chunks in map(tuple, all_chunks):
            if chunks not in done:
                done[chunks] = self._stage(choice, list(chunks))
        return [done[tuple(chunks)] for chunks in all_chunks]

    def memory(self, choice: Choice) -> float:
        """Bytes of the fullest rank at the peak of a step."""
        chunks = self._chunks(choice.layout.pipeline, choice.chunks)
        return rank_memory(choice, self.traces[choice.tensor], chunks, self.image_bytes)

    def least(self, choice: Choice) -> float:
        """Seconds that the slowest stage computes: a step takes no less."""
        return max(stage.least(choice.passes) for stage in self.stages(choice))

    def predict(self, choice: Choice) -> Prediction:
        stages, layout = self.stages(choice), choice.layout
        traced, machine = self.traces[choice.tensor], self.machine
        on_node = machine.ranks_per_node if layout.pipeline * layout.tensor <= machine.ranks_per_node else 1
        busy = self._ranks_on_node(layout)
        all_busy = machine.speed(busy)
        transfer = all_busy * machine.send(Message("send", 2, traced.boundary * choice.images), on_node)
        ranks = layout.data * layout.tensor  # of a stage, which compute together

        def speed(num_active: int) -> float:
            return machine.speed(min(num_active * ranks, busy))

        slowed = {"speed": speed} if all_busy < 1 else {}
        events = simulate([stage.costs for stage in stages], choice.passes, transfer, **slowed)
        events = finish(
            events,
            [stage.reduction for stage in stages],
            [stage.num_buckets for stage in stages],
            [stage.update / all_busy for stage in stages],
            machine.overlap,
        )
        exposed = 0.0  # outside of the simulation
        for stage in stages:
            forward, backward = (sum(getattr(cost, kind) for cost in stage.costs) for kind in Cost._fields)
            earlier = choice.passes - 1 if choice.zero == 2 else 0  # passes that reduce, too
            if machine.overlap:
                here = max(stage.broadcast - forward, 0.0) + earlier * max(stage.reduction - backward, 0.0)
            else:
                here = stage.broadcast + earlier * stage.reduction
            exposed = max(exposed, here)
        seconds = max(event.end for event in events) + exposed
        computing = communicating = 0.0
        for number, stage in enumerate(stages):
            own = [event for event in events if event.stage == number]
            passes = sum(e.end - e.start for e in own if e.kind in ("forward", "backward", "update"))
            sent = choice.passes * stage.messages
            passed = max(e.end for e in own if e.kind in ("forward", "backward", "communication"))
            reduced = max((e.end for e in own if e.kind == "reduce"), default=passed)
            moved = sum(min(e.end - e.start, transfer) for e in own if e.kind == "communication")
            computing += (passes - sent) / len(stages)
            communicating += (sent + moved + max(reduced - passed, 0.0) + exposed) / len(stages)
        shares = computing / seconds, communicating / seconds
        return Prediction(choice, seconds, self.memory(choice), *shares, max(1 - sum(shares), 0.0), events)


class Plan(NamedTuple):
    """The best layouts, and what was left out.

    Attributes:
        best: the fastest first; but those that are as fast as the fastest one, within the noise, by simplicity.
        num_equal: so many are as fast as the fastest one, itself included.
        num_layouts, num_too_large: all, and those that do not fit the memory.
        limit, smallest: bytes that a rank has for its tensors, and that the smallest layout takes.
        noise, warning: of the machine.
    """

    best: list[Prediction]
    num_equal: int
    num_layouts: int
    num_too_large: int
    limit: float
    smallest: float
    noise: float
    warning: str | None


def search(predictor: Predictor, choices: Iterable[Choice], shown: int = SHOWN) -> Plan:
    """The fastest layouts that fit.

    They are simulated in the order of what they take at least, until that is more than the slowest of the best ones
    takes, and than what is equal to the fastest one.
    """
    machine = predictor.machine
    limit = (machine.memory_gb - machine.reserved_gb) * 1e9
    choices = list(choices)
    fitting, smallest = [], float("inf")
    for choice in choices:
        memory = predictor.memory(choice)
        smallest = min(smallest, memory)
        if memory <= limit:
            fitting.append((predictor.least(choice), len(fitting), choice))
    best: list[Prediction] = []
    equal = 0.0  # seconds, within the noise, to those of the fastest one
    for least, _, choice in sorted(fitting):
        if len(best) >= shown and least > max(best[-1].seconds, equal):
            break
        best = sorted([*best, predictor.predict(choice)], key=lambda p: (p.seconds, p.memory))
        equal = best[0].seconds * (1 + machine.noise)
        best = [each for place, each in enumerate(best) if place < shown or each.seconds <= equal]
    ties = [each for each in best if each.seconds <= equal]
    if machine.noise:
        best[: len(ties)] = sorted(ties, key=lambda p: p.choice.complexity)
    num_too_large = len(choices) - len(fitting)
    return Plan(best[:shown], len(ties), len(choices), num_too_large, limit, smallest, machine.noise, machine.warning)


# ---- From the command line -------------------------------------------------------------------------------------------


Main = Callable[[Arguments], Any]


class Request(NamedTuple):
    """What is to be planned.

    Attributes:
        main: of the train script.
        args: its command line.
        config: loaded from it.
        world_size: number of ranks.
    """

    main: Main
    args: Arguments
    config: Config
    world_size: int


def request_of(main: Main, args: Arguments) -> Request:
    """What a command line with `--plan` asks for.

    Raises:
        UserError: if flags or config are not usable.
    """
    config, _ = read_config(args)
    return Request(main, args, config, planned_rendezvous(args, config).world_size)


def run_model(
    request: Request, tensor: TensorParallel, observe: Observe, images: int | None = None, device: int = 0
) -> Callable[[], Any]:
    """A function, for a fork, that runs a train script's `main` up to its engine, and returns what is observed.

    Args:
        request: to plan.
        tensor: tensor parallelism of the model; it has two blocks, and neither data parallelism nor a pipeline.
        observe: called with engine and batches.
        images: of a batch; with them, tensors are real and only the other ranks are fake.
        device: index of the GPU, if there are any.
    """
    args, (mode, size, depth) = request.args, tensor
    parallel = {"pipeline": 1, "tensor": {"mode": mode, "size": size, **({"depth": depth} if depth else {})}}
    parts = Layout.of(Config({"parallel": parallel}), size).batch_parts
    values: dict[str, Any] = {"BATCH_SIZE": images or TRACED_IMAGES * parts, "gradient_accumulation": 1}
    values |= {"zero": None, "DEPTH": 2}
    if "MODEL" in request.config and request.config.get("DROP_PATH_RATE"):
        values["DROP_PATH_UNIFORM"] = True  # the first of two blocks would have none, and it stands for all
    if args.script == HYBRID:
        values |= {"parallel": parallel, "NUM_MICRO_BATCHES": 1, "model": {"num_chunks": 1}, "CHECKPOINT": False}
    overrides = [*args.set, *(f"{key}={value!r}" for key, value in values.items())]
    of_rank = args.replace(set=overrides, world_size=size, rank=None, local_rank=device, backend=None)

    def of_model() -> Any:
        if images is None:
            return request.main(of_rank.replace(observer=on_fake_tensors(observe)))
        if request.world_size > 1:
            torch.set_num_threads(1)  # as torchrun has it
        return request.main(of_rank.replace(observer=on_real_tensors(observe)))

    return of_model


def record(request: Request, tensor: TensorParallel) -> Trace:
    """The trace of the script's model with this tensor parallelism, made in a fork."""
    return report.in_fork(run_model(request, tensor, trace))


def set_flags(choice: Choice, script: str | None) -> list[str]:
    """What to put on the command line for a layout, quoted for a shell: values have single quotes only."""
    values = choice.settings(script == HYBRID)
    if "model" in values:
        values["model.num_chunks"] = values.pop("model")["num_chunks"]
    return [f'--set "{key}={value!r}"' for key, value in values.items()]


def format_plan(plan: Plan, request: Request, images: int) -> str:
    """The table of the best layouts."""
    where = f"{request.world_size} ranks, {request.args.plan}"
    lines = [f"{where}, {images} images per step: {plan.num_layouts} layouts; predicted, not measured"]
    if plan.num_too_large:
        lines.append(
            f"{plan.num_too_large} of them do not fit the {plan.limit / 1e9:.1f} GB that a rank has for tensors; the "
            f"smallest takes {plan.smallest / 1e9:.1f} GB"
        )
    if plan.warning:
        lines.append(plan.warning)
    if plan.noise and plan.num_equal > 1:
        lines.append(f"{plan.num_equal} are equal within the noise of {plan.noise:.1%}: the simplest of them is first")
    rows = [
        [
            str(each.choice),
            f"{images / each.seconds:,.0f}",
            f"{each.memory / 1e9:.1f}",
            *(f"{share:.0%}" for share in (each.computing, each.communicating, each.bubble)),
        ]
        for each in plan.best
    ]
    header = ["layout", "images/s", "GB per rank", "computing", "communicating", "bubble"]
    return "\n".join([*lines, "", *format_table(header, rows)])


def draw(plan: Plan, request: Request, images: int) -> Figure:
    """The best layouts as bars, and the timetable of the first one if it is a pipeline."""
    layouts = {
        str(each.choice): {key: getattr(each, key) for key in ("seconds", *pictures.SHARES)} for each in plan.best
    }
    first = plan.best[0]
    events = first.events if first.choice.layout.pipeline > 1 else None
    return pictures.draw_plan(layouts, images, f"{request.world_size} ranks, {request.args.plan}", events)


def with_depth(config: Config) -> Config:
    """The config with its model's DEPTH, which it need not have if the model is timm's."""
    if "MODEL" not in config:
        return config
    with torch.device("meta"):
        return Config({**config, "DEPTH": len(build_timm_vit(config).blocks)})


def make_plan(request: Request) -> tuple[Plan, int]:
    """The best layouts, and the images of a step.

    Raises:
        UserError: if the machine is not known, the model has fewer than two blocks, or no layout makes as many images
            per step, or fits the memory.
    """
    config, check, num_ranks = request.config, request.args.check, request.world_size
    own = Layout.of(config, num_ranks)
    if "MODEL" in config:  # timm's, the same in all layouts
        check(config, own)
        check = None
    config = with_depth(config)
    if not config.get("DEPTH", 0) > 1:
        raise UserError("--plan is for models whose config has a DEPTH of at least 2")
    images = global_batch(config, num_ranks)
    choices = enumerate_layouts(config, num_ranks, images, request.args.script, check)
    if not choices:
        if check:
            check(config, own)
        fits = num_ranks * (2 if config.mix else 1)  # images are mixed in pairs
        nearest = " or ".join(str(number) for number in (images // fits * fits, (images // fits + 1) * fits) if number)
        key = "GLOBAL_BATCH" if config.get("GLOBAL_BATCH") else "BATCH_SIZE × gradient_accumulation × data parallel"
        raise UserError(
            f"--plan: no layout of {num_ranks} ranks makes {key} = {images} images per step: make them {nearest} (a "
            f"multiple of {fits})"
        )
    machine: Machine
    if request.args.plan == HERE or request.args.plan.endswith(".json"):
        machine = measured(request, choices)
    else:
        machine = find_machine(request.args.plan, config.machine, bool(config.fp16), config.TF32)
    traces = {tensor: record(request, tensor) for tensor in {choice.tensor: None for choice in choices}}
    plan = search(Predictor(config, machine, traces), choices)
    if not plan.best:
        raise UserError(
            f"--plan {request.args.plan}: none of {plan.num_layouts} layouts fits the memory of a rank, "
            f"{machine.memory_gb:.1f} GB less {machine.reserved_gb:.1f} GB for what is no tensor; the smallest takes "
            f"{plan.smallest / 1e9:.1f} GB"
        )
    return plan, images


def measured(request: Request, choices: Iterable[Choice]) -> calibration.Here:
    """This machine, measured, or read from the file that a request names."""
    model = plain({key: request.config.get(key) for key in calibration.MODEL})
    model |= {"script": request.args.script, "images of a step": global_batch(request.config, request.world_size)}
    made = calibration.origin(request.world_size, model)
    if (num_gpus := len(made["gpus"])) and request.world_size > num_gpus:
        raise UserError(
            f"--plan {request.args.plan}: --world_size {request.world_size}, but this machine has {num_gpus} GPU(s): "
            f"at most one process per GPU can be timed here"
        )
    images: dict[TensorParallel, set[int]] = {}
    for choice in choices:
        images.setdefault(choice.tensor, set()).add(choice.images)
    if request.args.plan != HERE:
        return calibration.load(Path(request.args.plan), made, images)
    here = calibration.calibrate(partial(run_model, request), images, request.world_size, made)
    calibration.save(here, find_output(request.args) / "calibration.json")
    return here


def report_plan(main: Main, args: Arguments) -> None:
    """Print the plan of a train script, and draw it in the run directory."""
    request = request_of(main, args)
    output = find_output(args)
    plan, images = make_plan(request)
    print(format_plan(plan, request, images))
    print(f"\n{pictures.write(draw(plan, request, images), output / 'plan.png')}")
    print("\nthe first one:", " ".join(set_flags(plan.best[0].choice, args.script)), sep="\n")
