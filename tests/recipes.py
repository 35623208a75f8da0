"""Small models and the runs that compare them."""

import json
from collections.abc import Sequence
from pathlib import Path

from colossal_vit import config as configs
from colossal_vit.results import read_metrics
from colossalai.context import Config

import fork_ranks
from check_layouts import MODEL, set_flags

HYBRID = "vit_cifar10_hybrid/train_hybrid.py"
DATA_PARALLEL = "vit_cifar10_hybrid/train_dp.py"
TIMES = {"images_per_s", "data_s", "step_s", "memory_gb", "reserved_gb"}  # what is allowed to differ
PIPELINE_CONFIG = "configs/config_pipeline_parallel.py"


def flags(amp: str | None = None, **values) -> list[str]:
    """The command line of a small run: the pipeline config on one stage, in fp32, unless arguments say otherwise."""
    settings = {"parallel.pipeline": 1, **MODEL, **values}
    if amp:
        settings.pop("fp16")
    amp_flags = ["--set", f"fp16.mode=AMP_TYPE.{amp}"] if amp else []
    return ["--config", str(fork_ranks.ROOT / "vit_cifar10_hybrid" / PIPELINE_CONFIG), *set_flags(settings), *amp_flags]


def config(argv: Sequence[str]) -> Config:
    """The config that the train script makes of `flags`."""
    _, path, *rest = argv
    return configs.load(path, rest[1::2], "train_hybrid")


def train(output: Path, world_size: int = 1, steps: int = 20, amp: str | None = None, **values):
    """Train; the arguments are those of `flags`.

    Returns:
        The records of steps, and those of evaluations.
    """
    argv = [*flags(amp, **values), "--output", str(output), "--max-steps", str(steps)]
    result = fork_ranks.run(HYBRID, argv, world_size)
    assert result.codes == [0] * world_size, str(result)
    return read_metrics(output)


def record(output: Path) -> list[dict]:
    """All that `metrics.jsonl` says, but for times and memory."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]
