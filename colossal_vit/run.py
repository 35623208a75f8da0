"""`Run`: the settings and state of a run that its parts share."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config

Observe = Callable[[Any, Iterable], Any]  # takes an `engine.Engine` and batches


class Observer(NamedTuple):
    """Looks at a train script's engine, where `--dry-run` and `--plan` train nothing.

    Attributes:
        observe: called with the engine and the training batches.
        rank: that this process plays; there are no others, so process groups are fake.
        store: of these groups.
        prepare: called with the device, once they exist.
    """

    observe: Observe
    rank: int
    store: dist.Store
    prepare: Callable[[torch.device], None]


@dataclass
class Run:
    """A started run, as `launch.start` returns it to `main`.

    Attributes:
        args: the command line, see `launch.Arguments`.
        config: the resolved config, also `gpc.config`.
        layout: data, pipeline and tensor parallel sizes.
        output: the run directory, absolute and without links; exists, unless the run trains nothing.
        device: this rank's device.
        log: see `RankLogger`.
        observe: what looks at engine and batches in place of training, which then have neither data nor other ranks;
            `main` returns its answer.
        data: identity of the data set, once it is read; see `data.identity.identify`.
        checkpointer: prepares, loads and saves, see `checkpoint.checkpointer.Checkpointer`; None if `observe` is set.
    """

    args: argparse.Namespace
    config: Config
    layout: Layout
    output: Path
    device: torch.device
    log: RankLogger
    observe: Observe | None = None
    data: dict[str, Any] | None = None
    checkpointer: Any = None
