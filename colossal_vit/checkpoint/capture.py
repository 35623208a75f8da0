"""Gathers the state of a run from all ranks, in any layout.

Rank 0 gathers full weights and optimizer moments, one tensor at a time; it alone reads and writes checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit import config
from colossal_vit.checkpoint.state import model_buffers, parameter_slots, random_state, rank_layout
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import all_gather_object
from colossal_vit.parallel.sharding import Shard
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor

EMA = "ema"  # the moving averages are gathered like one more optimizer moment
_PACKAGES = ("torch", "colossalai", "timm")


class Snapshot(NamedTuple):
    """The arguments of `storage.write` after the path; all tensors are full ones on the CPU."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    ema: dict[str, Tensor] | None


def _types(engine: Engine) -> dict[str, torch.dtype]:
    """The data type of each kind of tensor that this rank has: "" for weights, EMA for averages, moments by name."""
    types: dict[str, torch.dtype] = {}
    for slot in parameter_slots(engine):
        if slot.owned:
            types |= dict.fromkeys(["", EMA] if engine.ema else [""], slot.master.dtype)
    for state in engine.optimizer.optim.state.values():
        types |= {key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
    return types


def _moments_step(engine: Engine) -> int:
    """Number of updates in the moments: fewer than the optimizer steps if some were skipped for overflow."""
    return max((int(state.get("step", 0)) for state in engine.optimizer.optim.state.values()), default=0)


def _kinds(types: Iterable[str], trained: bool) -> list[str]:
    """The kinds of tensors that there are of a parameter; one that is not trained has no moments."""
    return [kind for kind in types if trained or kind in ("", EMA)]


def _own_pieces(engine: Engine, types: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Shard, Tensor]]:
    """Every tensor of this part of the model, in the same order on all ranks of its pipeline stage.

    Collective over the data-parallel ranks. The first one yields the pieces, to which the others send what they own.

    Args:
        engine: of the run.
        types: see `_types`, of all ranks.

    Yields:
        The kind, the shard, the piece.
    """
    replica, group = gpc.get_local_rank(ParallelMode.DATA), gpc.get_cpu_group(ParallelMode.GLOBAL)
    replicas = gpc.get_ranks_in_group(ParallelMode.DATA)
    for slot in parameter_slots(engine):
        pieces = {**engine.optimizer.optim.state.get(slot.master, {}), "": slot.master}
        if engine.ema and slot.owned:
            pieces[EMA] = engine.ema.averages[slot.master]
        for kind in _kinds(types, slot.working.requires_grad):
            if slot.owned:
                if kind not in pieces:  # a piece with no gradient (see `Shard.owner`) has no moments
                    pieces[kind] = torch.zeros_like(slot.master, dtype=types[kind])
                if replica > 0 and slot.owner is not None:
                    dist.send(pieces[kind].cpu().contiguous(), replicas[0], group=group)
            elif replica == 0:
                received = torch.empty(slot.working.shape, dtype=types[kind])
                dist.recv(received, replicas[slot.owner], group=group)
                pieces[kind] = received.to(slot.working.device)
            if replica == 0:
                yield kind, slot.shard, pieces[kind]


def _key(kind: str, name: str) -> str:
    return f"{kind}.{name}" if kind else name


@torch.no_grad()
def capture(trainer: Trainer, train_dataloader: MicroBatches, epoch: int, start: int, best: Any) -> Snapshot | None:
    """The state of the run on rank 0, None on other ranks. Collective: all ranks call it between two optimizer steps.

    Args:
        trainer: of the run.
        train_dataloader: as `engine.initialize` returned it.
        epoch: the epoch to resume in.
        start: the micro-batch of that epoch to resume at.
        best: accuracy and step of the best evaluation so far, or None.
    """
    engine = trainer.engine
    rank, replica = gpc.get_global_rank(), gpc.get_local_rank(ParallelMode.DATA)
    first_of_stage = replica == 0 and gpc.get_local_rank(ParallelMode.TENSOR) == 0  # sends its tensors to rank 0
    own = {
        "rng": random_state(),
        "data": train_dataloader.state_dict(),
        "first_of_stage": first_of_stage,
        "types": _types(engine),
        "moments_step": _moments_step(engine),
        "parameters": [
            (slot.shard.name, slot.shard.full_shape(slot.master.shape), slot.working.requires_grad)
            for slot in parameter_slots(engine)
        ],
    }
    ranks = all_gather_object(own)
    types = dict(sorted({kind: dtype for own in ranks for kind, dtype in own["types"].items()}.items()))
    group = gpc.get_cpu_group(ParallelMode.GLOBAL)
    full: dict[str, dict[str, Tensor]] = {kind: {} for kind in types}
    for kind, shard, piece in _own_pieces(engine, types):
        tensor = shard.gather(piece)
        if rank == 0:
            copied = tensor.to("cpu", copy=tensor.data_ptr() == piece.data_ptr()).contiguous()
            full[kind][_key(kind, shard.name)] = copied
        elif first_of_stage:
            dist.send(tensor.cpu().contiguous(), 0, group=group)
    if rank > 0:
        return None
    for sender, theirs in enumerate(ranks):
        if sender > 0 and theirs["first_of_stage"]:
            for name, shape, trained in theirs["parameters"]:
                for kind in _kinds(types, trained):
                    tensor = torch.empty(shape, dtype=types[kind])
                    dist.recv(tensor, sender, group=group)
                    full[kind][_key(kind, name)] = tensor
    model = {**full.pop(""), **{name: buffer.to("cpu", copy=True) for name, buffer in model_buffers(engine).items()}}
    global_batch = Layout.current().global_batch(gpc.config)
    state = {
        "step": engine.num_steps,
        "epoch": epoch,
        "images": start // engine.accumulation * global_batch,  # of this epoch
        "global_batch": global_batch,
        "optimizer": type(engine.optimizer.optim).__name__,
        "moments_step": max(own["moments_step"] for own in ranks),
        "scaler": engine.optimizer.scaler_state(),
        "best": best,
        "layout": rank_layout(),
        "ranks": [{"rng": own["rng"], "data": own["data"]} for own in ranks],
        "config": config.plain(gpc.config),
        "normalization": train_dataloader.normalization,
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }
    averages = {key.removeprefix(f"{EMA}."): tensor for key, tensor in full.pop(EMA, {}).items()}
    moments = {name: tensor for part in full.values() for name, tensor in part.items()}
    return Snapshot(model, moments, state, averages or None)
