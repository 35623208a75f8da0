"""Which piece of which full parameter a rank holds, and what follows from it: initial weights, global norms.

A model built from Colossal-AI layers is annotated once, by `annotate`; from then on each parameter carries a `Shard`.
The names of full parameters are timm's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.nn.layer.parallel_1d import Classifier1D, Linear1D_Col, Linear1D_Row
from torch import Tensor, nn

# A split: the dimension of the full parameter that is cut, and the group of ranks whose members take a piece each.
Split = tuple[int, ParallelMode]

# How Colossal-AI's layers cut their parameters; whatever is not listed is held whole by every rank.
LAYER_SPLITS: dict[type[nn.Module], dict[str, tuple[Split, ...]]] = {
    Linear1D_Col: {"weight": ((0, ParallelMode.PARALLEL_1D),), "bias": ((0, ParallelMode.PARALLEL_1D),)},
    Linear1D_Row: {"weight": ((1, ParallelMode.PARALLEL_1D),)},
    Classifier1D: {"weight": ((1, ParallelMode.PARALLEL_1D),)},
}


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a full parameter.

    Attributes:
        name: timm's name of the full parameter.
        splits: how it is cut, in order.
        num_heads: set for the fused query/key/value projection. timm stores all queries, then all keys, then all
            values; here each head's query, key and value lie together, so that a cut by rows keeps heads whole.
    """

    name: str
    splits: tuple[Split, ...] = ()
    num_heads: int | None = None

    def cut(self, full: Tensor) -> Tensor:
        """This rank's piece of `full`, a parameter as timm stores it."""
        piece = full
        if self.num_heads:
            piece = piece.unflatten(0, (3, self.num_heads, -1)).transpose(0, 1).flatten(0, 2)
        for dim, mode in self.splits:
            piece = piece.chunk(gpc.get_world_size(mode), dim)[gpc.get_local_rank(mode)]
        return piece

    def join(self, piece: Tensor) -> Tensor:
        """The inverse of `cut`: the full tensor, from the pieces that all ranks call this with, as timm stores it."""
        full = piece
        for dim, mode in reversed(self.splits):
            pieces = [torch.empty_like(full) for _ in range(gpc.get_world_size(mode))]
            dist.all_gather(pieces, full.contiguous(), group=gpc.get_group(mode))
            full = torch.cat(pieces, dim)
        if self.num_heads:
            full = full.unflatten(0, (self.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return full

    @property
    def num_pieces(self) -> int:
        """Into how many different pieces the full parameter is cut."""
        pieces = 1
        for _, mode in self.splits:
            pieces *= gpc.get_world_size(mode)
        return pieces


def annotate(model: nn.Module, rename: Callable[[str], str] = str, num_heads: int | None = None) -> None:
    """Give every parameter of a model made of Colossal-AI layers its `Shard`, as attribute `shard`.

    Args:
        model: this rank's part of the model, with module names as in timm.
        rename: from a parameter's name in `model`, without Colossal-AI's `.module`, to timm's.
        num_heads: attention heads of the full model; parameters named `*.qkv.*` are stored head by head.
    """
    for path, module in model.named_modules():
        splits = LAYER_SPLITS.get(type(module), {})
        prefix = path.replace(".module", "") + "."
        for key, parameter in module.named_parameters(recurse=False):
            heads = num_heads if ".qkv." in prefix else None
            parameter.shard = Shard(rename(prefix + key), splits.get(key, ()), heads)


@torch.no_grad()
def load_full(model: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Fill an annotated model with this rank's pieces of full parameters.

    Raises:
        KeyError: if `full` lacks a parameter of the model.
    """
    for parameter in model.parameters():
        parameter.copy_(parameter.shard.cut(full[parameter.shard.name]))


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters of which this rank holds pieces, by timm's names; to be called on all ranks of a stage."""
    return {p.shard.name: p.shard.join(p) for p in model.parameters()}


def num_replicas(parameter: Tensor) -> int:
    """How many ranks of the tensor-parallel group hold the same piece as this one."""
    shard = getattr(parameter, "shard", None)
    return gpc.tensor_parallel_size // (shard.num_pieces if shard else 1)


@torch.no_grad()
def global_norm(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm over all ranks that share the model, each element of the full model counted once.

    Args:
        tensors: this rank's pieces, for example gradients.
        parameters: the parameters they belong to, in the same order.

    Returns:
        A float32 scalar on the device of the tensors, equal on every rank of the model-parallel group.
    """
    device = torch.device("cpu")
    squared: dict[int, list[Tensor]] = {}
    for tensor, parameter in zip(tensors, parameters, strict=True):
        device = tensor.device
        squared.setdefault(num_replicas(parameter), []).append(tensor)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for replicas, group in squared.items():
        norms = torch._foreach_norm(group, 2, dtype=torch.float32)
        total += torch.stack(norms).square().sum() / replicas
    if gpc.is_initialized(ParallelMode.MODEL) and gpc.get_world_size(ParallelMode.MODEL) > 1:
        dist.all_reduce(total, group=gpc.get_group(ParallelMode.MODEL))
    return total.sqrt()
