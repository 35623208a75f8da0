"""The optimizer of a run, and the groups of parameters that it treats alike."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from colossal_vit.engine.lamb import Lamb
from colossalai.context import Config
from torch import nn
from torch.optim import Optimizer

VECTORS = ("token", "pos_embed")  # in the names of parameters that are vectors of each token, whatever their shape


def num_blocks(config: Config, model: nn.Module) -> int:
    """Transformer blocks of the whole model, of which `model` may be a part; DEPTH then says so."""
    return config.get("DEPTH") or len(getattr(model, "blocks", ()))


def layer_of(name: str, depth: int) -> int:
    """The layer of a Vision Transformer that a parameter belongs to, by its name in timm: 0 is the embedding.

    The blocks follow, the norm after the last one with it, and the head is `depth` + 1, with the norm behind average
    pooling, `fc_norm`.
    """
    if block := re.match(r"blocks\.(\d+)\.", name):
        return int(block[1]) + 1
    if name.startswith(("cls_token", "reg_token", "pos_embed", "patch_embed")):
        return 0
    return depth if name.startswith("norm") else depth + 1


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    exclude: Iterable[str] = VECTORS,
    lr: float | None = None,
    layer_decay: float = 1.0,
    depth: int = 0,
) -> list[dict[str, Any]]:
    """Parameter groups, the head's first: of each rate one with weight decay and trust ratios, one with neither.

    The second has all vectors, that is biases and the weights of norms, and whatever `exclude` names. To leave out only
    the weight decay there, set its `adam` to False.

    Args:
        model: whole, or this rank's part of it.
        weight_decay: of the first group.
        exclude: pieces of parameter names; the default means class token and position embedding.
        lr: the head's learning rate; None leaves the optimizer's to all.
        layer_decay: the rate of a layer over that of the next one, see `layer_of`.
        depth: blocks of the whole model, which layer-wise rates need.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        name = parameter.shard.name if hasattr(parameter, "shard") else name
        layer = depth + 1 if layer_decay == 1 else layer_of(name, depth)
        if layer not in groups:
            rate = {} if lr is None else dict(lr=lr * layer_decay ** (depth + 1 - layer))
            groups[layer] = [
                dict(params=[], weight_decay=weight_decay, adam=False, **rate),
                dict(params=[], weight_decay=0.0, adam=True, **rate),
            ]
        excluded = parameter.ndim < 2 or any(piece in name for piece in exclude)
        groups[layer][excluded]["params"].append(parameter)
    return [group for layer in sorted(groups, reverse=True) for group in groups[layer]]


def _parameters(config: Config, model: nn.Module) -> list[Any]:
    """The parameters, in groups if LAYER_DECAY or DECAY_VECTORS asks for them."""
    if config.LAYER_DECAY == 1 and config.DECAY_VECTORS:
        return list(model.parameters())
    depth = num_blocks(config, model)
    groups = parameter_groups(model, config.WEIGHT_DECAY, VECTORS, config.LEARNING_RATE, config.LAYER_DECAY, depth)
    for group in groups:
        if config.DECAY_VECTORS:
            group.update(weight_decay=config.WEIGHT_DECAY, adam=False)
        if config.OPTIMIZER != "lamb":
            del group["adam"]
    return [group for group in groups if group["params"]]


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """What OPTIMIZER names, with LEARNING_RATE, WEIGHT_DECAY and the other keys of the config that are for optimizers.

    On a GPU AdamW updates all parameters in one kernel. PyTorch's fused SGD cannot be planned by `--dry-run`: it does
    not know tensors without data.
    """
    common = dict(lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY)
    parameters = _parameters(config, model)
    if config.OPTIMIZER == "sgd":
        return torch.optim.SGD(parameters, momentum=config.MOMENTUM, **common)
    if config.get("EPSILON"):
        common["eps"] = config.EPSILON
    if config.OPTIMIZER == "lamb":
        return Lamb(parameters, **common)
    return torch.optim.AdamW(parameters, fused=torch.cuda.is_available() or None, **common)
