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
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.engine.trainer import Trainer
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


def _moment_types(engine: Engine) -> dict[str, torch.dtype]:
    """The data type of each optimizer moment of this rank, by name; empty if its stage is frozen."""
    states = engine.optimizer.optim.state.values()
    tensors = [(key, value) for state in states for key, value in state.items() if isinstance(value, Tensor)]
    return {key: value.dtype for key, value in tensors if value.ndim}


def _moments_step(engine: Engine) -> int:
    """Number of updates in the moments: fewer than the optimizer steps if some were skipped for overflow."""
    return max((int(state.get("step", 0)) for state in engine.optimizer.optim.state.values()), default=0)


def _kinds(engine: Engine, moments: Iterable[str], trained: bool) -> list[str]:
    """What there is of a parameter, in the order in which it is sent: "" for the weight, EMA, the moments' names."""
    return ["", *([EMA] if engine.ema else []), *(moments if trained else [])]


def _own_pieces(engine: Engine, moments: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Shard, Tensor]]:
    """Every tensor of this rank, in an order that is the same on all ranks of its pipeline stage.

    Yields:
        The kind (see `_kinds`), the shard, this rank's piece.
    """
    for slot in parameter_slots(engine):
        pieces = {**engine.optimizer.optim.state.get(slot.master, {}), "": slot.master}
        if engine.ema:
            pieces[EMA] = engine.ema.averages[slot.master]
        for kind in _kinds(engine, moments, slot.working.requires_grad):
            if kind not in pieces:  # a piece with no gradient (see `Shard.owner`) has no moments
                pieces[kind] = torch.zeros_like(slot.master, dtype=moments[kind])
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
        "moments": _moment_types(engine),
        "moments_step": _moments_step(engine),
        "parameters": [
            (slot.shard.name, slot.shard.full_shape(slot.master.shape), slot.working.requires_grad)
            for slot in parameter_slots(engine)
        ],
    }
    ranks = all_gather_object(own)
    moments = dict(sorted({kind: dtype for own in ranks for kind, dtype in own["moments"].items()}.items()))
    group = gpc.get_cpu_group(ParallelMode.GLOBAL)
    full: dict[str, dict[str, Tensor]] = {kind: {} for kind in _kinds(engine, moments, trained=True)}
    if replica == 0:
        for kind, shard, piece in _own_pieces(engine, moments):
            tensor = shard.gather(piece)
            if rank == 0:
                copied = tensor.to("cpu", copy=tensor.data_ptr() == piece.data_ptr()).contiguous()
                full[kind][_key(kind, shard.name)] = copied
            elif first_of_stage:
                dist.send(tensor.cpu().contiguous(), 0, group=group)
    if rank > 0:
        return None
    weights_type = parameter_slots(engine)[0].master.dtype  # the same on every stage
    for sender, theirs in enumerate(ranks):
        if sender > 0 and theirs["first_of_stage"]:
            for name, shape, trained in theirs["parameters"]:
                for kind in _kinds(engine, moments, trained):
                    tensor = torch.empty(shape, dtype=moments.get(kind, weights_type))
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
