"""ImageNet-1K from TFRecords, read by DALI."""

from pathlib import Path

from colossal_vit.data.batches import Loader
from colossal_vit.data.folders import INDEX_FILES
from colossal_vit.run import Run

MARKS = (INDEX_FILES, "train/train-*-of-*")
NUM_IMAGES, NUM_CLASSES = 1_281_167, 1000


def count_images(folder: Path) -> int:
    """Training images in a data folder, by its index files."""
    return sum(index.read_bytes().count(b"\n") for index in (folder / INDEX_FILES / "train").glob("*.idx"))


def build(run: Run) -> tuple[Loader, Loader]:
    """Training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot read the records, or they do not fit the config.
    """
    from colossal_vit.data import imagenet  # here, since DALI takes long to load, and a dry run does without it

    return imagenet.build(run)
