"""Data folders of the user's: class folders with image files, and where a data set may be downloaded to."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from colossal_vit.data.decoding import endings
from colossal_vit.errors import UserError, reason
from colossal_vit.files import scratch_folder

# What these scripts download. A folder may have several of them, and no other set is taken for the user's own images.
DOWNLOADED = {"cifar-10-batches-bin", "cifar-10-batches-py", "caltech101"}
INDEX_FILES = "idx_files"  # the folder of DALI's index files, of TFRecords or for a run that leaves some records out
VALIDATION = ("val", "valid", "validation")  # folders beside train/ to evaluate on: one of them, or else TEST
TEST = "test"
SPLITS = {"train", "training", *VALIDATION, TEST}
RUN = ("config.json", "checkpoints")  # a file and a folder that each run directory has
UNREAD = {".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".nef", ".arw"}  # photographs that nothing here decodes


def _entries(folder: Path) -> list[os.DirEntry]:
    """Everything in a folder but what is hidden, sorted.

    Raises:
        UserError: if a link leads nowhere, or something is neither a file nor a folder: a FIFO would block its reader.
        OSError: if the folder cannot be read.
    """
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if entry.name[0] != "."), key=lambda entry: entry.name)
    for entry in entries:
        try:
            if entry.is_dir() or entry.is_file():
                continue
            entry.stat()
            reason = "is neither a file nor a folder"
        except OSError as error:
            reason = error.strerror
        raise UserError(f"{entry.path}: {reason}; repair or remove it")
    return entries


def class_folders(root: Path) -> tuple[list[str], list[str]]:
    """The names of the folders in a folder, and of the files beside them; both sorted, hidden ones omitted.

    Raises:
        UserError, OSError: see `_entries`.
    """
    entries = _entries(root)
    return [entry.name for entry in entries if entry.is_dir()], [entry.name for entry in entries if entry.is_file()]


def refuse_run(folder: Path) -> None:
    """Refuse a run directory: the pictures that a run draws are no images to train on.

    Raises:
        UserError: if it is one.
    """
    config, checkpoints = RUN
    if (folder / config).is_file() and (folder / checkpoints).is_dir():
        raise UserError(f"{folder}: is a run directory, not images: give another folder, or move it out of the data")


def advice_without_images(folder: Path) -> str:
    """What to do with a class folder without images. One that has other files is perhaps needed elsewhere."""
    return "put images in it or move it out of the data" if os.listdir(folder) else "fill it or remove it"


def list_files(
    folder: Path, inside: str = "", above: frozenset[tuple[int, int]] = frozenset()
) -> list[tuple[str, int, int]]:
    """Path in the folder of a class, bytes and modification time (ns) of the files in it and in the folders below it.

    Sorted, folders among files by their names; hidden ones omitted.

    Args:
        folder: of the class.
        inside: the folder below it to look into, "" or ending with a slash.
        above: the folders that lead there, by device and inode.

    Raises:
        UserError: if a folder is a run directory, or a link leads back to a folder that it is in, or see `_entries`.
        OSError: if a folder cannot be read.
    """
    refuse_run(folder / inside)
    files: list[tuple[str, int, int]] = []
    for entry in _entries(folder / inside):
        status, path = entry.stat(), f"{inside}{entry.name}"
        if entry.is_dir():
            if (here := (status.st_dev, status.st_ino)) in above or os.path.samefile(entry.path, folder):
                raise UserError(f"{entry.path}: is a link to a folder that it is in; remove it")
            files += list_files(folder, f"{path}/", above | {here})
        else:
            files.append((path, status.st_size, status.st_mtime_ns))
    return files


def has_class_folders(root: Path) -> bool:
    """Whether a data folder has class folders of images, itself or in `train`, and no data set of another format.

    Raises:
        UserError: if it is a file or a run directory, or has images but no class folders, or one of its folders is
            called like a part of a split, or all images are of kinds that cannot be read; see `list_files`.
    """
    try:
        folder = root / "train" if (root / "train").is_dir() else root
        refuse_run(folder)
        if root.exists() and not root.is_dir():
            raise UserError(f"{root}: is a file, not a folder")
        if any((root / name).exists() for name in (*DOWNLOADED, INDEX_FILES)):
            return False
        known, (names, beside), kinds = endings(), class_folders(folder), Counter()
        for name in names:
            found = Counter(Path(path).suffix.lower() for path, *_ in list_files(folder / name))
            if found.keys() & known:
                break
            kinds += found
        else:
            if unread := ", ".join(f"{kind} {count}" for kind, count in kinds.most_common() if kind in UNREAD):
                raise UserError(f"{root}: no image in it can be read ({unread}): convert them to JPEG")
            if images := [name for name in beside if Path(name).suffix.lower() in known | UNREAD]:
                raise UserError(
                    f"{folder}: has images such as {images[0]}, but no class folders; a folder for each class is "
                    f"needed: make them, or give the folder above if this one is a class"
                )
            return False
    except OSError:  # what reads it will say why
        return False
    if folder == root and (parts := [name for name in names if name.lower() in SPLITS]):
        raise UserError(f"{root}: has {parts[0]} but no train: call the folder to train on train, or rename the class")
    return True


def download(root: Path, made: str, fetch: Callable[[Path], None], lacking: str, by_hand: str) -> None:
    """Download a data set to `root`, atomically.

    Only a folder that is empty, has other data sets of these scripts, or is new in an existing one is taken: another
    one is probably the user's own, or a mistake in writing.

    Args:
        root: the data folder.
        made: the folder that `fetch` makes, which gets the same name in `root`.
        fetch: downloads and unpacks to the folder that it gets.
        lacking: what is missing, for messages.
        by_hand: how to get the data set without a network, for messages.

    Raises:
        UserError: if `root` is not such a folder, or the data set cannot be downloaded.
    """
    asked = f"DATA = {root}"
    try:
        if not root.parent.is_dir():
            raise UserError(f"{asked}: no such folder, and no {root.parent} to make it in; correct the path")
        there = sorted(name for name in os.listdir(root) if name[0] != ".") if root.exists() else []
        if other := [name for name in there if name not in DOWNLOADED or name == made]:
            raise UserError(
                f"{asked}: {lacking}; it is downloaded to an empty or a new folder only, but {other[0]} is in this "
                f"one: set DATA to another folder, or {by_hand}"
            )
        with scratch_folder(root) as scratch:
            fetch(scratch)
            (scratch / made).rename(root / made)
    except (OSError, RuntimeError, ImportError) as error:
        raise UserError(
            f"{asked}: {lacking} and it cannot be downloaded ({reason(error)}); {by_hand}, or unset DATA for the sample"
        ) from None
