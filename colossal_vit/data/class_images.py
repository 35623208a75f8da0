"""The image files in class folders: found, split into those to train and to test on, checked, and kept decoded.

All cores decode the images when a run first needs them, as RGB squares of the config's CACHE_SIZE pixels, into one
memory-mapped file. What is kept of a file is found by its content, so that no other image is ever taken for it.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from colossal_vit import typed_json
from colossal_vit.data.batches import read_ahead
from colossal_vit.data.cropping import middle, trim
from colossal_vit.data.decoding import FORMATS, check_scan, endings, read_rgb
from colossal_vit.data.folders import (
    TEST,
    VALIDATION,
    advice_without_images,
    by_class,
    class_folders,
    composed,
    list_files,
    say_omitted,
    say_untested,
)
from colossal_vit.errors import UserError, in_one_line, oserror_as_user_error, reason
from colossal_vit.files import atomic_folder, write_bytes, write_text
from colossal_vit.parallel.collectives import RankLogger
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from tqdm import tqdm

DECODER = b"4"  # differs for caches that another version of `decode` made
CONTENTS, CHECKED, DAMAGED = "contents.json", "checked.json", "damaged.txt"  # files beside the decoded images
ONE_COLOUR = "is of one colour"


class Images(NamedTuple):
    """The files of a data set, sorted.

    Attributes:
        root: the folder that `paths` are relative to.
        caches: the folder in which decoded images are kept.
        classes: their names, in the order of the labels.
        paths: of the files.
        sizes: in bytes.
        versions: path and what else the file system knows of each file, which is another for another content.
        labels: int64, (N,).
        left_out: lines for the log about what else is in these folders, and what is missing.
    """

    root: Path
    caches: Path
    classes: list[str]
    paths: list[str]
    sizes: list[int]
    versions: list[str]
    labels: np.ndarray
    left_out: list[str]

    def digest(self) -> str:
        """Return a digest of the files' names and sizes, which copying does not change."""
        lines = (f"{composed(path)} {size}\n" for path, size in zip(self.paths, self.sizes, strict=True))
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def find_images(root: Path, caches: Path, parts: Sequence[str] = ("",), skip: str | None = None) -> Images:
    """Return all images in class folders, of every format that `decode` reads.

    Args:
        root: a folder of class folders, or of folders of them.
        caches: see `Images`.
        parts: those folders of class folders; the classes are those of the first one.
        skip: the name of a folder that is no class.

    Raises:
        UserError: if there are no class folders, or one of them is in another part only, has no images in the first, or
            is a run directory.
    """
    known = endings()
    classes: list[str] = []
    files, left_out, omitted, untested = [], [], [], []
    with oserror_as_user_error(root):
        for part in parts:
            names, beside = class_folders(root / part, omitted)
            folders = by_class(name for name in names if name != skip)
            if not folders:
                raise UserError(f"{root / part}: has no class folders")
            classes = classes or list(folders)
            if others := sorted(folders.keys() - set(classes)):
                folder = root / part / folders[others[0]][0]
                raise UserError(f"{folder}: there is no such class in {root / parts[0]}; add it there, or remove it")
            left_out += [os.path.join(part, file) for file in beside]
            found = [
                (label, os.path.join(part, folder, file.path), file)
                for label, name in enumerate(classes)
                for folder in folders.get(name, ())
                for file in list_files(root / part / folder, omitted)
            ]
            images = [entry for entry in found if Path(entry[1]).suffix.lower() in known]
            left_out += [path for _, path, _ in found if Path(path).suffix.lower() not in known]
            there = {label for label, *_ in images}
            lacking = [name for label, name in enumerate(classes) if label not in there]
            if lacking and (part == parts[0] or not there):
                folder = root / part / (folders[lacking[0]][0] if part == parts[0] else "")
                kinds = ", ".join(sorted(known))
                raise UserError(f"{folder}: has no images ({kinds}); {advice_without_images(folder)}")
            untested += say_untested(root / part, lacking, len(classes))
            files += images
    labels, paths, found = zip(*files, strict=True)
    versions = [" ".join(map(str, (path, *file[1:]))) for path, file in zip(paths, found, strict=True)]
    said = [*_say_left_out(root, left_out), *say_omitted(omitted), *untested]
    return Images(root, caches, classes, list(paths), [file.size for file in found], versions, np.array(labels), said)


