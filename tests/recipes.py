"""Small models and the runs that compare them."""

from pathlib import Path

import world
from colossal_vit.report import read_metrics

HYBRID = "vit_cifar10_hybrid/train_hybrid.py"
DATA_PARALLEL = "vit_cifar10_hybrid/train_dp.py"
PIPELINE_CONFIG = "configs/config_pipeline_parallel.py"

# A ViT of 4 blocks on 32 px images cut into 16 patches; fp32, no dropout, 20 steps of AdamW on a global batch of 32.
SMALL = dict(
    IMG_SIZE=32,
    PATCH_SIZE=8,
    HIDDEN_SIZE=32,
    DEPTH=4,
    NUM_HEADS=4,
    BATCH_SIZE=32,
    NUM_EPOCHS=1,
    WARMUP_EPOCHS=0,
    LEARNING_RATE=3e-3,
    CHECKPOINT=False,
    fp16=None,
    clip_grad_norm=1.0,
)


def flags(values: dict) -> list[str]:
    """`--set` flags for a dict of config values; nested keys have dots."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value!r}")]


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
    result = world.run(HYBRID, [*argv, *flags(settings)], world_size)
    assert result.codes == [0] * world_size, str(result)
    return read_metrics(output)
