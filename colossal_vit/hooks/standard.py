"""The hooks that every train script gives its trainer."""

from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.hooks.checkpoint import CheckpointHook
from colossal_vit.hooks.confusion import ConfusionHook
from colossal_vit.hooks.debug_nan import DebugNanHook
from colossal_vit.hooks.members import MembersHook
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.profile import ProfileHook
from colossal_vit.hooks.progress import ProgressHook
from colossal_vit.hooks.wandb_run import WandbRun
from colossal_vit.run import Run
from colossalai.legacy.trainer.hooks import BaseHook


def standard_hooks(run: Run, train_dataloader: TrainLoader) -> list[BaseHook]:
    """Return the hooks of every train script: those that say what it does, and others, as the command line asks.

    Args:
        run: from `main.start`.
        train_dataloader: as `engine.initialize` returned it.
    """
    debug = [DebugNanHook()] if run.args.debug_nan else []
    if run.args.eval_only:
        metrics = MetricsHook(None, train_dataloader, run.log)
        return [metrics, ProgressHook(run, train_dataloader), ConfusionHook(run), *debug]
    wandb = None
    if run.args.wandb:
        wandb = WandbRun(run.output, run.config, run.log)
        run.exits.add(wandb.finish, last=True)
    metrics = MetricsHook(run.output, train_dataloader, run.log, wandb)
    hooks = [
        metrics,
        ProgressHook(run, train_dataloader),
        CheckpointHook(run, train_dataloader, metrics),
    ]
    if run.config.ELASTIC:
        hooks.append(MembersHook(run))
    if run.args.profile:
        hooks.append(ProfileHook(run.output, train_dataloader, run.log))
    return hooks + debug