def find_parts(root: Path) -> tuple[list[str], list[str]]:
    """Return which folders in a data folder have class folders.

    Returns:
        Those to train on and to evaluate on, only one if that is to be split, "" for the data folder itself; the names
        of others, which are not read.

    Raises:
        UserError: if it is not clear which one is to evaluate on.
    """
    if not (root / "train").is_dir():
        return [""], []
    tests = [name for name in (*VALIDATION, TEST) if (root / name).is_dir()]
    if tests[1:] and tests[1] != TEST:
        raise UserError(f"{root}: has {tests[0]} and {tests[1]}; only one can be to evaluate on")
    with oserror_as_user_error(root):
        others = [name for name in class_folders(root)[0] if name != "train"]
    if others and not tests:
        raise UserError(
            f"{root}: has {others[0]} beside train: call it val if it is to evaluate on, or move all into train if "
            f"they are classes"
        )
    return ["train", *tests[:1]], [name for name in others if name not in tests[:1]]


def _say_left_out(root: Path, files: list[str]) -> list[str]:
    """Return a line about files that are no images; none if there are none."""
    if not files:
        return []
    kinds = Counter(Path(path).suffix.lower() or "no ending" for path in files)
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    first = in_one_line(str(root / files[0]))
    return [f"{len(files)} files that are no images are left out ({counts}), the first is {first}"]


def split_by_folder(images: Images) -> tuple[Tensor, Tensor]:
    """Return indices of the images in `train`, and of the others."""
    of_train = np.array([path.startswith("train/") for path in images.paths])
    return torch.from_numpy(np.flatnonzero(of_train)), torch.from_numpy(np.flatnonzero(~of_train))


