"""timm's last block without the tokens that the head does not see, under the same names and with the same results."""

import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn


class ClassTokenAttention(nn.Module):
    """timm's attention of the class token to all tokens, with the layers of an `Attention` that has no gate."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.num_heads = attention.num_heads
        self.qkv, self.q_norm, self.k_norm = attention.qkv, attention.q_norm, attention.k_norm
        self.norm, self.proj, self.proj_drop = attention.norm, attention.proj, attention.proj_drop

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, C) to (B, 1, C)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        heads = F.scaled_dot_product_attention(self.q_norm(q[:, :, :1]), self.k_norm(k), v)
        return self.proj_drop(self.proj(self.norm(heads.transpose(1, 2).flatten(2))))


class ClassTokenBlock(nn.Module):
    """timm's block that computes the class token only, with the layers of a `Block`."""

    def __init__(self, block: Block):
        super().__init__()
        self.norm1, self.attn = block.norm1, ClassTokenAttention(block.attn)
        self.ls1, self.drop_path1 = block.ls1, block.drop_path1
        self.norm2, self.mlp = block.norm2, block.mlp
        self.ls2, self.drop_path2 = block.ls2, block.drop_path2

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, C) to (B, 1, C)."""
        x = x[:, :1] + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
