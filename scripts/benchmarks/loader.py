"""Speed of the DALI loader on the CPU, compared with torchvision's ImageFolder on the same JPEGs.

About 5 minutes on 2 CPU cores. Both sides decode the same images of 500 x 375 pixels and about 100 KB, crop them at
random to 224 x 224, mirror, normalise and batch them; the DALI side has as many threads as the DataLoader has worker
processes. Their batches must have the same mean and standard deviation before they are timed.

With `--before FOLDER`, a checkout of an earlier commit (`git worktree add FOLDER COMMIT`), the sides are its loader and
that of now, each in a process of its own, on 8,192 images: without augmentation, with a lot of it, and with nothing in
the page cache. Where there is a GPU, images are decoded where `gpu_aug` says, with a thread for each core.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from colossal_vit.main import load_script
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks import jpegs
from benchmarks.harness import ROOT, Benchmark, Case, Side, Values, python_path
from imagenet_dali_dataloader import MEAN, STD, DaliLoader
from tfrecord import find_records

NUM_IMAGES = 256
IMG_SIZE, BATCH_SIZE, WORKERS = 224, 64, 2
NUM_BATCHES = 30  # in a round
SETTLED = 2.0  # seconds before a turn, in which the other side finishes prefetching
DRAINED = 5  # batches taken before the timing starts: more than are prefetched
CHECKED, TOLERANCE = 20, 0.05  # batches to compare; tolerance of mean and standard deviation, relative to the latter

Batches = Iterator[tuple[Tensor, Tensor]]


def dali(folder: Path) -> Batches:
    values = [f"BATCH_SIZE={BATCH_SIZE}", f"IMG_SIZE={IMG_SIZE}", f"NUM_CLASSES={jpegs.NUM_CLASSES}"]
    values.append("gradient_accumulation=1")
    config = load_script(ROOT / "vit_imagenet_dali/train.py").load(ROOT / "vit_imagenet_dali/config.py", values)
    loader = DaliLoader(find_records(jpegs.pack(folder), "train"), True, config, torch.device("cpu"), WORKERS)
    while True:
        yield from loader


def image_folder(folder: Path) -> Batches:
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


def timed(batches: Batches, num_batches: int, number: int) -> dict[str, float]:
    """Return the speed of so many batches, after some that were made ahead."""
    time.sleep(SETTLED)
    for _ in range(DRAINED):
        next(batches)
    started = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return {"images/s": BATCH_SIZE * num_batches / (time.perf_counter() - started)}


def sides(args: argparse.Namespace) -> dict[str, Side]:
    folder = jpegs.temporary_folder() / "images"
    jpegs.write(folder, NUM_IMAGES)
    loaders = {f"ImageFolder, {WORKERS} workers": image_folder(folder), f"DALI, {WORKERS} threads": dali(folder)}
    pixels = {name: torch.cat([next(of)[0] for _ in range(CHECKED)]) for name, of in loaders.items()}
    found = {name: (images.mean().item(), images.std().item()) for name, images in pixels.items()}
    (mean, deviation), (other_mean, other_deviation) = found.values()
    if max(abs(mean - other_mean), abs(deviation - other_deviation)) > TOLERANCE * deviation:
        sys.exit(f"the two sides do not make the same batches: {found}")
    num_batches = 1 if args.small else NUM_BATCHES
    return {name: partial(timed, batches, num_batches) for name, batches in loaders.items()}


def drained(root: Path, data: Path, num_batches: int, overrides: list[str], cold: bool, number: int) -> Values:
    """Return what `drain.py` says of the code in a folder."""
    batch_size = str(4 * BATCH_SIZE)  # the config's
    command = [sys.executable, str(Path(__file__).with_name("drain.py")), str(data), batch_size, str(num_batches)]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(root, root / "vit_imagenet_dali"),
        **({"COLD": "1"} if cold else {}),
    }
    done = subprocess.run([*command, *overrides], env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def compared(overrides: list[str], cold: bool, args: argparse.Namespace) -> dict[str, Side]:
    rest = (jpegs.tfrecords(256 if args.small else 8192), 1 if args.small else NUM_BATCHES, overrides, cold)
    return {"before": partial(drained, args.before.resolve(), *rest), "now": partial(drained, ROOT, *rest)}


def cases(args: argparse.Namespace) -> dict[str, Case]:
    if not args.before:
        return {"DALI on the CPU": Case(sides)}
    augmented = ["augment.policy='rand'", "augment.erase=0.25"]
    kinds = {"crop and mirror": ([], False), "RandAugment and erasing": (augmented, False), "cold cache": ([], True)}
    return {name: Case(partial(compared, *kind)) for name, kind in kinds.items()}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an earlier commit")


BENCHMARK = Benchmark(cases, rounds=7, flags=flags, compared=2)
