"""Dropout and stochastic depth that drop the same in every layout.

What a layer drops of a sample is a function of the seed, the optimizer step, the sample's place in the global batch and
the layer's name, see `philox.py`. It is computed again in the backward pass: no mask is stored.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.rng import philox
from torch import Tensor, nn
from torch.library import custom_op


class ActivationPart(NamedTuple):
    """Which part of an activation (B, N, C) of the full model a rank has.

    Attributes:
        row, rows: its number among the parts of B, and how many they are.
        column, columns: of C likewise.
    """

    row: int = 0
    rows: int = 1
    column: int = 0
    columns: int = 1


WHOLE = ActivationPart()
_samples: Tensor | None = None


@contextmanager
def batch_of(samples: Tensor | None) -> Iterator[None]:
    """Around a forward pass: (B, 2), each sample's optimizer step and place in the global batch; None in evaluation."""
    global _samples
    before, _samples = _samples, samples
    try:
        yield
    finally:
        _samples = before


def current_samples() -> Tensor | None:
    """Those of the innermost `batch_of`; None outside of any."""
    return _samples


@functools.cache
def _nothing(dtype: torch.dtype) -> Tensor:
    """The -0 with which the sum of a zero keeps its sign."""
    return torch.tensor(-0.0, dtype=dtype, device="cpu")


def drop(
    x: Tensor,
    samples: Tensor,
    key: Tensor,
    first: int,
    channels: int,
    gelu: bool = False,
    grad: Tensor | None = None,
) -> Tensor:
    """Set elements to 0 and scale the others up, so that the mean stays.

    Args:
        x: (B, ..., c), contiguous; c of the full model's channels.
        samples: (B, 2), see `batch_of`.
        key: a layer's seed, `word` and rate in units of 2^-16, int64.
        first, channels: the first channel of x, and the full model's number of channels.
        gelu: of GELU(x) instead of x.
        grad: with `gelu`, the gradient of the result, like x; the gradient of x is then computed.

    Returns:
        Of the shape and type of x.
    """
    if x.is_cuda:
        from colossal_vit.rng import kernels  # here, since a CPU needs no Triton

        return kernels.launch(x, samples, key, first, channels, gelu, grad)
    seed, layer, rate = key.tolist()
    tokens = x.shape[1:-1].numel()
    mask = philox.kept(seed, layer, rate, samples.numpy(), tokens, channels, slice(first, first + x.shape[-1]))
    kept = torch.from_numpy(mask.view(np.uint8).reshape(x.shape)).to(x.dtype)
    values = x if not gelu else F.gelu(x) if grad is None else grad
    values = torch.addcmul(_nothing(x.dtype), values, kept, value=philox.ONE / (philox.ONE - rate), out=kept)
    return values if grad is None else torch.ops.aten.gelu_backward(values, x)


_operator = custom_op("colossal_vit::drop", drop, mutates_args=())


@_operator.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _drop(x: Tensor, *others: Any) -> Tensor:
    """`drop`, as an operator if that is to be traced: calling one takes 0.04 ms more."""
    traced = torch.compiler.is_compiling() or type(x) is not Tensor
    return (_operator if traced else drop)(x, *others)


class _Drop(torch.autograd.Function):
    """`drop` with its gradient. (What `register_autograd` makes takes 0.15 ms more of the host's time.)"""

    @staticmethod
    def forward(ctx, x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int, gelu: bool) -> Tensor:
        ctx.save_for_backward(samples, key, x if gelu else None)
        ctx.channels = first, channels
        return _drop(x, samples, key, first, channels, gelu)

    @staticmethod
    def backward(ctx, grad: Tensor):
        samples, key, x = ctx.saved_tensors
        grad = grad.contiguous()
        if x is None:
            grad = _drop(grad, samples, key, *ctx.channels)
        else:
            grad = _drop(x, samples, key, *ctx.channels, True, grad)
        return grad, None, None, None, None, None


class Dropout(nn.Module):
    """Dropout (N. Srivastava et al., JMLR 15, 2014) of activations (B, ..., C), in training only.

    Args:
        rate: the probability that an element is dropped, rounded to 2^-16 and at most 255/256.
        part: this rank's part of the activations.
        gelu: of their GELU, which a GPU computes in the same kernel.

    Attributes:
        part: this rank's part of the random numbers.
        output_part: `part` as given.
    """

    def __init__(self, rate: float, part: ActivationPart = WHOLE, gelu: bool = False):
        super().__init__()
        self.rate, self.part, self.output_part, self.gelu = rate, part, part, gelu
        self.is_off = rate == 0.0  # compiled code depends on this, and so blocks of other rates share it
        self.key: Tensor | None = None  # see `drop`; not a buffer, since DDP would send it in each forward pass

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if self.key is not None:
            self.key = fn(self.key)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """Drop elements of x; `samples` are those of the whole batch, by default `current_samples`."""
        if not self.training or self.is_off:
            return F.gelu(x) if self.gelu else x
        if samples is None and (samples := current_samples()) is None:
            raise RuntimeError("the forward pass of a model with dropout needs `with batch_of(samples):` in training")
        width, part = x.shape[-1], self.part
        if part.rows > 1:
            samples = samples.chunk(part.rows)[part.row]
        return _Drop.apply(x.contiguous(), samples, self.key, part.column * width, part.columns * width, self.gelu)

    def extra_repr(self) -> str:
        return f"{self.rate}"


class DropPath(Dropout):
    """Drops a residual branch for some samples of a batch, and scales it up for the others (G. Huang et al., "Deep
    Networks with Stochastic Depth", arXiv:1603.09382).
    """

    def __init__(self, rate: float, part: ActivationPart = WHOLE):
        super().__init__(rate, part._replace(column=0, columns=1))  # one number decides on all channels
        self.output_part = part

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        if not self.training or self.is_off:
            return x
        return x * super().forward(x.new_ones(len(x), *[1] * (x.ndim - 1)), samples)


def name_layers(model: nn.Module, seed: int) -> None:
    """Give each dropout layer its own random numbers, by its name in the model and the seed of the run."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            rate = min(round(module.rate * philox.ONE), philox.MOST)
            module.key = torch.tensor([seed, philox.word(name), rate])
