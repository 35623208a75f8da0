"""What torch.compile cannot trace in Colossal-AI's layers, in forms that it can; `patches.apply` installs them.

A compiled program ends at a collective that is started and waited for later, at `dist.broadcast` and at `dist.reduce`.
And the programs of all ranks have to be the same: the compiler removes a collective if its rank does not use the
result, and may change the order of two that do not need each other. So whatever depends on a rank's number is within an
operator, which the compiler does not look into.

Eager code calls what it always called.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.nn.layer.parallel_2d import _operation as parallel_2d
from colossalai.legacy.nn.layer.parallel_2p5d import _operation as parallel_2p5d
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.library import custom_op

# Upstream's products A·B, A·Bᵀ and Aᵀ·B of matrices that are split over a square of ranks, and its rows and columns.
PRODUCTS = {
    "2d": (parallel_2d.Matmul_AB_2D, parallel_2d.Matmul_ABT_2D, parallel_2d.Matmul_ATB_2D),
    "2.5d": (parallel_2p5d.Matmul_AB_2p5D, parallel_2p5d.Matmul_ABT_2p5D, parallel_2p5d.Matmul_ATB_2p5D),
}
GROUPS = {
    "2d": (ParallelMode.PARALLEL_2D_ROW, ParallelMode.PARALLEL_2D_COL),
    "2.5d": (ParallelMode.PARALLEL_2P5D_ROW, ParallelMode.PARALLEL_2P5D_COL),
}


# ---- Collectives that are started and waited for later ----


class _Started:
    """A collective; `wait` puts its result where in eager code the collective itself does."""

    def __init__(self, result: Tensor, output: Tensor):
        self.result, self.output = result, output

    def wait(self) -> None:
        self.output.copy_(torch.ops._c10d_functional.wait_tensor(self.result))


def all_reduce(tensor: Tensor, *, group: dist.ProcessGroup, async_op: bool = False, **options: Any) -> Any:
    """`dist.all_reduce`; of a sum, if it is asynchronous."""
    if async_op and is_compiling():
        return _Started(torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name), tensor)
    return dist.all_reduce(tensor, group=group, async_op=async_op, **options)


def reduce_scatter(
    output: Tensor, tensor: Tensor, *, group: dist.ProcessGroup, async_op: bool = False, **options: Any
) -> Any:
    """`dist.reduce_scatter_tensor`; of a sum, if it is asynchronous."""
    if async_op and is_compiling():
        part = torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", group.size(), group.group_name)
        return _Started(part, output)
    return dist.reduce_scatter_tensor(output, tensor, group=group, async_op=async_op, **options)


def push_async_grad(work: Any, grad: Tensor, key: int) -> Tensor:
    """Keep a 3D layer's gradient as upstream does, for the hook of its parameter; without a key wait, and return it."""
    if not key:
        if work is not None:
            work.wait()
        return grad
    return parallel_3d_utils.push_async_grad(work, grad, key)


def key_of(parameter: nn.Parameter) -> int:
    """Return the key for `push_async_grad`, or 0 where no hook can take the gradient: in compiled code, in which
    upstream's `id` would be a constant, and each block another program; and in the parameters that `fully_shard` makes.
    """
    return 0 if is_compiling() or not parameter._backward_hooks else id(parameter)


# ---- Operators ----


@custom_op("colossal_vit::product", mutates_args=())
def _product(mode: str, number: int, a: Tensor, b: Tensor, shape: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """`PRODUCTS[mode][number]`, with all of its arguments that are numbers in `ranks`."""
    side, *place, data_rank, pipeline_rank, pipeline_size, tensor_size = ranks
    ranks = *place, *GROUPS[mode], data_rank, pipeline_rank, pipeline_size, tensor_size
    return PRODUCTS[mode][number].forward(None, a, b, side, shape, *ranks)


@_product.register_fake
def _(mode: str, number: int, a: Tensor, b: Tensor, shape: Sequence[int], ranks: Sequence[int]) -> Tensor:
    return a.new_empty(shape)


def _save(ctx, inputs, output) -> None:
    ctx.mode, _, a, b, _, ctx.ranks = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = _product(ctx.mode, 1, grad, b, a.shape, ctx.ranks)
    grad_b = _product(ctx.mode, 2, a, grad, b.shape, ctx.ranks)
    return None, None, grad_a, grad_b, None, None


_product.register_autograd(_backward, setup_context=_save)


class Product:
    """Takes the place of the first of `PRODUCTS[mode]` in upstream's layers."""

    def __init__(self, mode: str):
        self.mode = mode

    def apply(self, a: Tensor, b: Tensor, side: int, shape: Sequence[int], *more: Any) -> Tensor:
        if not is_compiling():
            return PRODUCTS[self.mode][0].apply(a, b, side, shape, *more)
        ranks = [side, *(number for number in more if isinstance(number, int))]
        return _product(self.mode, 0, *_autocast(a, b), shape, ranks)


@custom_op("colossal_vit::bias_2p5d", mutates_args=())
def _bias(x: Tensor, is_gradient: bool) -> Tensor:
    """Return the bias of a column's first rank, on each of its ranks; of gradients the sum, which is zero on the
    others.
    """
    group, x = gpc.get_group(ParallelMode.PARALLEL_2P5D_COL), x.clone()
    if not is_gradient:
        dist.broadcast(x, group_src=0, group=group)
    else:
        dist.reduce(x, group_dst=0, group=group)
        if dist.get_rank(group):
            x.zero_()
    return x


@_bias.register_fake
def _(x: Tensor, is_gradient: bool) -> Tensor:
    return torch.empty_like(x)


_bias.register_autograd(lambda ctx, grad: (_bias(grad, True), None))


def add_bias_2p5d(x: Tensor | None, bias: Tensor, *more: Any) -> Tensor:
    """Upstream's, for its layers and for the norm."""
    if not is_compiling():
        return parallel_2p5d.add_bias_2p5d(x, bias, *more)
    bias = _bias(*_autocast(bias), False)
    return bias if x is None else torch.add(*_autocast(x), bias)


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Under autocast, the tensors in its type, as in `patches._follow_autocast`."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
