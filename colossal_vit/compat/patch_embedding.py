"""The patch embedding as a matrix product.

It is a convolution of patches that do not overlap. For it cuDNN brings the images into another memory layout, and takes
kernels of an earlier GPU: 3.3 ms of a step of 78 ms of ViT-B/16 with 256 images on an H200.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def project(images: Tensor, weight: Tensor, bias: Tensor | None, stride: int | Sequence[int]) -> Tensor:
    """`F.conv2d` for a stride of the weight's own size, likewise without what is left over at the edges.

    Args:
        images: (B, C, H, W).
        weight: (D, C, h, w).
        bias: (D).
        stride: h and w again, as conv2d is given them.

    Returns:
        (B, D, H // h, W // w), the channels last in memory.
    """
    height, width = weight.shape[2:]
    rows, columns = images.shape[2] // height, images.shape[3] // width
    whole = images[:, :, : rows * height, : columns * width]
    patches = whole.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


class PatchProjection(nn.Conv2d):
    """The convolution in timm's patch embedding, computed so."""

    def forward(self, images: Tensor) -> Tensor:
        return project(images, self.weight, self.bias, self.stride)
