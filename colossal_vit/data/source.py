"""Which data a run has: those in its folder DATA, the digits sample, one random batch, or none in a dry run."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from colossal_vit.config.settings import NUM_CLASSES
from colossal_vit.data.batches import FakeBatches, Loader, SyntheticBatches
from colossal_vit.data.folders import class_folders, has_class_folders
from colossal_vit.data.identity import identify
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import RankLogger, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "sample"


def build_without_data(
    run: Run, name: str, num_images: int, endless: bool = False
) -> tuple[Loader, Loader | None] | None:
    """Training and test batches of a dry run, or with SYNTHETIC; None for a run that reads images.

    Args:
        run: whose config and flags say which of them it is.
        name: of the data set that an epoch has the size of.
        num_images: for training, in that data set.
        endless: whether an epoch with SYNTHETIC is much longer, for measurements.
    """
    config = run.config
    shape = (config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE)
    num_batches = num_images // (config.BATCH_SIZE * run.layout.data)
    if run.observe:
        return FakeBatches(num_batches, shape, run.device), None
    if not config.get("SYNTHETIC"):
        return None
    run.data = identify("SYNTHETIC", (0, 0), config.NUM_CLASSES, "")
    run.log.info(f"SYNTHETIC: one random batch over and over{'' if endless else f', of the size of {name} an epoch'}")
    lengths = 10**6 if endless else num_batches, 1
    train, test = (SyntheticBatches(n, shape, config.NUM_CLASSES, run.device, config.SEED) for n in lengths)
    return train, test


def _named(config: Config) -> Path | None:
    """The folder that DATA names, in the config or the environment."""
    data = config.get("DATA") or os.environ.get("DATA")
    return Path(data) if data else None


def own_images(run: Run) -> Path | None:
    """The folder that DATA names, if it has class folders of images: every script takes them, by `image_folder.py`."""
    folder = _named(run.config)
    return folder if folder and has_class_folders(folder) else None


def expected_classes(config: Config, script: str | None) -> int:
    """How many classes the data probably have, where none are read: a dry run or a plan needs the size of the model."""
    if (folder := _named(config)) and has_class_folders(folder):
        return len(class_folders(folder / "train" if (folder / "train").is_dir() else folder)[0])
    return NUM_CLASSES.get(script, 10)


def settle_classes(config: Config, count: int, where: Path) -> None:
    """Make NUM_CLASSES the number of classes of the data, unless the config says it.

    Raises:
        UserError: if the config has fewer.
    """
    if config.setdefault("NUM_CLASSES", count) < count:
        raise UserError(
            f"NUM_CLASSES = {config.NUM_CLASSES}, but {where} has {count} classes: leave NUM_CLASSES out, or raise it"
        )


def find_data(
    run: Run,
    name: str,
    write_sample: Callable[[Path], Path],
    fetch: Callable[[Path, RankLogger], None] = lambda folder, log: None,
) -> Path:
    """The folder that DATA names, in the config or the environment; without DATA, the digits sample.

    Args:
        run: whose data they are.
        name: of the data set whose format the sample has.
        write_sample: writes the sample to a folder, unless it is there; returns what DATA would be for it.
        fetch: downloads the data set to the folder that DATA names, unless it is there.

    Raises:
        UserError: on every rank, if the data set cannot be downloaded.
    """
    if folder := _named(run.config):
        run_on_rank_0(lambda: fetch(folder, run.log))
        return folder
    folder = run_on_rank_0(lambda: write_sample(SAMPLE))
    run.log.info(f"DATA is not set: this is the sample, 1,797 scanned digits in {name}'s format, in {SAMPLE}")
    return folder


def describe_data(
    run: Run, name: str, counts: tuple[int, int], classes: Sequence[str] | int, digest: str, folder: Path
) -> None:
    """Log how many images a run has, and keep their identity in `run.data`; for the arguments see `identify`."""
    run.data = identify(name, counts, classes, digest)
    run.log.info(f"{counts[0]} training and {counts[1]} test images from {folder}")
