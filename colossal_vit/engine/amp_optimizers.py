"""Optimizer wrappers with loss scaling, clipping by the global norm and fp32 master weights, as the precision requires.

All follow the protocol of Colossal-AI's `Engine.step`: `clip_grad_by_norm(max_norm)` on the accumulated gradients, then
`step()`. In between the engine reads the norm, the one host-device synchronisation in a step. Upstream's wrappers
override a method that its engine no longer calls, so upstream clips scaled gradients, by a norm local to each rank.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from colossal_vit.parallel.sharding import global_norm
from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer
from colossalai.interface import OptimizerWrapper
from colossalai.legacy.context import ParallelMode
from torch import Tensor
from torch.optim import Optimizer


def _clip(
    grads: list[Tensor], parameters: list[Tensor], max_norm: float, group: ParallelMode, scale: float = 1.0
) -> Tensor:
    """Unscale gradients and clip them by their norm over all ranks that share them, in place.

    Args:
        grads: this rank's gradients, multiplied by `scale`.
        parameters: the parameters they belong to.
        max_norm: the largest norm allowed; 0 does not clip.
        group: the ranks that share the gradients.
        scale: the loss scale of the gradients.

    Returns:
        The global norm of the unscaled gradients before clipping, a float32 scalar.
    """
    norm = global_norm(grads, parameters, group) / scale
    factor = torch.full_like(norm, 1.0 / scale)
    if max_norm > 0:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if grads and (max_norm > 0 or scale != 1.0):
        torch._foreach_mul_(grads, factor)
    return norm


class LossScale:
    """The factor of the loss in fp16 training, lowered after overflows and raised after a run of steps without any.

    It is kept on the host, which learns of an overflow from the gradient norm. The rule is that of Colossal-AI's
    `DynamicGradScaler`, and with `hysteresis` = 1 that of torch's `GradScaler`.

    Args:
        value: the initial scale.
        growth_factor, backoff_factor: factors by which the scale is raised and lowered.
        growth_interval: consecutive steps without overflow before it is raised.
        hysteresis: overflows since it was last raised before it is lowered.
        min_scale, max_scale: bounds of the scale.
    """

    def __init__(
        self,
        value: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
    ):
        self.value, self.growth_factor, self.backoff_factor = float(value), growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.growth_step = self.hysteresis_step = 0

    def update(self, overflow: bool) -> None:
        """Count a step, and change the scale if it is time to."""
        if overflow:
            self.growth_step, self.hysteresis_step = 0, self.hysteresis_step + 1
            if self.hysteresis_step >= self.hysteresis:
                self.value = max(self.value * self.backoff_factor, self.min_scale)
            return
        self.growth_step += 1
        if self.growth_step == self.growth_interval:
            self.growth_step = self.hysteresis_step = 0
            self.value = min(self.value * self.growth_factor, self.max_scale)

    def state(self) -> dict[str, Any]:
        """The state to save in checkpoints, JSON-serialisable."""
        keys = ("growth_step", "hysteresis_step")
        return {"loss_scale": self.value, **{key: getattr(self, key) for key in keys}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.value = state["loss_scale"]
        self.growth_step, self.hysteresis_step = state["growth_step"], state.get("hysteresis_step", 0)


class _Scaled:
    """Loss scaling, shared by the optimizer wrappers.

    Attributes:
        scale: None without loss scaling.
        grad_norm: L2 norm of the last full, unscaled gradient before clipping, over all ranks that share the model. A
            tensor, set by `clip_grad_by_norm`; the engine replaces it by a float.
        norm_group: the ranks that share the gradients: those that share the model, or with optimizer state split over
            data-parallel ranks all of them.
        skipped: whether the last `step()` left the weights unchanged because of an overflow.
    """

    scale: LossScale | None = None
    skipped = False
    norm_group = ParallelMode.MODEL

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in the backward pass; None without loss scaling."""
        return self.scale and self.scale.value

    def scaler_state(self) -> dict[str, Any]:
        """The loss scaler's state to save in checkpoints, JSON-serialisable; empty without loss scaling."""
        return self.scale.state() if self.scale else {}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `scaler_state` of any wrapper returned; ignored unless both scale the loss."""
        if self.scale and "loss_scale" in state:
            self.scale.load_state(state)

    def backward(self, loss: Tensor, *args, **kwargs) -> None:
        super().backward(loss * self.scale.value if self.scale else loss, *args, **kwargs)

    def _overflowed(self) -> bool:
        """Whether to skip this step. The norm is global, so all ranks agree. Updates the loss scale."""
        self.skipped = self.scale is not None and not math.isfinite(self.grad_norm)
        if self.scale:
            self.scale.update(self.skipped)
        return self.skipped


class ClippedOptimizer(_Scaled, OptimizerWrapper):
    """An optimizer with clipping by the global norm and, for `AMP_TYPE.TORCH` in fp16, a loss `scale`.

    Attributes:
        working_to_master_map: from a parameter of the model to its master copy, for those that have one.
    """

    working_to_master_map: Mapping[Tensor, Tensor] = {}

    def __init__(self, optim: Optimizer, scale: LossScale | None = None):
        super().__init__(optim)
        self.scale = scale

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        parameters = [p for p in self.parameters if p.grad is not None]
        grads, scale = [p.grad for p in parameters], self.loss_scale or 1.0
        self.grad_norm = _clip(grads, parameters, max_norm, self.norm_group, scale)
        return self.grad_norm

    def step(self, *args, **kwargs) -> None:
        if not self._overflowed():
            self.optim.step(*args, **kwargs)


class ApexOptimizer(ClippedOptimizer):
    """The optimizer for `AMP_TYPE.APEX` if apex is installed; `apex.amp` itself unscales gradients and skips steps."""

    def __init__(self, optim: Optimizer, amp: Any, working: list[Tensor]):
        super().__init__(optim)
        self.amp = amp
        self._lowered = False
        self.working_to_master_map = dict(zip(working, self.parameters, strict=True))

    @property
    def loss_scale(self) -> float:
        return self.amp._amp_state.loss_scalers[0].loss_scale()

    def scaler_state(self) -> dict[str, Any]:
        return self.amp.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if "loss_scaler0" in state:
            self.amp.load_state_dict(state)

    def backward(self, loss: Tensor, *args, **kwargs) -> None:
        scale = self.loss_scale
        with self.amp.scale_loss(loss, self.optim) as scaled:
            scaled.backward(*args, **kwargs)
        self._lowered = self.loss_scale < scale or self._lowered

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        parameters = [p for p in self.amp.master_params(self.optim) if p.grad is not None]
        self.grad_norm = _clip([p.grad for p in parameters], parameters, max_norm, self.norm_group)
        return self.grad_norm

    def step(self, *args, **kwargs) -> None:
        self.optim.step(*args, **kwargs)
        self.skipped, self._lowered = self._lowered, False


class NaiveAMPOptimizer(_Scaled, MixedPrecisionOptimizer):
    """The optimizer for `AMP_TYPE.NAIVE`: Colossal-AI's fp32 master weights, clipped by the global norm.

    Upstream's own loss scaling stays off: it unscales by the scale of the next step, computes the norm of each rank
    separately, and copies the scale from the device in every micro-batch.
    """

    def __init__(self, optim: Optimizer, scale: LossScale | None = None):
        super().__init__(optim, precision="bf16")  # switches upstream's loss scaling off, and nothing else
        self.scale = scale
        for working, master in self.working_to_master_map.items():
            if hasattr(working, "shard"):
                master.shard = working.shard

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        """Move the gradients to the master weights, in fp32, and unscale and clip them there."""
        masters = []
        for working, master in self.working_to_master_map.items():
            if working.grad is not None:
                if master is not working:
                    master.grad, working.grad = working.grad.float(), None
                masters.append(master)
        self.grad_norm = _clip(
            [p.grad for p in masters], masters, max_norm, self.norm_group, scale=self.loss_scale or 1.0
        )
        return self.grad_norm

    @torch.no_grad()
    def step(self, *args, **kwargs) -> None:
        if self._overflowed():
            self.zero_grad()
            return
        self.optim.step(*args, **kwargs)
        for working, master in self.working_to_master_map.items():
            if master is not working:
                working.copy_(master)
