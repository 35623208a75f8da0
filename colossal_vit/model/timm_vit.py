"""timm's Vision Transformers, for the purely data-parallel examples."""

import re

import timm
import torch
from colossal_vit.compat.patch_embedding import embed_patches
from colossal_vit.config.check import did_you_mean
from colossal_vit.config.schema import Side
from colossal_vit.config.settings import Setting, Settings
from colossal_vit.config.types import Bool, Positive, Text, one_of, whole
from colossal_vit.errors import UserError, multiples_near, reason
from colossal_vit.model.last_block import ClassTokenBlock
from colossal_vit.parallel.layout import Layout
from colossal_vit.rng.dropout import Dropout, DropPath, name_layers
from colossal_vit.rng.torch_generator import cpu_seed
from colossalai.context import Config
from timm.layers import Attention, Mlp, build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

MODELS = ["vit_*", "deit3_*"]  # timm's models that the examples take
SETTINGS: Settings = {
    "MODEL": Setting(Text, "a Vision Transformer of timm", "vit_base_patch16_224"),
    "PATCH_SIZE": Setting(Side, "side of a patch, in pixels; that of MODEL"),
    "HIDDEN_SIZE": Setting(whole(1, 2**16), "width; that of MODEL"),
    "DEPTH": Setting(whole(1, 256), "transformer blocks; those of MODEL"),
    "NUM_HEADS": Setting(whole(1, 2**16), "attention heads; those of MODEL"),
    "POOL": Setting(
        one_of("token", "avg"),
        "what the head sees: the class token, or the mean of the patches' tokens; that of MODEL",
    ),
    "POSITIONS": Setting(
        one_of("learned", "sincos2d"), "position embedding: learned, or fixed sines and cosines", "learned"
    ),
    "LAYER_SCALE": Setting(Positive, "what each branch is multiplied by at the start (LayerScale); that of MODEL"),
    "DROP_PATH_UNIFORM": Setting(Bool, "every block has the rate of the last one", False, {"DROP_PATH_RATE": ()}),
}
LARGEST_STEM = 1024  # pixels, a power of two: more than any convolutional stem makes a feature of
# Config keys that override how MODEL is built, and timm's names of them.
SHAPE = {
    "PATCH_SIZE": "patch_size",
    "HIDDEN_SIZE": "embed_dim",
    "DEPTH": "depth",
    "NUM_HEADS": "num_heads",
    "POOL": "global_pool",
    "LAYER_SCALE": "init_values",
}
# Config keys by the arguments of timm that `build_timm_vit` gives for them.
KEYS = {argument: key for key, argument in SHAPE.items()}
KEYS |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), "DROP_RATE")


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel, with its weights, see `embed_patches`."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images: Tensor) -> Tensor:
        return embed_patches(images, self.weight, self.bias).permute(0, 3, 1, 2)


def skip_unused_tokens(model: VisionTransformer) -> None:
    """Have the last block of a timm model compute no token that the head does not see.

    The results are the same but for rounding. A block of another kind than `Block` is left as it is.
    """
    last = model.blocks[-1]
    plain = type(last) is Block and type(last.attn) is Attention and last.attn.gate is None
    if model.global_pool == "token" and plain:
        model.blocks[-1] = ClassTokenBlock(last)


def fix_positions(model: nn.Module) -> None:
    """Put sines and cosines of row and column in place of a timm model's learned position embedding.

    A. Vaswani et al., arXiv:1706.03762, in two dimensions, as X. Chen et al., arXiv:2104.02057, use it. It is a buffer
    under the same name, (1, N, C), with zeros for tokens that are not patches.

    Raises:
        ValueError: if the model has no position embedding.
    """
    if getattr(model, "pos_embed", None) is None:
        raise ValueError("it has no position embedding that POSITIONS could replace")
    patches = build_sincos2d_pos_embed(model.patch_embed.grid_size, model.embed_dim)  # (patches, C)
    others = torch.zeros(model.pos_embed.shape[1] - len(patches), model.embed_dim)
    del model.pos_embed
    model.register_buffer("pos_embed", torch.cat([others, patches])[None])


