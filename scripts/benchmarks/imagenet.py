"""Speed of the ImageNet example on this machine: training with random data, training with DALI, and DALI alone.

Each training measurement is a run of `train.py` in a new process, with LAMB, Mixup and clipping as in `config.py`; its
result is the median step after the first two. If training never waits for data, training with DALI is as fast as the
slower one of training with random data and of DALI alone: the table's first lines have that ratio, the loop, median of
the rounds. DALI reads `DATA`, or generated JPEGs of 500 x 375 pixels. MFU is given if the device's peak is known. On a
GPU, a batch has 256 images, or as many as its memory takes.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from colossal_vit.main import load_script
from colossalai.context import Config

from benchmarks import jpegs
from benchmarks.harness import ROOT, Benchmark, Case, Rounds, Side, Values, positive
from benchmarks.training import add_set, device, mfu, summary_of, train
from imagenet_dali_dataloader import DaliLoader
from tfrecord import find_records

CONFIG = ROOT / "vit_imagenet_dali/config.py"
SKIPPED = 2  # steps of a run that are not counted
PRECISION = {"fp32": "fp16=None", "bf16": "fp16.dtype='bf16'", "fp16": "fp16.dtype='fp16'"}
TRAINED, RANDOM, ALONE = "training with DALI", "training with random data", "DALI alone"


def load_config(overrides: list[str]) -> Config:
    """Return the config as the train script resolves it."""
    return load_script(CONFIG.with_name("train.py")).load(CONFIG, overrides)


def train_steps(overrides: list[str], data: Path, args: argparse.Namespace, number: int) -> Values:
    flags = ["--config", str(CONFIG), "--max-steps", str(SKIPPED + args.steps)]
    flags += [f"--set={override}" for override in overrides]
    steps = train("vit_imagenet_dali/train.py", flags, DATA=str(data))
    found = summary_of(steps[SKIPPED:])
    return {**found, "MFU, %": mfu(load_config(overrides), found["images/s"])}


def drain(data: Path, batch_size: int, num_batches: int, overrides: list[str]) -> float:
    """Images/s of DALI's training batches without training."""
    values = [*overrides, f"BATCH_SIZE={batch_size}", "gradient_accumulation=1", "NUM_CLASSES=1000"]
    config = load_config(values)
    loader = DaliLoader(find_records(data, "train"), True, config, device(), len(os.sched_getaffinity(0)))

    def endless():
        while True:
            yield from loader

    batches = endless()
    for _ in range(SKIPPED + 3):  # 3 are prefetched
        next(batches)
    started = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    if device().type == "cuda":
        torch.cuda.synchronize()
    return batch_size * num_batches / (time.perf_counter() - started)


def drain_in_a_process(data: Path, args: argparse.Namespace, number: int) -> dict[str, float]:
    """Call `drain` in a new process, which returns its memory of the GPU when it ends."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return {"images/s": pool.apply(drain, (data, args.batch_size, 1 if args.small else 20, args.set))}


def batch_size_for(memory: float) -> int:
    """Return the largest power of two, up to 256, of images that a GPU with so many bytes trains any of the three
    models on.

    By their dry runs, see results/memory_plan, an image takes up to 0.09 GB, and a model up to 7 GB. DALI and CUDA's
    context get 2 GB.
    """
    return 2 ** min(8, int(math.log2(max((memory / 1e9 - 9) / 0.09, 1))))


def sides(model: str, precision: str, args: argparse.Namespace) -> dict[str, Side]:
    num_images = args.batch_size * args.accumulation * (SKIPPED + args.steps + 1)
    data = Path(os.environ.get("DATA") or jpegs.tfrecords(max(num_images, 64)))
    overrides = [f"MODEL={model!r}", PRECISION[precision], "NUM_EPOCHS=1", "WARMUP_EPOCHS=0", *args.set]
    overrides += [f"BATCH_SIZE={args.batch_size}", f"gradient_accumulation={args.accumulation}"]
    return {
        TRAINED: partial(train_steps, overrides, data, args),
        RANDOM: partial(train_steps, [*overrides, "SYNTHETIC=True"], data, args),
        ALONE: partial(drain_in_a_process, data, args),
    }


def loops(found: Mapping[str, Rounds], args: argparse.Namespace) -> list[str]:
    """Return what training with DALI reaches of the lower one of the others, in the same round."""
    lines = []
    for case, rounds in found.items():
        speeds = [[of_side[number]["images/s"] for of_side in rounds.values()] for number in range(len(rounds[ALONE]))]
        loop = statistics.median(trained / min(others) for trained, *others in speeds)
        lines += [f"{case}: loop {loop:.3f}", ""]
    return lines


def flags(parser: argparse.ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    models = ["vit_base_patch32_224", *(["vit_base_patch16_224", "vit_large_patch32_224"] if gpu else [])]
    parser.add_argument("--models", nargs="+", default=models, help="default %(default)s")
    parser.add_argument("--precision", nargs="+", choices=PRECISION, default=["fp16", "bf16"] if gpu else ["fp32"])
    batch_size = batch_size_for(torch.cuda.get_device_properties(0).total_memory) if gpu else 16
    parser.add_argument("--batch-size", type=positive, default=batch_size, help="here %(default)s by default")
    parser.add_argument("--accumulation", type=positive, default=1, help="default %(default)s")
    add_set(parser)


def cases(args: argparse.Namespace) -> dict[str, Case]:
    if args.small:
        args.models, args.precision, args.batch_size = ["vit_tiny_patch16_224"], ["fp32"], 2
    pairs = [(model, precision) for model in args.models for precision in args.precision]
    return {f"{model}, {precision}": Case(partial(sides, model, precision)) for model, precision in pairs}


BENCHMARK = Benchmark(cases, rounds=3, steps=8, flags=flags, summary=loops)
