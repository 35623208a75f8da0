"""Write small real data sets in the formats that the examples read.

python scripts/sample_data.py [FOLDER] [--imagenet]      # the digits; default: data/sample in this repository
python scripts/sample_data.py fashion-mnist FOLDER       # 60,000 + 10,000 images, of Debian's dataset-fashion-mnist

The digits are what the examples run on when DATA is not set: FOLDER/cifar-10-batches-bin, or with --imagenet
FOLDER/imagenet, the train/ and val/ folders of image files that vit_imagenet_dali/build_tfrecords.py packs.
Fashion-MNIST is written as FOLDER/cifar-10-batches-bin, as class folders in FOLDER/images, and as TFRecords in
FOLDER/imagenet_tfrecords, each time with a black border of 2 pixels: 32 x 32 pixels.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

from colossal_vit.data.digits import write_imagenet
from colossal_vit.data.fashion_mnist import NAMES, SOURCE, read_images, write_class_folders
from colossal_vit.errors import UserError, blame, run_command

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "vit_cifar10_hybrid"))

import cifar10


def write_fashion_mnist(root: Path, source: Path) -> int:
    """Write Fashion-MNIST in three formats; returns the exit code."""
    read = partial(read_images, source)
    folder = cifar10.write_images(root, read, NAMES)
    names = folder / "batches.meta.txt"
    if not names.is_file() or names.read_text(errors="replace").splitlines() != list(NAMES):
        raise UserError(f"{folder}: has other images than Fashion-MNIST's; give another folder")
    print(f"CIFAR-10 format: {folder}")
    print(f"class folders: {write_class_folders(root / 'images', read(32))}")
    pack = [sys.executable, str(ROOT / "vit_imagenet_dali" / "build_tfrecords.py")]
    return subprocess.run([*pack, str(root / "images"), str(root / "imagenet_tfrecords")]).returncode


def write_digits(root: Path, imagenet: bool) -> int:
    """Write the digits in one format; returns the exit code."""
    print(f"ImageNet folders: {write_imagenet(root)}" if imagenet else f"CIFAR-10 format: {cifar10.write_images(root)}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="[fashion-mnist] FOLDER")
    parser.add_argument("--imagenet", action="store_true", help="the folders of ImageNet instead of CIFAR-10's files")
    parser.add_argument("--source", type=Path, default=SOURCE, help="of Fashion-MNIST's files (default %(default)s)")
    args = parser.parse_args()
    names, fashion_mnist = args.arguments, args.arguments[:1] == ["fashion-mnist"]
    if fashion_mnist:
        names = names[1:]
        if len(names) != 1 or args.imagenet:
            parser.error("usage: sample_data.py fashion-mnist FOLDER [--source FOLDER]")
    if len(names) > 1:
        parser.error(f"unknown arguments: {' '.join(names[1:])}")
    folder = Path(*names) if names else ROOT / "data" / "sample"

    def write() -> int:
        with blame(folder):
            return write_fashion_mnist(folder, args.source) if fashion_mnist else write_digits(folder, args.imagenet)

    sys.exit(run_command("sample_data.py", write))
