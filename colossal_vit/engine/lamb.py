"""LAMB, the optimizer for large batches."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit.compat.norms import at_least_fp32
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor
from torch.optim import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements after which a batch of parameters ends. On the CPU a batch is one matrix and its neighbouring vectors, so
# that the update is applied while it is still in the cache. On a GPU fewer kernels matter more; the limit bounds the
# memory of a batch's updates to 0.5 GiB. (Under tensor parallelism all updates are kept until the norms are known.)
_BATCH_ON_CPU, _BATCH_ON_GPU = 2**10, 2**27


class _Batch(NamedTuple):
    """Parameters that are updated together: of the same group, data type, device and step count."""

    options: dict[str, Any]
    step: int
    parameters: list[Tensor]


def _add_adam_direction(
    sums: list[Tensor],
    gradients: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    options: dict[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Update the moments m and v from the gradients, and add m / (√v + eps) to `sums`; nothing if `found_inf` is 1.

    Adam's fused kernel does so to its "parameters" with a learning rate of -1, and a step count so large that bias
    correction has no effect: one pass through memory where foreach needs seven. It assumes that all tensors have the
    same memory layout.
    """
    beta1, beta2 = options["betas"]
    step = [torch.full((), 1e18, device=sums[0].device)] * len(sums)
    rule = dict(lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=options["eps"], amsgrad=False, maximize=False)
    torch._fused_adam_(sums, gradients, m, v, [], step, **rule, found_inf=found_inf)


