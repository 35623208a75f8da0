"""Full tensors from rank 0 to the ranks of any layout: it broadcasts one at a time, and each rank keeps its shard."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from colossal_vit.checkpoint.state import model_buffers, parameter_slots
from colossal_vit.checkpoint.storage import readable
from colossal_vit.engine.engine import Engine
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from safetensors import safe_open
from torch import Tensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64}
# Shape and type of each tensor, by name; and what returns the tensor.
Source = tuple[dict[str, tuple[list[int], torch.dtype]], Callable[[str], Tensor]]


def from_file(path: Path) -> Source:
    """The tensors of a safetensors file, which may be held, each read when it is needed.

    Raises:
        UserError: if one is of a type that no checkpoint has.
    """
    file, listing = safe_open(readable(path), "pt"), {}
    for name in sorted(file.keys()):
        piece = file.get_slice(name)
        if (dtype := str(piece.get_dtype())) not in _DTYPES:
            raise UserError(f"{path}: {name} is of type {dtype}, which no checkpoint here has")
        listing[name] = piece.get_shape(), _DTYPES[dtype]
    return listing, file.get_tensor


def from_memory(tensors: Mapping[str, Tensor]) -> Source:
    """Tensors that are in memory."""
    return {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, tensors.__getitem__


class Distributed:
    """Tensors that rank 0 reads and broadcasts; all methods are collective.

    Args:
        find: called on rank 0 only.
    """

    def __init__(self, find: Callable[[], Source]):
        self._get: Callable[[str], Tensor] | None = None

        def listing() -> dict[str, tuple[list[int], torch.dtype]]:
            found, self._get = find()
            return found

        self.listing = run_on_rank_0(listing)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors, on the CPU, one at a time."""
        for name, (shape, dtype) in self.listing.items():
            tensor = self._get(name).contiguous() if self._get else torch.empty(shape, dtype=dtype)
            dist.broadcast(tensor, 0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
            yield name, tensor


def own_shapes(engine: Engine) -> dict[str, list[int]]:
    """The shapes of the full tensors of which this rank has a piece, parameters and buffers, by name."""
    shapes = {slot.shard.name: slot.shard.full_shape(slot.master.shape) for slot in parameter_slots(engine)}
    return shapes | {name: list(buffer.shape) for name, buffer in model_buffers(engine).items()}


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
def load_model(source: str, tensors: Distributed, engine: Engine, advice: str) -> None:
    """Load this rank's part of the model, and the optimizer's master weights. Collective.

    Args:
        source: what the tensors are of, for messages.
        tensors: all of the model's.
        engine: has the model.
        advice: what to do if a tensor is of another shape.

    Raises:
        UserError: on every rank, if the tensors are not those of the model.
    """
    slots, buffers = {slot.shard.name: slot for slot in parameter_slots(engine)}, model_buffers(engine)
    _check_fits(source, {name: list(shape) for name, (shape, _) in tensors.listing.items()}, engine, advice)
    for name, tensor in tensors.tensors():
        if name in buffers:
            buffers[name].copy_(tensor)
        elif name in slots:  # else another stage has it
            slots[name].master.copy_(slots[name].shard.split(tensor))
            slots[name].working.copy_(slots[name].master)
