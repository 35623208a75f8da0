"""A Vision Transformer built from Colossal-AI layers, one class for every layout.

The architecture, the parameter names and the initial weights are those of timm's `VisionTransformer` (A. Dosovitskiy
et al., "An Image is Worth 16x16 Words", arXiv:2010.11929; pre-norm blocks, class token, learned positions). Which
layers it is made of depends on the tensor-parallel mode and is decided in one place, `LAYERS`; which blocks this rank
holds depends on its pipeline stage.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from colossal_vit.config.load import num_model_chunks
from colossal_vit.model.timm_vit import set_dropout, skip_unused_tokens
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.partition import partition_blocks
from colossal_vit.parallel.sharding import annotate, load_full, output_part
from colossal_vit.rng.dropout import Dropout, DropPath, current_samples, name_layers
from colossal_vit.rng.torch_generator import cpu_seed
from colossalai.context import Config
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-6  # timm's; PyTorch's default is 1e-5


class Layers(NamedTuple):
    """The layer classes of a tensor-parallel mode.

    A column layer's output is split over the ranks, as is a row layer's input.
    """

    column: Callable[[int, int], nn.Module]
    row: Callable[[int, int], nn.Module]
    norm: Callable[[int], nn.Module]


def _norm(size: int) -> nn.Module:
    return nn.LayerNorm(size, eps=NORM_EPS)


def _norm_of_parts(size: int) -> nn.Module:
    return col_nn.LayerNorm(size, eps=NORM_EPS)


_SPLIT = Layers(col_nn.Linear, col_nn.Linear, _norm_of_parts)
LAYERS: dict[str | None, Layers] = {
    None: Layers(col_nn.Linear, col_nn.Linear, _norm),
    # Norms see the whole hidden vector on every rank, so PyTorch's is right; upstream's needs a CUDA kernel compiled at
    # run time. Upstream's automatic Linear is column or row as the layer that was built before it says.
    "1d": Layers(col_nn.Linear1D_Col, col_nn.Linear1D_Row, _norm),
    # Every layer splits its input and its output, and upstream's automatic layers are right.
    "2d": _SPLIT,
    "2.5d": _SPLIT,
    "3d": _SPLIT,
}


class Attention(nn.Module):
    """Multi-head self-attention on (B, N, C); under tensor parallelism each rank computes whole heads.

    Args:
        layers: of the tensor-parallel mode.
        config: of the run.
        class_only: whether it returns the class token only, (B, 1, C).
    """

    def __init__(self, layers: Layers, config: Config, class_only: bool):
        super().__init__()
        self.class_only = class_only
        self.head_size = config.HIDDEN_SIZE // config.NUM_HEADS
        self.qkv = layers.column(config.HIDDEN_SIZE, 3 * config.HIDDEN_SIZE)
        self.proj = layers.row(config.HIDDEN_SIZE, config.HIDDEN_SIZE)
        self.proj_drop = Dropout(config.DROP_RATE, output_part(self.proj))

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        qkv = self.qkv(x)  # (B, N, heads on this rank × [query, key, value] × head_size)
        parts = qkv.unflatten(-1, (-1, 3, self.head_size)).unbind(-2)  # 3 × (B, N, heads, head_size)
        q, k, v = (part.transpose(1, 2) for part in parts)
        q = q[:, :, :1] if self.class_only else q
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)), samples)


class MLP(nn.Module):
    """The feed-forward part of a block. Its hidden activations are split over the ranks in every mode."""

    def __init__(self, layers: Layers, config: Config):
        super().__init__()
        mlp_size = int(config.HIDDEN_SIZE * config.MLP_RATIO)
        self.fc1 = layers.column(config.HIDDEN_SIZE, mlp_size)
        self.drop1 = Dropout(config.DROP_RATE, output_part(self.fc1), gelu=True)
        self.fc2 = layers.row(mlp_size, config.HIDDEN_SIZE)
        self.drop2 = Dropout(config.DROP_RATE, output_part(self.fc2))

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.fc1(x), samples)), samples)


class Block(nn.Module):
    """A transformer block; with CHECKPOINT its activations are recomputed in the backward pass instead of kept.

    Args:
        layers: of the tensor-parallel mode.
        config: of the run.
        number: of this block in the model; the drop-path rate grows linearly with it, to DROP_PATH_RATE at the last.
            The last block computes no token that the head does not see.
    """

    def __init__(self, layers: Layers, config: Config, number: int):
        super().__init__()
        self.norm1 = layers.norm(config.HIDDEN_SIZE)
        self.class_only = number == config.DEPTH - 1 and config.POOL == "token"
        self.attn = Attention(layers, config, self.class_only)
        self.norm2 = layers.norm(config.HIDDEN_SIZE)
        self.mlp = MLP(layers, config)
        rate = config.DROP_PATH_RATE * number / max(config.DEPTH - 1, 1)
        self.drop_path1 = DropPath(rate, output_part(self.norm1))
        self.drop_path2 = DropPath(rate, output_part(self.norm2))
        self.checkpoint = config.CHECKPOINT

    def _forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        branch = self.drop_path1(self.attn(self.norm1(x), samples), samples)
        x = (x[:, :1] if self.class_only else x) + branch
        return x + self.drop_path2(self.mlp(self.norm2(x), samples), samples)

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """x (B, N, C) behind the block; in training `samples` are those of x, for dropout."""
        if self.checkpoint and self.training:
            # When a pipeline recomputes a block, it has other samples in its forward passes: these are an argument.
            return checkpoint(self._forward, x, samples, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, samples)


class ViT(nn.Module):
    """This rank's part of a Vision Transformer.

    The part with block 0 takes images (B, 3, IMG_SIZE, IMG_SIZE), any other one activations (B, N, HIDDEN_SIZE); the
    part with the last block returns logits (B, NUM_CLASSES), any other one activations. These are full shapes: between
    blocks, 2D, 2.5D and 3D split B and HIDDEN_SIZE.

    Args:
        config: IMG_SIZE, PATCH_SIZE, HIDDEN_SIZE, DEPTH, NUM_HEADS, MLP_RATIO, NUM_CLASSES, POOL, DROP_RATE,
            DROP_PATH_RATE, CHECKPOINT.
        layout: data, pipeline and tensor parallel sizes.
        blocks: numbers of the transformer blocks in this part.
    """

    def __init__(self, config: Config, layout: Layout, blocks: range):
        super().__init__()
        layers = LAYERS[layout.tensor_mode]
        hidden = config.HIDDEN_SIZE
        first, last = blocks.start == 0, blocks.stop == config.DEPTH
        self.patch_embed = col_nn.PatchEmbedding(config.IMG_SIZE, config.PATCH_SIZE, 3, hidden) if first else None
        self.pos_drop = Dropout(config.DROP_RATE, output_part(self.patch_embed)) if first else None
        self.blocks = nn.ModuleDict({str(n): Block(layers, config, n) for n in blocks})
        average = config.POOL == "avg"  # timm's norm is then behind the pooling, and named so
        self.norm = layers.norm(hidden) if last and not average else None
        self.fc_norm = layers.norm(hidden) if last and average else None
        # Above that limit, upstream would split the classes over the ranks, which `annotate` does not know.
        classes = config.NUM_CLASSES
        self.head = col_nn.Classifier(hidden, classes, vocab_parallel_limit=classes) if last else None
        annotate(self, rename=_timm_name, num_heads=config.NUM_HEADS)
        name_layers(self, config.SEED)

    def forward(self, x: Tensor) -> Tensor:
        samples = current_samples()
        if self.patch_embed is not None:
            x = self.pos_drop(self.patch_embed(x), samples)
        for block in self.blocks.values():
            x = block(x, samples)
        if self.norm is not None:
            x = self.norm(x)[:, 0]
        if self.fc_norm is not None:
            x = self.fc_norm(x[:, 1:].mean(1))
        return x if self.head is None else self.head(x)


def _timm_name(name: str) -> str:
    """timm's name of a parameter. It differs in `patch_embed` only, which in timm has just the projection `proj`."""
    if name in ("patch_embed.cls_token", "patch_embed.pos_embed"):
        return name.removeprefix("patch_embed.")
    return name.replace("patch_embed.", "patch_embed.proj.")


