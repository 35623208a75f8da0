"""The optimizer of a run, which parameters it trains, and the groups of these that it treats alike."""

import re
from typing import Any

import torch
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.muon import Muon, num_matrices
from colossal_vit.errors import UserError
from colossalai.context import Config
from torch import nn
from torch.optim import Optimizer

# Parts of the names of parameters that are vectors, of a token or of frequencies, whatever their shape.
VECTORS = ("token", "pos_embed", "rope.freqs")


def num_blocks(config: Config, model: nn.Module) -> int:
    """Transformer blocks of the whole model, of which `model` may be a part; DEPTH then says so."""
    return config.get("DEPTH") or len(getattr(model, "blocks", ()))


def layer_of(name: str, depth: int) -> int:
    """Return the layer of a Vision Transformer that a parameter belongs to, by its name in timm: 0 is the embedding.

    The blocks follow, the norm after the last one with it, and the head is `depth` + 1, with the norm behind average
    pooling, `fc_norm`.
    """
    if block := re.match(r"blocks\.(\d+)\.", name):
        return int(block[1]) + 1
    if name.startswith(("cls_token", "reg_token", "pos_embed", "patch_embed", "norm_pre")):
        return 0
    return depth if name.startswith("norm") else depth + 1


def frozen_parameters(config: Config, model: nn.Module) -> list[nn.Parameter]:
    """Return what is not trained: all but the head, or the embedding and the first blocks, or nothing.

    Args:
        config: of the run.
        model: this rank's part, whose parameters have the attribute `shard`.

    Raises:
        UserError: if the model has fewer blocks.
    """
    finetune = config.finetune
    if not finetune or not (finetune.frozen_blocks or finetune.linear_probe):
        return []
    frozen = finetune.frozen_blocks
    depth = num_blocks(config, model)
    if frozen > depth:
        raise UserError(f"finetune.frozen_blocks = {frozen}, but the model has {depth} blocks")

    def is_frozen(name: str) -> bool:
        if finetune.linear_probe:
            return not name.startswith("head.")
        # All blocks share the frequencies of rotary positions. The norm after the last block is always trained.
        return name.startswith("rope.") or layer_of(name, depth + 1) <= frozen

    return [parameter for parameter in model.parameters() if is_frozen(parameter.shard.name)]


def parameter_groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters that have the same learning rate and weight decay, the head's first.

    The head has LEARNING_RATE, and a layer LAYER_DECAY times the rate of the next one, see `layer_of`. If DECAY_VECTORS
    is False, biases, the weights of norms, class token and position embedding have no weight decay and, in LAMB, no
    trust ratios.

    Args:
        config: of the run.
        model: whole, or this rank's part of it.
    """
    depth = num_blocks(config, model)
    members: dict[tuple[int, bool, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        name = parameter.shard.name if hasattr(parameter, "shard") else name
        below_head = 0 if config.LAYER_DECAY == 1 else depth + 1 - layer_of(name, depth)
        is_vector = parameter.ndim < 2 or any(piece in name for piece in VECTORS)
        matrices = num_matrices(name, parameter) if config.OPTIMIZER == "muon" else 0
        members.setdefault((below_head, is_vector and not config.DECAY_VECTORS, matrices), []).append(parameter)
    groups = []
    for (below_head, excluded, matrices), parameters in sorted(members.items()):
        rate, decay = config.LEARNING_RATE * config.LAYER_DECAY**below_head, 0.0 if excluded else config.WEIGHT_DECAY
        groups.append(dict(params=parameters, lr=rate, weight_decay=decay))
        if config.OPTIMIZER == "lamb":
            groups[-1]["adam"] = excluded
        if config.OPTIMIZER == "muon":
            groups[-1]["matrices"] = matrices
    return groups


def start_momentum(optimizer: torch.optim.SGD, *arguments: Any) -> None:
    """Give parameters that are about to have their first step a momentum of zero.

    PyTorch's fused SGD makes it without a value, which remains if the device skips that step for an overflow, and
    counts as momentum in the next one. From zero, the first momentum is the gradient, as PyTorch's is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return what OPTIMIZER names, with LEARNING_RATE, WEIGHT_DECAY and the other keys of the config that are for
    optimizers.

    The device skips a step that overflows without asking the host. On CPUs the fused AdamW makes one pass through
    memory, where PyTorch's default needs eight. Muon iterates in bf16, which is faster, only where activations are in
    half precision: elsewhere its rounding would be the largest difference between layouts.
    """
    groups = parameter_groups(config, model)
    if config.OPTIMIZER == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=config.MOMENTUM, fused=True)
        optimizer.register_step_pre_hook(start_momentum)
        return optimizer
    options = {"eps": config.EPSILON} if config.get("EPSILON") else {}
    if config.OPTIMIZER == "lamb":
        return Lamb(groups, **options)
    if config.OPTIMIZER == "muon":
        half = config.fp16 and config.fp16.get("opt_level") != "O0"
        dtype = torch.bfloat16 if half else None
        return Muon(groups, config.MUON_MOMENTUM, config.MUON_NESTEROV, dtype, **options)
    return torch.optim.AdamW(groups, fused=True, **options)
