"""Which data a run has: those in its folder DATA, of any format, the digits sample, random images, or none."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from colossal_vit.config.settings import CALTECH101, DP, HYBRID, IMAGENET
from colossal_vit.data.batches import FakeBatches, Loader, SyntheticBatches
from colossal_vit.data.decoding import endings
from colossal_vit.data.folders import INDEX_FILES, by_class, class_folders, has_class_folders, list_files
from colossal_vit.data.identity import differences, identify
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import all_gather_object, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "sample"


class Format(NamedTuple):
    """A format of data sets.

    Attributes:
        name: of the data set that it is from.
        module: its name. Its `build(run, root)` makes batches of what is in the folder `root`, its `fetch(root,
            log)` downloads the data set to `root` or refuses, its `write_sample(folder)` writes the sample there.
        marks: a folder in which one of these patterns is found has this format.
        num_images: of the data set, for training: the length of an epoch where no data are read.
        num_classes: of the data set.
    """

    name: str
    module: str
    marks: tuple[str, ...]
    num_images: int
    num_classes: int

    def is_in(self, folder: Path) -> bool:
        """Whether a data folder has this format."""
        return any(any(folder.glob(mark)) for mark in self.marks)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the module, which is imported only then: DALI takes long to load."""
        if (folder := str(SAMPLE.parents[1] / "vit_imagenet_dali")) not in sys.path:
            sys.path.append(folder)
        return getattr(import_module(self.module), function)(*arguments)


FORMATS = (
    Format("CIFAR-10", "colossal_vit.data.cifar10", ("cifar-10-batches-bin", "cifar-10-batches-py"), 50_000, 10),
    Format(
        "Caltech101", "colossal_vit.data.caltech101", ("caltech101/101_ObjectCategories",), 6_941, 101
    ),  # four fifths of 8,677
    Format("ImageNet", "imagenet_dali_dataloader", (INDEX_FILES, "train/train-*-of-*"), 1_281_167, 1000),
)
USUAL = dict(zip((HYBRID, CALTECH101, IMAGENET), FORMATS, strict=True)) | {DP: FORMATS[0]}  # of each script


def find_format(folder: Path, usual: Format) -> Format | None:
    """The format of the data in a folder, `usual` if it has several; None for class folders.

    Raises:
        UserError: if it has none of them, naming what `usual` needs.
    """
    for known in (usual, *FORMATS):
        if known.is_in(folder):
            return known
    return None if has_class_folders(folder) else usual


def _named(config: Config) -> Path | None:
    """The folder that DATA names, in the config or the environment."""
    data = config.get("DATA") or os.environ.get("DATA")
    return Path(data) if data else None


def build_data(run: Run) -> tuple[Loader, Loader | None]:
    """Training and test batches of a run, of whatever it has as data. Collective.

    Raises:
        UserError: on every rank, if any rank cannot get or read the data, or they do not fit the config.
    """
    usual = USUAL[run.args.script]
    if run.alone or run.config.get("SYNTHETIC"):
        return _without_data(run, usual)
    if folder := _named(run.config):
        found = run_on_rank_0(lambda: find_format(folder, usual))
        _check_split(run.config, found)
        if found is None:
            return import_module("colossal_vit.data.image_folder").build_own_images(run, folder)
        run_on_rank_0(lambda: found.call("fetch", folder, run.log))
        return found.call("build", run, folder)
    _check_split(run.config, usual)
    folder = run_on_rank_0(lambda: _write_sample(usual))
    run.log.info(f"DATA is not set: this is the sample, 1,797 scanned digits in {usual.name}'s format, in {SAMPLE}")
    return usual.call("build", run, folder)


def _check_split(config: Config, found: Format | None) -> None:
    """Refuse TRAIN_PER_CLASS for data of a format, None for class folders, that it does not split.

    Raises:
        UserError: if it is set all the same.
    """
    if "TRAIN_PER_CLASS" in config and found != USUAL[CALTECH101]:
        these = f"{found.name}'s, which are split" if found else "class folders, for which there is TEST_FRACTION"
        asked = f"TRAIN_PER_CLASS = {config.TRAIN_PER_CLASS}"
        raise UserError(f"{asked}: is for Caltech101's images, but these are {these}: leave it out")


