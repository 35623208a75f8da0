"""`Run`: the settings and state of a run that its parts share."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from colossal_vit.config.schema import SCHEMA
from colossal_vit.config.settings import Settings
from colossal_vit.launch.exits import Exits
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config


@dataclass
class Run:
    """A started run, as `main.start` returns it to a script's `main`.

    Attributes:
        args: the command line, see `launch.flags.Arguments`.
        config: the resolved config, also `gpc.config`.
        layout: data, pipeline and tensor parallel sizes.
        output: the run directory, absolute and without links; exists, unless `alone`.
        device: this rank's device.
        log: see `RankLogger`.
        exits: what is left to do when this process ends, see `launch.exits.Exits`.
        schema: all keys that the config may have.
        alone: whether there are neither data nor other ranks, see `main.start_alone`.
        data: identity of the data set, once it is read; see `data.identity.identify`.
        source: where it was read, by which loader and in which folder; see `data.loaders.load_data`.
        checkpointer: prepares, loads and saves, see `checkpoint.checkpointer.Checkpointer`; None if `alone`.
    """

    args: argparse.Namespace
    config: Config
    layout: Layout
    output: Path
    device: torch.device
    log: RankLogger
    exits: Exits = field(default_factory=Exits)
    schema: Settings = field(default_factory=lambda: SCHEMA)
    alone: bool = False
    data: dict[str, Any] | None = None
    source: dict[str, str] = field(default_factory=dict)
    checkpointer: Any = None
