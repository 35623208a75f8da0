"""Steps of shipped configs on one GPU beside what `--plan` predicts from the GPU's data sheet, eager and compiled.

Each is a run of the train script in a new process on random images, with the config's own BATCH_SIZE and no
accumulation; the median of its steps counts, without the wait for data. A compiled step is predicted where its kernels
can be found, which takes the planner's version of PyTorch. Nothing is predicted for a GPU whose data sheet `--plan`
does not know. On a machine without a GPU the predictions are an H100's.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from colossal_vit.config.settings import CALTECH101, DP, IMAGENET, PATHS
from colossal_vit.mfu import peak_flops
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


def machine() -> str | None:
    """The planner's name of the GPU here, None if it has none; an H100's without a GPU."""
    gpus = gpu_names()
    if not gpus:
        return "h100"
    # An entry such as "h100" has the words of GPUs with other peaks too, such as the H100 PCIe.
    words, peak = set(gpus[0].lower().replace("-", " ").split()), peak_flops(gpus[0], torch.float16)
    names = [
        name
        for name in MACHINES
        if words.issuperset(name.split("-")) and peak == peak_flops(name.upper(), torch.float16)
    ]
    return max(names, key=len, default=None)  # "a100-40gb" rather than "a100"


def predict(name: str | None, script: str, config: Path, values: dict[str, Any]) -> float | None:
    """Seconds of a step on a machine; None without one, or if it is compiled and its kernels cannot be found here."""
    if name is None:
        return None
    request = request_of(*request_for(script, config, 1, ["--plan", name], values))
    compiled = request.config.COMPILE
    if compiled and not lowering.can_lower(request.config):
        return None
    predictor = Predictor(request.config, request.machine(), request.trace, request.lower_layout if compiled else None)
    return predictor.predict(own_layout(request.config, 1)).seconds


def compare(script: str, config: Path, values: dict[str, Any], steps: int, number: int) -> Values:
    flags = ["--config", str(config), *set_flags({**values, "SYNTHETIC": True})]
    records = train(PATHS[script], [*flags, "--max-steps", str(UNCOUNTED + steps)])[UNCOUNTED:]
    measured = statistics.median(record["step_s"] - record["data_s"] for record in records)
    name = machine()
    return {
        "images/s": records[0]["images_per_s"] * records[0]["step_s"] / measured,
        "planned for": name,
        "predicted, s": predict(name, script, config, values),
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