def _write_sample(usual: Format) -> Path:
    """Make the sample, unless it is there; returns its folder."""
    try:
        return usual.call("write_sample", SAMPLE)
    except OSError as error:
        raise UserError(f"the sample cannot be made ({error.filename}: {error.strerror}): set DATA") from None


def _without_data(run: Run, usual: Format) -> tuple[Loader, Loader | None]:
    """Training and test batches of a dry run, or with SYNTHETIC."""
    config = run.config
    if run.alone:
        shape, batch = (config.BATCH_SIZE, 3, *[config.IMG_SIZE] * 2), config.BATCH_SIZE * run.layout.data
        return FakeBatches(usual.num_images // batch, shape, run.device), None
    largest, num_tested = FORMATS[-1], SyntheticBatches.DISTINCT
    run.data = identify("SYNTHETIC", (largest.num_images, num_tested), config.NUM_CLASSES, "")
    run.log.info(f"SYNTHETIC: {num_tested} random images over and over, of the size of {largest.name} an epoch")
    size, accumulation = config.BATCH_SIZE, config.gradient_accumulation
    train = GlobalBatchSampler(largest.num_images, size, accumulation, config.SEED, repeats=config.REPEATS)
    samplers = train, EvalSampler(num_tested, size)
    train, test = (SyntheticBatches(sampler, config, run.device) for sampler in samplers)
    return train, test


def _expected(config: Config, script: str | None) -> tuple[Path | None, Format | None]:
    """The folder DATA, None for the sample, and its format, None for class folders."""
    usual, folder = USUAL.get(script, FORMATS[0]), _named(config)
    return folder, find_format(folder, usual) if folder else usual


def _to_train_on(folder: Path) -> Path:
    """Where class folders to train on are: in `train`, if there is a split."""
    return folder / "train" if (folder / "train").is_dir() else folder


def expected_classes(config: Config, script: str | None) -> int:
    """How many classes the data probably have, where none are read: a dry run or a plan needs the size of the model."""
    folder, found = _expected(config, script)
    return found.num_classes if found else len(by_class(class_folders(_to_train_on(folder))[0]))


def expected_images(config: Config, script: str | None) -> int:
    """How many training images there probably are, where none are read: of TFRecords by their index files."""
    folder, found = _expected(config, script)
    if found:
        indices = (folder / INDEX_FILES / "train").glob("*.idx") if folder else ()
        return sum(index.read_bytes().count(b"\n") for index in indices) or found.num_images
    train, known = _to_train_on(folder), endings()
    files = (path for name in class_folders(train)[0] for path, *_ in list_files(train / name))
    count = sum(Path(path).suffix.lower() in known for path in files)
    return count if train != folder else round(count * (1 - config.TEST_FRACTION))


def settle_classes(config: Config, count: int, where: Path) -> None:
    """Make NUM_CLASSES the number of classes of the data, unless the config says it.

    Raises:
        UserError: if the config has fewer.
    """
    if config.setdefault("NUM_CLASSES", count) < count:
        raise UserError(
            f"NUM_CLASSES = {config.NUM_CLASSES}, but {where} has {count} classes: leave NUM_CLASSES out, or raise it"
        )


def describe_data(
    run: Run,
    name: str,
    counts: tuple[int, int],
    classes: Sequence[str] | int,
    digest: str,
    folder: Path,
    contents: tuple[str, str] | None = None,
) -> None:
    """Log how many images a run has, and keep their identity in `run.data`. Collective.

    Args:
        run: of which data.
        name, counts, classes, digest, contents: see `identify`.
        folder: where they are.

    Raises:
        UserError: on every rank, if not all read the same data, in whichever folder.
    """
    run.data = identify(name, counts, classes, digest, contents)
    run.log.info(f"{counts[0]} training and {counts[1]} test images from {folder}")
    of_rank_0, *others = all_gather_object(run.data)
    for rank, data in enumerate(others, start=1):
        if said := differences(of_rank_0, data):
            raise UserError(f"rank 0 and rank {rank} read different data ({said}): DATA must be the same on all nodes")
