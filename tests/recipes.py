"""Small training runs for tests, and their records for comparison."""

import json
from collections.abc import Sequence
from pathlib import Path

from colossal_vit import config as configs
from colossal_vit.results import read_metrics
from colossalai.context import Config

import fork_ranks
from layouts import MODEL, set_flags

HYBRID = "vit_cifar10_hybrid/train_hybrid.py"
DATA_PARALLEL = "vit_cifar10_hybrid/train_dp.py"
TIMES = {"images_per_s", "data_s", "step_s", "memory_gb", "reserved_gb"}  # metrics that may differ between equal runs
PIPELINE_CONFIG = "configs/config_pipeline_parallel.py"


def flags(amp: str | None = None, **values) -> list[str]:
    """The command line of a small run: by default, the pipeline config on one stage, in fp32."""
    settings = {"parallel.pipeline": 1, **MODEL, **values}
    if amp:
        settings.pop("fp16")
    amp_flags = ["--set", f"fp16.mode=AMP_TYPE.{amp}"] if amp else []
    return ["--config", str(fork_ranks.ROOT / "vit_cifar10_hybrid" / PIPELINE_CONFIG), *set_flags(settings), *amp_flags]


def config(argv: Sequence[str]) -> Config:
    """The resolved config of a command line from `flags`."""
    _, path, *rest = argv
    return configs.load(path, rest[1::2], "train_hybrid")


def train(output: Path, world_size: int = 1, steps: int = 20, amp: str | None = None, **values):
    """Train; the arguments are those of `flags`.

    Returns:
        The records of steps, and the records of evaluations.
    """
    argv = [*flags(amp, **values), "--output", str(output), "--max-steps", str(steps)]
    result = fork_ranks.run(HYBRID, argv, world_size)
    assert result.codes == [0] * world_size, str(result)
    return read_metrics(output)


def record(output: Path) -> list[dict]:
    """All records of `metrics.jsonl`, without times and memory."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]
