"""What a started run knows of itself."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config


@dataclass
class Run:
    """A started run: what `main` needs to know.

    Attributes:
        config: the resolved config, also `gpc.config`.
        layout: how the processes share the work.
        output: the run directory; exists.
        max_steps: optimizer steps to stop after, or None.
        checkpoint: to resume, or None; only rank 0 reads it.
        started_from: the `--resume PATH` that this run began with, or None.
        data: what identifies the images, once they are read; see `data.identify`.
        accept_changes: whether other data, or values that change what is learned, may resume a checkpoint.
        changes: those that were accepted, and after which step.
        best: accuracy and step of the best evaluation so far, once `state.resume` knows of one.
        eval_only: whether to evaluate that checkpoint and no more.
        stop_on_save_error: whether a checkpoint that cannot be written ends the run.
        device: this rank's device.
        log: see `RankLogger`.
        profile: whether to add `hooks.ProfileHook`.
        debug_nan: whether to add `hooks.DebugNanHook`.
        dry_run: whether there are no data, no tensors and no other ranks, and `main` is to return what
            `dry_run.measure` says of its engine.
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
    stop_on_save_error: bool = False
    profile: bool = False
    debug_nan: bool = False
    dry_run: bool = False
