"""`--dry-run`: what each rank of a layout would hold and send in an optimizer step, without the other ranks.

The train script runs as it is, once for a rank of each pipeline stage, up to the engine's first optimizer step. Its
tensors are PyTorch's fake ones, which have a shape and a type but no data, and its process groups have members that
never answer: any model in any world fits a laptop. `measure` also takes real tensors and groups, which is how the
tests check what a dry run says.
"""

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.config import Layout, num_model_chunks
from colossal_vit.data import sees_images
from colossal_vit.engine import Engine
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.rendezvous import Rendezvous, own_place
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step, measured
# ---------------------------------------------------------------------------------------------------------------------

# What a rank sends with a ring algorithm, as a multiple of the message, by the number of ranks n. The message is what
# nccl-tests calls the size: the tensor, or where the ranks' pieces are put together or taken apart, the whole of them.
_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
# PyTorch's operators: the kind of collective, and which argument is the message.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
}


def _num_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]


class StepMeter(TorchDispatchMode):
    """Watches every operator: memory that comes and goes, and messages to other ranks.

    Attributes:
        live, peak: bytes in tensors now, and at most so far.
        calls, sent: by kind of collective, how many calls, and bytes that this rank sends (see `_SENT`).
    """

    def __init__(self, existing: Iterable[Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self.calls: dict[str, int] = {}
        self.sent: dict[str, float] = {}
        self._seen = WeakIdKeyDictionary()
        self._watch(list(existing))

    def _watch(self, tensors: Any) -> None:
        for storage in _storages(tensors):
            if storage not in self._seen:
                self._seen[storage] = _Release(self, storage.nbytes())
                self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _count(self, name: str, args: tuple) -> None:
        if name in _COLLECTIVES:
            kind, message = _COLLECTIVES[name]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.sent[kind] = self.sent.get(kind, 0.0) + _num_bytes(args[message]) * _SENT[kind](size)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._count(function._schema.name.removeprefix("c10d::"), args)
        self._watch(result)
        return result


class _Release:
    """Gives a storage's bytes back to the meter when the storage, whose entry it is, goes."""

    def __init__(self, meter: StepMeter, size: int):
        self.meter, self.size = meter, size

    def __del__(self):
        self.meter.live -= self.size


@dataclass
class StepPlan:
    """What one rank holds and sends in an optimizer step. Memory in bytes.

    Attributes:
        layers: names of the full parameters of which this rank has a piece.
        parameters: how many numbers those pieces are.
        memory: of `weights`, `gradients`, `optimizer` (moments, and fp32 copies of half-precision weights),
            `activations` (whatever else there is at the peak) and the `peak` that these make together.
        calls, sent: see `StepMeter`.
        stage_ranks: a rank of each pipeline stage; those with the same data and tensor coordinates.
        notes: what else the script has to say.
    """

    layers: list[str]
    parameters: int
    memory: dict[str, int]
    calls: dict[str, int]
    sent: dict[str, float]
    layout: Layout
    config: dict[str, Any] = field(repr=False)
    stage_ranks: list[int] = field(default_factory=lambda: [0])
    notes: list[str] = field(default_factory=list)


def measure(engine: Engine, batches: Iterable) -> StepPlan:
    """Run one optimizer step of a fresh engine, and say what it took.

    Every step sends as much as the first, but DDP reduces in several calls from the second on.

    Args:
        engine: that has not made a step yet.
        batches: enough micro-batches for one.
    """
    config = gpc.config
    model = engine.model
    optimizer = engine.optimizer.optim
    weights = [p for p in model.parameters() if p.requires_grad]
    trained = [p for group in optimizer.param_groups for p in group["params"]]  # the weights, or fp32 copies of them
    copies = [p for p in trained if p not in set(weights)]
    memory: dict[str, int] = {}

    with StepMeter([*model.parameters(), *model.buffers(), *copies]) as meter:

        def before_update(*_: Any) -> None:
            memory["gradients"] = _num_bytes([p.grad for p in trained])
            memory["before update"], meter.peak = meter.peak, meter.live

        hook = optimizer.register_step_pre_hook(before_update)
        data_iter = iter(batches)
        engine.train()
        for _ in range(engine.accumulation):
            engine.zero_grad()
            engine.execute_schedule(data_iter, forward_only=False, return_loss=True)
            engine.step()
        hook.remove()

    moments = _num_bytes([list(state.values()) for state in optimizer.state.values()])
    memory["weights"] = _num_bytes(weights)
    memory["optimizer"] = moments + _num_bytes(copies)
    # From the second step on the moments are there during forward and backward too.
    memory["peak"] = max(memory.pop("before update") + moments, meter.peak)
    known = sum(memory[part] for part in ("weights", "gradients", "optimizer"))
    memory["activations"] = max(memory["peak"] - known, 0)
    pipelined = gpc.is_initialized(ParallelMode.PIPELINE)
    return StepPlan(
        layers=list(
            dict.fromkeys(p.shard.name if hasattr(p, "shard") else name for name, p in model.named_parameters())
        ),
        parameters=sum(p.numel() for p in weights),
        memory=memory,
        calls=meter.calls,
        sent=meter.sent,
        layout=Layout.of(config, gpc.get_world_size(ParallelMode.GLOBAL)),
        config=dict(config),
        stage_ranks=list(gpc.get_ranks_in_group(ParallelMode.PIPELINE)) if pipelined else [0],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Without data, tensors and peers
# ---------------------------------------------------------------------------------------------------------------------


class Placeholders:
    """Batches of the right shapes with nothing in them, for `images, labels` on the device.

    Args:
        num_batches: in an epoch, on this rank.
        shape: of a batch of images, (B, 3, H, W).
        device: where they would be.
    """

    def __init__(self, num_batches: int, shape: tuple[int, ...], device: torch.device):
        self.num_batches, self.shape, self.device = num_batches, shape, device
        self.first_stage = sees_images()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.num_batches):
            labels = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
            yield torch.zeros(self.shape, device=self.device) if self.first_stage else labels, labels


def place(args: argparse.Namespace, config: Config) -> Rendezvous:
    """The rank that `--rank` names among `--world_size`, or the launcher's number, or the fewest that the layout takes.

    Raises:
        UserError: if there are none.
    """
    launched = [os.environ.get(name) for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    fewest = config.parallel.pipeline * config.parallel.tensor.size
    world_size = args.world_size if args.world_size is not None else int(next(filter(None, launched), fewest))
    if world_size < 1:
        raise UserError(f"--world_size {world_size}: must be at least 1")
    return Rendezvous("none", args.rank or 0, 0, world_size, "nowhere", 0)


@contextmanager
def no_peers() -> Iterator[None]:
    """Make every process group of the block one whose other members need not exist."""
    originals = dist.init_process_group, dist.new_group

    def init_process_group(rank: int, world_size: int, **_: Any) -> None:
        originals[0]("fake", rank=rank, world_size=world_size, store=FakeStore())

    def new_group(ranks: list[int] | None = None, **_: Any) -> dist.ProcessGroup:
        return originals[1](ranks, backend="fake")

    dist.init_process_group, dist.new_group = init_process_group, new_group
    try:
        yield
    finally:
        dist.init_process_group, dist.new_group = originals


class _Answers(TorchDispatchMode):
    """Answers what only tensors with data can be asked."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            # On a GPU what is asked for is a norm or a count of overflows; on the CPU also an optimizer's step count.
            return 1.0 if args[0].device.type == "cpu" else 0.0
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and isinstance(result, tuple):
            # DDP reads its gradients from the future of the reduction, and that of a fake group holds none.
            done = torch.futures.Future()
            done.set_result(result[0])
            return result[0], _create_work_from_future(done).boxed()
        return result


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply` for fake parameters; PyTorch's replaces them by others, without the attributes they have."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        tensor.data = function(tensor.data)
    return module


def no_tensors(device: torch.device) -> None:
    """From here on, every tensor that this process makes is a fake one, on `device` where the script names none."""
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    torch.set_default_device(device)  # fake weights cannot be moved to another one
    nn.Module._apply = _convert
    for module in (torch, torch.random, torch.cuda):  # a generator's state has to be real
        module.get_rng_state = lambda *_: torch.empty(0)
        module.set_rng_state = lambda *_: None
    _Answers().__enter__()


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


def _in_fork(function: Callable[[], StepPlan]) -> StepPlan:
    """Call a function in a child process; its mistakes are raised here."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(torch.get_num_threads())  # mends PyTorch's thread pool after the fork, before autograd's
        try:
            with redirect_stdout(None):
                answer = function()
        except (UserError, TrainingError) as error:
            answer = error
        send.send(answer)

    process = fork.Process(target=child)
    process.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        sys.exit(1)  # the child has printed its traceback
    finally:
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def plan_rank(main: Callable[[], StepPlan | None], rank: int) -> StepPlan:
    """What a train script's `main`, started with `--dry-run`, plans for one rank."""

    def of_rank() -> StepPlan:
        sys.argv += ["--rank", str(rank)]
        return main()

    return _in_fork(of_rank)


def plan(main: Callable[[], StepPlan | None]) -> list[StepPlan]:
    """The plans for the first rank of each pipeline stage."""
    first = plan_rank(main, 0)
    return [first] + [plan_rank(main, rank) for rank in first.stage_ranks[1:]]


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _layers(names: Iterable[str]) -> str:
    """Parameter names as the layers they are of: `patch_embed, blocks 0-5`."""
    blocks, others = set(), {}
    for name in names:
        block = re.search(r"\bblocks\.(\d+)\.", name)
        if block:
            blocks.add(int(block[1]))
            others.setdefault("blocks")
        else:
            others.setdefault(name.removeprefix("module.").removeprefix("model.").split(".")[0])
    return ", ".join(f"blocks {_ranges(blocks)}" if name == "blocks" else name for name in others)


def format_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table whose first column is aligned to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (header, *rows)
    ]


def format_report(plans: list[StepPlan]) -> str:
    """The plans of all pipeline stages as text."""
    layout, config = plans[0].layout, Config(plans[0].config)
    world = layout.data * layout.pipeline * layout.tensor
    replica = layout.pipeline * layout.tensor
    lines = [f"{world} process(es): {layout}"]
    for stage, stage_plan in enumerate(plans):
        ranks = (replica * d + layout.tensor * stage + t for d in range(layout.data) for t in range(layout.tensor))
        lines.append(
            f"stage {stage}, rank(s) {_ranges(ranks)}: {_layers(stage_plan.layers)}; "
            f"{stage_plan.parameters:,} parameters on each"
        )
    parts = ["weights", "gradients", "optimizer", "activations", "peak"]
    memory = [[f"stage {s}"] + [f"{p.memory[part] / 1e6:,.1f}" for part in parts] for s, p in enumerate(plans)]
    lines += ["", *format_table(["memory of a rank, MB", *parts], memory)]

    kinds = [kind for kind in _SENT if any(kind in p.calls for p in plans)]
    if kinds:
        traffic = [
            [f"stage {s}"] + [f"{p.sent.get(kind, 0) / 1e6:,.2f} ({p.calls.get(kind, 0)})" for kind in kinds]
            for s, p in enumerate(plans)
        ]
        lines += ["", *format_table(["MB sent a step (calls)", *kinds], traffic)]
    if layout.pipeline > 1:
        chunks, micro_batches = num_model_chunks(config), config.NUM_MICRO_BATCHES
        bubble = (layout.pipeline - 1) / (chunks * micro_batches)
        lines += [
            "",
            f"pipeline bubble: (stages - 1) / (chunks × micro-batches) = ({layout.pipeline} - 1) / "
            f"({chunks} × {micro_batches}) = {bubble:.1%} of the time spent computing",
        ]
    return "\n".join([*lines, "", *plans[0].notes] if plans[0].notes else lines)


def report(main: Callable[[], StepPlan | None]) -> None:
    """Print the plans of all pipeline stages; of several processes that a launcher started, the first one does."""
    if own_place()[0] == 0:
        print(format_report(plan(main)))
