"""Muon, which orthogonalises the updates of hidden matrices, with AdamW for all other parameters."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW


def num_matrices(name: str, parameter: Tensor) -> int:
    """Return how many matrices of hidden layers a parameter has, one above the other: 0 if AdamW is to train it.

    Those of the transformer blocks count. A fused projection to queries, keys and values has three, which are as
    independent as if they were stored apart.

    Args:
        name: of the parameter in timm.
        parameter: whole, or a rank's piece of it.
    """
    if parameter.ndim != 2 or not re.fullmatch(r"blocks\.\d+\..*\.weight", name):
        return 0
    return 3 if ".qkv." in name else 1


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, and singular values near 1, by five Newton-Schulz iterations.

    The quintic polynomial, its coefficients and the smallest norm are those of `torch.optim.Muon`, which computes in
    bf16.

    Args:
        matrices: (n, rows, columns), each of which is a whole one; computed in their data type.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices  # the products are of the shorter side
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(AdamW):
    """Muon for the parameter groups that say of how many matrices each parameter consists, AdamW for the others.

    A step updates a matrix w of r rows and c columns, and its momentum m, from the gradient g by

        m ← μ m + (1 - μ) g,  u = μ m + (1 - μ) g, or without Nesterov's momentum u = m,
        w ← w - lr weight_decay w - lr 0.2 √max(r, c) orthogonalise(u)

    (K. Jordan, kellerjordan.github.io/posts/muon). The factor is that of J. Liu et al., arXiv:2502.16982: updates are
    as large as AdamW's are on average, so that one learning rate serves both. State and results are those of
    `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, with these differences:

    - ranks that hold pieces of a matrix gather u, so that its whole is orthogonalised, and each takes its own piece of
      the result;
    - the iteration is in `dtype`, not always in bf16, in which layouts differ by more than the rounding of fp32;
    - a step never synchronises host and device;
    - if the attribute `found_inf` is a tensor, and 1 on the device, nothing changes, as in torch's fused AdamW.

    Args:
        groups: parameter groups, with `matrices`, see `num_matrices`. Parameters of hidden matrices have a `Shard`, and
            all tensor-parallel ranks list them in the same order.
        momentum: μ.
        nesterov: whether u is one step ahead of m.
        dtype: data type of the iteration; None for that of the parameter.
        options: of AdamW.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        momentum: float = 0.95,
        nesterov: bool = True,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(groups, fused=True, **options)
        self.momentum, self.nesterov, self.dtype = momentum, nesterov, dtype

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # AdamW's step asks here what to update in a group. Of matrices nothing is left to it.
        if not group["matrices"]:
            return super()._init_group(group, *lists)
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, group)
        return False

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Make a step of Muon with a parameter; collective over the ranks that hold its pieces."""
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state.update(step=parameter.new_zeros((), dtype=torch.float32), momentum_buffer=torch.zeros_like(parameter))
        momentum = state["momentum_buffer"]
        lr = group["lr"]
        if self.found_inf is not None:
            # In place of the gradient, the momentum leaves itself as it is; and the weight has a rate of 0.
            gradient = torch.where(self.found_inf.bool(), momentum, gradient)
            lr = lr * (1 - self.found_inf.double())
            state["step"] -= self.found_inf
        state["step"] += 1
        momentum.lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        whole = parameter.shard.gather(update.to(self.dtype or update.dtype))
        matrices = whole.reshape(group["matrices"], -1, whole.size(1))
        piece = parameter.shard.split(orthogonalise(matrices).reshape(whole.shape)).to(parameter.dtype)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(lr * 0.2 * max(matrices.shape[1:]) ** 0.5 * piece)
