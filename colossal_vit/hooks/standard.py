"""The hooks that every train script gives its trainer."""

from typing import Any

from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.hooks.checkpoint import CheckpointHook
from colossal_vit.hooks.debug_nan import DebugNanHook
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.priority import Priority
from colossal_vit.hooks.profile import ProfileHook
from colossal_vit.hooks.progress import ProgressHook
from colossal_vit.run import Run
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor


class LRSchedulerHook(BaseHook):
    """Steps a learning-rate scheduler once per optimizer step, so that its unit is the optimizer step.

    Upstream's hook steps per batch, which under accumulation is several times a step. Runs after `MetricsHook`, which
    records the rate that the step was made with.
    """

    def __init__(self, lr_scheduler: Any, priority: int = Priority.SCHEDULER):
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if trainer.engine.finished_step:
            self.lr_scheduler.step()


def standard_hooks(run: Run, train_dataloader: MicroBatches, lr_scheduler: Any) -> list[BaseHook]:
    """What every train script gives its trainer: first the `MetricsHook`, then what the command line asked for.

    With `--eval-only` that is all.
    """
    metrics = MetricsHook(None if run.eval_only else run.output, train_dataloader, run.log)
    if run.eval_only:
        return [metrics]
    hooks = [
        metrics,
        ProgressHook(run, train_dataloader, metrics),
        LRSchedulerHook(lr_scheduler),
        CheckpointHook(run, train_dataloader, metrics),
    ]
    if run.profile:
        hooks.append(ProfileHook(run.output, train_dataloader, run.log))
    if run.debug_nan:
        hooks.append(DebugNanHook())
    return hooks
