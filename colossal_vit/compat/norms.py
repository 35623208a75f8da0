"""Layer norms for 2D, 2.5D and 3D, where the hidden size is split over ranks; `patches.apply` installs them.

Colossal-AI's sum the squares of activations in the activations' own type. In fp16 the sum overflows from an RMS of 10
on (at width 768), and the norm silently returns zeros; in bf16 the variance is the difference of two numbers of 8 bits.
And a variance that is E[x²] − E[x]² loses the digits that both have in common: at a mean of 100 standard deviations
four of fp32's seven. Here statistics and normalised values are computed in at least fp32, as PyTorch's `layer_norm`
does, and each rank's mean and variance are merged as in T. Chan et al., "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances", 1979. The statistics of a pass take one collective operation.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.compat.compiled import add_bias_2p5d, all_reduce, key_of, push_async_grad
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.nn.layer.parallel_2d._operation import add_bias_2d
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64; copied only if necessary."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean_and_scale(x: Tensor, eps: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Mean and 1/√(variance + eps) of a last dimension that is split over the group in equal parts: (..., 1) each."""
    _, mean, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)  # one kernel that sums as torch's norm
    own = torch.stack([mean, scale])
    parts = own.new_empty(dist.get_world_size(group) * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(parts, own, group=group)
    means, scales = parts.unflatten(0, (-1, 2)).unbind(1)
    spread, mean = torch.var_mean(means, 0, correction=0)
    return mean, torch.rsqrt(scales.pow(-2).mean(0) + spread)


def _sums(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums of `a` and of `b` over a last dimension that is split over the group: (2, ..., 1)."""
    sums = torch.stack([a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)])
    dist.all_reduce(sums, group=group)
    return sums


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over a last dimension that is split over a group.

    As with PyTorch's norm, the output has the type of the input, or at least fp32 under autocast.
    """

    @staticmethod
    def forward(ctx, x: Tensor, size: int, eps: float, group: dist.ProcessGroup) -> Tensor:
        wide = at_least_fp32(x)
        mean, scale = _mean_and_scale(wide, eps, group)
        normalized = (wide - mean) * scale
        if not torch.is_autocast_enabled(x.device.type):
            normalized = normalized.to(x.dtype)
        ctx.save_for_backward(normalized, scale)
        ctx.size, ctx.group, ctx.dtype = size, group, x.dtype
        return normalized

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalized, scale = ctx.saved_tensors
        grad, normalized = at_least_fp32(grad), at_least_fp32(normalized)
        total, projection = _sums(grad, grad * normalized, ctx.group)
        centered = torch.addcmul(grad, normalized, projection, value=-1 / ctx.size).sub_(total, alpha=1 / ctx.size)
        return centered.mul_(scale).to(ctx.dtype), None, None, None


class _ScaleAndShift3D(torch.autograd.Function):
    """bias + weight · x; the gradients of weight and bias are all-reduced asynchronously in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, ids: tuple[int, int], mode: ParallelMode) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.ids, ctx.mode = bias.dtype, ids, mode
        return torch.addcmul(bias, weight, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        all_but_last = tuple(range(grad.dim() - 1))
        sums = ((grad * x).sum(all_but_last).to(weight.dtype), grad.sum(all_but_last).to(ctx.bias_dtype))
        pending = []
        for total, parameter in zip(sums, ctx.ids, strict=True):
            work = all_reduce(total, group=gpc.get_group(ctx.mode), async_op=True)
            pending.append(push_async_grad(work, total, parameter))
        return (grad * weight).to(x.dtype), *pending, None, None


def _scale_and_shift(self: nn.Module, normalized: Tensor, gather: Callable, *place: Any) -> Tensor:
    """bias + weight · normalized; `gather`, which is `add_bias_2d` or `add_bias_2p5d`, gathers both over a column."""
    ranks = (
        self.data_parallel_rank,
        self.pipeline_parallel_rank,
        self.pipeline_parallel_size,
        self.tensor_parallel_size,
    )
    with torch.autocast(normalized.device.type, enabled=False):  # which would round them
        weight, bias = (
            gather(None, parameter, self.partitioned_partition, *place, True, *ranks)
            for parameter in (self.weight, self.bias)
        )
    return torch.addcmul(bias, weight, normalized)


def forward_2d(self: nn.Module, x: Tensor) -> Tensor:
    """`LayerNorm2D.forward`: x is (B/q, N, H/q); weight and bias are gathered over the ranks of a column."""
    rows, columns = ParallelMode.PARALLEL_2D_ROW, ParallelMode.PARALLEL_2D_COL
    normalized = _Normalize.apply(x, self.normalized_shape, self.variance_epsilon, gpc.get_group(rows))
    return _scale_and_shift(self, normalized, add_bias_2d, self.row_rank, self.col_rank, rows, columns)


def forward_2p5d(self: nn.Module, x: Tensor) -> Tensor:
    """`LayerNorm2p5D.forward`: as in 2D, within each q × q square of ranks."""
    rows, columns = ParallelMode.PARALLEL_2P5D_ROW, ParallelMode.PARALLEL_2P5D_COL
    normalized = _Normalize.apply(x, self.normalized_shape, self.variance_epsilon, gpc.get_group(rows))
    place = self.tesseract_dim, self.row_rank, self.col_rank, self.dep_rank, columns
    return _scale_and_shift(self, normalized, add_bias_2p5d, *place)


def forward_3d(self: nn.Module, x: Tensor) -> Tensor:
    """`LayerNorm3D.forward`: x is (B/q², N, H/q), weight and bias are (H/q,)."""
    group = gpc.get_group(self.output_parallel_mode)
    normalized = _Normalize.apply(x, self.normalized_shape, self.variance_epsilon, group)
    ids = key_of(self.weight), key_of(self.bias)  # the keys under which their hooks find the pending gradients
    return _ScaleAndShift3D.apply(normalized, self.weight, self.bias, ids, self.input_x_weight_parallel_mode)
