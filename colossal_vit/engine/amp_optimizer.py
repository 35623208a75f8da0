"""The optimizer with loss scaling, clipping by the global norm and fp32 master weights, as the precision requires.

The engine calls `clip_grad_by_norm(max_norm)` on the accumulated gradients, then `launch_update()`, and
`finish_update(norm)` once it has read the norm, which on a GPU is in the next step. Upstream's wrappers override a
method that its engine no longer calls, so upstream clips scaled gradients, by a norm local to each rank, and those of
its newer API unscale by the scale of the next step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from colossal_vit.engine.lamb import Lamb
from colossal_vit.parallel.sharding import global_norm
from colossalai.interface import OptimizerWrapper
from colossalai.legacy.context import ParallelMode
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class LossScale:
    """The factor of the loss in fp16 training, lowered after overflows and raised after a run of steps without any.

    It is kept on the host, which learns of an overflow from the gradient norm. The rule is that of Colossal-AI's
    `DynamicGradScaler`, and with `hysteresis` = 1 that of torch's `GradScaler`.

    Attributes:
        initial_scale: the scale to begin with, if it is within the bounds.
        growth_factor, backoff_factor: factors by which the scale is raised and lowered.
        growth_interval: consecutive steps without overflow before it is raised.
        hysteresis: overflows since it was last raised before it is lowered.
        min_scale, max_scale: bounds of the scale.
        value: the scale now.
        growth_step: steps since it was last raised, or the last overflow.
        hysteresis_step: overflows since it was last raised.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = math.inf

    def __post_init__(self):
        self.value = self.within(float(self.initial_scale))
        self.growth_step = self.hysteresis_step = 0

    def within(self, value: float) -> float:
        """Return the nearest scale to a value that is within the bounds."""
        return min(max(value, self.min_scale), self.max_scale)

    def update(self, overflow: bool) -> None:
        """Count a step, and change the scale if it is time to."""
        if overflow:
            self.growth_step, self.hysteresis_step = 0, self.hysteresis_step + 1
            if self.hysteresis_step >= self.hysteresis:
                self.value = self.within(self.value * self.backoff_factor)
            return
        self.growth_step += 1
        if self.growth_step >= self.growth_interval:  # above it if a run resumes with a shorter one
            self.growth_step = self.hysteresis_step = 0
            self.value = self.within(self.value * self.growth_factor)


class AMPOptimizer(OptimizerWrapper):
    """An optimizer whose gradients are unscaled and clipped by their global norm.

    Args:
        optim: over the parameters of the model.
        scale: the loss scale, or None.
        master_weights: whether `optim` updates fp32 copies of the parameters that are in half precision, as in
            `AMP_TYPE.NAIVE`.

    Attributes:
        grad_norm: L2 norm of the last full, unscaled gradient before clipping, over all ranks that share the model; a
            tensor.
        norm_group: the ranks that share the gradients: those that share the model, or with optimizer state split over
            data-parallel ranks all of them.
        skipped: whether the last step that ended left the weights unchanged, since its gradient was not finite.
        has_diverged: whether it did so with the smallest loss scale, or without one.
        working_to_master_map: from a parameter of the model to its master copy, for those that have one.
    """

    def __init__(self, optim: Optimizer, scale: LossScale | None = None, master_weights: bool = False):
        super().__init__(optim)
        self.scale, self.norm_group = scale, ParallelMode.MODEL
        self.skipped = self.has_diverged = False
        self.working_to_master_map: dict[Tensor, Tensor] = {}
        for group in optim.param_groups if master_weights else ():
            group["params"] = [self._master(p) if p.dtype.itemsize < 4 else p for p in group["params"]]

    def _master(self, working: Tensor) -> Tensor:
        master = self.working_to_master_map[working] = working.detach().float()
        if hasattr(working, "shard"):
            master.shard = working.shard
        return master

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in the backward pass; None without loss scaling."""
        return self.scale and self.scale.value

    def scaler_state(self) -> dict[str, Any]:
        """Return the loss scaler's state to save in checkpoints, JSON-serialisable; empty without loss scaling."""
        if not (scale := self.scale):
            return {}
        return dict(loss_scale=scale.value, growth_step=scale.growth_step, hysteresis_step=scale.hysteresis_step)

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `scaler_state` returned; ignored unless both scale the loss."""
        if (scale := self.scale) and "loss_scale" in state:
            scale.value, scale.growth_step = scale.within(state["loss_scale"]), state["growth_step"]
            scale.hysteresis_step = state.get("hysteresis_step", 0)

    def zero_grad(self, *args, **kwargs) -> None:
        for working in self.working_to_master_map:
            working.grad = None
        super().zero_grad(*args, **kwargs)

    def backward(self, loss: Tensor, *args, **kwargs) -> None:
        super().backward(loss * self.scale.value if self.scale else loss, *args, **kwargs)

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        """Unscale the gradients and clip them by their norm over all ranks that share them; 0 does not clip.

        Returns:
            The global norm of the unscaled gradients before clipping, a float32 scalar.
        """
        for working, master in self.working_to_master_map.items():
            if working.grad is not None:
                master.grad, working.grad = working.grad.float(), None
        parameters = [p for p in self.parameters if p.grad is not None]
        grads, scale = [p.grad for p in parameters], self.loss_scale or 1.0
        self.grad_norm = global_norm(grads, parameters, self.norm_group) / scale
        factor = torch.full_like(self.grad_norm, 1.0 / scale)
        if max_norm > 0:
            factor = factor * torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0)
        if grads and (max_norm > 0 or scale != 1.0):
            torch._foreach_mul_(grads, factor)
        return self.grad_norm

    @property
    def updates_on_device(self) -> bool:
        """Whether the optimizer leaves everything unchanged where its `found_inf` is 1, as torch's fused ones do."""
        return getattr(self.optim, "_step_supports_amp_scaling", False)  # torch's GradScaler asks so, too

    def launch_update(self) -> None:
        """Have the device update the weights if it finds the norm finite; the host need not know it yet.

        With an optimizer that cannot be queued, `finish_update` updates the weights.
        """
        if self.updates_on_device:
            self.optim.found_inf = (~self.grad_norm.isfinite()).float()
            self._update_weights()
            self.optim.found_inf = None

    @torch.no_grad()
    def _update_weights(self) -> None:
        self.optim.step()
        if self.working_to_master_map:
            torch._foreach_copy_(list(self.working_to_master_map), list(self.working_to_master_map.values()))

    def finish_update(self, grad_norm: float) -> None:
        """Update the loss scale, and what `launch_update` has left; the norm is global, so all ranks agree on it."""
        scale = self.scale
        self.skipped = not math.isfinite(grad_norm)
        self.has_diverged = self.skipped and (scale is None or scale.value <= max(1, scale.min_scale))
        if scale:
            scale.update(self.skipped)
        if not self.updates_on_device and not self.skipped:
            self._update_weights()
        elif self.skipped and isinstance(self.optim, Lamb):
            self.optim.undo_step_count()