def full_vit(config: Config) -> VisionTransformer:
    """timm's unsharded model for the config: the source of initial weights, and the reference for tests.

    Weights are initialised as in the paper's JAX code, on the CPU from `config.SEED`.
    """
    with cpu_seed(config.SEED):
        model = VisionTransformer(
            img_size=config.IMG_SIZE,
            patch_size=config.PATCH_SIZE,
            embed_dim=config.HIDDEN_SIZE,
            depth=config.DEPTH,
            num_heads=config.NUM_HEADS,
            mlp_ratio=config.MLP_RATIO,
            num_classes=config.NUM_CLASSES,
            global_pool=config.POOL,
            weight_init="jax",
            pos_drop_rate=config.DROP_RATE,
            proj_drop_rate=config.DROP_RATE,
        )
    set_dropout(model, config)
    skip_unused_tokens(model)
    return model


def build_vit(config: Config, layout: Layout) -> nn.Module:
    """Return this rank's part of the model, with its shards of the initial weights of `full_vit`.

    Returns:
        A `ViT`, or for an interleaved pipeline the `ModuleList` of this rank's chunks: of p stages, stage r has the
        parts r, r + p, r + 2p, ... of the model.
    """
    num_chunks = num_model_chunks(config)
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if layout.pipeline > 1 else 0
    parts = partition_blocks(config, layout.pipeline * num_chunks)[stage :: layout.pipeline]
    full = full_vit(config).state_dict()
    chunks = []
    for blocks in parts:
        chunks.append(ViT(config, layout, blocks))
        load_full(chunks[-1], full)
    return nn.ModuleList(chunks) if num_chunks > 1 else chunks[0]