class Lamb(Optimizer):
    """LAMB: Adam, with each parameter's update scaled in proportion to the parameter's norm.

    A step updates a parameter w and its moments m and v from the gradient g by

        m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²,  u = m / (√v + eps) + weight_decay w,
        w ← w - lr c ‖w‖ / ‖u‖ u,

    where the trust ratio ‖w‖ / ‖u‖ is 1 if either norm is 0 (Y. You et al., arXiv:1904.00962, algorithm 2), and c is 1
    or, with `bias_correction`, √(1 - β₂ᵗ) / (1 - β₁ᵗ) in step t. Signature, defaults, state and results are those of
    `colossalai.nn.optimizer.Lamb`, with these differences:

    - of split parameters the norms are those of full ones, at the cost of one small all-reduce per step and group;
    - a step never synchronises host and device;
    - if the attribute `found_inf` is a tensor, and 1 on the device, a step only counts, see `undo_step_count`;
    - `adam` can be set per parameter group;
    - half-precision parameters have fp32 moments: in bf16, 0.999 v rounds to v.

    Args:
        params: parameters, or parameter groups with their own options. Under tensor parallelism parameters with a
            `Shard` are shards, and all ranks list them in the same order.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: added to √v.
        weight_decay: coefficient of w in u.
        adam: whether to fix the trust ratio at 1.
        bias_correction: whether to scale steps by c. The paper corrects m and v instead, which changes the trust ratio.

    Raises:
        ValueError: if an option is out of range.
    """

    found_inf: Tensor | None = None
    norm_groups = (ParallelMode.TENSOR,)  # over which parameters are split, all or none
    _step_supports_amp_scaling = True  # torch's name for this of its fused optimizers

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
        """Load what `state_dict()` of this class or of Colossal-AI's Lamb returned."""
        super().load_state_dict(state_dict)
        # PyTorch casts the moments to their parameter's type, which may be half precision: load them as saved.
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            for key in state_dict["state"].get(number, {}).keys() & set(_MOMENTS):
                self.state[parameter][key] = state_dict["state"][number][key].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; collective over `norm_groups`.

        Args:
            closure: recomputes the gradients and returns the loss, which `step` then returns.

        Raises:
            RuntimeError: if a gradient is sparse.
            ValueError: if a loaded moment is not of its parameter's shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = list(self._batches())
        self._counted = [p for batch in batches for p in batch.parameters]
        updates = map(self._updates, batches)  # lazily: one batch at a time in the loop below
        groups = [mode for mode in self.norm_groups if gpc.is_initialized(mode) and gpc.get_world_size(mode) > 1]
        if groups:
            updates = self._with_global_norms(batches, list(updates), groups)
        for (options, step, parameters), (update, norms) in zip(batches, updates, strict=True):
            lr, (beta1, beta2) = options["lr"], options["betas"]
            if options["bias_correction"]:
                lr = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
            w, u = norms.unbind(1)
            ratios = torch.ones_like(w) if options["adam"] else (w / u).masked_fill((w == 0) | (u == 0), 1.0)
            if self.found_inf is not None:
                ratios = ratios * (1 - self.found_inf)
            torch._foreach_addcmul_(parameters, update, (-lr * ratios).unbind())
        return loss

    def undo_step_count(self) -> None:
        """Take back the count of the last step, which has changed nothing since `found_inf` was 1."""
        for parameter in self._counted:
            self.state[parameter]["step"] -= 1

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _batches(self) -> Iterator[_Batch]:
        """Batches of all parameters that have a gradient; counts the step and creates missing moments."""
        for group in self.param_groups:
            options = {**self.defaults, **group}  # a loaded group may lack some options
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
                    state[key] = state[key].to(at_least_fp32(p).dtype).contiguous()
                part = elements // (_BATCH_ON_CPU if p.is_cpu else _BATCH_ON_GPU)
                elements += p.numel()
                batches[int(state["step"]), p.dtype, p.device, part].append(p)
            for (step, *_), parameters in batches.items():
                yield _Batch(options, step, parameters)

    def _updates(self, batch: _Batch) -> tuple[list[Tensor], Tensor]:
        """Update the moments of a batch of n parameters from their gradients.

        Returns:
            u of each parameter, in its shape, and the norms of w and u on this rank's shards, (n, 2).
        """
        options, _, parameters = batch
        weights = [at_least_fp32(p).contiguous() for p in parameters]
        updates = torch._foreach_mul(weights, options["weight_decay"])
        gradients = [at_least_fp32(p.grad).contiguous() for p in parameters]
        _add_adam_direction(
            updates,
            gradients,
            *([self.state[p][key] for p in parameters] for key in _MOMENTS),
            options,
            self.found_inf,
        )
        norms = torch._foreach_norm([*chain.from_iterable(zip(weights, updates, strict=True))])
        return updates, torch.stack(norms).view(-1, 2)

    def _with_global_norms(
        self, batches: list[_Batch], updates: list[tuple[list[Tensor], Tensor]], groups: list[ParallelMode]
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Replace the norms of shards, in what `_updates` returned for all batches, by those of full parameters.

        Replicas of a shard are all summed: that multiplies both norms of a parameter by the same factor, which cancels.
        The sum is in float64, so that replicas of the model have the same norms whatever the order of summation.
        """
        # An unused shard (see `Shard.owner`) has no meaningful gradient, and counts as zeros. It keeps its row, since
        # the all-reduce matches rows by position.
        here = {
            p: norms
            for batch, (_, rows) in zip(batches, updates, strict=True)
            for p, norms in zip(batch.parameters, rows.unbind(), strict=True)
            if not hasattr(p, "shard") or p.shard.in_use
        }
        parameters = list(self._parameters())
        if not parameters:
            return []
        nothing = torch.zeros(2, device=parameters[0].device)
        shards = torch.stack([here.get(p, nothing) for p in parameters])
        squares = shards.double().square_()
        for mode in groups:
            dist.all_reduce(squares, group=gpc.get_group(mode))
        whole = dict(zip(parameters, squares.sqrt_().to(shards.dtype).unbind(), strict=True))
        return [
            (update, torch.stack([whole[p] for p in batch.parameters]))
            for batch, (update, _) in zip(batches, updates, strict=True)
        ]
