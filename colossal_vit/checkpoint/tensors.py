"""Which tensors a rank has of a checkpoint, and loading them from the full ones, in any layout."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.fully_sharded import pieces_of
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossal_vit.parallel.sharding import Shard
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor


class ParameterSlot(NamedTuple):
    """A parameter of this rank.

    Attributes:
        shard: which part of which full parameter it is.
        working: the model's parameter.
        master: what the optimizer updates: an fp32 copy under some AMP modes, else `working` itself.
        owner: the data-parallel rank that has master and optimizer state, if these are split; None if all have.
    """

    shard: Shard
    working: Tensor
    master: Tensor
    owner: int | None

    @property
    def owned(self) -> bool:
        """Whether this rank has master and optimizer state; otherwise `master` is `working`."""
        return self.owner is None or self.owner == gpc.get_local_rank(ParallelMode.DATA)

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank is of the first replica that has master and optimizer state."""
        return gpc.get_local_rank(ParallelMode.DATA) == (self.owner or 0)

    @property
    def trained(self) -> bool:
        """Whether it has a gradient, and so moments."""
        return self.working.requires_grad


def parameter_slots(engine: Engine) -> list[ParameterSlot]:
    """Return the parameters of this rank, in the order of the model."""
    masters, owners = engine.optimizer.working_to_master_map, engine.zero.owners if engine.zero else {}
    return [ParameterSlot(p.shard, p, masters.get(p, p), owners.get(p)) for p in pieces_of(engine.bare_model)]


def _by_name(engine: Engine) -> dict[str, ParameterSlot]:
    return {slot.shard.name: slot for slot in parameter_slots(engine)}


def buffers(engine: Engine) -> dict[str, Tensor]:
    """Return the model's persistent buffers by name, such as fixed position embeddings.

    Not from `state_dict`, because Colossal-AI's layers communicate to build theirs.
    """
    return {
        f"{path}.{key}".removeprefix("."): buffer
        for path, module in engine.bare_model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


class _Broadcast:
    """Full tensors that rank 0 reads, on every rank one at a time: `(name, tensor)`, on the CPU. Collective.

    Args:
        read: called on rank 0 only.

    Attributes:
        shapes: of all tensors by name, on every rank.
    """

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]):
        self._tensors: Mapping[str, Tensor] = {}

        def listing() -> dict[str, tuple[list[int], torch.dtype]]:
            self._tensors = read()
            return {name: (list(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

        self._listing = run_on_rank_0(listing)
        self.shapes = {name: shape for name, (shape, _) in self._listing.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in self._listing.items():
            tensor = self._tensors[name].contiguous() if self._tensors else torch.empty(shape, dtype=dtype)
            dist.broadcast(tensor, 0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
            yield name, tensor


def own_shapes(engine: Engine) -> dict[str, list[int]]:
    """Return the shapes of the full tensors of which this rank has a piece, parameters and buffers, by name."""
    shapes = {slot.shard.name: slot.shard.full_shape(slot.master.shape) for slot in parameter_slots(engine)}
    return shapes | {name: list(buffer.shape) for name, buffer in buffers(engine).items()}


def _check_fits(source: str, shapes: Mapping[str, list[int]], engine: Engine, advice: str) -> None:
    """Check that names and shapes of tensors are those of the model.

    Raises:
        UserError: on every rank, naming the first tensor that is missing, unknown or of another shape.
    """
    needed = own_shapes(engine)
    everywhere = {name for names in all_gather_object(list(needed)) for name in names}
    with raise_on_all_ranks():
        for name, shape in needed.items():
            if name not in shapes:
                raise UserError(f"{source}: has no {name}, which this model needs: it is of another model")
            if shapes[name] != shape:
                raise UserError(
                    f"{source}: {name} is of shape {tuple(shapes[name])}, but this model's is {tuple(shape)}: {advice}"
                )
        for name in sorted(shapes.keys() - everywhere):
            raise UserError(f"{source}: has {name}, which this model lacks: it is of another model")


@torch.no_grad()
def scatter_weights(engine: Engine, read: Callable[[], Mapping[str, Tensor]], source: str, advice: str) -> None:
    """Load this rank's part of the model, and the optimizer's master weights. Collective.

    Args:
        engine: has the model.
        read: returns all weights and buffers; called on rank 0 only.
        source: what they are of, for messages.
        advice: what to do if one is of another shape.

    Raises:
        UserError: on every rank, if they are not those of the model.
    """
    slots, own_buffers, full = _by_name(engine), buffers(engine), _Broadcast(read)
    _check_fits(source, full.shapes, engine, advice)
    for name, tensor in full:
        if name in own_buffers:
            own_buffers[name].copy_(tensor)
        elif name in slots:  # else another stage has it
            slots[name].master.copy_(slots[name].shard.split(tensor))
            slots[name].working.copy_(slots[name].master)


@torch.no_grad()
def scatter_averages(engine: Engine, read: Callable[[], Mapping[str, Tensor]]) -> None:
    """Load this rank's moving averages of the weights; those that `read` does not return stay. Collective."""
    slots = _by_name(engine)
    for name, tensor in _Broadcast(read):
        if name in slots and slots[name].owned:
            engine.ema.averages[slots[name].master].copy_(slots[name].shard.split(tensor))


def num_updates(engine: Engine) -> dict[str, int]:
    """Return how many updates are in the moments of each of the full model's trained parameters. Collective.

    Fewer than there were optimizer steps, if some were skipped for overflow; and fewer than in others', if a parameter
    was frozen at first.
    """
    states, slots = engine.optimizer.optim.state, parameter_slots(engine)
    trained = [slot for slot in slots if slot.owned and slot.trained]
    own = {slot.shard.name: int(states.get(slot.master, {}).get("step", 0)) for slot in trained}
    return {name: number for part in all_gather_object(own) for name, number in part.items()}


@torch.no_grad()
def scatter_moments(
    engine: Engine, read: Callable[[], Mapping[str, Tensor]], updates: int, fewer: Mapping[str, int], source: str
) -> None:
    """Load this rank's optimizer moments. Collective.

    Args:
        engine: has the optimizer.
        read: returns all moments; called on rank 0 only.
        updates: so many are in them.
        fewer: so many in those of some parameters, by name.
        source: what they are of, for messages.

    Raises:
        UserError: naming `source`, if a moment is not of its parameter's shape.
    """
    slots, optimizer = _by_name(engine), engine.optimizer.optim
    groups = optimizer.state_dict()["param_groups"]
    parameters, numbers = (chain.from_iterable(g["params"] for g in gs) for gs in (optimizer.param_groups, groups))
    number_of = dict(zip(parameters, numbers, strict=True))
    states: dict[int, dict[str, Any]] = {}
    for key, tensor in _Broadcast(read):
        moment, _, name = key.partition(".")
        if name in slots and slots[name].owned and slots[name].trained:
            slot = slots[name]
            if list(tensor.shape) != slot.shard.full_shape(slot.master.shape):
                raise UserError(f"{source}: {key} is of shape {tuple(tensor.shape)}, which is not its parameter's")
            piece = slot.shard.split(tensor).to(slot.master.device, copy=True).contiguous()
            states.setdefault(number_of[slot.master], {"step": fewer.get(name, updates)})[moment] = piece
    # Each optimizer has its own rules for the type of its moments and the place of its step.
    optimizer.load_state_dict({"state": states, "param_groups": groups})
