"""Which data a run has: those in its folder DATA, a sample of scanned digits, random images, or none.

A *loader* is a Python file that reads one format: the one that LOADER names, else the train script's own. It has

    build(run)            returns training and test batches, or None in place of the latter; called by all ranks

and may have

    NUM_IMAGES            training images of the data set: the length of an epoch where no data are read
    NUM_CLASSES           classes of the data set: the size of the model where no data are read
    MARKS                 patterns of which a DATA folder of this format has one; class folders without them are read
                          by `image_folder`. Without MARKS, the loader reads any folder
    SETTINGS              config keys of the loader, see `config.settings`
    count_images(folder)  returns the training images in a folder, without reading them; 0 if it cannot

The module is imported wherever one of these is asked for, so in dry runs, too: an import that takes long, or that needs
a GPU, belongs into `build`. Modules beside a loader can be imported by their names.
"""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from colossal_vit.config.settings import OPTIONAL
from colossal_vit.data import image_folder
from colossal_vit.data.batches import FakeLoader, Loader, SyntheticLoader
from colossal_vit.data.decoding import endings
from colossal_vit.data.folders import by_class, class_folders, has_class_folders, list_files
from colossal_vit.data.identity import OWN, differences, identify
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import RankLogger, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "sample"
SYNTHETIC_IMAGES = 1_281_167  # of an epoch with SYNTHETIC: as many as the largest of the usual data sets has


# ---------------------------------------------------------------------------------------------------------------------
# The loader of a run
# ---------------------------------------------------------------------------------------------------------------------


def find_loader(args: argparse.Namespace, config: Mapping[str, Any]) -> Path | None:
    """Return the file that LOADER names, else the train script's own; None if it has none.

    Raises:
        UserError: if there is no such file beside the config, beside the script or in the working directory.
    """
    if (name := config.get("LOADER")) is None:
        return args.loader
    folders = [Path(args.config).parent, *([args.loader.parent] if args.loader else []), Path()]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    looked = ", ".join(map(str, dict.fromkeys(folder.resolve() for folder in folders)))
    raise UserError(f"LOADER = {name}: no such file in {looked}")


def import_file(path: Path) -> ModuleType:
    """Import a Python file as the module of its name, unless another module has that name already.

    Its folder joins the end of `sys.path`, so that it can import what lies beside it.
    """
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.find_spec(path.stem)
    if found and found.origin and Path(found.origin).resolve() == path.resolve():
        return import_module(path.stem)
    name = f"loader:{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def import_loader(args: argparse.Namespace, config: Config) -> ModuleType:
    """Return the module of the loader, see `find_loader`.

    Raises:
        UserError: if there is none, or it has no `build`.
    """
    path = find_loader(args, config)
    if path is None:
        raise UserError("LOADER is missing: the Python file that reads the data, since this script has none of its own")
    loader = import_file(path)
    if not callable(getattr(loader, "build", None)):
        raise UserError(f"{path}: has no function build(run), which a LOADER needs")
    return loader


# ---------------------------------------------------------------------------------------------------------------------
# The data of a run
# ---------------------------------------------------------------------------------------------------------------------


def load_data(run: Run) -> tuple[Loader, Loader | None]:
    """Return training and test batches of a run, of whatever it has as data. Collective.

    Raises:
        UserError: on every rank, if any rank cannot get or read the data, or they do not fit the config.
    """
    if run.alone or run.config.get("SYNTHETIC"):
        return _without_data(run)
    loader, folder = import_loader(run.args, run.config), named_folder(run.config)
    run.source["loader"] = recorded(Path(loader.__file__))
    if folder and run_on_rank_0(lambda: is_class_folders(folder, loader)):
        run.source["folder"] = recorded(folder)
        _refuse_unused(run, (), "class folders, for which there is TEST_FRACTION, do")
        return image_folder.build_own_images(run, folder)
    _refuse_unused(run, getattr(loader, "SETTINGS", ()), f"{Path(loader.__file__).name} does")
    return loader.build(run)


def recorded(path: Path) -> str:
    """Return a path for a record: relative to this repository, if it is in it; JSON takes UTF-8 only."""
    path = path.resolve()
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return os.fsencode(path).decode(errors="replace")


def load_test_data(run: Run, source: Mapping[str, str], expected: Mapping[str, Any]) -> Loader:
    """Return the test batches that another run was evaluated on, in a process of its own, without process groups.

    What is recorded of a run may come from elsewhere. So of the files that it names none is run but a loader of this
    repository, in one of the folders at its root.

    Args:
        run: with the config of the other one; gets its data.
        source: the other's `Run.source`.
        expected: the other's `Run.data`.

    Raises:
        UserError: if the data are not there any more, or others are.
    """
    folders = [base / text for base, text in ((ROOT, source.get("folder")), (Path(), os.environ.get("DATA"))) if text]
    if not (folder := next((folder for folder in folders if folder.is_dir()), None)):
        raise UserError(
            f"{folders[0]}: no such folder any more" if folders else "where the run's data are is not known"
        )
    run.config["DATA"] = str(folder)
    if expected.get("images") == OWN:
        _, batches = image_folder.build_own_images(run, folder)
    elif not re.fullmatch(r"\w+/\w+\.py", name := source.get("loader", "")) or not (ROOT / name).is_file():
        raise UserError(f"{name or 'what'} has read the run's data: is no loader in a folder of this repository")
    else:
        _, batches = import_file(ROOT / name).build(run)
    if said := differences(expected, run.data):
        raise UserError(f"{folder}: has other data than the run had ({said})")
    return batches


