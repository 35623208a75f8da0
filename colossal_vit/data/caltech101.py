"""Caltech101 (L. Fei-Fei et al., CVPR 2004 workshop): 9,144 JPEGs, 131 MB, as class folders."""

from pathlib import Path

from colossal_vit.data.batches import Loader
from colossal_vit.data.class_images import Images, digest_contents, split
from colossal_vit.data.class_images import find_images as find_in_class_folders
from colossal_vit.data.digits import write_caltech101
from colossal_vit.data.folders import download
from colossal_vit.data.image_folder import build_batches
from colossal_vit.parallel.ranks import RankLogger, raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from torchvision.datasets import Caltech101

FOLDER = "caltech101/101_ObjectCategories"
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
    """All images of Caltech101's classes below `data`; your own may have other formats than JPEG.

    Raises:
        UserError: see `class_images.find_images`.
    """
    root = data / FOLDER
    return find_in_class_folders(root, root.parent, skip=NO_CLASS)


def write_sample(folder: Path) -> Path:
    """Write the digits sample to a folder, unless it is there; returns what DATA would be for it."""
    return write_caltech101(folder).parent


def build(run: Run, root: Path) -> tuple[Loader, Loader]:
    """Training and test batches for a run of what is in `root`.

    Raises:
        UserError: on every rank, if any rank cannot read the images, or they do not fit the config.
    """
    with raise_on_all_ranks():
        images = find_images(root)
        train, test = split(images, run.config.get("TRAIN_PER_CLASS"))
    digests = run_on_rank_0(lambda: digest_contents(images, run.log))
    return build_batches(run, images, digests, "Caltech101", train, test)
