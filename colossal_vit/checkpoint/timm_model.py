"""A checkpoint as a model of timm, with the preprocessing and the class names of its run; and as a folder of one."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired

import timm
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint.contents import State
from colossal_vit.checkpoint.storage import EMA, MODEL, STATE, Checkpoint
from colossal_vit.data.cropping import cache_size, trim
from colossal_vit.data.decoding import read_rgb
from colossal_vit.errors import UserError, reason
from colossal_vit.model.timm_vit import SHAPE
from colossal_vit.typed_json import RECORD, Count, Positive
from timm.models import save_for_hf
from torch import Tensor, nn
from typing_extensions import TypedDict

# A config without MODEL has the sizes of a model; all other things are those of this one of timm's.
SIZED_MODEL, SIZED_SHAPE = "vit_base_patch16_224", {**SHAPE, "MLP_RATIO": "mlp_ratio"}
# Fields that describe timm's own pretrained weights; left in, timm would export them as if they described these.
NOT_OURS = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")


class ModelConfig(TypedDict):
    """What a run's resolved config says of its model and of the images that it was evaluated on."""

    __pydantic_config__ = RECORD
    NUM_CLASSES: Count
    IMG_SIZE: Count
    MODEL: NotRequired[str]
    CACHE_SIZE: NotRequired[Positive]
    EVAL_CROP: NotRequired[Positive]


def _build(config: ModelConfig, device: str) -> nn.Module:
    """Return the timm model that a run's resolved config describes, without dropout."""
    name, shape = (config["MODEL"], SHAPE) if "MODEL" in config else (SIZED_MODEL, SIZED_SHAPE)
    sizes = {argument: config[key] for key, argument in shape.items() if key in config}
    with torch.device(device):
        return timm.create_model(
            name,
            num_classes=config["NUM_CLASSES"],
            img_size=config["IMG_SIZE"],
            pretrained_cfg_overlay=dict.fromkeys(NOT_OURS),
            **sizes,
        )


def _preprocessing(state: State, config: ModelConfig) -> dict[str, Any]:
    """Return the preprocessing of a run's test images, as timm's data config."""
    size = config["IMG_SIZE"]
    mean, std = state.get("normalization") or (None, None)  # SYNTHETIC images have none
    images = (state.get("data") or {}).get("images")
    # CIFAR-10 images are used whole; others are centre-cropped, to 224 of 256 pixels unless a key says otherwise.
    resized = size if images == "CIFAR-10" else config.get("CACHE_SIZE", cache_size(size))
    crop_pct = size / resized
    if math.floor(size / crop_pct) != resized:  # the size that timm resizes to
        crop_pct = math.nextafter(crop_pct, 0)
    crop_pct = config.get("EVAL_CROP", crop_pct) if images == "ImageNet" else crop_pct
    crop = dict(crop_pct=crop_pct, crop_mode="center", interpolation="bilinear")
    return dict(input_size=(3, size, size), mean=mean, std=std, **crop)


def _label_names(state: State, num_classes: int) -> list[str] | None:
    """Return the class names of a run's data, as many as the model has outputs; None if its data have no names."""
    names = (state.get("data") or {}).get("classes")
    if not isinstance(names, list) or len(names) > num_classes:
        return None
    return [*names, *map(str, range(len(names), num_classes))]


def load_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, ema: bool = False) -> nn.Module:
    """Return a checkpoint as a model of timm on the CPU, whose `pretrained_cfg` has its preprocessing and
    `label_names`.

    Args:
        checkpoint: of a run that trained.
        dtype: of the weights.
        ema: take the moving averages of the weights instead of the weights.

    Raises:
        UserError: if the checkpoint has no config or no averages, or its config is not of a model with these weights.
    """
    path, state = checkpoint.path, checkpoint.state
    if ema and EMA not in checkpoint.files:
        raise UserError(f"{path}: has no {EMA}, which a run with the block ema writes: leave --ema out")
    tensors = checkpoint.tensors(MODEL)
    if ema:
        tensors |= checkpoint.tensors(EMA)  # has no buffers, since they are not averaged
    config = typed_json.check(state["config"], ModelConfig, f"{path / STATE}: config")
    try:
        weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        model = _build(config, "meta")
        model.load_state_dict(weights, assign=True)
        if any(buffer.is_meta for buffer in model.buffers()):  # such as rotary tables, which no checkpoint contains
            model = _build(config, "cpu")
            model.load_state_dict(weights, assign=True)
    except (RuntimeError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
        raise UserError(f"{path / STATE}: config is not of a model with these weights: {reason(error)}") from None
    model.pretrained_cfg |= _preprocessing(state, config)
    if names := _label_names(state, config["NUM_CLASSES"]):
        model.pretrained_cfg["label_names"] = names
    return model


def class_names(model: nn.Module) -> list[str]:
    """Return the names of a model's classes, which are their numbers where the data had none."""
    return model.pretrained_cfg.get("label_names") or list(map(str, range(model.num_classes)))


def image_reader(model: nn.Module) -> Callable[[Path], Tensor]:
    """Return a function that reads an image file as the test images of a model's run were prepared, (3, H, W).

    The function raises `UserError`, naming the file, if it cannot be decoded.
    """
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)

    def read(path: Path) -> Tensor:
        try:
            return transform(trim(read_rgb(path)))
        except Exception as error:  # decoders raise nearly any exception for a broken file
            raise UserError(f"{path}: cannot be decoded: {reason(error)}") from None

    return read


def write_timm(model: nn.Module, folder: Path) -> None:
    """Write a model of `load_model` into an empty folder for `timm.create_model("local-dir:<folder>", pretrained=True)`
    and transformers' `AutoModelForImageClassification`.

    Raises:
        OSError, SafetensorError: if it cannot be written.
    """
    names = model.pretrained_cfg.pop("label_names", None)
    # timm adds the model's arguments itself.
    preprocessing = timm.data.resolve_model_data_config(model)
    save_for_hf(model, str(folder), {"label_names": names}, safe_serialization=True, data_config=preprocessing)
    described = json.loads((folder / "config.json").read_text())
    # It is beside them, too, from where transformers takes it; with both it refuses to build the model.
    described["model_args"].pop("num_classes", None)
    (folder / "config.json").write_text(json.dumps(described, indent=2))
    if names:
        model.pretrained_cfg["label_names"] = names
