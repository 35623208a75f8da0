"""Speed of the DALI loader on the CPU, compared with torchvision's ImageFolder on the same JPEGs.

    python scripts/bench_loader.py [--runs N] [--batches N] [--output DIR]

Takes about 5 minutes on 2 CPU cores. Both sides decode the same images of 500 x 375 pixels and about 100 KB, crop them
at random to 224 x 224, mirror, normalise and batch them; the DALI side has as many threads as the DataLoader has
worker processes. Their batches must have the same mean and standard deviation before they are timed. Then they
alternate, so that other load on the machine affects both alike. The ratio of a run is our images/s divided by
torchvision's.

Writes loader.md (the table), loader.json (every run), log.txt and provenance.json. Exit code 0 whatever the ratios are,
1 when the two sides do not agree.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from colossal_vit import config as configs
from colossal_vit.provenance import ResultFolder
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from turns import in_turns, spread

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "vit_imagenet_dali"))

import build_tfrecords as tfrecords  # noqa: E402
from imagenet_dali_dataloader import MEAN, STD, DaliLoader, find_records  # noqa: E402

NUM_CLASSES, IMAGES_PER_CLASS = 8, 32
WIDTH, HEIGHT = 500, 375  # ImageNet's most frequent size
NOISE, QUALITY = 18, 90  # chosen to give about 100 KB per image
IMG_SIZE, BATCH_SIZE, WORKERS = 224, 64, 2
SETTLED = 2.0  # seconds before a turn, in which the other side finishes prefetching
DRAINED = 5  # batches taken before the timing starts: more than are prefetched
CHECKED, TOLERANCE = 20, 0.05  # batches to compare; tolerance of mean and standard deviation, relative to the latter

Batches = Iterator[tuple[Tensor, Tensor]]


def write_images(folder: Path) -> float:
    """Write smooth random images with some noise, like photographs; returns the mean file size in KB."""
    generator, sizes = np.random.default_rng(0), []
    for split in ("train", "val"):
        for label in range(NUM_CLASSES):
            part = folder / split / f"n{label:08d}"
            part.mkdir(parents=True)
            for number in range(IMAGES_PER_CLASS if split == "train" else 1):
                coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
                smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
                noisy = smooth + generator.normal(0, NOISE, (HEIGHT, WIDTH, 1))
                path = part / f"{number}.JPEG"
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
                sizes.append(path.stat().st_size / 1e3)
    return statistics.fmean(sizes)


def ours(folder: Path) -> Batches:
    output = folder.with_name("tfrecords")
    with redirect_stdout(None):
        tfrecords.build(tfrecords.parse([str(folder), str(output)]))
    values = [f"BATCH_SIZE={BATCH_SIZE}", f"IMG_SIZE={IMG_SIZE}", f"NUM_CLASSES={NUM_CLASSES}"]
    config = configs.load(ROOT / "vit_imagenet_dali" / "config.py", values, "imagenet")
    options = dict(num_threads=WORKERS, rank=0, num_ranks=1, with_images=True)
    loader = DaliLoader(find_records(output, "train"), True, config, torch.device("cpu"), **options)
    while True:
        yield from loader


def torchvisions(folder: Path) -> Batches:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(IMG_SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    dataset = ImageFolder(str(folder / "train"), transform)
    endless = RandomSampler(dataset, replacement=True, num_samples=10**9)
    return iter(DataLoader(dataset, BATCH_SIZE, sampler=endless, num_workers=WORKERS))


def rate(batches: Batches, count: int) -> float:
    """Images/s of so many batches, after some that were made ahead."""
    time.sleep(SETTLED)
    for _ in range(DRAINED):
        next(batches)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)
    return BATCH_SIZE * count / (time.perf_counter() - started)


def statistics_of(batches: Batches) -> tuple[float, float]:
    """Mean and standard deviation of the pixels of some batches."""
    images = torch.cat([next(batches)[0] for _ in range(CHECKED)])
    return images.mean().item(), images.std().item()


def main() -> None:
    # ---- Command line ----------------------------------------------------------------------------------------------
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="paired runs (default %(default)s)")
    parser.add_argument("--batches", type=int, default=30, help="batches a side and run (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "results/loader_cpu", help="where the result goes")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    rates: dict[str, list[float]] = {"ours": [], "torchvision": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "images"
        kilobytes = write_images(folder)
        num_images = NUM_CLASSES * IMAGES_PER_CLASS
        benchmark.print(f"{num_images} images of {WIDTH} x {HEIGHT} pixels, {kilobytes:.0f} KB on average")
        sides = {"ours": ours(folder), "torchvision": torchvisions(folder)}
        found = {name: statistics_of(batches) for name, batches in sides.items()}
        benchmark.print(f"mean and standard deviation: {found}")
        if any(abs(a - b) > TOLERANCE * found["torchvision"][1] for a, b in zip(*found.values(), strict=True)):
            sys.exit(f"the two sides do not make the same batches: {found}")
        for number in range(args.runs):
            for name in in_turns(sides, number):
                rates[name].append(rate(sides[name], args.batches))
            here = ", ".join(f"{name} {of_side[-1]:.1f}" for name, of_side in rates.items())
            benchmark.print(f"run {number + 1} of {args.runs}: {here} images/s")

    # ---- Table -----------------------------------------------------------------------------------------------------
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    cells = " | ".join([f"{statistics.median(of_side):.0f}" for of_side in rates.values()] + spread(ratios, ".2f"))
    table = [
        "| comparison | ours, images/s | torchvision, images/s | ratio: median | min | max |",
        "| --- |" + " ---: |" * 5,
        f"| DALI on the CPU, {WORKERS} threads / ImageFolder, {WORKERS} workers | {cells} |",
    ]

    # ---- Result ----------------------------------------------------------------------------------------------------
    settings = {"image": [WIDTH, HEIGHT], "kilobytes": round(kilobytes, 1), "batch": BATCH_SIZE, "workers": WORKERS}
    settings |= {"IMG_SIZE": IMG_SIZE, "batches": args.batches}
    document = {"settings": settings, "images_per_s": rates, "ratios": ratios}
    benchmark.finish("loader", table, document)


if __name__ == "__main__":
    main()
