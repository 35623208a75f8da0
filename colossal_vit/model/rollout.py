"""What a Vision Transformer looks at: attention rollout, S. Abnar and W. Zuidema, arXiv:2005.00928."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from colossal_vit.errors import UserError
from colossal_vit.model.pixels import to_pixels
from PIL import Image
from torch import Tensor, nn

RESIDUAL = 0.5  # the share of a token that goes around the attention of a block
SHOWN = 224  # pixels that a picture's sides have at least
STRENGTH = 0.6  # of the colours over the image


def check_rollout(model: nn.Module) -> None:
    """Check that a model of timm is one whose attention `attention_rollout` can follow.

    Raises:
        UserError: naming what it has instead.
    """
    pool = getattr(model, "global_pool", None)
    if pool not in ("token", "avg"):
        raise UserError(
            f"attention cannot be followed to a head that sees global_pool = {pool!r}, not 'token' or 'avg'"
        )
    for number, block in enumerate(model.blocks):
        if len(found := _attentions(block)) != 1:
            raise UserError(
                f"attention cannot be followed: block {number} of the model has {len(found)} attention layers"
            )


def _attentions(block: nn.Module) -> list[nn.Module]:
    """Return the modules in a block that compute attention, each of which hands its probabilities to `attn_drop`."""
    return [module for module in block.modules() if hasattr(module, "attn_drop") and hasattr(module, "fused_attn")]


def attention_rollout(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return a model's logits, and how much of each patch reaches what the head sees.

    In a block, half of a token stays and half is what attention, averaged over the heads, gathers; the product over the
    blocks says which share of the last tokens comes from which patch. The head sees the class token, or without one
    the mean over the pooled tokens.

    Args:
        model: of timm, for which `check_rollout` passes; in evaluation mode.
        images: (B, 3, H, W), normalised.

    Returns:
        Logits (B, classes); shares (B, rows, columns), which with those of class and register tokens add up to 1.
    """
    rollout: Tensor | None = None

    def follow(_module: nn.Module, _inputs: object, attention: Tensor) -> None:  # (B, heads, tokens, tokens)
        nonlocal rollout
        mean = attention.float().mean(dim=1)
        mixed = RESIDUAL * torch.eye(mean.shape[-1], device=mean.device) + (1 - RESIDUAL) * mean
        rollout = mixed if rollout is None else mixed @ rollout

    with ExitStack() as stack:
        for block in model.blocks:
            (attention,) = _attentions(block)
            stack.callback(setattr, attention, "fused_attn", attention.fused_attn)
            attention.fused_attn = False  # fused, it has no probabilities to look at
            stack.callback(attention.attn_drop.register_forward_hook(follow).remove)
        logits = model(images)
    prefix = model.num_prefix_tokens
    if model.global_pool == "token":
        seen = rollout[:, 0]
    else:
        seen = rollout[:, 0 if getattr(model, "pool_include_prefix", False) else prefix :].mean(dim=1)
    return logits, seen[:, prefix:].unflatten(1, tuple(model.patch_embed.grid_size))


def draw_rollout(image: Tensor, shares: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Return an image as the model sees it, and beside it the same under colours: the brightest patch has the largest
    share, the darkest one the smallest.

    Args:
        image: (3, H, W), normalised.
        shares: of its patches, (rows, columns).
        mean, std: what it was normalised with, of each channel.
    """
    from matplotlib import colormaps  # takes a second

    mean, std = (torch.tensor(values, device=image.device).view(3, 1, 1) for values in (mean, std))
    pixels = to_pixels(image, mean, std).cpu().numpy()
    size = [side * -(-SHOWN // min(pixels.shape[:2])) for side in (pixels.shape[1], pixels.shape[0])]
    shown = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
    heat = (shares - shares.min()) / (shares.max() - shares.min()).clamp(min=1e-12)
    heat = Image.fromarray(heat.cpu().numpy()).resize(size, Image.Resampling.BILINEAR)
    colours = Image.fromarray(colormaps["inferno"](np.asarray(heat), bytes=True)).convert("RGB")
    both = Image.new("RGB", (2 * size[0], size[1]))
    both.paste(shown)
    both.paste(Image.blend(shown, colours, STRENGTH), (size[0], 0))
    return both
