"""A model as an ONNX file, which takes pixels as image files have them."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from colossal_vit.errors import UserError, reason
from torch import Tensor, nn

NEEDED = ("onnx", "onnxruntime", "onnxscript")
ONNX = "model.onnx"


def check_installed() -> None:
    """Raise `UserError` if a package is missing that `--onnx` needs."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"--onnx needs {', '.join(missing)}: pip install {' '.join(NEEDED)}")


class _FromPixels(nn.Module):
    """A model with its normalisation before it.

    Args:
        model: of timm.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        config = timm.data.resolve_model_data_config(model)
        for key in ("mean", "std"):
            self.register_buffer(key, torch.tensor(config[key]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((pixels.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std)


def write_onnx(model: nn.Module, path: Path, facts: dict[str, object]) -> None:
    """Write a model as an ONNX file: uint8 RGB `pixels` (batch, H, W, 3), batch of any size, to `logits` (batch,
    classes).

    Args:
        model: of timm, in fp32 and evaluation mode, on the CPU.
        path: of the file.
        facts: what the file says of the model beside it, by name.

    Raises:
        UserError: if torch cannot export it.
        OSError: if the file cannot be written.
    """
    height, width = timm.data.resolve_model_data_config(model)["input_size"][1:]
    pixels = torch.zeros(2, height, width, 3, dtype=torch.uint8)
    batch = {"pixels": {0: torch.export.Dim("batch")}}
    logger, level = logging.getLogger("onnxscript"), logging.getLogger("onnxscript").level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):  # of torch's own code
            program = torch.onnx.export(
                _FromPixels(model).eval(),
                (pixels,),
                input_names=["pixels"],
                output_names=["logits"],
                dynamic_shapes=batch,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise UserError(f"torch cannot export this model to ONNX: {reason(error)}") from None
    finally:
        logger.setLevel(level)
    program.model.metadata_props.update({name: json.dumps(fact) for name, fact in facts.items()})
    program.save(str(path))


def open_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    """Return an ONNX file as onnxruntime runs it on the CPU: logits of uint8 pixels (B, H, W, 3)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])
