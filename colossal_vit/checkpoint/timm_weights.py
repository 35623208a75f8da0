"""Export checkpoints as folders that `timm.create_model` loads, and import timm's weights as new checkpoints."""

from pathlib import Path
from typing import Any, NotRequired

import timm
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint import fitting, lock, storage
from colossal_vit.checkpoint.contents import UNTRAINED, State
from colossal_vit.errors import UserError
from colossal_vit.files import atomic_folder
from colossal_vit.models import SHAPE
from colossal_vit.typed_json import RECORD, Count, Positive
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import save_for_hf
from torch import nn
from typing_extensions import TypedDict

# timm's model for the Vision Transformer of train_hybrid.py, whose sizes come from the config.
HYBRID_MODEL, HYBRID_SHAPE = "vit_base_patch16_224", {**SHAPE, "MLP_RATIO": "mlp_ratio"}
# Fields that describe timm's own pretrained weights; left in, timm would export them as if they described these.
NOT_OURS = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")


# ---------------------------------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------------------------------


class ModelConfig(TypedDict):
    """What a run's resolved config says of its model and of the images that it was evaluated on."""

    __pydantic_config__ = RECORD
    NUM_CLASSES: Count
    IMG_SIZE: Count
    MODEL: NotRequired[str]
    CACHE_SIZE: NotRequired[Positive]
    EVAL_CROP: NotRequired[Positive]


class Exportable(TypedDict):
    """The part of state.json that says what is exported."""

    config: ModelConfig


def _build(config: ModelConfig) -> nn.Module:
    """The timm model that a run's resolved config describes, without dropout, on the meta device."""
    name, shape = (config["MODEL"], SHAPE) if "MODEL" in config else (HYBRID_MODEL, HYBRID_SHAPE)
    sizes = {argument: config[key] for key, argument in shape.items() if key in config}
    with torch.device("meta"):
        return timm.create_model(
            name,
            num_classes=config["NUM_CLASSES"],
            img_size=config["IMG_SIZE"],
            pretrained_cfg_overlay=dict.fromkeys(NOT_OURS),
            **sizes,
        )


def _preprocessing(state: State, config: ModelConfig) -> dict[str, Any]:
    """The preprocessing of a run's test images, as timm's data config."""
    size = config["IMG_SIZE"]
    mean, std = state.get("normalization") or (None, None)  # SYNTHETIC images have none
    # CIFAR-10 images are used whole; others are centre-cropped, to 224 of 256 pixels unless a key says otherwise.
    crop_pct = 1.0 if "CROP_PADDING" in config else size / config.get("CACHE_SIZE", size * 8 / 7)
    crop_pct = config.get("EVAL_CROP", crop_pct)
    return dict(input_size=(3, size, size), mean=mean, std=std, crop_pct=crop_pct, interpolation="bilinear")


def export_timm(path: Path, folder: Path, dtype: torch.dtype, ema: bool = False) -> None:
    """Write a checkpoint as a folder for `timm.create_model("local-dir:<folder>", pretrained=True)`.

    Args:
        path: a valid checkpoint, see `storage.verify`.
        folder: must not exist, or be empty; written atomically.
        dtype: of the exported weights.
        ema: export the moving averages of the weights instead of the weights.

    Raises:
        UserError: if the folder is not empty or cannot be written, or the checkpoint has no config or no averages.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: exists already, and is not an empty folder")
    state = storage.read_state(path)
    if not state["config"]:
        raise UserError(f"{path}: was imported and has no config, which says what model it is: export a trained one")
    if ema and not storage.readable(path / storage.EMA).exists():
        raise UserError(f"{path}: has no {storage.EMA}, which a run with the block ema writes: leave --ema out")
    weights = load_file(storage.readable(path / storage.MODEL))
    if ema:
        weights |= load_file(storage.readable(path / storage.EMA))  # has no buffers, since they are not averaged
    config = typed_json.check(state, Exportable, path / storage.STATE)["config"]
    try:
        model = _build(config)
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    except (RuntimeError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"{path / storage.STATE}: config is not of a model with these weights: {reason[0]}") from None
    try:
        if folder.exists():
            folder.rmdir()
        with atomic_folder(folder) as scratch:
            # timm adds the model's arguments itself.
            save_for_hf(model, str(scratch), safe_serialization=True, data_config=_preprocessing(state, config))
            for file in scratch.iterdir():
                file.chmod(0o644)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Import
# ---------------------------------------------------------------------------------------------------------------------


def import_timm(source: Path, path: Path, img_size: int | None, num_classes: int | None) -> None:
    """Write weights under timm's names as a checkpoint at step 0, which `--resume` starts from.

    Args:
        source: a safetensors file.
        path: of the checkpoint, which must not exist.
        img_size: image size in pixels to resample the position embedding for, or None to keep it.
        num_classes: number of classes of the head, or None to keep it.

    Raises:
        UserError: if the weights cannot be read or do not fit, or the checkpoint cannot be written.
    """
    if path.exists():
        raise UserError(f"{path}: exists already")
    weights = fitting.read(source)
    if img_size is not None:
        fitting.resample(source, weights, img_size, f"--img-size {img_size}")
    if num_classes is None and "head.weight" not in weights:
        raise UserError(f"{source}: has no head: say with --num-classes how many classes there are to be")
    if num_classes is not None and num_classes < 1:
        raise UserError(f"--num-classes {num_classes}: must be at least 1")
    if num_classes is not None and not fitting.has_head(weights, num_classes):
        fitting.new_head(weights, num_classes, f"--num-classes {num_classes}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.resolve().parent.name == storage.FOLDER:  # of a run
            lock.acquire(path.resolve().parents[1])
        storage.write(path, weights, {}, UNTRAINED)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
