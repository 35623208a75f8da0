"""Names of `training` from before it was, until every test uses that."""

from pathlib import Path

from colossal_vit.results import read_metrics  # noqa: F401

import fork_ranks  # noqa: F401
import training
from layouts import CONFIG as PIPELINE_CONFIG  # noqa: F401
from layouts import MODEL, set_flags  # noqa: F401
from training import DATA_PARALLEL, HYBRID, TIMES, flags  # noqa: F401
from training import config_of as config  # noqa: F401
from training import records as record  # noqa: F401


def train(output: Path, world_size: int = 1, steps: int = 20, amp: str | None = None, **values):
    """The records of steps, and the records of evaluations."""
    run = training.train(output, world_size, steps=steps, amp=amp, **values)
    return run.steps, run.evaluations
