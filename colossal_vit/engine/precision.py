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

In fp16 the loss is scaled so that small gradients do not underflow, and a step whose scaled gradients overflow is
skipped; bf16 has fp32's range and needs neither. The default is fp16 on CUDA and bf16 on the CPU; to choose, set
`fp16 = dict(..., dtype='bf16')`.

NVIDIA has removed `amp` from its apex: torch implements the levels of the table.
"""

from collections.abc import Mapping
from typing import Any

import torch
from colossal_vit.engine.amp_optimizer import AMPOptimizer, LossScale
from colossal_vit.errors import UserError
from colossal_vit.rng.dropout import DropPath
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.utils import is_no_pp_or_last_stage
from torch import Tensor, nn
from torch.optim import Optimizer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(fp16: Mapping[str, Any] | None, device: torch.device) -> torch.dtype:
    """Return the type of activations: without mixed precision that of DTYPE, else `dtype` or the device's default."""
    if not fp16:
        return torch.get_default_dtype()
    return DTYPES[fp16.get("dtype") or ("fp16" if device.type == "cuda" else "bf16")]


def _opt_level(fp16: Mapping[str, Any]) -> str:
    return fp16.get("opt_level", "O1")


def describe(fp16: Mapping[str, Any] | None, device: torch.device) -> str:
    """Return the precision in a few words, for logs and tables."""
    if not fp16:
        return {torch.float32: "fp32", torch.float64: "fp64"}[torch.get_default_dtype()]
    dtype = str(compute_dtype(fp16, device)).removeprefix("torch.")
    if fp16["mode"] != AMP_TYPE.APEX:
        return f"{fp16['mode']} in {dtype}"
    level = _opt_level(fp16)
    if level == "O0":
        return "AMP_TYPE.APEX O0, which is fp32"
    return f"AMP_TYPE.APEX {level} by torch in {dtype}"


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


class Autocast(nn.Module):
    """Runs a model or criterion under `torch.autocast`."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.model = module
        self.device_type, self.dtype = device.type, dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(*args, **kwargs)


class Converted(nn.Module):
    """A model whose weights, inputs and activations are of `dtype`.

    Args:
        module: the model; its floating-point parameters and buffers are converted in place.
        dtype: torch.float16, torch.bfloat16 or torch.float64.
        output_to_fp32: whether the output is converted to fp32, for the loss. False for pipeline stages that send
            their output on, to send half the bytes.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, output_to_fp32: bool):
        super().__init__()
        self.model = module.to(dtype)
        self.dtype, self.output_to_fp32 = dtype, output_to_fp32

    def forward(self, input_: Tensor) -> Tensor:
        output = self.model(input_.to(self.dtype))
        return output.float() if self.output_to_fp32 else output


def _halve_residual(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model under autocast sum its residual branches in `dtype`.

    Autocast leaves embeddings in fp32, as it does branches behind a layer scale, and so all sums with them.
    """
    # Before the dropout of the positions, and after a norm behind it. A later pipeline stage has no pos_drop.
    for module in filter(None, (getattr(model, "pos_drop", None), next(model.blocks.children()))):
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(dtype), *inputs[1:]))
    for module in model.blocks.modules():
        if isinstance(module, DropPath):  # the end of each branch
            module.register_forward_hook(lambda path, inputs, output: output.to(dtype))


def _keep_norms_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the normalisation layers of a half-precision model compute in fp32, with fp32 weights."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            module.float()
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Putting them together
# ---------------------------------------------------------------------------------------------------------------------


# Defaults of Colossal-AI's loss scaler, for NAIVE and O2; those of `LossScale` are torch's.
NAIVE_SCALE = dict(growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=2.0**32)


def _level(fp16: Mapping[str, Any] | None) -> str | None:
    """Return APEX's level that is the same as a mode: TORCH is O1. NAIVE is none of them."""
    if not fp16:
        return "O0"
    return {AMP_TYPE.TORCH: "O1", AMP_TYPE.APEX: _opt_level(fp16)}.get(fp16["mode"])


def wrap_model(
    model: nn.Module, criterion: nn.Module | None, fp16: Mapping[str, Any] | None, device: torch.device
) -> tuple[nn.Module, nn.Module | None]:
    """Wrap model and criterion for the precision that the config's `fp16` block asks for.

    Args:
        model: on its device, in fp32.
        criterion: the loss function, or None.
        fp16: the config block; None or empty for fp32.
        device: the model's device.

    Returns:
        `(model, criterion)`.
    """
    level = _level(fp16)
    full = level == "O0"
    dtype = torch.get_default_dtype() if full else compute_dtype(fp16, device)
    if dtype == torch.float32:
        return model, criterion
    if level == "O1":
        if fp16.get("half_residual"):
            _halve_residual(model, dtype)
        return Autocast(model, device, dtype), criterion and Autocast(criterion, device, dtype)
    chunks = list(model) if isinstance(model, nn.ModuleList) else [model]  # an interleaved pipeline has several
    last = len(chunks) - 1 if is_no_pp_or_last_stage() and not full else None
    chunks = [Converted(chunk, dtype, output_to_fp32=number == last) for number, chunk in enumerate(chunks)]
    if level == "O2":
        _keep_norms_in_fp32(chunks[0], dtype)
    return nn.ModuleList(chunks) if isinstance(model, nn.ModuleList) else chunks[0], criterion


def wrap_optimizer(optimizer: Optimizer, fp16: Mapping[str, Any] | None, device: torch.device) -> AMPOptimizer:
    """Wrap the optimizer of a model that `wrap_model` has wrapped.

    Args:
        optimizer: over the parameters of the model.
        fp16, device: as before. The keys of `fp16` that are not read anywhere else set the loss scaler.

    Raises:
        UserError: if the bounds of the loss scale exclude each other.
    """
    level = _level(fp16)
    if level in ("O0", "O3"):
        return AMPOptimizer(optimizer)
    others = ("mode", "dtype", "opt_level", "half_residual")
    scaling = {**(NAIVE_SCALE if level != "O1" else {}), **{k: v for k, v in fp16.items() if k not in others}}
    scale = LossScale(**scaling) if compute_dtype(fp16, device) == torch.float16 else None
    if scale and scale.min_scale > scale.max_scale:
        raise UserError(f"fp16.min_scale = {scale.min_scale:g} is above fp16.max_scale = {scale.max_scale:g}")
    return AMPOptimizer(optimizer, scale, master_weights=level != "O1")
