"""Measures memory and communication of one rank in an optimizer step.

Works on fake tensors and process groups, and on real ones, with which the tests check the dry run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.fully_sharded import pieces_of
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.sharding import Shard
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# Bytes that a rank sends with a ring algorithm on n ranks, as a multiple of the message size. The size is defined as in
# nccl-tests: that of the tensor, and for all-gather and reduce-scatter that of the full tensor.
SENT_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
# PyTorch's operator: (kind of collective, index of the argument that is the message).
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


def count_bytes(tensors: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and dicts."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def copies_of_weights(engine: Engine) -> list[Tensor]:
    """Return what is kept of weights beside themselves: fp32 copies that the optimizer updates, and moving averages."""
    averages = engine.ema.averages.values() if engine.ema else ()
    return [*engine.optimizer.working_to_master_map.values(), *averages]


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    """Return what tensors are stored in; of a DTensor, this rank's part."""
    leaves = [getattr(t, "_local_tensor", t) for t in tree_leaves(tensors) if isinstance(t, Tensor)]
    return [t.untyped_storage() for t in leaves]


class StepMeter(TorchDispatchMode):
    """Tracks tensor memory and communication of all operators in a `with` block.

    Args:
        existing: tensors that count from the start.

    Attributes:
        live, peak: bytes in tensors, now and at most so far.
        calls, sent: number of calls, and bytes that this rank sends (see `SENT_SHARE`), by kind of collective.
    """

    def __init__(self, existing: Iterable[Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self.calls: dict[str, int] = {}
        self.sent: dict[str, float] = {}
        self._seen = WeakIdKeyDictionary()
        self._watch(list(existing))
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self):
        # `fully_shard` frees gathered weights so, and no operator does.
        torch.UntypedStorage.resize_ = lambda storage, size: self._watch_resized(storage, size)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _watch_resized(self, storage: torch.UntypedStorage, size: int) -> None:
        self._resize(storage, size)
        if storage in self._seen:
            self.live += size - self._seen[storage].size
            self.peak = max(self.peak, self.live)
            self._seen[storage].size = size

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
            self._record(kind, size, count_bytes(args[message]))

    def _record(self, kind: str, size: int, nbytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent[kind] = self.sent.get(kind, 0.0) + nbytes * SENT_SHARE[kind](size)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._count(function._schema.name.removeprefix("c10d::"), args)
        self._watch(result)
        return result


class _Release:
    """Subtracts a storage's bytes from the meter when it is deleted, which is when the storage is freed."""

    def __init__(self, meter: StepMeter, size: int):
        self.meter, self.size = meter, size

    def __del__(self):
        self.meter.live -= self.size


@dataclass
class StepPlan:
    """Memory and communication of one rank in an optimizer step. Memory in bytes.

    Attributes:
        parameters: number of elements in this rank's pieces of full parameters.
        memory: of `weights`, `gradients`, `optimizer` (moments, fp32 copies of half-precision weights, and moving
            averages), `activations` (everything else at the peak), and their sum, the `peak`.
        calls, sent: see `StepMeter`.
        layout: of the run.
        config: the resolved config.
        stage_ranks: one rank of each pipeline stage, with this rank's data and tensor coordinates.
        shards: which pieces these are, by the names of the full parameters.
        shapes: of these full parameters, as timm stores them.
    """

    parameters: int
    memory: dict[str, int]
    calls: dict[str, int]
    sent: dict[str, float]
    layout: Layout
    config: dict[str, Any] = field(repr=False)
    stage_ranks: list[int]
    shards: dict[str, Shard] = field(repr=False)
    shapes: dict[str, list[int]] = field(repr=False)


def measure(engine: Engine, batches: Iterable) -> StepPlan:
    """Measure the first optimizer step of an engine.

    Later steps send as many bytes, but DDP splits them into several all-reduce calls.

    Args:
        engine: has made no step yet.
        batches: micro-batches for at least one optimizer step.
    """
    config = gpc.config
    model = engine.model
    optimizer = engine.optimizer.optim
    weights = list(dict.fromkeys(pieces_of(model)))
    updated = [p for group in optimizer.param_groups for p in group["params"]]  # the weights, or fp32 copies of them
    copies = copies_of_weights(engine)
    memory: dict[str, int] = {}

    with StepMeter([*weights, *model.buffers(), *copies]) as meter:

        def before_update(*_: Any) -> None:
            memory["gradients"] = count_bytes([p.grad for p in updated])
            memory["before update"], meter.peak = meter.peak, meter.live

        hook = optimizer.register_step_pre_hook(before_update)
        data_iter = iter(batches)
        engine.train()
        for _ in range(engine.accumulation):
            engine.zero_grad()
            engine.execute_schedule(data_iter, forward_only=False, return_loss=True)
            engine.step()
        hook.remove()
        if engine.zero:
            engine.zero.receive_weights()  # some would be sent in the next forward pass only

    moments = count_bytes([list(state.values()) for state in optimizer.state.values()])
    memory["weights"] = count_bytes(weights)
    memory["optimizer"] = moments + count_bytes(copies)
    # From the second step on, the moments also take memory during forward and backward.
    memory["peak"] = max(memory.pop("before update") + moments, meter.peak)
    known = sum(memory[part] for part in ("weights", "gradients", "optimizer"))
    memory["activations"] = max(memory["peak"] - known, 0)
    pipelined = gpc.is_initialized(ParallelMode.PIPELINE)
    return StepPlan(
        parameters=sum(p.numel() for p in weights),
        memory=memory,
        calls=meter.calls,
        sent=meter.sent,
        layout=Layout.current(),
        config=dict(config),
        stage_ranks=list(gpc.get_ranks_in_group(ParallelMode.PIPELINE)) if pipelined else [0],
        shards={p.shard.name: p.shard for p in weights},
        shapes={p.shard.name: p.shard.full_shape(p.shape) for p in weights},
    )
