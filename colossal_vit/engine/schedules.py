"""Learning-rate schedules, in units of the optimizer step."""

import math

from colossal_vit.errors import UserError
from colossalai.context import Config
from colossalai.nn.lr_scheduler import LinearWarmupLR
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


class CosineAnnealingWarmupLR(LambdaLR):
    """Linear warm-up to the base learning rate, then half a cosine down to zero.

    With W warm-up steps of T, step k (from 0) is made with the base rate times (k + 1) / W while k < W, and times
    (1 + cos(π (k - W) / (T - W))) / 2 from there on (I. Loshchilov and F. Hutter, arXiv:1608.03983). With a `floor`,
    that last factor f becomes floor + (1 - floor) f.

    Other args as `colossalai.nn.lr_scheduler.CosineAnnealingWarmupLR`, which on torch 2.14 exceeds the base rate after
    the warm-up: it chains recursive schedulers, and the first step of the second is taken for an ordinary one.

    Raises:
        ValueError: unless 0 <= warmup_steps <= total_steps.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, floor: float = 0.0
    ):
        if not 0 <= warmup_steps <= total_steps:
            raise ValueError(f"warmup_steps = {warmup_steps} does not fit total_steps = {total_steps}")

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
            return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, factor, last_epoch)


def build_scheduler(config: Config, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """Return what SCHEDULE names, after WARMUP_EPOCHS of NUM_EPOCHS epochs of `steps_per_epoch` optimizer steps.

    Raises:
        UserError: if MIN_LEARNING_RATE is above LEARNING_RATE.
    """
    steps_per_epoch = max(steps_per_epoch, 1)  # `TrainLoader` refuses an epoch without a step
    steps = dict(total_steps=config.NUM_EPOCHS * steps_per_epoch, warmup_steps=config.WARMUP_EPOCHS * steps_per_epoch)
    if config.SCHEDULE == "linear":
        return LinearWarmupLR(optimizer, **steps)
    lowest, highest = config.MIN_LEARNING_RATE, config.LEARNING_RATE
    if lowest > highest:
        raise UserError(f"MIN_LEARNING_RATE = {lowest} is above LEARNING_RATE = {highest}")
    return CosineAnnealingWarmupLR(optimizer, **steps, floor=lowest / highest)
