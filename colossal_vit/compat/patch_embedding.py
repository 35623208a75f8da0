"""The embedding of an image's patches as a matrix product; `patches.apply` gives it to Colossal-AI's layers.

For a convolution whose stride is its kernel, cuDNN brings the images into another memory layout, and takes kernels of
an earlier GPU: 3 of 78 ms of a step of ViT-B/16 with 256 images on an H200, see results/1x_NVIDIA_H200/profile.
"""

import torch.nn.functional as F
from torch import Tensor


def embed_patches(images: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> Tensor:
    """`F.conv2d` of (B, C, H, W) with a weight (D, C, h, w) and the stride (h, w).

    Returns:
        (B, D, H // h, W // w), without what is left over at the edges.
    """
    height, width = stride
    rows, columns = images.shape[2] // height, images.shape[3] // width
    whole = images[:, :, : rows * height, : columns * width]
    patches = whole.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)
