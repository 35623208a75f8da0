"""timm's Vision Transformers, for the purely data-parallel examples."""

from collections.abc import Iterator
from contextlib import contextmanager

import timm
import torch
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config
from torch import nn

MODELS = ["vit_*", "deit3_*"]  # timm's models that the examples take
# Config keys that override how MODEL is built, and timm's names of them.
SHAPE = {
    "PATCH_SIZE": "patch_size",
    "HIDDEN_SIZE": "embed_dim",
    "DEPTH": "depth",
    "NUM_HEADS": "num_heads",
    "POOL": "global_pool",
}


@contextmanager
def cpu_seed(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator inside the block, and restore its state afterwards.

    `torch.manual_seed` would also reseed the GPU's generator, and give all ranks the same dropout masks.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def build_timm_vit(config: Config) -> nn.Module:
    """The timm model `config.MODEL`, its weights initialised on the CPU from `config.SEED`.

    DROP_RATE has the meaning of timm's `drop_rate` when the tutorials were written: dropout after the position
    embedding, the attention projection and the layers of the MLP. DROP_PATH_RATE is timm's `drop_path_rate`.
    """
    with cpu_seed(config.SEED):
        return timm.create_model(
            config.MODEL,
            num_classes=config.NUM_CLASSES,
            img_size=config.IMG_SIZE,
            pos_drop_rate=config.DROP_RATE,
            proj_drop_rate=config.DROP_RATE,
            drop_path_rate=config.get("DROP_PATH_RATE", 0.0),
            **{name: config[key] for key, name in SHAPE.items() if key in config},
        )


def check_timm_vit(config: Config, layout: Layout) -> None:
    """Refuse a model that timm lacks or cannot build, and a layout that is not purely data parallel.

    Raises:
        UserError: naming the values.
    """
    if layout.pipeline * layout.tensor > 1:
        raise UserError(
            f"this script is data parallel only, but the config asks for {layout}: "
            f"use vit_cifar10_hybrid/train_hybrid.py"
        )
    if config.MODEL not in timm.list_models(MODELS):
        raise UserError(f"MODEL = {config.MODEL!r} is not a Vision Transformer of timm: see timm.list_models({MODELS})")
    with torch.device("meta"):
        try:
            build_timm_vit(config)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"MODEL = {config.MODEL!r} cannot be built with these sizes: {error}") from None
