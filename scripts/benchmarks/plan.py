"""Steps of shipped configs on one GPU beside what `--plan` predicts from the GPU's data sheet, eager and compiled.

Each is a run of the train script in a new process on random images, with the config's own BATCH_SIZE and no
accumulation; the median of its steps counts, without the wait for data. A compiled step is predicted where its kernels
can be found, which takes the planner's version of PyTorch. On a machine without a GPU the predictions are an H100's.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from colossal_vit.config.settings import CALTECH101, DP, IMAGENET, PATHS
from colossal_vit.plan import lowering
from colossal_vit.plan.__main__ import request_for
from colossal_vit.plan.enumeration import own_layout
from colossal_vit.plan.machines import MACHINES
from colossal_vit.plan.request import request_of
from colossal_vit.plan.search import Predictor
from colossal_vit.provenance import gpu_names

from benchmarks.harness import ROOT, Benchmark, Case, Side, Values
from benchmarks.training import train
from layouts import set_flags

CONFIGS = {
    "ImageNet, B/16": (IMAGENET, "vit_imagenet_dali/config.py"),
    "ImageNet, DeiT III B/16": (IMAGENET, "vit_imagenet_dali/configs/config_deit3_b16.py"),
    "CIFAR-10, B/16": (DP, "vit_cifar10_hybrid/configs/config_data_parallel.py"),
    "Caltech101, NAIVE bf16": (CALTECH101, "vit_caltech101_amp/config/config_AMP_naive_bf16.py"),
}
SMALL = {"MODEL": "vit_tiny_patch16_224", "IMG_SIZE": 32, "DEPTH": 2, "BATCH_SIZE": 4}
UNCOUNTED = 4  # first steps


def machine() -> str:
    """The planner's name of the GPU here; an H100's without one."""
    words = " ".join(gpu_names()[:1]).lower().replace("-", " ").split()
    return next((name for name in MACHINES if set(name.split("-")) <= set(words)), "h100")


def predict(script: str, config: Path, values: dict[str, Any]) -> float | None:
    """Seconds of a step; None if it is compiled and its kernels cannot be found here."""
    request = request_of(*request_for(script, config, 1, ["--plan", machine()], values))
    compiled = request.config.COMPILE
    if compiled and not lowering.can_lower(request.config):
        return None
    predictor = Predictor(request.config, request.machine(), request.trace, request.lower_layout if compiled else None)
    return predictor.predict(own_layout(request.config, 1)).seconds


def compare(script: str, config: Path, values: dict[str, Any], steps: int, number: int) -> Values:
    flags = ["--config", str(config), *set_flags({**values, "SYNTHETIC": True})]
    records = train(PATHS[script], [*flags, "--max-steps", str(UNCOUNTED + steps)])[UNCOUNTED:]
    measured = statistics.median(record["step_s"] - record["data_s"] for record in records)
    return {
        "images/s": records[0]["images_per_s"] * records[0]["step_s"] / measured,
        "predicted, s": predict(script, config, values),
        "measured, s": measured,
        "peak memory, GB": max(record["memory_gb"] for record in records),
    }


def sides(script: str, config: str, args: argparse.Namespace) -> dict[str, Side]:
    values = {"gradient_accumulation": 1, **(SMALL if args.small else {})}
    return {
        name: partial(compare, script, ROOT / config, {**values, "COMPILE": compiled}, args.steps)
        for name, compiled in (("eager", False), *([] if args.small else [("compiled", True)]))
    }


def cases(args: argparse.Namespace) -> dict[str, Case]:
    return {name: Case(partial(sides, *where)) for name, where in CONFIGS.items()}


BENCHMARK = Benchmark(cases, rounds=1, steps=12)
