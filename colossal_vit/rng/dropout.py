"""Dropout and stochastic depth that drop the same in every layout.

What a layer drops of a sample is a function of the seed, the optimizer step, the sample's place in the global batch and
the layer's name, see `philox.py`. It is computed again in the backward pass: no mask is stored.

A sample's (tokens, channels) are drawn row by row, each row in whole blocks of `BLOCK` elements, so that a rank with
some of the channels need not draw the others. An element is kept if its 8 bits are not below a limit: the rate in units
of 1/256, rounded up in some blocks and down in the others, as many as make up the rate. Which ones changes with the
sample: over 256 steps, or 256 places, an element has the rate exactly. This correlates the elements of a block by at
most 4e-6 / (rate · (1 - rate)), with the rate as a probability. From one sample to the next there is an odd number of
blocks, so that each of 256 places has other limits; limits of neighbouring blocks are 157/256 apart, near the golden
ratio.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from colossal_vit.rng import cpu_kernel, philox
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
    """Surround a forward pass with samples (B, 2): optimizer step, place in the global batch; None in evaluation."""
    global _samples
    before, _samples = _samples, samples
    try:
        yield
    finally:
        _samples = before


def current_samples() -> Tensor | None:
    """Return the samples of the innermost `batch_of`; None outside of any."""
    return _samples


def drop(x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int, gelu: bool) -> Tensor:
    """Set elements to 0 and scale the others up, so that the mean stays.

    Args:
        x: (B, ..., c), contiguous; c of the full model's channels.
        samples: (B, 2), see `batch_of`.
        key: a layer's seed, `word` and rate in units of 2^-16, int64.
        first, channels: the first channel of x, and the full model's number of channels.
        gelu: of GELU(x) instead of x.

    Returns:
        Like x.
    """
    if x.is_cuda:
        from colossal_vit.rng import kernels  # here, since a CPU needs no Triton

        y = torch.empty_like(x)
        kernels.launch(x, y, samples, key, first, channels, gelu)
        return y
    return cpu_kernel.drop(F.gelu(x) if gelu else x, samples, key, first, channels).to(x.dtype)


def drop_gradient(
    grad: Tensor,
    x: Tensor | None,
    samples: Tensor,
    key: Tensor,
    first: int,
    channels: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of `drop`.

    Args:
        grad: of its result, contiguous.
        x: what it had, if it computed GELU.
        samples, key, first, channels: see `drop`.
        dtype: the gradient's type.

    Returns:
        The gradient, of the shape of `grad`.
    """
    if grad.is_cuda:
        from colossal_vit.rng import kernels

        y, gelu = torch.empty_like(grad, dtype=dtype), x is not None
        values, factor = (x, grad) if gelu else (grad, None)
        kernels.launch(values, y, samples, key, first, channels, gelu, grad=factor)
        return y
    y = cpu_kernel.drop(grad, samples, key, first, channels).to(dtype)
    return y if x is None else torch.ops.aten.gelu_backward(y, x)


_operator = custom_op("colossal_vit::drop", drop, mutates_args=())
_gradient_operator = custom_op("colossal_vit::drop_gradient", drop_gradient, mutates_args=())


@_operator.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_gradient_operator.register_fake
def _(grad, x, samples, key, first, channels, dtype):
    return torch.empty_like(grad, dtype=dtype)


def _is_traced(x: Tensor) -> bool:
    """Return whether an operator is to be called: calling one takes 0.04 ms more."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


class _Drop(torch.autograd.Function):
    """`drop` with its gradient. (What `register_autograd` makes takes 0.15 ms more of the host's time.)"""

    @staticmethod
    def forward(ctx, x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int, gelu: bool) -> Tensor:
        ctx.save_for_backward(samples, key, x if gelu else None)
        ctx.options = first, channels, x.dtype
        return (_operator if _is_traced(x) else drop)(x, samples, key, first, channels, gelu)

    @staticmethod
    def backward(ctx, grad: Tensor):
        samples, key, x = ctx.saved_tensors
        function = _gradient_operator if _is_traced(grad) else drop_gradient
        return function(grad.contiguous(), x, samples, key, *ctx.options), None, None, None, None, None


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

    def drops(self) -> bool:
        """Return whether it does anything now but GELU."""
        return self.training and not self.is_off

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """Drop elements of x; `samples` are those of the whole batch, by default `current_samples`."""
        if not self.drops():
            return F.gelu(x) if self.gelu else x
        if samples is None and (samples := current_samples()) is None:
            raise RuntimeError("the forward pass of a model with dropout needs `with batch_of(samples):` in training")
        width, part = x.shape[-1], self.part
        if part.rows > 1:
            samples = samples.chunk(part.rows)[part.row]
        channels = part.column * width, part.columns * width
        return _Drop.apply(x.contiguous(), samples, self.key, *channels, self.gelu)

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
        if not self.drops():
            return x
        return x * super().forward(x.new_ones(len(x), *[1] * (x.ndim - 1)), samples)


def name_layers(model: nn.Module, seed: int) -> None:
    """Give each dropout layer its own random numbers, by its name in the model and the seed of the run."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            rate = min(round(module.rate * philox.ONE), philox.MOST)
            module.key = torch.tensor([seed, philox.word(name), rate])
