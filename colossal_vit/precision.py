"""Mixed precision: `fp16 = dict(mode=...)` with AMP_TYPE.TORCH, NAIVE or APEX, in fp16 and in bf16.

| mode    | weights        | forward, backward    | optimizer                | reduces gradients in |
| ---     | ---            | ---                  | ---                      | ---                  |
| none    | fp32           | fp32                 | fp32                     | fp32                 |
| TORCH   | fp32           | autocast to fp16/bf16| fp32                     | fp32                 |
| NAIVE   | fp16/bf16      | fp16/bf16            | on fp32 master weights   | fp16/bf16            |
| APEX O0 | as none        |                      |                          |                      |
| APEX O1 | as TORCH       |                      |                          |                      |
| APEX O2 | as NAIVE, but norms in fp32 |         |                          |                      |
| APEX O3 | fp16/bf16      | fp16/bf16            | on these weights         | fp16/bf16            |

fp16 scales the loss so that small gradients do not vanish, and skips the step when the scaled ones overflow; bf16 has
fp32's range and needs neither. The default is fp16 on CUDA and bf16 on the CPU; `fp16 = dict(..., dtype='bf16')`
chooses.

APEX is NVIDIA's apex, where an apex that still has `amp` is installed and there is a GPU. NVIDIA has removed it, so
mostly torch does what the table says; `describe` tells which.

All optimizer wrappers follow the protocol of Colossal-AI's `Engine.step`: `clip_grad_by_norm(max_norm)` on whatever
gradients the backward passes left, then `step()`. Upstream's wrappers do not: the engine stopped calling the method
they override, so it clips scaled gradients, by a norm that each rank takes for itself.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from colossal_vit.sharding import global_norm
from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer
from colossalai.interface import OptimizerWrapper
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.utils import is_no_pp_or_last_stage
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(fp16: Mapping[str, Any] | None, device: torch.device) -> torch.dtype:
    """The data type of activations: fp32 without mixed precision, else as `dtype` says or the device prefers."""
    if not fp16:
        return torch.float32
    return DTYPES[fp16.get("dtype") or ("fp16" if device.type == "cuda" else "bf16")]


def _apex_amp(device: torch.device) -> Any | None:
    """The module `apex.amp`, where there is one and it can be used."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module("apex.amp")
    except ImportError:
        return None


def _opt_level(fp16: Mapping[str, Any]) -> str:
    return fp16.get("opt_level", "O1")


def describe(fp16: Mapping[str, Any] | None, device: torch.device) -> str:
    """What runs, in a few words, for logs and tables."""
    if not fp16:
        return "fp32"
    dtype = str(compute_dtype(fp16, device)).removeprefix("torch.")
    if fp16["mode"] != AMP_TYPE.APEX:
        return f"{fp16['mode']} in {dtype}"
    level = _opt_level(fp16)
    if level == "O0":
        return "AMP_TYPE.APEX O0, which is fp32"
    return f"AMP_TYPE.APEX {level} by {'apex' if _apex_amp(device) else 'torch'} in {dtype}"


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------


def _clip(grads: list[Tensor], parameters: list[Tensor], max_norm: float, scale: float = 1.0) -> Tensor:
    """Unscale gradients and clip them by their norm over all ranks that share the model, in place.

    Args:
        grads: this rank's gradients, multiplied with `scale`.
        parameters: the parameters they belong to.
        max_norm: the largest norm allowed; 0 only measures.
        scale: the loss scale that is still in the gradients.

    Returns:
        The global norm of the unscaled gradients before clipping, a float32 scalar.
    """
    norm = global_norm(grads, parameters) / scale
    factor = torch.full_like(norm, 1.0 / scale)
    if max_norm > 0:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if grads and (max_norm > 0 or scale != 1.0):
        torch._foreach_mul_(grads, factor)
    return norm


