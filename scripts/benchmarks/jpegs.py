"""JPEGs as large as ImageNet's, for benchmarks of what reads them."""

import atexit
import os
import shutil
import tempfile
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

import build_tfrecords

WIDTH, HEIGHT = 500, 375  # ImageNet's most frequent size
NOISE, QUALITY = 18, 90  # chosen to give about 100 KB per image
NUM_DIFFERENT = 256  # images; others are links to them
NUM_CLASSES = 8


def temporary_folder() -> Path:
    """Return a folder that is removed when this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def write(folder: Path, num_images: int) -> None:
    """Write smooth random images with some noise, like photographs, in the folders `train` and `val` of ImageNet."""
    generator = np.random.default_rng(0)
    paths: list[Path] = []
    for number in range(num_images + NUM_CLASSES):  # the last ones are for `val`
        split = "train" if number < num_images else "val"
        path = folder / split / f"n{number % NUM_CLASSES:08d}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number >= NUM_DIFFERENT:
            os.link(paths[number % NUM_DIFFERENT], path)
            continue
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + generator.normal(0, NOISE, (HEIGHT, WIDTH, 1))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        paths.append(path)


def pack(folder: Path) -> Path:
    """Pack the images of such a folder into TFRecords beside it."""
    packed = folder.with_name("tfrecords")
    with redirect_stdout(None):
        build_tfrecords.build(build_tfrecords.parse([str(folder), str(packed)]))
    return packed


@cache
def tfrecords(num_images: int) -> Path:
    """TFRecords of so many images, for as long as this process runs."""
    folder = temporary_folder() / "images"
    write(folder, num_images)
    return pack(folder)
