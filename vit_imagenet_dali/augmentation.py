"""The block `augment` in DALI's graph, on the CPU or the GPU: 3-Augment, colour jitter, random erasing.

The operations are torchvision's, see `colossal_vit.data.augment`; RandAugment is DALI's own.
"""

from math import log
from typing import Any

from colossal_vit.data.augment import BLUR
from nvidia.dali import fn, math, types
from nvidia.dali.auto_aug.rand_augment import rand_augment
from nvidia.dali.data_node import DataNode

ERASED_AREA, ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)  # as in torchvision's RandomErasing


def grayscale(images: DataNode) -> DataNode:
    """Grey images with three equal channels; HWC, uint8."""
    grey = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    return fn.color_space_conversion(grey, image_type=types.GRAY, output_type=types.RGB)


def solarize(images: DataNode, threshold: int = 128) -> DataNode:
    """Values from `threshold` on are inverted; HWC, uint8."""
    return fn.cast((images < threshold) * images + (images >= threshold) * (255 - images), dtype=types.UINT8)


def blur(images: DataNode, sigma: Any) -> DataNode:
    """Gaussian blur of this standard deviation, in pixels; HWC, uint8."""
    return fn.gaussian_blur(images, sigma=sigma, window_size=BLUR["kernel_size"])


def jitter(images: DataNode, brightness: Any, contrast: Any, saturation: Any) -> DataNode:
    """Brightness, contrast about the mean of the grey image, and saturation, times these factors; HWC, uint8."""
    images = fn.brightness_contrast(images, brightness=brightness)
    middle = fn.cast(fn.reductions.mean(grayscale(images)), dtype=types.FLOAT)
    images = fn.brightness_contrast(images, contrast=contrast, contrast_center=middle.cpu())
    return fn.saturation(images, saturation=saturation)


def three_augment(images: DataNode) -> DataNode:
    """One of grayscale, solarisation and blur; needs a pipeline with conditionals."""
    choice = fn.random.uniform(values=[0, 1, 2], dtype=types.INT32)
    if choice == 0:
        images = grayscale(images)
    elif choice == 1:
        images = solarize(images)
    else:
        images = blur(images, fn.random.uniform(range=BLUR["sigma"]))
    return images


def augment(images: DataNode, size: int, policy: str | None = None, n: int = 2, m: int = 9, color_jitter: float = 0.0):
    """What is done to images (size, size, 3) of type uint8; the other values are those of the block `augment`."""
    if policy == "rand":
        images = rand_augment(images, shape=[size, size], n=n, m=m)
    if policy == "three":
        images = three_augment(images)
    if color_jitter:
        factors = [fn.random.uniform(range=(1 - color_jitter, 1 + color_jitter)) for _ in range(3)]
        images = jitter(images, *factors)
    return images


def erase(images: DataNode, probability: float) -> DataNode:
    """Replace a part of normalised images (3, H, W) by noise, as often as `probability` says.

    Needs a pipeline with conditionals: noise is dear on the CPU, and made only where it is used.
    """
    happens = fn.random.coin_flip(probability=probability, dtype=types.BOOL)
    if happens:  # noqa: SIM108 conditionals of DALI are statements
        erased = erase_part(images)
    else:
        erased = images
    return erased


def erase_part(images: DataNode) -> DataNode:
    """Replace a random rectangle of each of the normalised images (3, H, W) by noise."""
    root = math.sqrt(fn.random.uniform(range=ERASED_AREA))
    log_aspect = fn.random.uniform(range=tuple(map(log, ERASED_ASPECT)))
    sides = [math.min(root * math.exp(sign * log_aspect / 2), 1.0) for sign in (1, -1)]  # shares of the image's
    anchors = [fn.random.uniform(range=(0.0, 1.0)) * (1.0 - side) for side in sides]
    region = dict(anchor=fn.stack(*anchors), shape=fn.stack(*sides))
    kept = fn.erase(images * 0.0 + 1.0, axis_names="HW", normalized=True, fill_value=0.0, **region)
    return images * kept + fn.random.normal(images) * (1.0 - kept)