class FP32Optimizer(OptimizerWrapper):
    """A plain optimizer, clipped by the global norm.

    Attributes:
        grad_norm: L2 norm of the last full, unscaled gradient before clipping, over all ranks that share the model.
        loss_scale: what the loss is multiplied with before the backward pass; None without loss scaling.
        skipped: whether the last `step()` left the weights alone because of an overflow.
        working_to_master_map: for each parameter of the model that the optimizer updates a copy of, that copy.
    """

    loss_scale: float | None = None
    skipped = False
    working_to_master_map: Mapping[Tensor, Tensor] = {}

    def scaler_state(self) -> dict[str, Any]:
        """What the loss scaler would have to know to go on: for JSON, empty without loss scaling."""
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Go on with what `scaler_state` returned, of whichever wrapper: as far as both scale the loss."""

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        parameters = [p for p in self.parameters if p.grad is not None]
        self.grad_norm = _clip([p.grad for p in parameters], parameters, max_norm)
        return self.grad_norm


class TorchAMPOptimizer(FP32Optimizer):
    """The optimizer of `AMP_TYPE.TORCH` in fp16: dynamic loss scaling, the same decision on every rank of the model."""

    def __init__(self, optim: Optimizer, device: torch.device, **scaling: Any):
        super().__init__(optim)
        self.scaler = ShardedGradScaler(device.type, process_group=gpc.get_group(ParallelMode.MODEL), **scaling)

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def scaler_state(self) -> dict[str, Any]:
        state = self.scaler.state_dict()
        return {"loss_scale": state["scale"], "growth_step": state["_growth_tracker"]}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if "loss_scale" in state:
            own = {"scale": state["loss_scale"], "_growth_tracker": state["growth_step"]}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **own})

    def backward(self, loss: Tensor, *args, **kwargs) -> None:
        super().backward(self.scaler.scale(loss), *args, **kwargs)

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        self.scaler.unscale_(self.optim)
        return super().clip_grad_by_norm(max_norm)

    def step(self, *args, **kwargs) -> None:
        scale = self.loss_scale
        self.scaler.step(self.optim)
        self.scaler.update()
        self.skipped = self.loss_scale < scale


class ApexOptimizer(FP32Optimizer):
    """The optimizer of `AMP_TYPE.APEX` through `apex.amp`, which unscales in the backward pass and skips by itself."""

    def __init__(self, optim: Optimizer, amp: Any, working: list[Tensor]):
        super().__init__(optim)
        self.amp = amp
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
        self._overflowed = self.loss_scale < scale or getattr(self, "_overflowed", False)

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        parameters = [p for p in self.amp.master_params(self.optim) if p.grad is not None]
        self.grad_norm = _clip([p.grad for p in parameters], parameters, max_norm)
        return self.grad_norm

    def step(self, *args, **kwargs) -> None:
        self.optim.step(*args, **kwargs)
        self.skipped, self._overflowed = self._overflowed, False


class NaiveAMPOptimizer(MixedPrecisionOptimizer):
    """The optimizer of `AMP_TYPE.NAIVE`: Colossal-AI's fp32 master weights and loss scaler, with a global norm.

    Upstream unscales with the scale that is meant for the next step, and takes the norm on each rank by itself.
    """

    skipped = False

    def __init__(self, optim: Optimizer, precision: str, **scaling: Any):
        super().__init__(optim, precision=precision, **scaling)
        for working, master in self.working_to_master_map.items():
            if hasattr(working, "shard"):
                master.shard = working.shard

    @property
    def loss_scale(self) -> float | None:
        return getattr(self.mixed_precision, "loss_scale", None)

    def scaler_state(self) -> dict[str, Any]:
        """See `FP32Optimizer.scaler_state`."""
        if self.loss_scale is None:
            return {}
        scaler = self.mixed_precision.grad_scaler
        return {
            "loss_scale": self.loss_scale,
            "growth_step": scaler._growth_step,
            "hysteresis_step": scaler._hysteresis_step,
        }

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """See `FP32Optimizer.load_scaler_state`."""
        if "loss_scale" in state and self.loss_scale is not None:
            scaler = self.mixed_precision.grad_scaler
            scaler._scale.fill_(state["loss_scale"])
            scaler._growth_step, scaler._hysteresis_step = state["growth_step"], state.get("hysteresis_step", 0)

    def clip_grad_by_norm(self, max_norm: float, *args, **kwargs) -> Tensor:
        """Move the gradients to the master weights, in fp32, and unscale and clip them there."""
        masters = []
        for working, master in self.working_to_master_map.items():
            if working.grad is not None:
                if master is not working:
                    master.grad, working.grad = working.grad.float(), None
                masters.append(master)
        self.grad_norm = _clip([p.grad for p in masters], masters, max_norm, scale=self.loss_scale or 1.0)
        return self.grad_norm

    @torch.no_grad()
    def step(self, *args, **kwargs) -> None:
        if self.loss_scale is not None:
            self.skipped = not bool(torch.isfinite(self.grad_norm))  # the norm is global: one decision for all ranks
            self.mixed_precision.grad_scaler.update(self.skipped)
            if self.skipped:
                self.zero_grad()
                return
        self.optim.step(*args, **kwargs)
        for working, master in self.working_to_master_map.items():
            if master is not working:
                working.copy_(master)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


class Autocast(nn.Module):
    """A model or criterion run under `torch.autocast`."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.model = module
        self.device_type, self.dtype = device.type, dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(*args, **kwargs)


