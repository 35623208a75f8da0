"""What is drawn for each training image, and what DALI's graph makes of it, on the CPU or the GPU.

An image's random numbers depend on the seed, the epoch and its number only. The operations are torchvision's, see
`colossal_vit.data.augment`, and DALI's own for RandAugment.
"""

from math import log
from typing import NamedTuple

import numpy as np
import torch
from colossal_vit.data.augment import BLUR, SOLARIZED
from colossal_vit.data.devices import to_device
from colossal_vit.rng import philox
from colossalai.context import Config
from nvidia.dali import fn, types
from nvidia.dali.auto_aug.core import select, signed_bin
from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite
from nvidia.dali.data_node import DataNode
from torch import Tensor

ERASED_AREA, ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)  # as in torchvision's RandomErasing
TRIES = 10  # to place a rectangle, as in torchvision
FILL, BINS = 128, 31  # RandAugment: the grey of what a turn leaves empty; the magnitudes that there are
RAND_AUGMENT = get_rand_augment_suite(use_shape=True)

# ---------------------------------------------------------------------------------------------------------------------
# Drawn
# ---------------------------------------------------------------------------------------------------------------------


class AugmentParams(NamedTuple):
    """What is drawn for B images; DALI's graph is fed with it, field by field.

    Attributes:
        crop: float64 (B, 2 · TRIES + 2), see `place_rectangles`.
        mirror: int32 (B,), whether an image is mirrored.
        choice: int32 (B,), which operation of 3-Augment.
        sigma: float32 (B,), of the blur, in pixels.
        factors: float32 (B, 3), of the colour jitter: brightness, contrast, saturation.
        operations, signs: int32 (B, n), which operations of RandAugment, and whether each one's magnitude is negative.
    """

    crop: np.ndarray
    mirror: np.ndarray
    choice: np.ndarray
    sigma: np.ndarray
    factors: np.ndarray
    operations: np.ndarray
    signs: np.ndarray


class Erased(NamedTuple):
    """Rectangles of a batch that noise replaces.

    Attributes:
        images: (E,), places in the batch.
        rectangles: (E, 4), top, left, height and width in pixels.
        noise: float32, normally distributed, of all rectangles one after the other, each (3, height, width).
    """

    images: np.ndarray
    rectangles: np.ndarray
    noise: np.ndarray


KINDS = [(types.FLOAT64, 1), (types.INT32, 0), (types.INT32, 0), (types.FLOAT, 0), (types.FLOAT, 1)]
KINDS += [(types.INT32, 1)] * 2  # type and dimensions of the fields of `AugmentParams`, for an image


def _between(low: float, high: float, share: np.ndarray) -> np.ndarray:
    return low + (high - low) * share


