"""Caltech101 (L. Fei-Fei et al., CVPR 2004 workshop): 9,144 JPEGs, 131 MB; read by `colossal_vit.data.image_folder`."""

from pathlib import Path

from colossal_vit.data.batches import Loader
from colossal_vit.data.digits import write_caltech101
from colossal_vit.data.folders import download
from colossal_vit.data.image_folder import Images, build_batches, build_own_images, split
from colossal_vit.data.image_folder import find_images as find_in_class_folders
from colossal_vit.data.source import build_without_data, find_data, own_images
from colossal_vit.parallel.ranks import RankLogger, raise_on_all_ranks
from colossal_vit.run import Run
from torchvision.datasets import Caltech101

FOLDER = "caltech101/101_ObjectCategories"
NO_CLASS = "BACKGROUND_Google"  # images of no class, which torchvision leaves out, too
NUM_TRAINING_IMAGES = 6_941  # four fifths of 8,677, for dry runs


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
    """All images of Caltech101's classes below `data`; your own may have other formats than JPEG.

    Raises:
        UserError: see `image_folder.find_images`.
    """
    root = data / FOLDER
    return find_in_class_folders(root, root.parent, skip=NO_CLASS)


def build_caltech101(run: Run) -> tuple[Loader, Loader | None]:
    """Training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot get or read the images.
    """
    if batches := build_without_data(run, "Caltech101", NUM_TRAINING_IMAGES, endless=True):
        return batches
    if own := own_images(run):
        return build_own_images(run, own)
    root = find_data(run, "Caltech101", lambda folder: write_caltech101(folder).parent, fetch)
    with raise_on_all_ranks():
        images = find_images(root)
    return build_batches(run, images, "Caltech101", lambda: split(images, run.config.get("TRAIN_PER_CLASS")))
