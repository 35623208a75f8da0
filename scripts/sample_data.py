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

from colossal_vit.data.loaders import import_file
from colossal_vit.errors import UserError, oserror_as_user_error, run_command

ROOT = Path(__file__).resolve().parents[1]
CIFAR10, FASHION_MNIST = (ROOT / "vit_cifar10_hybrid" / f"{name}.py" for name in ("cifar10", "fashion_mnist"))
IMAGENET = ROOT / "vit_imagenet_dali" / "imagenet_dali_dataloader.py"


def write_fashion_mnist(root: Path, source: Path | None) -> int:
    """Write Fashion-MNIST in three formats; returns the exit code."""
    cifar10, fashion_mnist = import_file(CIFAR10), import_file(FASHION_MNIST)
    read = partial(fashion_mnist.read_images, source or fashion_mnist.SOURCE)
    folder = cifar10.write_images(root, read, fashion_mnist.NAMES)
    names = folder / "batches.meta.txt"
    if not names.is_file() or names.read_text(errors="replace").splitlines() != list(fashion_mnist.NAMES):
        raise UserError(f"{folder}: has other images than Fashion-MNIST's; give another folder")
    print(f"CIFAR-10 format: {folder}")
    print(f"class folders: {fashion_mnist.write_class_folders(root / 'images', read(32))}")
    pack = [sys.executable, str(ROOT / "vit_imagenet_dali" / "build_tfrecords.py")]
    return subprocess.run([*pack, str(root / "images"), str(root / "imagenet_tfrecords")]).returncode


def write_digits(root: Path, imagenet: bool) -> int:
    """Write the digits in one format; returns the exit code."""
    if imagenet:
        print(f"ImageNet folders: {import_file(IMAGENET).write_imagenet(root)}")
    else:
        print(f"CIFAR-10 format: {import_file(CIFAR10).write_images(root)}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="[fashion-mnist] FOLDER")
    parser.add_argument("--imagenet", action="store_true", help="the folders of ImageNet instead of CIFAR-10's files")
    parser.add_argument("--source", type=Path, help="of Fashion-MNIST's files (default: that of Debian's package)")
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
        with oserror_as_user_error(folder):
            return write_fashion_mnist(folder, args.source) if fashion_mnist else write_digits(folder, args.imagenet)

    sys.exit(run_command("sample_data.py", write))