def place_rectangles(
    sizes: np.ndarray, draws: np.ndarray, area: tuple[float, float], aspect: tuple[float, float]
) -> np.ndarray:
    """Return random rectangles in images, as torchvision's RandomResizedCrop places them.

    Each image has `TRIES` tries for one whose share of the image and width ÷ height are in the given ranges. If none
    fits, it is the largest one in the middle whose aspect is in its range.

    Args:
        sizes: (N, 2), height and width of the images.
        draws: (N, 2 · TRIES + 2), uniform between 0 and 1.
        area, aspect: the ranges.

    Returns:
        int64 (N, 4), top, left, height and width.
    """
    whole = np.broadcast_to(sizes, (len(draws), 2)).astype(np.int64)
    areas, aspects, places = np.split(draws, [TRIES, 2 * TRIES], axis=1)
    pixels = whole.prod(1, keepdims=True) * _between(*area, areas)
    ratios = np.exp(_between(*map(log, aspect), aspects))
    tried = np.rint(np.sqrt(np.stack([pixels / ratios, pixels * ratios], axis=2)))  # (N, TRIES, 2)
    largest = np.minimum(whole, np.rint(whole[:, ::-1] * [1 / aspect[0], aspect[1]]))
    tried = np.concatenate([tried, largest[:, None]], axis=1).astype(np.int64)
    first = ((tried > 0) & (tried <= whole[:, None])).all(2).argmax(1)
    shape = tried[np.arange(len(tried)), first]
    corner = np.where(first[:, None] < TRIES, places * (whole - shape + 1), (whole - shape) // 2)
    return np.column_stack([corner.astype(np.int64), shape])


def draw(config: Config, epoch: int, numbers: np.ndarray) -> tuple[AugmentParams, Erased | None]:
    """Draw for the images with these numbers in an epoch, (B,); see `GlobalBatchSampler`."""
    how, rectangle = config.augment or {}, 2 * TRIES + 2
    count = how.get("n", 2)
    parts = np.cumsum([rectangle, 1, 1, 1, 3, 1, rectangle, count])
    uniform = philox.uniform(config.SEED, "augmentation", epoch, numbers, count=int(parts[-1]) + count)
    crop, mirror, choice, sigma, jitter, erase, place, operations, signs = np.split(uniform, parts, axis=1)
    strength = how.get("color_jitter", 0.0)
    erased = np.flatnonzero(erase[:, 0] < how.get("erase", 0.0))
    return AugmentParams(
        np.ascontiguousarray(crop),
        (config.FLIP & (mirror[:, 0] < 0.5)).astype(np.int32),
        (choice[:, 0] * 3).astype(np.int32),
        _between(*BLUR["sigma"], sigma[:, 0]).astype(np.float32),
        _between(max(1 - strength, 0.0), 1 + strength, jitter).astype(np.float32),
        (operations * len(RAND_AUGMENT)).astype(np.int32),
        (signs < 0.5).astype(np.int32),
    ), _draw_erased(config, epoch, numbers, erased, place[erased]) if len(erased) else None


def _draw_erased(config: Config, epoch: int, numbers: np.ndarray, images: np.ndarray, draws: np.ndarray) -> Erased:
    size = np.array([config.IMG_SIZE, config.IMG_SIZE])
    rectangles = place_rectangles(size, draws, ERASED_AREA, ERASED_ASPECT)
    noise = [
        philox.generator(config.SEED, "erasing", epoch, number).standard_normal(3 * height * width, np.float32)
        for number, (_, _, height, width) in zip(numbers[images].tolist(), rectangles, strict=True)
    ]
    return Erased(images, rectangles, np.concatenate(noise))


# ---------------------------------------------------------------------------------------------------------------------
# Done
# ---------------------------------------------------------------------------------------------------------------------


def grayscale(images: DataNode) -> DataNode:
    """Grey images with three equal channels; HWC, uint8."""
    grey = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    return fn.color_space_conversion(grey, image_type=types.GRAY, output_type=types.RGB)


def solarize(images: DataNode) -> DataNode:
    """Values from `SOLARIZED` on are inverted; HWC, uint8."""
    return fn.cast((images < SOLARIZED) * images + (images >= SOLARIZED) * (255 - images), dtype=types.UINT8)


def blur(images: DataNode, sigma: DataNode | float) -> DataNode:
    """Gaussian blur of this standard deviation, in pixels; HWC, uint8."""
    return fn.gaussian_blur(images, sigma=sigma, window_size=BLUR["kernel_size"])


def jitter(
    images: DataNode, brightness: DataNode | float, contrast: DataNode | float, saturation: DataNode | float
) -> DataNode:
    """Brightness, contrast about the mean of the grey image, and saturation, times these factors; HWC, uint8."""
    images = fn.brightness_contrast(images, brightness=brightness)
    middle = fn.cast(fn.reductions.mean(grayscale(images)), dtype=types.FLOAT)
    images = fn.brightness_contrast(images, contrast=contrast, contrast_center=middle.cpu())
    return fn.saturation(images, saturation=saturation)


def three_augment(images: DataNode, choice: DataNode, sigma: DataNode) -> DataNode:
    """Apply one of grayscale, solarisation and blur; needs a pipeline with conditionals."""
    if choice == 0:
        images = grayscale(images)
    elif choice == 1:
        images = solarize(images)
    else:
        images = blur(images, sigma)
    return images


def rand_augment(images: DataNode, size: int, n: int, m: int, operations: DataNode, signs: DataNode) -> DataNode:
    """DALI's RandAugment, with operations and signs from outside; needs a pipeline with conditionals."""
    bins = signed_bin(m, signs)
    for number in range(n):
        how = dict(magnitude_bin=bins[number], num_magnitude_bins=BINS, shape=[size, size], fill_value=FILL)
        images = select(RAND_AUGMENT, operations[number], images, **how)
    return images


def changes_pixels(config: Config) -> bool:
    """Return whether `augment` does anything."""
    how = config.augment or {}
    return bool(how.get("policy") or how.get("color_jitter"))


def augment(images: DataNode, config: Config, draws: AugmentParams) -> DataNode:
    """Do all that is done to images (IMG_SIZE, IMG_SIZE, 3) of type uint8, but cropping, mirroring and erasing.

    Args:
        images: the images.
        config: of the run.
        draws: nodes of the graph in place of arrays.
    """
    how = config.augment or {}
    if how.get("policy") == "rand":
        images = rand_augment(images, config.IMG_SIZE, how["n"], how["m"], draws.operations, draws.signs)
    if how.get("policy") == "three":
        images = three_augment(images, draws.choice, draws.sigma)
    if how.get("color_jitter"):
        images = jitter(images, draws.factors[0], draws.factors[1], draws.factors[2])
    return images


def erase(images: Tensor, erased: Erased) -> None:
    """Replace parts of normalised images (B, 3, H, W) by noise, in place."""
    chosen, rectangles, noise = (to_device(torch.from_numpy(part), images.device) for part in erased)
    corner, size = rectangles[:, :2, None], rectangles[:, 2:, None]
    pixels = torch.arange(max(images.shape[2:]), device=images.device)
    rows, columns = ((corner <= pixels) & (pixels < corner + size)).unbind(1)  # (E, pixels)
    mask = rows[:, None, : images.shape[2], None] & columns[:, None, None, : images.shape[3]]
    images[chosen] = images[chosen].masked_scatter_(mask, noise.to(images.dtype))
