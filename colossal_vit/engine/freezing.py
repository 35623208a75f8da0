"""Which parameters are trained, as the config's block `finetune` says."""

from colossal_vit.engine.optimizers import layer_of, num_blocks
from colossal_vit.errors import UserError
from colossalai.context import Config
from torch import nn


def frozen_parameters(model: nn.Module, config: Config) -> list[nn.Parameter]:
    """What is not trained: all but the head, or the embedding and the first blocks, or nothing.

    Args:
        model: this rank's part, whose parameters have the attribute `shard`.
        config: of the run.

    Raises:
        UserError: if the model has fewer blocks.
    """
    if not config.finetune:
        return []
    frozen, head_only = config.finetune.frozen_blocks, config.finetune.linear_probe
    if not frozen and not head_only:
        return []
    depth = num_blocks(config, model)
    if frozen > depth:
        raise UserError(f"finetune.frozen_blocks = {frozen}, but the model has {depth} blocks")

    def is_frozen(name: str) -> bool:
        if head_only:
            return not name.startswith("head.")
        # The norm after the last block is trained even if all blocks are frozen; that before the first one is not.
        return name.startswith("norm_pre") or layer_of(name, depth + 1) <= frozen

    return [parameter for parameter in model.parameters() if is_frozen(parameter.shard.name)]
