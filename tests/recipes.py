"""Small models and the runs that compare them."""

from pathlib import Path

from colossal_vit.report import read_metrics

import world
from check_layouts import MODEL, set_flags

HYBRID = "vit_cifar10_hybrid/train_hybrid.py"
DATA_PARALLEL = "vit_cifar10_hybrid/train_dp.py"
PIPELINE_CONFIG = "configs/config_pipeline_parallel.py"

# fp32, no dropout; the bound is one that the random weights of the tests exceed in every step.
SMALL = {**MODEL, "clip_grad_norm": 1.0}


def train(output: Path, world_size: int = 1, steps: int = 20, amp: str | None = None, **values):
    """Train with the pipeline config, on one stage unless `values` say otherwise, in fp32 unless `amp` names a mode.

    Returns:
        The records of steps, and those of evaluations.
    """
    settings = {"parallel.pipeline": 1, **SMALL, **values}
    if amp:
        settings.pop("fp16")
    argv = ["--config", PIPELINE_CONFIG, "--output", str(output), "--max-steps", str(steps)]
    argv += ["--set", f"fp16.mode=AMP_TYPE.{amp}"] if amp else []
    result = world.run(HYBRID, [*argv, *set_flags(settings)], world_size)
    assert result.codes == [0] * world_size, str(result)
    return read_metrics(output)
