"""Caltech101 (L. Fei-Fei et al., CVPR 2004 workshop): 9,144 JPEGs, 131 MB, as class folders."""

from pathlib import Path

import numpy as np
import torch
from colossal_vit.config.settings import Setting, Settings
from colossal_vit.config.types import PositiveInt
from colossal_vit.data.batches import Loader
from colossal_vit.data.class_images import Images, digest_contents
from colossal_vit.data.class_images import find_images as find_in_class_folders
from colossal_vit.data.digits import digits
from colossal_vit.data.folders import download
from colossal_vit.data.image_folder import build_batches
from colossal_vit.data.loaders import data_folder
from colossal_vit.errors import UserError
from colossal_vit.files import atomic_folder
from colossal_vit.parallel.collectives import RankLogger, raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from PIL import Image
from torch import Tensor
from torchvision.datasets import Caltech101

FOLDER = "caltech101/101_ObjectCategories"
MARKS = (FOLDER,)
NUM_IMAGES, NUM_CLASSES = 6_941, 101  # four fifths of 8,677
SETTINGS: Settings = {"TRAIN_PER_CLASS": Setting(PositiveInt, "training images of each class; four fifths")}
TRAIN_FRACTION, SPLIT_SEED = 0.8, 0
NO_CLASS = "BACKGROUND_Google"  # images of no class, which torchvision leaves out, too


def fetch(root: Path, log: RankLogger) -> None:
    """Download the images to `root`, unless they are there.

    Raises:
        UserError: if they cannot be downloaded.
    """
    if (root / FOLDER).is_dir():
        return

    def download_to(scratch: Path) -> None:
        log.info(f"downloading Caltech101 to {root}")
        Caltech101(str(scratch), download=True)  # checks the archive's MD5

    by_hand = "unpack the archive of https://data.caltech.edu/records/mzrjq-6wc02 there by hand"
    download(root, FOLDER.split("/")[0], download_to, f"has no {FOLDER}/<class>/", by_hand)


def find_images(data: Path) -> Images:
    """Return all images of Caltech101's classes below `data`; your own may have other formats than JPEG.

    Raises:
        UserError: see `class_images.find_images`.
    """
    root = data / FOLDER
    return find_in_class_folders(root, root.parent, skip=NO_CLASS)


def write_sample(folder: Path) -> Path:
    """Write the digits sample to a folder, unless it is there; returns what DATA would be for it.

    `caltech101/101_ObjectCategories/<digit>/image_<number>.jpg`, grey, of 64 x 64 pixels, numbered from 1 in each
    class. Caltech101 has no split of its own: this is all 1,797 of them.
    """
    made = folder / Path(FOLDER).parts[0]
    if made.is_dir():
        return folder
    train_images, train_labels, test_images, test_labels = digits(64)
    images, labels = np.concatenate([train_images, test_images]), np.concatenate([train_labels, test_labels])
    with atomic_folder(made) as scratch:
        for digit in range(10):
            part = scratch / Path(FOLDER).name / str(digit)
            part.mkdir(parents=True)
            for number, image in enumerate(images[labels == digit], start=1):
                Image.fromarray(image).save(part / f"image_{number:04d}.jpg", "JPEG", quality=95)
    return folder


def split(images: Images, per_class: int | None = None) -> tuple[Tensor, Tensor]:
    """Return indices for training and for testing, the same in every run.

    The data set comes without a split. By default four fifths of each class are for training; the paper of the data set
    takes `per_class` = 30 (L. Fei-Fei et al., CVPR 2004 workshop). The rest is for testing. The split is random with a
    fixed seed, independent of SEED.

    Raises:
        UserError: if a class has no image left to test.
    """
    generator, train, test = np.random.default_rng(SPLIT_SEED), [], []
    for label, name in enumerate(images.classes):
        own = generator.permutation(np.flatnonzero(images.labels == label))
        count = round(len(own) * TRAIN_FRACTION) if per_class is None else per_class
        if not 0 < count < len(own):
            there = f"{images.root / name}: has {len(own)} image{'s'[: len(own) > 1]}"
            if per_class is None:
                raise UserError(f"{there}, but 3 are the fewest to train and to test on: add some, or leave it out")
            raise UserError(
                f"{there}, but TRAIN_PER_CLASS = {per_class} needs {per_class + 1}, so that one is left to test: lower "
                f"TRAIN_PER_CLASS, or leave it out"
            )
        train.append(own[:count])
        test.append(own[count:])
    return torch.from_numpy(np.sort(np.concatenate(train))), torch.from_numpy(np.sort(np.concatenate(test)))


def build(run: Run) -> tuple[Loader, Loader]:
    """Return training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot read the images, or they do not fit the config.
    """
    root = data_folder(run, "Caltech101", write_sample, fetch)
    with raise_on_all_ranks():
        images = find_images(root)
        train, test = split(images, run.config.get("TRAIN_PER_CLASS"))
    digests = run_on_rank_0(lambda: digest_contents(images, run.log))
    return build_batches(run, images, digests, "Caltech101", train, test)
