"""Images as a model takes them, back as image files have them."""

from torch import Tensor


def to_pixels(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return normalised images (..., 3, H, W) as RGB of 8 bits, rounded: uint8, (..., H, W, 3).

    Args:
        images: to convert.
        mean, std: what they were normalised with, (3, 1, 1).
    """
    return ((images * std + mean) * 255).round().clamp(0, 255).byte().movedim(-3, -1)