class LowPrecision(nn.Module):
    """A model whose weights, inputs and activations are of `dtype`.

    Args:
        module: the model; its floating-point parameters and buffers are converted in place.
        dtype: torch.float16 or torch.bfloat16.
        output_to_fp32: whether the output is converted back, so that the loss is computed in fp32. A pipeline stage
            that hands its output on keeps it small.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, output_to_fp32: bool):
        super().__init__()
        self.model = module.to(dtype)
        self.dtype, self.output_to_fp32 = dtype, output_to_fp32

    def forward(self, input_: Tensor) -> Tensor:
        output = self.model(input_.to(self.dtype))
        return output.float() if self.output_to_fp32 else output


def _keep_norms_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the normalisation layers of a half-precision model compute in fp32, with fp32 weights."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)):
            module.float()
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Putting them together
# ---------------------------------------------------------------------------------------------------------------------


def convert(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: nn.Module | None,
    fp16: Mapping[str, Any] | None,
    device: torch.device,
) -> tuple[nn.Module, OptimizerWrapper, nn.Module | None]:
    """Wrap model, optimizer and criterion for the precision that the config's `fp16` block asks for.

    Args:
        model: on its device, in fp32.
        optimizer: over the parameters of `model`.
        criterion: the loss, or None.
        fp16: the config block; None or empty for fp32. Keys beside `mode` and `dtype` go to the loss scaler.
        device: where the model is.
    """
    mode, level = (fp16["mode"], _opt_level(fp16)) if fp16 else (None, None)
    if mode is None or (mode == AMP_TYPE.APEX and level == "O0"):
        return model, FP32Optimizer(optimizer), criterion
    dtype = compute_dtype(fp16, device)
    scaling = {key: value for key, value in fp16.items() if key not in ("mode", "dtype", "opt_level")}
    if dtype != torch.float16:
        scaling.clear()
    if mode == AMP_TYPE.APEX and (amp := _apex_amp(device)):
        working = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return model, ApexOptimizer(optimizer, amp, working), criterion
    if mode == AMP_TYPE.TORCH or (mode == AMP_TYPE.APEX and level == "O1"):
        model = Autocast(model, device, dtype)
        criterion = criterion and Autocast(criterion, device, dtype)
        if dtype == torch.float16:
            return model, TorchAMPOptimizer(optimizer, device, **scaling), criterion
        return model, FP32Optimizer(optimizer), criterion
    chunks = list(model) if isinstance(model, nn.ModuleList) else [model]  # several in an interleaved pipeline
    last = len(chunks) - 1 if is_no_pp_or_last_stage() else None
    chunks = [LowPrecision(chunk, dtype, output_to_fp32=number == last) for number, chunk in enumerate(chunks)]
    if mode == AMP_TYPE.APEX and level == "O2":
        _keep_norms_in_fp32(chunks[0], dtype)
    model = nn.ModuleList(chunks) if isinstance(model, nn.ModuleList) else chunks[0]
    if mode == AMP_TYPE.APEX and level == "O3":
        return model, FP32Optimizer(optimizer), criterion
    return model, NaiveAMPOptimizer(optimizer, "fp16" if dtype == torch.float16 else "bf16", **scaling), criterion