def named_folder(config: Config) -> Path | None:
    """Return the folder that DATA names, in the config or the environment."""
    data = config.get("DATA") or os.environ.get("DATA")
    return Path(data) if data else None


def is_class_folders(folder: Path, loader: ModuleType) -> bool:
    """Return whether a data folder is for `image_folder`, and not for the loader.

    Raises:
        UserError: see `has_class_folders`.
    """
    marks = getattr(loader, "MARKS", None)
    if marks is None or any(any(folder.glob(mark)) for mark in marks):
        return False
    return has_class_folders(folder)


def _refuse_unused(run: Run, used: Collection[str], who: str) -> None:
    """Refuse keys of the script's own loader that another reader of data does not know.

    Those with a default say nothing: a config may have them for other data.

    Args:
        run: of which data.
        used: keys that are used here.
        who: does not use the others, with its verb.

    Raises:
        UserError: if one of them is set all the same.
    """
    own = getattr(import_file(run.args.loader), "SETTINGS", {}) if run.args.loader else {}
    for key in own.keys() & run.config.keys() - set(used):
        if own[key].default is OPTIONAL:
            raise UserError(f"{key} = {run.config[key]}: {who} not use it: leave it out")


def data_folder(
    run: Run,
    name: str = "",
    write_sample: Callable[[Path], Path] | None = None,
    fetch: Callable[[Path, RankLogger], None] | None = None,
) -> Path:
    """Return the folder with a run's data, for its loader: DATA, else the sample. Collective.

    Args:
        run: of which data.
        name: of the data set that the loader reads.
        write_sample: writes the digits in the loader's format to a folder, unless they are there; returns what DATA
            would be for them.
        fetch: downloads the data set to a folder, unless it is there.

    Raises:
        UserError: on every rank, if there are no data; see `write_sample` and `fetch`.
    """
    if folder := named_folder(run.config):
        if fetch:
            run_on_rank_0(lambda: fetch(folder, run.log))
        run.source["folder"] = recorded(folder)
        return folder
    if write_sample is None:
        raise UserError("DATA is not set, and this LOADER has no sample: set DATA to the folder with the data")

    def write() -> Path:
        try:
            return write_sample(SAMPLE)
        except OSError as error:
            raise UserError(f"the sample cannot be made ({error.filename}: {error.strerror}): set DATA") from None

    folder = run_on_rank_0(write)
    run.source["folder"] = recorded(folder)
    run.log.info(f"DATA is not set: this is the sample, 1,797 scanned digits in {name}'s format, in {SAMPLE}")
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Without data
# ---------------------------------------------------------------------------------------------------------------------


def _without_data(run: Run) -> tuple[Loader, Loader | None]:
    """Return training and test batches of a dry run, or with SYNTHETIC."""
    config = run.config
    if run.alone:
        shape, batch = (config.BATCH_SIZE, 3, *[config.IMG_SIZE] * 2), config.BATCH_SIZE * run.layout.data
        loader = find_loader(run.args, config)
        num_images = getattr(loader and import_file(loader), "NUM_IMAGES", SYNTHETIC_IMAGES)
        return FakeLoader(num_images // batch, shape, run.device), None
    num_tested = SyntheticLoader.DISTINCT
    run.data = identify("SYNTHETIC", (SYNTHETIC_IMAGES, num_tested), config.NUM_CLASSES, "")
    run.log.info(f"SYNTHETIC: {num_tested} random images over and over, {SYNTHETIC_IMAGES:,} an epoch")
    size, accumulation = config.BATCH_SIZE, config.gradient_accumulation
    train = GlobalBatchSampler(SYNTHETIC_IMAGES, size, accumulation, config.SEED, repeats=config.REPEATS)
    samplers = train, EvalSampler(num_tested, size)
    train, test = (SyntheticLoader(sampler, config, run.device) for sampler in samplers)
    return train, test


def _to_train_on(folder: Path) -> Path:
    """Return where class folders to train on are: in `train`, if there is a split."""
    return folder / "train" if (folder / "train").is_dir() else folder


def expected_classes(config: Config, loader: ModuleType) -> int:
    """Return how many classes the data probably have, where none are read: a dry run or a plan needs the size of the
    model.

    Raises:
        UserError: if the loader does not say it.
    """
    folder = named_folder(config)
    if folder and is_class_folders(folder, loader):
        return len(by_class(class_folders(_to_train_on(folder))[0]))
    if not hasattr(loader, "NUM_CLASSES"):
        raise UserError(f"NUM_CLASSES is missing: where no data are read, {Path(loader.__file__).name} does not say it")
    return loader.NUM_CLASSES


def expected_images(config: Config, loader: ModuleType) -> int:
    """Return how many training images there probably are, where none are read."""
    folder = named_folder(config)
    if not folder or not is_class_folders(folder, loader):
        counted = loader.count_images(folder) if folder and hasattr(loader, "count_images") else 0
        return counted or getattr(loader, "NUM_IMAGES", SYNTHETIC_IMAGES)
    train, known = _to_train_on(folder), endings()
    files = (path for name in class_folders(train)[0] for path, *_ in list_files(train / name))
    count = sum(Path(path).suffix.lower() in known for path in files)
    return count if train != folder else round(count * (1 - config.TEST_FRACTION))