def digest_contents(images: Images, log: RankLogger) -> list[str]:
    """Return a digest of the content of each image file. All cores read; what they find is kept for files that do not
    change.

    Raises:
        UserError: if one cannot be read.
    """
    known = _read_kept(images, CONTENTS, dict[str, str])

    def read(path: str) -> str:
        with oserror_as_user_error(images.root / path), open(images.root / path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    keys = list(map(ascii, images.versions))  # names need not be UTF-8, but JSON is
    if new := {key: path for key, path in zip(keys, images.paths, strict=True) if key not in known}:
        log.info(f"reading {len(new)} images")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = tqdm(pool.map(read, new.values()), "reading", len(new), unit="img", disable=None)
            known |= dict(zip(new, found, strict=True))
        _keep(images, CONTENTS, {key: known[key] for key in keys})
    return [known[key] for key in keys]


def digest_side(digests: Sequence[str], chosen: Tensor) -> str:
    """Return a digest of the contents of the images with these numbers, (N,), in this order."""
    return hashlib.sha256("".join(digests[number] for number in chosen.tolist()).encode()).hexdigest()


def say_copies(images: Images, digests: Sequence[str], train: Tensor, test: Tensor) -> Iterator[str]:
    """Yield lines about images of the same content on both sides of the split, and in two classes.

    Args:
        images: the files.
        digests: of their contents.
        train, test: numbers of the images on each side, int64.
    """

    def name(number: int) -> str:
        return in_one_line(images.paths[number])

    trained = {digests[number]: number for number in reversed(train.tolist())}
    if both := [number for number in test.tolist() if digests[number] in trained]:
        first = f"{name(both[0])}, which is {name(trained[digests[both[0]]])}"
        yield f"{len(both)} of {len(test)} test images are training images too, the first is {first}"
    firsts = {digest: number for number, digest in reversed(list(enumerate(digests)))}
    pairs = [(number, firsts[digest]) for number, digest in enumerate(digests)]
    if pairs := [pair for pair in pairs if images.labels[pair[0]] != images.labels[pair[1]]]:
        first = " and ".join(map(name, reversed(pairs[0])))
        yield f"{len(pairs)} images are in another class too, the first is {first}"


def _read_kept(images: Images, name: str, kind: type[dict]) -> dict:
    """Return what a file beside the images has; empty if it is missing, damaged or of another version."""
    try:
        return typed_json.read(images.caches / name, kind)
    except UserError:
        return {}


def _keep(images: Images, name: str, value: dict) -> None:
    """Write a file beside the images, unless the disk is full or read-only: then they are read again."""
    with suppress(OSError):
        images.caches.mkdir(exist_ok=True)
        write_text(images.caches / name, json.dumps(value))


def split_by_content(images: Images, digests: Sequence[str], fraction: float) -> tuple[Tensor, Tensor]:
    """Return indices for training and for testing: of each class the images with the smallest digests are for testing.

    So the split is the same whatever the files are called and wherever they lie, an image more changes it only little,
    and copies of an image are on the same side.

    Args:
        images: of which classes.
        digests: see `digest_contents`.
        fraction: share of each class to test on.

    Raises:
        UserError: if a class has too few different images for both.
    """
    test = np.zeros(len(digests), bool)
    for label, name in enumerate(images.classes):
        own = sorted(np.flatnonzero(images.labels == label), key=lambda number: digests[number])
        count = max(round(len(own) * fraction), 1)
        while count < len(own) and digests[own[count]] == digests[own[count - 1]]:
            count += 1
        if count >= len(own):
            raise UserError(
                f"{images.root / name}: has {len(own)} image{'s'[: len(own) > 1]}, too few different ones to train and "
                f"to test on: add some, or leave it out"
            )
        test[own[:count]] = True
    return torch.from_numpy(np.flatnonzero(~test)), torch.from_numpy(np.flatnonzero(test))


def decode(images: Images, size: int, img_size: int, number: int) -> np.ndarray:
    """Image `number`, resized to `size` pixels on its shorter side and cropped: RGB, uint8, (size, size, 3).

    The centre of this square is that of the whole image, if it is cropped to `img_size` pixels.

    Raises:
        UserError: if it cannot be decoded.
    """
    path = images.root / images.paths[number]
    try:
        shrunk = v2.functional.resize(trim(read_rgb(path)), size, antialias=True)
        # Two centre crops, each rounded, may be a pixel beside the one that timm's transform makes.
        top, left = middle(v2.functional.get_size(shrunk), img_size) - middle(size, img_size)
        return np.asarray(v2.functional.crop(shrunk, top, left, size, size))
    except Exception as error:  # decoders raise nearly any exception for a broken file
        raise UserError(f"{path}: cannot be decoded: {reason(error)}; repair or remove it") from None


def find_damage(path: Path) -> str | None:
    """Return what is wrong with the pixels of a JPEG that `decode` takes; it fills those that are missing with grey."""
    data = path.read_bytes()
    try:
        if data.startswith(b"\xff\xd8"):
            with Image.open(path, formats=FORMATS) as image:
                check_scan(data, cmyk=image.mode == "CMYK")
    except ValueError as error:
        return str(error)
    return None


def _examine(images: Images, size: int, img_size: int, number: int) -> tuple[np.ndarray | None, str]:
    """Return what `decode` returns, None if it cannot, and what is to be said of the image; empty for nothing."""
    path = images.root / images.paths[number]
    try:
        pixels = decode(images, size, img_size, number)
        with oserror_as_user_error(path):
            if damage := find_damage(path):
                return pixels, damage
            # What is cut off may have other colours.
            plain = (pixels == pixels[0, 0]).all() and all(low == high for low, high in read_rgb(path).getextrema())
            return pixels, ONE_COLOUR if plain else ""
    except UserError as error:
        return None, str(error)


def check_images(
    images: Images,
    digests: Sequence[str],
    size: int,
    img_size: int,
    log: RankLogger,
    array: np.ndarray | None = None,
) -> tuple[dict[int, str], dict[int, str]]:
    """Decode all images; without `array` only those of contents that have not been decoded before.

    Args:
        images: the files.
        digests: of their contents.
        size, img_size: see `decode`.
        log: says how many are decoded.
        array: gets the pixels, (N, size, size, 3).

    Returns:
        Why images cannot be decoded, and what is odd about others; each by its number.
    """
    version = DECODER.decode()
    known = _read_kept(images, CHECKED, dict[str, dict[str, str]]).get(version, {})
    numbers = [number for number, digest in enumerate(digests) if array is not None or digest not in known]
    faults: dict[int, str] = {}
    if numbers:
        if array is None:
            log.info(f"checking {len(numbers)} images")
        threads = len(os.sched_getaffinity(0))
        # Pillow lets other threads run. It warns of what it reads all the same.
        with warnings.catch_warnings(action="ignore"):
            examined = read_ahead(numbers, partial(_examine, images, size, img_size), threads)
            for number, (pixels, said) in tqdm(examined, "decoding", len(numbers), unit="img", disable=None):
                if pixels is None:
                    faults[number] = said
                    continue
                known[digests[number]] = said
                if array is not None:
                    array[number] = pixels
        _keep(images, CHECKED, {version: {digest: known[digest] for digest in digests if digest in known}})
    return faults, {number: known[digest] for number, digest in enumerate(digests) if known.get(digest)}


def say_odd(images: Images, odd: dict[int, str]) -> Iterator[str]:
    """Yield lines about images that can be decoded, but perhaps not as they should be, see `check_images`."""
    grey, plain = {}, {}
    for number, what in sorted(odd.items()):
        path = in_one_line(str(images.root / images.paths[number]))
        (plain if what == ONE_COLOUR else grey)[path] = what
    for path, what in list(grey.items())[:1]:
        yield f"{len(grey)} images are damaged, and grey where pixels are missing; the first is {path}: {what}"
    for path in list(plain)[:1]:
        yield f"{len(plain)} images are of one colour, the first is {path}"


def refuse_damaged(images: Images, faults: dict[int, str], log: RankLogger) -> None:
    """Refuse images that cannot be decoded, and list all of them in a file; or in the log, if it cannot be written.

    Raises:
        UserError: if there are any, see `check_images`.
    """
    listed = images.caches / DAMAGED
    if not faults:
        with suppress(OSError):
            listed.unlink(missing_ok=True)
        return
    lines = [in_one_line(faults[number]) for number in sorted(faults)]
    try:
        images.caches.mkdir(exist_ok=True)
        write_bytes(listed, os.fsencode("".join(f"{line}\n" for line in lines)))
        where = f"listed in {listed}"
    except OSError:
        for line in lines:
            log.info(line)
        where = "listed above"
    raise UserError(f"{lines[0]}. Images that cannot be decoded: {len(lines)}, {where}")


def cache_folder(images: Images, digests: Sequence[str], size: int, img_size: int) -> Path:
    """Return the folder of the decoded images, see `decode`; its name depends on the sizes and the contents of the
    files.
    """
    digest = hashlib.sha256(DECODER + "".join(digests).encode())
    return images.caches / f"decoded-{size}px-{img_size}px-{digest.hexdigest()[:12]}"


def open_cache(folder: Path) -> np.ndarray | None:
    """Return the decoded images, memory-mapped: uint8, (N, S, S, 3); None if they are missing or incomplete."""
    try:
        return np.load(folder / "images.npy", mmap_mode="c")
    except (OSError, ValueError):
        return None


def fill_cache(images: Images, digests: Sequence[str], size: int, img_size: int, log: RankLogger) -> bool:
    """Decode all images into the cache, unless it exists. It is written atomically, and outdated caches are removed.

    Returns:
        Whether it is there: not on a disk that is full or read-only.

    Raises:
        UserError: if images cannot be decoded.
    """
    folder = cache_folder(images, digests, size, img_size)
    if open_cache(folder) is not None:
        return True
    log.info(f"decoding {len(images.paths)} images into {folder}{', which is damaged' if folder.exists() else ''}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        images.caches.mkdir(exist_ok=True)
        with atomic_folder(folder) as scratch:
            shape = (len(images.paths), size, size, 3)
            array = np.lib.format.open_memmap(scratch / "images.npy", "w+", np.uint8, shape)
            with open(scratch / "images.npy", "r+b") as file:  # a full disk raises here, but kills with a memory map
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            faults, _ = check_images(images, digests, size, img_size, log, array)
            refuse_damaged(images, faults, log)
            array.flush()
        outdated = re.compile(rf"decoded-{size}px-({img_size}px-)?\w+")  # the files or this program have changed since
        for other in folder.parent.iterdir():
            if outdated.fullmatch(other.name) and other != folder:
                shutil.rmtree(other)
    except OSError as error:
        log.info(f"{folder}: cannot be written: {error.strerror or error}; images are decoded for each batch")
        return False
    return True


class Decoded:
    """Images that all cores decode when they are asked for, with the pixels that the cache would have.

    Args:
        images: the files.
        size, img_size: see `decode`.
    """

    def __init__(self, images: Images, size: int, img_size: int):
        self.decode = partial(decode, images, size, img_size)
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def __getitem__(self, numbers: Tensor) -> Tensor:
        """Return the images with these numbers, (B,): uint8, (B, S, S, 3)."""
        return torch.from_numpy(np.stack(list(self.pool.map(self.decode, numbers.tolist()))))
