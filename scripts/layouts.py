"""The layouts that are tried, and the small model that is trained in them: for `scripts/`, `tools/` and the tests."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"
CONFIG = "configs/config_pipeline_parallel.py"  # in FOLDER; it has every key of MODEL and LAYOUTS
# Limits of the relative difference between a layout and one process, in fp32: in the first step, and in steps 1 to 20.
FIRST_STEP, ANY_STEP = 1e-5, 1e-4

# A ViT of 4 blocks on 32 px images cut into 16 patches, on a global batch of 32.
MODEL: dict[str, Any] = dict(
    IMG_SIZE=32,
    PATCH_SIZE=8,
    HIDDEN_SIZE=32,
    DEPTH=4,
    NUM_HEADS=4,
    NUM_CLASSES=10,
    BATCH_SIZE=32,
    NUM_EPOCHS=1,
    WARMUP_EPOCHS=0,
    LEARNING_RATE=3e-3,
    CHECKPOINT=False,
    NUM_MICRO_BATCHES=2,
    fp16=None,
    clip_grad_norm=0.5,
    COMPILE=False,
)
# All that training may draw at random, besides the crops and mirror images that CONFIG has.
RANDOM: dict[str, Any] = {"DROP_RATE": 0.1, "DROP_PATH_RATE": 0.1}
STEPS_PER_EPOCH = 44  # on the digits, with MODEL's batch

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"OPTIMIZER": "sgd", "LEARNING_RATE": 0.1, "WEIGHT_DECAY": 1e-4},
    "lamb": {"OPTIMIZER": "lamb", "LEARNING_RATE": 1.8e-2, "WEIGHT_DECAY": 0.1},
    "muon": {"OPTIMIZER": "muon"},
}


def tensor(mode: str, size: int, **more: int) -> dict[str, Any]:
    """Overrides for a tensor-parallel mode."""
    return {f"parallel.tensor.{key}": value for key, value in dict(mode=mode, size=size, **more).items()}


PIPELINE = {"parallel.pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name: processes, overrides
    "DP 2": (2, {"BATCH_SIZE": 16}),
    "DP 4": (4, {"BATCH_SIZE": 8}),
    "DP 4, zero 3": (4, {"BATCH_SIZE": 8, "zero.stage": 3}),
    "PP 2": (2, PIPELINE),
    "PP 2, 4 micro-batches": (2, {**PIPELINE, "NUM_MICRO_BATCHES": 4}),
    "PP 2 interleaved × 2": (2, {**PIPELINE, "model.num_chunks": 2}),
    "PP 2 interleaved × 2, 4 micro-batches": (2, {**PIPELINE, "model.num_chunks": 2, "NUM_MICRO_BATCHES": 4}),
    "PP 4": (4, {"parallel.pipeline": 4, "NUM_MICRO_BATCHES": 4}),
    "1D 2": (2, tensor("1d", 2)),
    "1D 4": (4, tensor("1d", 4)),
    "2D 4": (4, tensor("2d", 4)),
    "2.5D 4": (4, tensor("2.5d", 4, depth=1)),
    "2.5D 8": (8, tensor("2.5d", 8, depth=2)),
    "3D 8": (8, tensor("3d", 8)),
    "PP 2 × 1D 2": (4, {**PIPELINE, **tensor("1d", 2)}),
    "PP 2 × 2D 4": (8, {**PIPELINE, **tensor("2d", 4)}),
    "PP 2 × 2.5D 4": (8, {**PIPELINE, **tensor("2.5d", 4, depth=1)}),
    "DP 2 × PP 2": (4, {**PIPELINE, "BATCH_SIZE": 16}),
    "DP 2 × PP 2 × 1D 2": (8, {**PIPELINE, **tensor("1d", 2), "BATCH_SIZE": 16}),
    "DP 2 × 2D 4": (8, {**tensor("2d", 4), "BATCH_SIZE": 16}),
}


def set_flags(values: dict[str, Any]) -> list[str]:
    """`--set` flags for config values; nested keys have dots."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value!r}")]


def _relative(here: float, there: float) -> float:
    """Return the relative difference; infinite if only one is finite, as `max` would pass over NaN."""
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    found = abs(here - there) / abs(there)
    return math.inf if math.isnan(found) else found


def errors(steps: list[dict], expected: list[dict], keys: Iterable[str] = ("loss", "grad_norm")) -> list[float]:
    """Return the largest relative difference of the values `keys` between two runs, step by step."""
    return [max(_relative(here[key], there[key]) for key in keys) for here, there in zip(steps, expected, strict=True)]