def set_dropout(model: nn.Module, config: Config) -> None:
    """Put our dropout and stochastic depth in the places of a timm model's own, see `colossal_vit.rng.dropout`.

    The rate of stochastic depth is DROP_PATH_RATE in all blocks, or linear from 0 to it.
    """

    def replace(parent: nn.Module, path_rate: float) -> None:
        for name, module in parent.named_children():
            if name.startswith("drop_path"):  # one in blocks of parallel parts, two in others
                setattr(parent, name, DropPath(path_rate))
            elif isinstance(module, nn.Dropout) and module.p:
                act = parent.act if isinstance(parent, Mlp) and name == "drop1" else None
                gelu = isinstance(act, nn.GELU) and act.approximate == "none"
                if gelu:  # computed with the dropout, in one kernel
                    parent.act = nn.Identity()
                setattr(parent, name, Dropout(module.p, gelu=gelu))
            elif module is not model.blocks:
                replace(module, path_rate)

    replace(model, 0.0)
    uniform, last = config.get("DROP_PATH_UNIFORM", False), max(len(model.blocks) - 1, 1)
    for number, block in enumerate(model.blocks):
        replace(block, config.DROP_PATH_RATE * (1.0 if uniform else number / last))
    name_layers(model, config.SEED)


def build_timm_vit(config: Config) -> nn.Module:
    """Return the timm model `config.MODEL`, its weights initialised on the CPU from `config.SEED`.

    DROP_RATE has the meaning of timm's `drop_rate` when the tutorials were written: dropout after the position
    embedding, the attention projection and the layers of the MLP. DROP_PATH_RATE is timm's `drop_path_rate`, or the
    rate of every block.
    """
    with cpu_seed(config.SEED):
        model = timm.create_model(
            config.MODEL,
            num_classes=config.NUM_CLASSES,
            img_size=config.IMG_SIZE,
            pos_drop_rate=config.DROP_RATE,
            proj_drop_rate=config.DROP_RATE,
            **{name: config[key] for key, name in SHAPE.items() if key in config},
        )
    if isinstance(projection := model.patch_embed.proj, nn.Conv2d):  # one model has none
        model.patch_embed.proj = PatchProjection(projection)
    if config.POSITIONS == "sincos2d":
        fix_positions(model)
    set_dropout(model, config)
    skip_unused_tokens(model)
    return model


def describe_timm_vit(config: Config, model: nn.Module) -> str:
    """Return a line about a model for the log: timm's name, what the config has otherwise, and its parameters."""
    changed = ", ".join(f"{key} {config[key]}" for key in SHAPE if key in config)
    name = f"{config.MODEL} with {changed}" if changed else config.MODEL
    return f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters"


def check_timm_vit(config: Config, layout: Layout) -> None:
    """Refuse a model that timm lacks or cannot build, images that are not whole patches, and layouts beyond data
    parallelism.

    Raises:
        UserError: naming the values.
    """
    if layout.pipeline * layout.tensor > 1:
        raise UserError(
            f"this script is data parallel only, but the config asks for {layout}: leave parallel out, or take a "
            f"script whose model has other layouts"
        )
    if config.MODEL not in timm.list_models(MODELS):
        hint = did_you_mean(config.MODEL, timm.list_models(MODELS)) or f": see timm.list_models({MODELS})"
        raise UserError(f"MODEL = {config.MODEL!r} is no Vision Transformer of timm{hint}")
    # Whole patches of any stem, whose ratio timm computes from its input and output and so would round for IMG_SIZE.
    whole = {"IMG_SIZE": LARGEST_STEM * config.get("PATCH_SIZE", 1), "NUM_CLASSES": 1}
    with torch.device("meta"):
        try:
            embed = build_timm_vit(Config({**config, **whole})).patch_embed
            patch = embed.feat_ratio()
            embed.set_input_size(config.IMG_SIZE)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown and (key := KEYS.get(unknown[1])):
                remedy = f", or leave {key} out" if key in SHAPE else ""
                raise UserError(
                    f"MODEL = {config.MODEL!r}: timm's model has no {unknown[1]}, which {key} sets: take another "
                    f"model{remedy}"
                ) from None
            raise UserError(f"MODEL = {config.MODEL!r} cannot be built with these sizes: {reason(error)}") from None
    if embed.grid_size[0] * patch < config.IMG_SIZE:  # stems that pad their input have the part of a patch in one more
        raise UserError(
            f"IMG_SIZE = {config.IMG_SIZE} is not a multiple of the patch size of MODEL = {config.MODEL!r}, {patch} "
            f"pixels: use {multiples_near(config.IMG_SIZE, patch)}"
        )
