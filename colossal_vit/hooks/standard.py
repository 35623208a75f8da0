"""The hooks that every train script gives its trainer."""

from typing import Any

from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.hooks.checkpoint import CheckpointHook
from colossal_vit.hooks.debug_nan import DebugNanHook
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.priority import Priority
from colossal_vit.hooks.profile import ProfileHook
from colossal_vit.hooks.progress import ProgressHook
from colossal_vit.hooks.wandb_run import WandbRun
from colossal_vit.run import Run
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor


class LRSchedulerHook(BaseHook):
    """Steps a learning-rate scheduler once per optimizer step.

    Upstream's hook steps it per batch, several times per optimizer step under gradient accumulation. Runs after
    `MetricsHook`, which records the learning rate of the step.
    """

    def __init__(self, lr_scheduler: Any, priority: int = Priority.SCHEDULER):
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if trainer.engine.finished_step:
            self.lr_scheduler.step()


def standard_hooks(run: Run, train_dataloader: MicroBatches, lr_scheduler: Any) -> list[BaseHook]:
    """The hooks of every train script: `MetricsHook`, and for training the others, as the command line asks.

    Args:
        run: from `launch.start`.
        train_dataloader, lr_scheduler: as `engine.initialize` returned them.
    """
    if run.eval_only:
        return [MetricsHook(None, train_dataloader, run.log)]
    wandb = WandbRun(run.output, run.config, run.log) if run.wandb else None
    metrics = MetricsHook(run.output, train_dataloader, run.log, wandb)
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
