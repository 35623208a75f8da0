"""Which pixels of an image are evaluated: those of torchvision's Resize and CenterCrop, and so of timm's transform.

An image is resized until its shorter side has a given number of pixels, and a square is cut from its middle.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

LONGEST = 64  # times the shorter side


def cache_size(img_size: int) -> int:
    """Return the default of CACHE_SIZE: 256 pixels for 224, as in the tutorial."""
    return round(img_size * 8 / 7)


def middle(sides: Sequence[int] | int, size: int) -> np.ndarray:
    """Return the first of `size` pixels in the middle of each side."""
    return np.rint((np.asarray(sides) - size) / 2).astype(int)  # halves to even numbers, as in torchvision


def source(sides: Sequence[int], shorter: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of an image that becomes the square of `size` pixels.

    Args:
        sides: of the image.
        shorter: pixels of the shorter side of the resized image.
        size: at most that.

    Returns:
        Where it starts and ends on each side, in pixels of the image, not rounded.
    """
    sides = np.asarray(sides)
    resized = sides * shorter // sides.min()
    first = middle(resized, size)
    return first * sides / resized, (first + size) * sides / resized


def trim(image: Image.Image | Tensor) -> Image.Image | Tensor:
    """Return the middle of an image (..., H, W) that is more than `LONGEST` times as long as wide; resized whole, a
    strip of a pixel's width would take gigabytes.

    What is cut off at each end is an even multiple of the shorter side, so that resizing would make an even number of
    whole pixels of it: those in the middle are the same ones.
    """
    sides = v2.functional.get_size(image)
    kept = [side - max(side // min(sides) - LONGEST, 0) // 4 * 4 * min(sides) for side in sides]
    return image if kept == sides else v2.functional.center_crop(image, kept)
