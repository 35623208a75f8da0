"""Shards: which part of which full parameter a rank holds; gathering, loading and global norms based on that.

`annotate` attaches a `Shard` to each parameter of a model built from Colossal-AI layers. Names of full parameters are
timm's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.rng.dropout import ActivationPart
from colossalai.accelerator import get_accelerator
from colossalai.legacy.constants import INPUT_GROUP_3D, WEIGHT_GROUP_3D
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.global_variables import tensor_parallel_env
from colossalai.legacy.nn.layer.parallel_1d import Classifier1D, Linear1D_Col, Linear1D_Row
from colossalai.legacy.nn.layer.parallel_2d import (
    Classifier2D,
    LayerNorm2D,
    Linear2D,
    PatchEmbedding2D,
    reduce_by_batch_2d,
    split_batch_2d,
)
from colossalai.legacy.nn.layer.parallel_2p5d import (
    Classifier2p5D,
    LayerNorm2p5D,
    Linear2p5D,
    PatchEmbedding2p5D,
    reduce_by_batch_2p5d,
    split_batch_2p5d,
)
from colossalai.legacy.nn.layer.parallel_3d import (
    Classifier3D,
    LayerNorm3D,
    Linear3D,
    PatchEmbedding3D,
    reduce_by_batch_3d,
    split_batch_3d,
)
from colossalai.legacy.nn.layer.parallel_3d._utils import get_parallel_mode_from_env
from torch import Tensor, nn

# The dimension of a parameter that is split, and the group of ranks over which it is split.
Split = tuple[int, ParallelMode]


@dataclass(frozen=True)
class Shard:
    """How this rank's piece of a full parameter is cut from it.

    Attributes:
        name: timm's name of the full parameter.
        splits: applied in order.
        transposed: whether the layer stores the transpose of timm's matrix; `splits` refer to the layer's dimensions.
        owner: set if only one rank of a group uses its piece, and the others' pieces get no gradient: the group, and
            that rank's number in it.
        num_heads: set for the fused query/key/value projection. timm stores all queries, then all keys, then all
            values; the layer stores query, key and value of each head together, so that splitting rows keeps heads
            whole.
    """

    name: str
    splits: tuple[Split, ...] = ()
    transposed: bool = False
    owner: tuple[ParallelMode, int] | None = None
    num_heads: int | None = None

    def split(self, full: Tensor) -> Tensor:
        """Return this rank's piece of `full`, a parameter as timm stores it."""
        piece = full
        if self.num_heads:
            piece = piece.unflatten(0, (3, self.num_heads, -1)).transpose(0, 1).flatten(0, 2)
        if self.transposed:
            piece = piece.t()
        for dim, mode in self.splits:
            piece = piece.chunk(gpc.get_world_size(mode), dim)[gpc.get_local_rank(mode)]
        return piece

    def gather(self, piece: Tensor) -> Tensor:
        """Invert `split`: return the full tensor as timm stores it. Collective over the tensor-parallel ranks."""
        full = piece.contiguous()
        if self.owner is not None:
            mode, number = self.owner
            full = full.clone()
            dist.broadcast(full, gpc.get_ranks_in_group(mode)[number], group=gpc.get_group(mode))
        for dim, mode in reversed(self.splits):
            pieces = [torch.empty_like(full) for _ in range(gpc.get_world_size(mode))]
            dist.all_gather(pieces, full, group=gpc.get_group(mode))
            full = torch.cat(pieces, dim)
        if self.transposed:
            full = full.t()
        if self.num_heads:
            full = full.unflatten(0, (self.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return full

    def full_shape(self, piece: Sequence[int]) -> list[int]:
        """Return the shape of the full parameter as timm stores it, from the shape of this rank's piece."""
        shape = list(piece)
        for dim, mode in self.splits:
            shape[dim] *= gpc.get_world_size(mode)
        return shape[::-1] if self.transposed else shape

    @property
    def modes(self) -> list[ParallelMode]:
        """Groups over which one copy of the full parameter is distributed, unused pieces included."""
        return [mode for _, mode in self.splits] + ([self.owner[0]] if self.owner else [])

    @property
    def num_holders(self) -> int:
        """Number of ranks that together hold one copy of the full parameter, unused pieces included."""
        return math.prod(gpc.get_world_size(mode) for mode in self.modes)

    @property
    def in_use(self) -> bool:
        """Whether this rank's piece is used, see `owner`."""
        return self.owner is None or gpc.get_local_rank(self.owner[0]) == self.owner[1]


# How a layer splits its parameters: arguments of `Shard`, by the parameter's name in the layer; others are replicated.
# Source: the `_load_from_global_state_dict` of each layer, except for `LayerNorm2p5D`, whose version does not fit its
# shape, and `LayerNorm3D`, whose version transposes a vector.
Splits = dict[str, dict[str, Any]]


def _along(dim: int, *modes: ParallelMode) -> dict[str, Any]:
    return dict(splits=tuple((dim, mode) for mode in modes))


def _square(row: ParallelMode, column: ParallelMode, first_row_only: bool) -> tuple[Splits, Splits, Splits, Splits]:
    """Linear layer, norm, patch embedding and classifier of 2D and of 2.5D.

    In 2.5D only the first row of ranks uses its norms and biases; each forward pass broadcasts them down the columns.
    """
    matrix = dict(transposed=True, splits=((1, row), (0, column)))
    first, last = _along(0, row, column), _along(-1, row, column)
    vector = dict(**_along(0, row), owner=(column, 0)) if first_row_only else first
    embedding = {"weight": first, "bias": first, "cls_token": last, "pos_embed": last}
    return {"weight": matrix, "bias": vector}, {"weight": vector, "bias": vector}, embedding, {"weight": last}


def _cube(layer: nn.Module) -> Splits:
    """Return the splits of a layer of 3D, where input and output groups alternate from layer to layer."""
    first, last = _along(0, layer.output_parallel_mode), _along(-1, layer.output_parallel_mode)
    match layer:
        case Linear3D():
            modes = (layer.output_parallel_mode, layer.input_parallel_mode, layer.weight_parallel_mode)
            matrix = dict(transposed=True, splits=tuple(zip((0, 1, 0), modes, strict=True)))
            return {"weight": matrix, "bias": _along(0, layer.input_parallel_mode)}
        case Classifier3D():  # each forward pass broadcasts the weight from the diagonal ranks
            diagonal = (layer.input_parallel_mode, gpc.get_local_rank(layer.output_parallel_mode))
            return {"weight": dict(owner=diagonal, **last)}
    return {"weight": first, "bias": first, "cls_token": last, "pos_embed": last}


_OF_1D, _OF_2D = ParallelMode.PARALLEL_1D, (ParallelMode.PARALLEL_2D_ROW, ParallelMode.PARALLEL_2D_COL)
_OF_2P5D = ParallelMode.PARALLEL_2P5D_ROW, ParallelMode.PARALLEL_2P5D_COL
_LAYERS: dict[type[nn.Module], Splits | Callable[[nn.Module], Splits]] = {
    Linear1D_Col: {"weight": _along(0, _OF_1D), "bias": _along(0, _OF_1D)},
    Linear1D_Row: {"weight": _along(1, _OF_1D)},
    Classifier1D: {"weight": _along(1, _OF_1D)},
    **dict(zip((Linear2D, LayerNorm2D, PatchEmbedding2D, Classifier2D), _square(*_OF_2D, False), strict=True)),
    **dict(zip((Linear2p5D, LayerNorm2p5D, PatchEmbedding2p5D, Classifier2p5D), _square(*_OF_2P5D, True), strict=True)),
    **dict.fromkeys((Linear3D, LayerNorm3D, PatchEmbedding3D, Classifier3D), _cube),
}


def split_batch(batch: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of a batch in 2D, 2.5D and 3D, which split dimension `dim`; in 1D the whole batch."""
    split = {"2d": split_batch_2d, "2.5d": split_batch_2p5d, "3d": split_batch_3d}.get(tensor_parallel_env.mode)
    return split(batch, dim) if split else batch


def output_part(layer: nn.Module) -> ActivationPart:
    """Return this rank's part of a layer's output; the whole of a layer that is not split."""
    layer = getattr(layer, "module", layer)  # Colossal-AI's automatic layers wrap the real one
    rows: list[ParallelMode] = []
    columns: list[ParallelMode] = []
    match layer:
        case Linear1D_Col():
            columns = [_OF_1D]
        case Linear2D() | LayerNorm2D() | PatchEmbedding2D() | Classifier2D():
            columns, rows = [_OF_2D[0]], [_OF_2D[1]]
        case Linear2p5D() | LayerNorm2p5D() | PatchEmbedding2p5D() | Classifier2p5D():
            columns, rows = [_OF_2P5D[0]], [_OF_2P5D[1]]
        case Linear3D():  # a linear layer swaps the groups that split its input and its output
            columns, rows = [layer.input_parallel_mode], [layer.weight_parallel_mode, layer.output_parallel_mode]
        case LayerNorm3D() | PatchEmbedding3D() | Classifier3D():
            columns, rows = [layer.output_parallel_mode], [layer.weight_parallel_mode, layer.input_parallel_mode]
    if isinstance(layer, (Classifier2D, Classifier2p5D, Classifier3D)):
        columns = []
    return ActivationPart(*_number_among(rows), *_number_among(columns))


def _number_among(modes: Iterable[ParallelMode]) -> tuple[int, int]:
    """Return this rank's number among parts that are split over one group after the other, and how many they are."""
    number, parts = 0, 1
    for mode in modes:
        number = number * gpc.get_world_size(mode) + gpc.get_local_rank(mode)
        parts *= gpc.get_world_size(mode)
    return number, parts


def mean_over_batch_parts(loss: Tensor) -> Tensor:
    """Return the mean loss of a batch, from the mean over this rank's part of it, see `split_batch`. Collective."""
    if tensor_parallel_env.mode == "3d":
        groups = map(get_parallel_mode_from_env, (INPUT_GROUP_3D, WEIGHT_GROUP_3D))
        return reduce_by_batch_3d(loss, *groups, True)
    reduce = {"2d": reduce_by_batch_2d, "2.5d": reduce_by_batch_2p5d}.get(tensor_parallel_env.mode)
    return reduce(loss, True) if reduce else loss


def annotate(model: nn.Module, rename: Callable[[str], str] = str, num_heads: int | None = None) -> None:
    """Set the attribute `shard` of every parameter of a model built from Colossal-AI layers.

    Args:
        model: this rank's part of the model.
        rename: maps a parameter's name in `model`, without Colossal-AI's `.module`, to timm's.
        num_heads: attention heads of the full model; parameters named `*.qkv.*` are stored head by head.
    """
    for path, module in model.named_modules():
        splits = _LAYERS.get(type(module), {})
        splits = splits(module) if callable(splits) else splits
        prefix = path.replace(".module", "") + "."
        for key, parameter in module.named_parameters(recurse=False):
            heads = num_heads if ".qkv." in prefix else None
            parameter.shard = Shard(rename(prefix + key), num_heads=heads, **splits.get(key, {}))


def name_parameters(model: nn.Module) -> None:
    """Set the attribute `shard` of parameters that `annotate` has not set, as replicated ones under their own names."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "shard"):
            parameter.shard = Shard(name)


@torch.no_grad()
def load_full(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Copy this rank's pieces of full parameters into an annotated model.

    Raises:
        KeyError: if `full` lacks a parameter of the model.
    """
    for parameter in model.parameters():
        parameter.copy_(parameter.shard.split(full[parameter.shard.name]))


def num_replicas(parameter: Tensor) -> int:
    """Return the number of ranks in the tensor-parallel group that use the same piece of a parameter."""
    shard = getattr(parameter, "shard", None)
    return gpc.tensor_parallel_size // (shard.num_holders if shard else 1)


@torch.no_grad()
def global_norm(
    tensors: Iterable[Tensor], parameters: Iterable[Tensor], group: ParallelMode = ParallelMode.MODEL
) -> Tensor:
    """L2 norm over all ranks that share the tensors, with each element of the full model counted once. Collective.

    Args:
        tensors: this rank's pieces, for example gradients.
        parameters: the parameters they belong to, in the same order.
        group: the ranks that share them: those with the parts of a model, or all if each replica has some of them.

    Returns:
        A scalar of torch's default data type on this rank's device, equal on every rank of the group; and on every
        group, whatever the order in which its ranks are summed, since rounding from float64 hides that order.
    """
    squared: dict[int, list[Tensor]] = {}
    for tensor, parameter in zip(tensors, parameters, strict=True):
        if hasattr(parameter, "shard") and not parameter.shard.in_use:
            continue
        squared.setdefault(num_replicas(parameter), []).append(tensor)
    total = torch.zeros((), dtype=torch.float64, device=get_accelerator().get_current_device())
    for replicas, pieces in squared.items():
        norms = torch._foreach_norm(pieces, 2, dtype=torch.get_default_dtype())
        total += torch.stack(norms).double().square().sum() / replicas
    if gpc.is_initialized(group) and gpc.get_world_size(group) > 1:
        dist.all_reduce(total, group=gpc.get_group(group))
    return total.sqrt().to(torch.get_default_dtype())
