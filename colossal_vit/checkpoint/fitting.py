"""Weights of Vision Transformers under timm's names: read, and fitted to other images and other classes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from colossal_vit.checkpoint.storage import readable
from colossal_vit.errors import UserError
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

PATCHES = "patch_embed.proj.weight"  # (width, 3, patch size, patch size)
BIAS = "patch_embed.proj.bias"  # (width,)
HEAD = "head.weight"  # (classes, width)
Normalization = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


def read(source: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, in fp32.

    Raises:
        UserError: if it cannot be read, or does not hold a Vision Transformer under timm's names.
    """
    try:
        weights = load_file(readable(source))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
    return in_fp32(source, weights)


def in_fp32(source: Path | str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp32.

    Raises:
        UserError: if they are not those of a Vision Transformer under timm's names.
    """
    if PATCHES not in weights:
        raise UserError(f"{source}: has no {PATCHES}: not a Vision Transformer with timm's names")
    # Of what is computed with before shapes are held against a model's.
    shapes = {name: tuple(weights[name].shape) for name in (PATCHES, BIAS, HEAD) if name in weights}
    shape = shapes[PATCHES]
    if len(shape) != 4 or min(shape) < 1 or shape[1] != 3 or shape[2] != shape[3]:
        raise UserError(f"{source}: {PATCHES} is of shape {shape}, which is not (width, 3, patch size, patch size)")
    if shapes.get(BIAS, shape[:1]) != shape[:1]:
        raise UserError(f"{source}: {BIAS} is of shape {shapes[BIAS]}, but {PATCHES} of {shape}")
    if len(shapes.get(HEAD, (0, 0))) != 2:
        raise UserError(f"{source}: {HEAD} is of shape {shapes[HEAD]}, which is not (classes, width)")
    return {name: tensor.float() for name, tensor in weights.items()}


def _check_memory(asked: str, numel: int) -> None:
    """Check that this machine can hold a tensor of so many elements.

    Raises:
        UserError: if not, since the allocator would end the process, by a traceback or a signal.
    """
    needed, there = 4 * numel, psutil.virtual_memory().total
    if needed > there:
        raise UserError(f"{asked}: would take {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f}")


def resample(source: Path | str, weights: dict[str, Tensor], img_size: int, asked: str) -> None:
    """Resample the position embedding in place for another image size; the class token's embedding is kept.

    Args:
        source: of the weights, for messages.
        weights: by timm's names.
        img_size: in pixels.
        asked: how the user gave `img_size`, for messages.

    Raises:
        UserError: if `img_size` is not a multiple of the patch size, or the embedding is not a square grid.
    """
    patch = weights[PATCHES].shape[-1]
    if img_size < patch or img_size % patch:
        down = img_size // patch * patch
        nearest = f"{down} or {down + patch}" if down > 0 else f"{patch}"
        raise UserError(f"{asked}: is not a multiple of the patch size {patch} of {source}: use {nearest}")
    position = weights.get("pos_embed", torch.empty(0))  # (1, N, C)
    num_tokens = position.shape[1] if position.ndim == 3 else 0
    num_prefix = num_tokens - math.isqrt(num_tokens) ** 2  # tokens that are not patches
    if num_tokens == 0 or num_prefix > 1 or position.shape != (1, num_tokens, len(weights[PATCHES])):
        raise UserError(
            f"{asked}: pos_embed of {source} is of shape {tuple(position.shape)}, which is not (1, N, width) with "
            f"N a square, or a square and the class token"
        )
    grid = [img_size // patch] * 2
    _check_memory(asked, math.prod(grid) * position.shape[2])
    weights["pos_embed"] = resample_abs_pos_embed(position, grid, num_prefix_tokens=num_prefix)


def has_head(weights: Mapping[str, Tensor], num_classes: int) -> bool:
    """Whether there is a head for so many classes."""
    return HEAD in weights and len(weights[HEAD]) == num_classes


def new_head(weights: dict[str, Tensor], num_classes: int, asked: str) -> None:
    """Give the weights a head of zeros, as the ViT paper does for fine-tuning (arXiv:2010.11929, section 3.2).

    Args:
        weights: by timm's names.
        num_classes: of the head.
        asked: how the user gave `num_classes`, for messages.

    Raises:
        UserError: if this machine cannot hold it.
    """
    width = len(weights[PATCHES])
    _check_memory(asked, num_classes * width)
    weights[HEAD], weights["head.bias"] = torch.zeros(num_classes, width), torch.zeros(num_classes)


def new_norm(weights: dict[str, Tensor]) -> None:
    """Put a new norm behind average pooling in place of the one before it, as MAE's fine-tuning does (arXiv:2111.06377,
    appendix A.1)."""
    width = len(weights[PATCHES])
    weights["fc_norm.weight"], weights["fc_norm.bias"] = torch.ones(width), torch.zeros(width)
    for name in ("norm.weight", "norm.bias"):
        weights.pop(name, None)


def renormalize(weights: dict[str, Tensor], theirs: Normalization, ours: Normalization) -> bool:
    """Let the patch embedding compute in place, from images that are normalised as ours, what it did from theirs.

    A channel of theirs is scale × ours + shift. The embedding is linear and its patches are not padded, so that this is
    exact: the kernel is multiplied by the scale, and its sum over a patch, times the shift, goes to the bias.

    Returns:
        Whether it could be done: without a bias only if the means are the same.
    """
    (their_mean, their_std), (our_mean, our_std) = map(torch.tensor, theirs), map(torch.tensor, ours)
    scale, shift = our_std / their_std, (our_mean - their_mean) / their_std
    kernel = weights[PATCHES]
    if BIAS in weights:
        weights[BIAS] = weights[BIAS] + kernel.sum((2, 3)) @ shift
    elif shift.any():
        return False
    weights[PATCHES] = kernel * scale.view(3, 1, 1)
    return True
