"""`Run`: the settings and state of a run that its parts share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config


@dataclass
class Run:
    """A started run, as `launch.start` returns it to `main`.

    Attributes:
        config: the resolved config, also `gpc.config`.
        layout: data, pipeline and tensor parallel sizes.
        output: the run directory, absolute and without links; exists, unless `eval_only` or `dry_run`.
        max_steps: optimizer steps to stop after, or None.
        checkpoint: to resume, or None; only rank 0 reads it.
        started_from: the `--resume PATH` that this run began with, or None.
        data: identity of the data set, once it is read; see `data.identity.identify`.
        accept_changes: whether to resume a checkpoint although the data, or config values that affect learning,
            have changed.
        changes: the changes accepted so far, each with the step it was made after.
        best: accuracy and step of the best evaluation so far, or None; `restore.resume` loads it.
        eval_only: whether to evaluate `checkpoint`, or the weights of the block `finetune`, and not train.
        eval_knn: whether that is done by nearest neighbours, see `engine.knn`.
        stop_on_save_error: whether a checkpoint that cannot be written ends the run.
        device: this rank's device.
        log: see `RankLogger`.
        wandb: whether to give the records to `hooks.wandb_run.WandbRun` too.
        profile: whether to add `hooks.profile.ProfileHook`.
        debug_nan: whether to add `hooks.debug_nan.DebugNanHook`.
        dry_run: whether tensors are fake and there is no data and no other rank; `main` then returns
            `plan.meter.measure(...)` of its engine.
    """

    config: Config
    layout: Layout
    output: Path
    max_steps: int | None
    device: torch.device
    log: RankLogger
    checkpoint: Path | None = None
    started_from: str | None = None
    data: dict[str, Any] | None = None
    accept_changes: bool = False
    changes: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    eval_only: bool = False
    eval_knn: bool = False
    stop_on_save_error: bool = False
    wandb: bool = False
    profile: bool = False
    debug_nan: bool = False
    dry_run: bool = False
