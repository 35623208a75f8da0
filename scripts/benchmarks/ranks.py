"""Rank 0 of pipeline- and tensor-parallel layouts on one device, without the others: what it computes.

A ViT-B/16 of Colossal-AI's layers in NAIVE bf16 with AdamW, eager, 64 images in a global batch. The process groups are
torch's fake ones: a message takes no time and brings nothing, so that a step takes what this rank computes, and its
loss says nothing. Beside it what the planner predicts of the computing (on average over the stages), and what a dry run
says of this rank's memory. Each layout has a new process. On a machine without a GPU the predictions are an H100's.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from colossal_vit.main import load_script

from benchmarks.harness import Benchmark, Case, Side, Values
from benchmarks.plan import UNCOUNTED, machine, prediction_for, request_for
from benchmarks.training import in_new_process, seconds, start_rank_0
from layouts import CONFIG, FOLDER, LAYOUTS, set_flags
from tools.planner.enumeration import own_layout

SCRIPT = FOLDER / "train_hybrid.py"
MEASURED = ("PP 2", "1D 2", "2D 4", "3D 8")
B16 = dict(IMG_SIZE=224, PATCH_SIZE=16, HIDDEN_SIZE=768, DEPTH=12, NUM_HEADS=12, NUM_CLASSES=1000, BATCH_SIZE=64)
SMALL = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=2, NUM_HEADS=4, BATCH_SIZE=8)
COMMON = {"CHECKPOINT": False, "parallel.pipeline": 1, "NUM_MICRO_BATCHES": 4, "COMPILE": False}
COMMON |= {"fp16.mode": "NAIVE", "fp16.dtype": "bf16"}


def measure(flags: list[str], world_size: int, steps: int) -> tuple[float, float | None]:
    """Return seconds of a step of rank 0, the median, and its peak memory in bytes, None on a CPU."""
    train = load_script(SCRIPT)
    training = train.build(start_rank_0(train, flags, world_size))
    engine, batches = training.engine, iter(training.train_dataloader)
    engine.train()

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(batches)
        engine.step()

    times = [seconds(step) for _ in range(UNCOUNTED + steps)][UNCOUNTED:]
    return statistics.median(times), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def compare(flags: list[str], world_size: int, steps: int, number: int) -> Values:
    # In a new process, since the dry run below may not follow the use of a GPU.
    measured, peak = in_new_process(measure, flags, world_size, steps)
    name, request = machine(), request_for(SCRIPT, flags, world_size)
    prediction = name and prediction_for(name, request)
    return {
        "planned for": name,
        "predicted, s": prediction and prediction.seconds * prediction.computing,
        "measured, s": measured,
        "planned memory, GB": request.memory(own_layout(request.config, world_size)) / 1e9,
        "peak memory, GB": peak and peak / 1e9,
    }


def sides(name: str, args: argparse.Namespace) -> dict[str, Side]:
    world_size, layout = LAYOUTS[name]
    values: dict[str, Any] = {**COMMON, **B16, **(SMALL if args.small else {}), **layout}
    flags = ["--config", str(FOLDER / CONFIG), *set_flags(values)]
    return {"rank 0": partial(compare, flags, world_size, args.steps)}


def cases(args: argparse.Namespace) -> dict[str, Case]:
    return {name: Case(partial(sides, name)) for name in MEASURED}


BENCHMARK = Benchmark(cases, rounds=1, steps=10, compared=0)
