"""The progress of a run: a bar at a terminal, lines in a log."""

import math
import time
from typing import Any

from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.hooks.metrics import writes_metrics
from colossal_vit.hooks.priority import Priority
from colossal_vit.run import Run
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor
from tqdm import tqdm


def time_left(seconds: float) -> str:
    """Return a duration in the largest unit that fits: `2.1 h left`, `35 min left`, `8 s left`."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h left"
    return f"{seconds / 60:.0f} min left" if seconds >= 60 else f"{seconds:.0f} s left"


def progress_bar(**options: Any) -> tqdm:
    """Return a progress bar that shows itself on one rank, if stderr is a terminal."""
    return tqdm(dynamic_ncols=True, disable=None if writes_metrics() else True, **options)


class ProgressHook(BaseHook):
    """A progress bar over the optimizer steps of the run, with the time left, if stderr is a terminal.

    Otherwise, as in the log of a batch job, a line after the first step, every `LOG_EVERY` seconds, and after each
    epoch. An evaluation has a bar of its own, or a line every `LOG_EVERY` seconds.

    Args:
        run: from `main.start`.
        train_dataloader: as `engine.initialize` returned it.
    """

    def __init__(self, run: Run, train_dataloader: TrainLoader):
        super().__init__(Priority.READER)
        self.run, self.train_dataloader = run, train_dataloader

    def before_train(self, trainer: Trainer) -> None:
        steps = self.run.config.NUM_EPOCHS * (len(self.train_dataloader) // trainer.engine.accumulation)
        self.total = min(steps, self.run.args.max_steps or steps)
        self.bar = progress_bar(total=self.total, initial=trainer.engine.num_steps, unit="step")
        self.logs = writes_metrics() and self.bar.disable
        self.logged_at, self.logged_step = -math.inf, 0
        self.first: tuple[int, float] | None = None  # a step, and when it ended; those before may compile the model

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        records = trainer.states.get("records")
        if not self.bar.disable:
            if records:
                self.bar.set_postfix_str(self._describe(trainer, records[-1]), refresh=False)
            self.bar.update()
        elif self.logs and records and time.monotonic() - self.logged_at >= self.run.config.LOG_EVERY:
            self._log(trainer, records[-1])

    def after_train_epoch(self, trainer: Trainer) -> None:
        records = trainer.states.get("records")
        if self.logs and records and records[-1]["step"] > self.logged_step:
            self._log(trainer, records[-1])

    def _describe(self, trainer: Trainer, record: dict[str, Any], step: str = "") -> str:
        speed = f"loss {record['loss']:.4f}, {record['images_per_s']:.0f} images/s"
        return f"epoch {record['epoch']} of {trainer.num_epochs}{step}, {speed}"

    def _log(self, trainer: Trainer, record: dict[str, Any]) -> None:
        step = record["step"]
        self.logged_at, self.logged_step = time.monotonic(), step
        line = self._describe(trainer, record, f": step {step:,} of {self.total:,}")
        if self.first is None:
            self.first = step, self.logged_at
        elif step > self.first[0] and step < self.total:  # evaluations and checkpoints so far count as part of steps
            seconds = (self.logged_at - self.first[1]) / (step - self.first[0])
            line += f", {time_left(seconds * (self.total - step))}"
        self.run.log.info(line, ranks=None)

    def after_train(self, trainer: Trainer) -> None:
        self.bar.close()

    def before_test(self, trainer: Trainer) -> None:
        self.tested, self.test_logged_at = 0, time.monotonic()
        self.test_bar = progress_bar(total=len(trainer.test_dataloader), unit="batch", desc="evaluation", leave=False)

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        self.tested += 1
        self.test_bar.update()
        now = time.monotonic()
        if writes_metrics() and self.test_bar.disable and now - self.test_logged_at >= self.run.config.LOG_EVERY:
            self.test_logged_at = now
            self.run.log.info(f"evaluation: batch {self.tested:,} of {len(trainer.test_dataloader):,}", ranks=None)

    def after_test(self, trainer: Trainer) -> None:
        self.test_bar.close()
