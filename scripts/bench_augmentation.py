"""Cost of each part of the augmentation: images/s of the DALI loader with it and without, on this machine's CPU.

    python scripts/bench_augmentation.py [--runs N] [--batches N] [--output DIR]

Takes about 10 minutes on 2 CPU cores. JPEGs of 500 x 375 pixels and about 100 KB are decoded, cropped at random to
224 x 224, normalised and batched: that is "without". Each part is compared with it in every run, one after the other
and in turns, so that other load on the machine affects both alike. The ratio of a run is images/s with the part divided
by images/s without.

Writes augmentation.md (the table), augmentation.json (every run), log.txt and provenance.json.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from colossal_vit.benchmark import Benchmark, in_turns, spread
from colossal_vit.data.batches import Loader
from colossal_vit.data.mixing import MixedBatches
from colossalai.context import Config

from bench_loader import (
    BATCH_SIZE,
    HEIGHT,
    IMG_SIZE,
    NUM_CLASSES,
    ROOT,
    WIDTH,
    WORKERS,
    rate,
    tfrecords,
    write_images,
)

sys.path.append(str(ROOT / "vit_imagenet_dali"))

from imagenet_dali_dataloader import DaliLoader, Records, find_records

MIX = dict(mixup=0.8, cutmix=1.0)
PARTS = {  # arguments of the loader
    "mirror": dict(flip=True),
    "colour jitter, 0.3": dict(augment=dict(color_jitter=0.3)),
    "3-Augment": dict(augment=dict(policy="three")),
    "RandAugment, n = 2, m = 9": dict(augment=dict(policy="rand", n=2, m=9)),
    "random erasing, a quarter": dict(augment=dict(erase=0.25)),
    "REPEATS = 3": dict(repeats=3),
    "Mixup and CutMix": dict(mix=MIX),
}


def build(records: Records, mix: dict[str, float] | None = None, flip: bool = False, **options) -> Loader:
    """A training loader with these parts; `mix` is the block of the config, the others are `DaliLoader`'s."""
    place = dict(rank=0, num_ranks=1)
    cpu = torch.device("cpu")
    options |= dict(flip=flip, num_threads=WORKERS, with_images=True)
    loader = DaliLoader(records, True, BATCH_SIZE, IMG_SIZE, NUM_CLASSES, cpu, **place, **options)
    sizes = dict(SEED=0, BATCH_SIZE=BATCH_SIZE, gradient_accumulation=1, IMG_SIZE=IMG_SIZE, NUM_CLASSES=NUM_CLASSES)
    return MixedBatches(loader, Config(dict(mix=mix, **sizes)), **place) if mix else loader


def endless(loader: Loader) -> Iterator:
    while True:
        yield from loader


def main() -> None:
    # ---- Command line ----------------------------------------------------------------------------------------------
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="paired runs (default %(default)s)")
    parser.add_argument("--batches", type=int, default=20, help="batches a side and run (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "results/augmentation_cost", help="where the result goes")
    args = parser.parse_args()
    benchmark = Benchmark(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    rates: dict[str, dict[str, list[float]]] = {part: {"without": [], "with": []} for part in PARTS}
    with tempfile.TemporaryDirectory() as scratch:
        images, packed = Path(scratch) / "images", Path(scratch) / "tfrecords"
        kilobytes = write_images(images)
        benchmark.print(f"images of {WIDTH} x {HEIGHT} pixels, {kilobytes:.0f} KB on average")
        with redirect_stdout(None):
            tfrecords.build(tfrecords.parse([str(images), str(packed)]))
        records = find_records(packed, "train")
        without = endless(build(records))
        sides = {part: {"without": without, "with": endless(build(records, **how))} for part, how in PARTS.items()}
        for number in range(args.runs):
            for part, pair in sides.items():
                for side in in_turns(pair, number):
                    rates[part][side].append(rate(pair[side], args.batches))
                here = ", ".join(f"{side} {of_side[-1]:.1f}" for side, of_side in rates[part].items())
                benchmark.print(f"run {number + 1} of {args.runs}, {part}: {here} images/s")

    # ---- Table -----------------------------------------------------------------------------------------------------
    ratios = {part: [a / b for a, b in zip(of["with"], of["without"], strict=True)] for part, of in rates.items()}
    table = [
        "| DALI on the CPU | without, images/s | with, images/s | ratio: median | min | max |",
        "| --- |" + " ---: |" * 5,
    ]
    for part, of in rates.items():
        cells = [f"{statistics.median(of[side]):.0f}" for side in of] + spread(ratios[part], ".2f")
        table.append(f"| {part} | {' | '.join(cells)} |")

    # ---- Result ----------------------------------------------------------------------------------------------------
    settings = {"image": [WIDTH, HEIGHT], "kilobytes": round(kilobytes, 1), "batch": BATCH_SIZE, "threads": WORKERS}
    settings |= {"IMG_SIZE": IMG_SIZE, "batches": args.batches, "parts": PARTS}
    benchmark.finish("augmentation", table, {"settings": settings, "images_per_s": rates, "ratios": ratios})


if __name__ == "__main__":
    main()
