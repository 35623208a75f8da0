"""Export checkpoints as folders that `timm.create_model` loads, and import timm's weights as new checkpoints."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from colossal_vit.checkpoint import lock, storage
from colossal_vit.errors import UserError
from colossal_vit.files import appearing
from colossal_vit.models import SHAPE
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import Tensor, nn

# timm's model for the Vision Transformer of train_hybrid.py, whose sizes come from the config.
HYBRID_MODEL, HYBRID_SHAPE = "vit_base_patch16_224", {**SHAPE, "MLP_RATIO": "mlp_ratio"}
# Fields that describe timm's own pretrained weights; left in, timm would export them as if they described these.
NOT_OURS = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")


# ---------------------------------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------------------------------


def _build(config: Mapping[str, Any]) -> nn.Module:
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


def _preprocessing(state: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing of a run's test images, as timm's data config."""
    config, size = state["config"], state["config"]["IMG_SIZE"]
    mean, std = state["normalization"] or (None, None)  # SYNTHETIC images have none
    # CIFAR-10 images are used whole; others are centre-cropped, to 224 of 256 pixels unless CACHE_SIZE is set.
    crop_pct = 1.0 if "CROP_PADDING" in config else size / config.get("CACHE_SIZE", size * 8 / 7)
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
    if ema and not (path / storage.EMA).exists():
        raise UserError(f"{path}: has no {storage.EMA}, which a run with the block ema writes: leave --ema out")
    weights = load_file(path / storage.MODEL)
    if ema:
        weights |= load_file(path / storage.EMA)  # has no buffers, since they are not averaged
    model = _build(state["config"])
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    try:
        if folder.exists():
            folder.rmdir()
        with appearing(folder) as scratch:
            # timm adds the model's arguments itself.
            save_for_hf(model, str(scratch), safe_serialization=True, data_config=_preprocessing(state))
            for file in scratch.iterdir():
                file.chmod(0o644)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Import
# ---------------------------------------------------------------------------------------------------------------------


def _read(source: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, in fp32.

    Raises:
        UserError: if it cannot be read, or does not hold a Vision Transformer under timm's names.
    """
    try:
        weights = load_file(source)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
    if "patch_embed.proj.weight" not in weights:
        raise UserError(f"{source}: has no patch_embed.proj.weight: not a Vision Transformer with timm's names")
    return {name: tensor.float() for name, tensor in weights.items()}


def _resample(source: Path, weights: dict[str, Tensor], img_size: int) -> None:
    """Resample the position embedding in place for another image size; the class token's embedding is kept.

    Raises:
        UserError: if `img_size` is not a multiple of the patch size, or the embedding is not a square grid.
    """
    patch = weights["patch_embed.proj.weight"].shape[-1]
    if img_size < patch or img_size % patch:
        down = img_size // patch * patch
        nearest = f"{down} or {down + patch}" if down > 0 else f"{patch}"
        raise UserError(
            f"--img-size {img_size}: is not a multiple of the patch size {patch} of {source}: use {nearest}"
        )
    position = weights.get("pos_embed", torch.empty(0))  # (1, N, C)
    num_tokens = position.shape[1] if position.ndim == 3 else 0
    num_prefix = num_tokens - math.isqrt(num_tokens) ** 2  # tokens that are not patches
    if num_tokens == 0 or num_prefix > 1:
        raise UserError(
            f"--img-size {img_size}: pos_embed of {source} is of shape {tuple(position.shape)}, which is not (1, N, C) "
            f"with N a square, or a square and the class token"
        )
    grid = [img_size // patch] * 2
    weights["pos_embed"] = resample_abs_pos_embed(position, grid, num_prefix_tokens=num_prefix)


def _fit_head(source: Path, weights: dict[str, Tensor], num_classes: int | None) -> None:
    """Replace a missing head, or one with another number of classes, by zeros, as the ViT paper does for fine-tuning
    (arXiv:2010.11929, section 3.2).

    Raises:
        UserError: if there is no head and `num_classes` is None.
    """
    if num_classes is None:
        if "head.weight" not in weights:
            raise UserError(f"{source}: has no head: say with --num-classes how many classes there are to be")
        return
    if num_classes < 1:
        raise UserError(f"--num-classes {num_classes}: must be at least 1")
    if "head.weight" not in weights or len(weights["head.weight"]) != num_classes:
        width = weights["patch_embed.proj.weight"].shape[0]
        weights["head.weight"], weights["head.bias"] = torch.zeros(num_classes, width), torch.zeros(num_classes)


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
    weights = _read(source)
    if img_size is not None:
        _resample(source, weights, img_size)
    _fit_head(source, weights, num_classes)
    state = {
        "step": 0,
        "epoch": 0,
        "images": 0,
        "global_batch": 0,
        "optimizer": None,  # and no moments
        "moments_step": 0,
        "scaler": {},
        "best": None,
        "layout": None,
        "ranks": [],
        "config": {},
        "normalization": None,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.resolve().parent.name == storage.FOLDER:  # of a run
            lock.hold(path.resolve().parents[1])
        storage.write(path, weights, {}, state)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
