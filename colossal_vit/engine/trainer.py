"""Colossal-AI's Trainer, extended to resume in the middle of an epoch and to evaluate averaged weights."""

from typing import Any

from colossal_vit.engine.micro_batches import MicroBatches
from colossalai.legacy.trainer import Trainer as ColossalTrainer


class _WithoutMaxSteps:
    """A logger that drops upstream's message about `max_steps`, which counts micro-steps."""

    def __init__(self, logger: Any):
        self.logger = logger

    def info(self, message: str, **options: Any) -> None:
        if not message.startswith("Max number of steps"):
            self.logger.info(message, **options)


class Trainer(ColossalTrainer):
    """Colossal-AI's Trainer, starting from `cur_epoch` and `MicroBatches.start`, which `restore.resume` sets.

    Upstream resumes at whole epochs only, and makes one step too many if `max_steps` were already made.

    Attributes:
        averaged: whether the current evaluation is of the averaged weights; it precedes that of the weights.
    """

    averaged = False

    def _eval(self, *args: Any, **options: Any) -> None:
        if self.engine.ema:
            with self.engine.ema.in_the_model():
                self.averaged = True
                super()._eval(*args, **options)
            self.averaged = False
        super()._eval(*args, **options)

    def fit(self, train_dataloader: MicroBatches, epochs: int, max_steps: int | None = None, **options: Any) -> None:
        """Train; the arguments are upstream's. `max_steps` counts micro-steps since the start of the run."""
        made = self.cur_epoch * len(train_dataloader)
        if train_dataloader.start == 0 and made >= min(max_steps or made + 1, epochs * len(train_dataloader)):
            self._logger.info(f"nothing is left to do: the run has made its {made // self.engine.accumulation} steps")
            epochs = self.cur_epoch
        logger, self._logger = self._logger, _WithoutMaxSteps(self._logger)
        try:
            super().fit(train_dataloader, epochs, max_steps, **options)
        finally:
            self._logger = logger
        if max_steps and self._cur_step >= max_steps:
            self._logger.info(f"stopped after step {max_steps // self.engine.accumulation}, as --max-steps says")

    def _train_epoch(self, train_dataloader: MicroBatches, *args: Any, **options: Any) -> None:
        whole = self._steps_per_epoch
        self._cur_step += train_dataloader.start
        left = whole - train_dataloader.start
        self._steps_per_epoch = left if self._max_steps is None else min(left, self._max_steps - self._cur_step)
        try:
            super()._train_epoch(train_dataloader, *args, **options)
        finally:
            self._steps_per_epoch = whole
