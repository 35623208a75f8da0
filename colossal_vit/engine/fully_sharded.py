"""ZeRO stage 3: weights split over the data-parallel ranks, too, by PyTorch's `fully_shard`.

Each block's weights are gathered before it computes and freed afterwards, in the forward and in the backward pass, and
its gradients are averaged to the ranks that have the pieces. Nobody but `fully_shard` sees its DTensors: optimizer,
clipping, averages and checkpoints get a rank's pieces as plain tensors in the same memory, each with a `Shard`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.engine.compilation import blocks_of
from colossal_vit.engine.lamb import Lamb
from colossal_vit.parallel.sharding import Shard
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine.gradient_handler import BaseGradientHandler
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer


@dataclass(frozen=True)
class DataShard(Shard):
    """A data-parallel rank's part of what the other splits leave to it.

    Attributes:
        dim: the dimension that is split last. Each rank has as many of its elements, rounded up, as long as there are
            any: the last ranks may have fewer or none.
        length: of that dimension, before.
    """

    dim: int = 0
    length: int = 0

    def _sizes(self) -> tuple[int, int]:
        """Return the size of the largest part, and of this rank's."""
        largest = -(-self.length // gpc.get_world_size(ParallelMode.DATA))
        left = self.length - largest * gpc.get_local_rank(ParallelMode.DATA)
        return largest, min(max(left, 0), largest)

    def split(self, full: Tensor) -> Tensor:
        """Return this rank's piece of `full`, a parameter as timm stores it."""
        largest, own = self._sizes()
        start = min(largest * gpc.get_local_rank(ParallelMode.DATA), self.length)
        return super().split(full).narrow(self.dim, start, own)

    def gather(self, piece: Tensor) -> Tensor:
        """Invert `split`. Collective over the tensor-parallel and the data-parallel ranks."""
        part, group = self._padded(piece), gpc.get_group(ParallelMode.DATA)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return self._joined(parts)

    def gather_at(self, replica: int, piece: Tensor) -> Tensor | None:
        """As `gather`, on the tensor-parallel ranks of one replica; None on the others."""
        part, group = self._padded(piece), gpc.get_group(ParallelMode.DATA)
        here = gpc.get_local_rank(ParallelMode.DATA) == replica
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))] if here else None
        dist.gather(part, parts, group=group, group_dst=replica)
        return self._joined(parts) if here else None

    def start_of(self, piece: Tensor) -> int | None:
        """Return where a piece begins in the full parameter, in elements; None if its elements are not side by side."""
        if gpc.tensor_parallel_size > 1 or self.dim or self.num_heads:
            return None
        largest, _ = self._sizes()
        row = math.prod(piece.shape[1:])
        return min(largest * gpc.get_local_rank(ParallelMode.DATA), self.length) * row

    def _padded(self, piece: Tensor) -> Tensor:
        """Return a piece in the size of the largest one."""
        largest, own = self._sizes()
        shape = list(piece.shape)
        shape[self.dim] = largest
        part = piece.new_zeros(shape)
        part.narrow(self.dim, 0, own).copy_(piece)
        return part

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return super().gather(torch.cat(parts, self.dim).narrow(self.dim, 0, self.length))

    def full_shape(self, piece: Sequence[int]) -> list[int]:
        """Return the shape of the full parameter as timm stores it, from the shape of this rank's piece."""
        shape = list(piece)
        shape[self.dim] = self.length
        return super().full_shape(shape)


def _placement(parameter: nn.Parameter) -> dtensor.Shard:
    """Return the first dimension that the ranks can split evenly, else the first one."""
    ranks = gpc.get_world_size(ParallelMode.DATA)
    return dtensor.Shard(next((dim for dim, length in enumerate(parameter.shape) if length % ranks == 0), 0))


def pieces_of(model: nn.Module) -> list[Tensor]:
    """Return what this rank has of the parameters of a model, and what is updated: the parameters themselves, or their
    pieces if `shard_fully` has split them. Not inside of a forward or backward pass.
    """
    return [getattr(parameter, "piece", parameter) for parameter in model.parameters()]


def shard_fully(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Split a model's parameters over the data-parallel ranks, and have the optimizer update this rank's pieces.

    Args:
        model: this rank's part, in its final precision, the same on all data-parallel ranks. Its parameters have the
            attribute `shard`.
        optimizer: over the parameters of `model`.
        device: the model's.
    """
    # The weights outside of blocks are freed after a forward pass, too, which by default they are not: an evaluation's
    # next one would compute with them although averages were swapped in, or a checkpoint loaded.
    mesh = DeviceMesh.from_group(gpc.get_group(ParallelMode.DATA), device.type)
    options: dict[str, Any] = dict(mesh=mesh, shard_placement_fn=_placement, reshard_after_forward=True)
    whole = dict(model.named_parameters())
    for chunk in model if isinstance(model, nn.ModuleList) else [model]:  # an interleaved pipeline has several
        for block in blocks_of(chunk):
            fully_shard(block, **options)
        fully_shard(chunk, **options)
    piece_of: dict[Tensor, Tensor] = {}
    for name, parameter in model.named_parameters():
        before, dim = whole[name], parameter.placements[0].dim
        piece = parameter.to_local().detach().requires_grad_(parameter.requires_grad)
        piece.shard = DataShard(**vars(before.shard), dim=dim, length=before.shape[dim])
        parameter.piece = piece_of[before] = piece
        parameter.hooks = list((before._backward_hooks or {}).values())  # which fully_shard drops
    for group in optimizer.param_groups:
        group["params"] = [piece_of[parameter] for parameter in group["params"]]
    if isinstance(optimizer, Lamb):
        optimizer.norm_groups = (ParallelMode.TENSOR, ParallelMode.DATA)


class PieceGradients(BaseGradientHandler):
    """Gives the pieces of a model's parameters the gradients that `fully_shard` has averaged in the backward passes.

    Before, hooks of the parameters get their pieces' gradients: 3D's sum them over ranks, which may as well come last.

    Args:
        model: that `shard_fully` has split.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())

    def handle_gradient(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                grad, parameter.grad = parameter.grad.to_local(), None
                for hook in parameter.hooks:
                    grad = hook(grad)
                parameter.piece.grad = grad
