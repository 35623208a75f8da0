"""The embedding of an image's patches as a matrix product: in timm's models, and by `patches.apply` in Colossal-AI's.

For a convolution whose stride is its kernel, cuDNN brings the images into another memory layout, and takes kernels of
an earlier GPU: 3 of 78 ms of a step of ViT-B/16 with 256 images on an H200, see results/1x_NVIDIA_H200/profile, where
c3738d2.json.gz has it.
"""

import torch
import torch.nn.functional as F
from colossalai.legacy.nn.layer.vanilla import VanillaPatchEmbedding
from torch import Tensor


def embed_patches(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution of (B, C, H, W) with a weight (D, C, h, w) and the stride (h, w).

    Returns:
        (B, H // h, W // w, D), without what is left over at the edges.
    """
    height, width = weight.shape[2:]
    rows, columns = images.shape[2] // height, images.shape[3] // width
    whole = images[:, :, : rows * height, : columns * width]
    patches = whole.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias)


def forward_vanilla(self: VanillaPatchEmbedding, images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 1 + N, D): the class token and N patches, with their positions."""
    patches = embed_patches(images, self.weight, self.bias).flatten(1, 2)
    return torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
