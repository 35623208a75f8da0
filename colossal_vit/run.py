"""`Run`: the settings and state of a run that its parts share."""

import argparse
from dataclasses import dataclass
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
        args: the command line, see `launch.Arguments`.
        config: the resolved config, also `gpc.config`.
        layout: data, pipeline and tensor parallel sizes.
        output: the run directory, absolute and without links; exists, unless `alone`.
        device: this rank's device.
        log: see `RankLogger`.
        alone: whether there are neither data nor other ranks, see `launch.startup.start_alone`.
        data: identity of the data set, once it is read; see `data.identity.identify`.
        checkpointer: prepares, loads and saves, see `checkpoint.checkpointer.Checkpointer`; None if `alone`.
    """

    args: argparse.Namespace
    config: Config
    layout: Layout
    output: Path
    device: torch.device
    log: RankLogger
    alone: bool = False
    data: dict[str, Any] | None = None
    checkpointer: Any = None
