"""LAMB, the optimizer for large batches."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor
from torch.optim import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
# After how many elements a batch of parameters ends. On the CPU it is a matrix and the vectors beside it: the update is
# then applied while the cache still has it. On a GPU few kernels matter more, and the limit is for the memory that
# updates take, 0.5 GiB. (Under tensor parallelism all of them wait for the norms.)
_BATCH_ON_CPU, _BATCH_ON_GPU = 2**10, 2**27


class _Batch(NamedTuple):
    """Parameters updated at a time: of one group, type and device, in the same step of theirs."""

    options: dict[str, Any]
    step: int
    parameters: list[Tensor]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor in at least fp32 and contiguous; itself if it is so already."""
    return (tensor.float() if tensor.dtype.itemsize < 4 else tensor).contiguous()


class Lamb(Optimizer):
    """LAMB: Adam with the step of each parameter scaled to that parameter's norm.

    From the gradient g, a step makes of a parameter w and its moments m and v

        m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²,  u = m / (√v + eps) + weight_decay w,
        w ← w - lr c ‖w‖ / ‖u‖ u,

    with a trust ratio ‖w‖ / ‖u‖ of 1 where either norm is 0 (Y. You et al., arXiv:1904.00962, algorithm 2). c is 1, or
    √(1 - β₂ᵗ) / (1 - β₁ᵗ) in step t with `bias_correction`. Signature, defaults, state and numbers are those of
    `colossalai.nn.optimizer.Lamb`. What differs:

    - under tensor parallelism norms are those of whole parameters, which takes one small all_reduce a step;
    - the host never waits for the device;
    - `adam` is an option of the parameter group;
    - the moments of parameters in half precision are in fp32: in bf16, 0.999 v rounds to v.

    Args:
        params: parameters, or groups of them with options of their own, see `parameter_groups`. Under tensor
            parallelism those with a `Shard` are pieces, and every rank lists them in the same order.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: added to √v.
        weight_decay: the share of w in u.
        adam: whether the trust ratio is always 1.
        bias_correction: whether steps are scaled by c. The paper's corrects m and v, which changes the trust ratio too.

    Raises:
        ValueError: if an option is out of range.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        bias_correction: bool = False,
    ):
        for name, value in dict(lr=lr, eps=eps, weight_decay=weight_decay).items():
            if not value >= 0:
                raise ValueError(f"{name} = {value}, but it must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}, but both must be at least 0 and below 1")
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam=adam)
        super().__init__(params, dict(**options, bias_correction=bias_correction))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned, of a `Lamb` or of Colossal-AI's."""
        super().load_state_dict(state_dict)
        # PyTorch has cast the moments to their parameter's type, which may be half precision: take them as saved.
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            for key in state_dict["state"].get(number, {}).keys() & set(_MOMENTS):
                self.state[parameter][key] = state_dict["state"][number][key].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; under tensor parallelism, on all ranks together.

        Args:
            closure: computes the gradients, and the loss, which is returned.

        Raises:
            RuntimeError: if a gradient is sparse.
            ValueError: if a moment that was loaded is not of its parameter's shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = list(self._batches())
        updates = map(self._updates, batches)  # one at a time, as the loop below gets there
        if gpc.is_initialized(ParallelMode.TENSOR) and gpc.get_world_size(ParallelMode.TENSOR) > 1:
            updates = self._with_global_norms(batches, list(updates))
        for (options, step, parameters), (update, norms) in zip(batches, updates, strict=True):
            lr, (beta1, beta2) = options["lr"], options["betas"]
            if options["bias_correction"]:
                lr = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
            if options["adam"]:
                torch._foreach_add_(parameters, update, alpha=-lr)
            else:
                w, u = norms.unbind(1)
                ratios = (w / u).masked_fill((w == 0) | (u == 0), 1.0)
                torch._foreach_addcmul_(parameters, update, (-lr * ratios).unbind())
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _batches(self) -> Iterator[_Batch]:
        """All parameters that have a gradient, with this step counted and their moments ready."""
        for group in self.param_groups:
            options = {**self.defaults, **group}  # one that was loaded may lack some
            batches, elements = defaultdict(list), 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Lamb does not take sparse gradients")
                state = self.state[p]
                if not state:
                    state.update(step=0, **{key: torch.zeros_like(p) for key in _MOMENTS})
                state["step"] += 1
                for key in _MOMENTS:
                    if state[key].shape != p.shape:
                        raise ValueError(f"{key} of shape {(*state[key].shape,)} for a parameter of {(*p.shape,)}")
                    state[key] = _plain(state[key])
                part = elements // (_BATCH_ON_CPU if p.is_cpu else _BATCH_ON_GPU)
                elements += p.numel()
                batches[int(state["step"]), p.dtype, p.device, part].append(p)
            for (step, *_), parameters in batches.items():
                yield _Batch(options, step, parameters)

    def _updates(self, batch: _Batch) -> tuple[list[Tensor], Tensor]:
        """Take the gradients of a batch into its moments.

        Returns:
            u of each of the n parameters, in its shape, and the norms of w and u, both of this rank's pieces: (n, 2).
        """
        options, _, parameters = batch
        weights = [_plain(p) for p in parameters]
        updates = torch._foreach_mul(weights, options["weight_decay"])
        # With a learning rate of -1, and after so many steps that no bias is left to correct, Adam's kernel adds
        # m / (√v + eps) to what it takes for parameters: one pass through memory, where foreach needs seven. It trusts
        # all tensors to be laid out alike.
        torch._fused_adam_(
            updates,
            [_plain(p.grad) for p in parameters],
            *([self.state[p][key] for p in parameters] for key in _MOMENTS),
            [],
            [torch.full((), 1e18, device=weights[0].device)] * len(parameters),
            lr=-1.0,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=0.0,
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )
        norms = torch._foreach_norm([*chain.from_iterable(zip(weights, updates, strict=True))])
        return updates, torch.stack(norms).view(-1, 2)

    def _with_global_norms(
        self, batches: list[_Batch], updates: list[tuple[list[Tensor], Tensor]]
    ) -> list[tuple[list[Tensor], Tensor]]:
        """What `_updates` returned for all batches, with the norms of whole parameters for those of pieces.

        Copies of a piece all count: they make both norms of a parameter larger by the same factor.
        """
        # A piece that is not used has no gradient, or one that means nothing. It keeps its place in the sum, since the
        # ranks add up by place.
        here = {
            p: norms
            for batch, (_, rows) in zip(batches, updates, strict=True)
            for p, norms in zip(batch.parameters, rows.unbind(), strict=True)
            if not hasattr(p, "shard") or p.shard.in_use
        }
        nothing = torch.zeros(2, device=next(self._parameters()).device)
        squares = torch.stack([here.get(p, nothing) for p in self._parameters()]).square_()
        dist.all_reduce(squares, group=gpc.get_group(ParallelMode.TENSOR))
        whole = dict(zip(self._parameters(), squares.sqrt_().unbind(), strict=True))
        return [
            (update, torch.stack([whole[p] for p in batch.parameters]))
            for batch, (update, _) in zip(batches, updates, strict=True)
        ]
