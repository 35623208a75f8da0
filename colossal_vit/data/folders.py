"""Data folders of the user's: class folders with image files, and where a data set may be downloaded to."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from colossal_vit.data.decoding import endings
from colossal_vit.errors import UserError, in_one_line, oserror_as_user_error, reason
from colossal_vit.files import scratch_folder

# What these scripts download. A folder may have several of them, and no other set is taken for the user's own images.
DOWNLOADED = {"cifar-10-batches-bin", "cifar-10-batches-py", "caltech101"}
INDEX_FILES = "idx_files"  # the folder of DALI's index files, of TFRecords or for a run that leaves some records out
VALIDATION = ("val", "valid", "validation")  # folders beside train/ to evaluate on: one of them, or else TEST
TEST = "test"
SPLITS = {"train", "training", *VALIDATION, TEST}
RUN = ("config.json", "checkpoints")  # a file and a folder that each run directory has
UNREAD = {".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".nef", ".arw"}  # photographs that nothing here decodes
# Folders that file servers and operating systems make, in lower case: thumbnails, deleted files, snapshots.
SYSTEM_FOLDERS = {"@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "@tmp"}  # Synology, QNAP
SYSTEM_FOLDERS |= {"$recycle.bin", "system volume information", "found.000", "lost+found"}  # Windows, Linux
SYSTEM_FOLDERS |= {"__macosx", "network trash folder", "temporary items"}  # macOS


class File(NamedTuple):
    """A file in the folder of a class.

    Attributes:
        path: relative to that folder.
        size: in bytes.
        modified: when its content was last written, in ns.
        changed: when that, its name or its attributes were, in ns. Programs cannot set it, but copying changes it.
        inode: its number in the file system, which it takes along if it or a folder above gets another name.
    """

    path: str
    size: int
    modified: int
    changed: int
    inode: int


def composed(name: str) -> str:
    """Return a name with composed characters: macOS writes é as two, e and an accent, which look the same and compare
    unequal.

    Bytes that are not UTF-8 are kept.
    """
    return normalize("NFC", name)


def by_class(folders: Iterable[str]) -> dict[str, list[str]]:
    """Return the folders of each class, in their order: mostly one, but é may be written in two ways."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        found.setdefault(composed(folder), []).append(folder)
    return found


def _entries(folder: Path, omitted: list[str]) -> list[os.DirEntry]:
    """Everything in a folder but what is hidden, sorted; the paths of `SYSTEM_FOLDERS` go to `omitted`.

    Raises:
        UserError: if a link leads nowhere, or something is neither a file nor a folder: a FIFO would block its reader.
        OSError: if the folder cannot be read.
    """
    with os.scandir(folder) as found:
        visible = (entry for entry in found if entry.name[0] != ".")
        entries = sorted(visible, key=lambda entry: (composed(entry.name), entry.name))
    kept = []
    for entry in entries:
        try:
            if entry.is_dir() and entry.name.lower() in SYSTEM_FOLDERS:
                omitted.append(entry.path)
                continue
            if entry.is_dir() or entry.is_file():
                kept.append(entry)
                continue
            entry.stat()
            reason = "is neither a file nor a folder"
        except OSError as error:
            reason = error.strerror
        raise UserError(f"{entry.path}: {reason}; repair or remove it")
    return kept


def class_folders(root: Path, omitted: list[str] | None = None) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, and of the files beside them; both sorted, hidden ones omitted.

    Args:
        root: the folder.
        omitted: gets the paths of `SYSTEM_FOLDERS`, which are omitted too.

    Raises:
        UserError, OSError: see `_entries`.
    """
    entries = _entries(root, [] if omitted is None else omitted)
    return [entry.name for entry in entries if entry.is_dir()], [entry.name for entry in entries if entry.is_file()]


def say_omitted(omitted: list[str]) -> list[str]:
    """Return a line about folders that were omitted; none if there are none."""
    if not omitted:
        return []
    first = in_one_line(min(omitted))
    return [f"{len(omitted)} folders of file servers or operating systems are left out, the first is {first}"]


def say_untested(folder: Path, classes: list[str], count: int) -> list[str]:
    """Return a line about those of `count` classes that have no images in a folder to evaluate on, if there are any."""
    if not classes:
        return []
    first = in_one_line(classes[0])
    return [f"{folder}: {len(classes)} of {count} classes have no images here, the first is {first}"]


def refuse_run(folder: Path) -> None:
    """Refuse a run directory: the pictures that a run draws are no images to train on.

    Raises:
        UserError: if it is one.
    """
    config, checkpoints = RUN
    if (folder / config).is_file() and (folder / checkpoints).is_dir():
        raise UserError(f"{folder}: is a run directory, not images: give another folder, or move it out of the data")


def advice_without_images(folder: Path) -> str:
    """Return what to do with a class folder without images. One that has other files is perhaps needed elsewhere."""
    return "put images in it or move it out of the data" if os.listdir(folder) else "fill it or remove it"


def list_files(
    folder: Path,
    omitted: list[str] | None = None,
    inside: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
) -> list[File]:
    """Return the files in the folder of a class and in the folders below it.

    Sorted, folders among files by their names; hidden ones omitted.

    Args:
        folder: of the class.
        omitted: see `class_folders`.
        inside: the folder below it to look into, "" or ending with a slash.
        above: the folders that lead there, by device and inode.

    Raises:
        UserError: if a folder is a run directory, or a link leads back to a folder that it is in, or see `_entries`.
        OSError: if a folder cannot be read.
    """
    refuse_run(folder / inside)
    files: list[File] = []
    omitted = [] if omitted is None else omitted
    for entry in _entries(folder / inside, omitted):
        status, path = entry.stat(), f"{inside}{entry.name}"
        if entry.is_dir():
            if (here := (status.st_dev, status.st_ino)) in above or os.path.samefile(entry.path, folder):
                raise UserError(f"{entry.path}: is a link to a folder that it is in; remove it")
            files += list_files(folder, omitted, f"{path}/", above | {here})
        else:
            files.append(File(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return files


def find_images(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files that are named, and all images in the folders that are named, sorted; lines about what else
    these have.

    Raises:
        UserError: if there is no such file or folder, or no image, or see `list_files`.
    """
    known, found, others, omitted = endings(), [], 0, []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise UserError(f"{path}: no such file or directory")
            found.append(path)
            continue
        with oserror_as_user_error(path):
            files = [path / file for file, *_ in list_files(path, omitted)]
        images = [file for file in files if file.suffix.lower() in known]
        if not images:
            raise UserError(f"{path}: has no images ({', '.join(sorted(known))})")
        found += images
        others += len(files) - len(images)
    left_out = [f"{others} files that are no images are left out"] if others else []
    return found, left_out + say_omitted(omitted)


def has_class_folders(root: Path) -> bool:
    """Return whether a data folder has class folders of images, itself or in `train`, and no data set of another
    format.

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
                f"one: set DATA to another folder, or {by_hand}; a LOADER reads other formats"
            )
        with scratch_folder(root) as scratch:
            fetch(scratch)
            (scratch / made).rename(root / made)
    except (OSError, RuntimeError, ImportError) as error:
        raise UserError(
            f"{asked}: {lacking} and it cannot be downloaded ({reason(error)}); {by_hand}, or unset DATA for the sample"
        ) from None
