"""Steps of shipped configs on one GPU, eager and compiled, beside the planner's prediction of eager ones.

Each is a run of the train script in a new process on random images, with the config's own BATCH_SIZE and no
accumulation; the median of its steps counts, without the wait for data. Nothing is predicted of compiled steps, and
for a GPU whose data sheet the planner does not know. On a machine without a GPU the predictions are an H100's.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from colossal_vit.main import load_script
from colossal_vit.provenance import gpu_names

from benchmarks.harness import ROOT, Benchmark, Case, Side, Values
from benchmarks.training import train
from layouts import set_flags
from tools.planner.enumeration import own_layout
from tools.planner.machines import find_machine, name_of
from tools.planner.request import Request, request_of
from tools.planner.search import Prediction, Predictor

IMAGENET, DP, CALTECH101 = "vit_imagenet_dali/train.py", "vit_cifar10_hybrid/train_dp.py", "vit_caltech101_amp/train.py"
CONFIGS = {
    "ImageNet, B/16": (IMAGENET, "vit_imagenet_dali/config.py"),
    "ImageNet, DeiT III B/16": (IMAGENET, "vit_imagenet_dali/configs/config_deit3_b16.py"),
    "CIFAR-10, B/16": (DP, "vit_cifar10_hybrid/configs/config_data_parallel.py"),
    "Caltech101, NAIVE bf16": (CALTECH101, "vit_caltech101_amp/config/config_AMP_naive_bf16.py"),
}
SMALL = {"MODEL": "vit_tiny_patch16_224", "IMG_SIZE": 32, "DEPTH": 2, "BATCH_SIZE": 4}
UNCOUNTED = 4  # first steps
NO_RUN = ("--output", "/nonexistent", "--dry-run")


def machine() -> str | None:
    """Return the planner's name of the GPU here, None if it has none; an H100's without a GPU."""
    gpus = gpu_names()
    return name_of(gpus[0]) if gpus else "h100"


def request_for(script: Path, flags: list[str], world_size: int) -> Request:
    """Return what a script and its flags ask the planner for."""
    train = load_script(script)
    return request_of(train, train.parse([*flags, "--world_size", str(world_size), *NO_RUN]))


def prediction_for(name: str, request: Request) -> Prediction:
    """Return what is predicted on a machine of the layout that a config asks for."""
    known = find_machine(name, {}, bool(request.config.fp16), request.config.TF32)
    return Predictor(request.config, known, request.trace).predict(own_layout(request.config, request.world_size))


def predict(name: str | None, script: str, config: Path, values: dict[str, Any]) -> float | None:
    """Return seconds of an eager step on a machine; None without one."""
    if name is None:
        return None
    return prediction_for(name, request_for(ROOT / script, ["--config", str(config), *set_flags(values)], 1)).seconds


def compare(script: str, config: Path, values: dict[str, Any], steps: int, number: int) -> Values:
    flags = ["--config", str(config), *set_flags({**values, "SYNTHETIC": True})]
    records = train(script, [*flags, "--max-steps", str(UNCOUNTED + steps)])[UNCOUNTED:]
    measured = statistics.median(record["step_s"] - record["data_s"] for record in records)
    name = machine()
    return {
        "images/s": records[0]["images_per_s"] * records[0]["step_s"] / measured,
        "planned for": name,
        "predicted, s": None if values["COMPILE"] else predict(name, script, config, values),
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
