"""timm's blocks with fewer passes over memory, under the same names and with the same results but for rounding.

- The gradient of a bias is summed where the gradient of the layer's result is written: by the dropout behind the layer,
  or where the gradients of queries, keys and values are put side by side.
- The dropout at the end of a branch adds the branch to the residual.
- A last block whose other tokens nobody sees computes its first one only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from colossal_vit.rng.dropout import Dropout, is_traced
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.library import custom_op


def merge_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Put tensors (B, heads, N, size) side by side.

    Returns:
        (B, N, C), C = 3 · heads · size, and its sums over B and N, each of some rows: (parts, C), at least fp32.
    """
    y, sums = _results(q)
    flat = [each.transpose(1, 2).flatten(2) for each in (q, k, v)]
    if q.is_cuda:
        from colossal_vit import merge_kernel  # here, since a CPU needs no Triton

        merge_kernel.launch(*flat, y, sums)
    else:
        torch.cat(flat, 2, out=y)
        sums[0] = y.flatten(0, 1).sum(0, dtype=sums.dtype)
    return y, sums


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, size = q.shape
    parts = 1
    if q.is_cuda:
        from colossal_vit import merge_kernel

        parts = -(-batch * tokens // merge_kernel.TILE)
    y = q.new_empty(batch, tokens, 3 * heads * size)
    return y, q.new_empty(parts, y.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))


_merge_heads = custom_op("colossal_vit::merge_heads", merge_heads, mutates_args=())
_merge_heads.register_fake(lambda q, *_: _results(q))


class _SplitHeads(torch.autograd.Function):
    """The inverse of `merge_heads`. What it splits is a sum with `bias`, whose gradient is computed here."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, ...]:
        ctx.type_of_bias = bias if bias is None else bias.dtype
        return x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad, sums = (_merge_heads if is_traced(grads[0]) else merge_heads)(*grads)
        return grad, None if ctx.type_of_bias is None else sums.sum(0).to(ctx.type_of_bias), None


class LeanLinear(nn.Linear):
    """A layer whose bias has its gradient from what comes next, which sums what it writes in any case.

    Attributes:
        dropout: what comes next, if it is one; in a tuple, since as a module it would have two names.
    """

    dropout: tuple[Dropout, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        detached = self.bias is not None and all(dropout.drops() for dropout in self.dropout)
        return F.linear(x, self.weight, self.bias.detach() if detached else self.bias)


class LeanAttention(Attention):
    """timm's attention, without a gate.

    Attributes:
        queries: how many tokens it computes, the first ones; all if None.
    """

    queries: int | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None, **options: Any) -> Tensor:
        """x (B, N, C) to (B, queries, C); a residual is for a `Dropout` at the end, `options` are timm's."""
        bias = self.qkv.bias if isinstance(self.qkv, LeanLinear) else None
        q, k, v = _SplitHeads.apply(self.qkv(x), bias, self.num_heads)
        q, k = self.q_norm(q[:, :, : self.queries]), self.k_norm(k)
        heads = F.scaled_dot_product_attention(q, k, v, **options)
        x = self.proj(self.norm(heads.transpose(1, 2).flatten(2)))
        return self.proj_drop(x) if residual is None else self.proj_drop(x, residual=residual)


class LeanMlp(Mlp):
    """timm's MLP; a residual is for a `Dropout` at its end."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = self.fc2(self.norm(self.drop1(self.act(self.fc1(x)))))
        return self.drop2(x) if residual is None else self.drop2(x, residual=residual)


class LeanBlock(Block):
    """timm's block of a `LeanAttention`.

    Attributes:
        adds: whether its MLP is a `LeanMlp`, and nothing is between its dropouts and the residual.
    """

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        residual = x[:, : self.attn.queries]
        if self.adds:
            x = self.attn(self.norm1(x), residual=residual, **options)
            return self.mlp(self.norm2(x), residual=x)
        x = residual + self.drop_path1(self.ls1(self.attn(self.norm1(x), **options)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def make_lean(block: nn.Module, biases: bool = True) -> bool:
    """Make a block of timm, if it is a `Block` with plain attention, one of these; whether it is now.

    Without `biases` its linear layers stay PyTorch's, which can be split over ranks.
    """
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    if type(block) is not Block or type(attention) is not Attention or getattr(attention, "gate", None):
        return type(block) is LeanBlock
    block.__class__, attention.__class__ = LeanBlock, LeanAttention
    layers = [(attention.proj, attention.proj_drop, False)]  # and whether the dropout would compute GELU
    block.adds = False
    if type(mlp) is Mlp:
        mlp.__class__ = LeanMlp
        layers += [(mlp.fc1, mlp.drop1, True), (mlp.fc2, mlp.drop2, False)]
        between = block.ls1, block.drop_path1, block.ls2, block.drop_path2
        drops = isinstance(attention.proj_drop, Dropout) and isinstance(mlp.drop2, Dropout)
        block.adds = drops and all(isinstance(each, nn.Identity) or getattr(each, "is_off", False) for each in between)
    if biases:
        attention.qkv.__class__ = LeanLinear
        for linear, dropout, gelu in layers:
            if isinstance(dropout, Dropout) and dropout.gelu == gelu and linear.bias is not None:
                linear.__class__, linear.dropout, dropout.linear = LeanLinear, (dropout,), (linear,)
    return True
