"""The image files in class folders: found, split into those to train and to test on, decoded, and kept decoded.

All cores decode the images when a run first needs them, as RGB squares of the config's CACHE_SIZE pixels, into one
memory-mapped file.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
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
from colossal_vit.data.folders import advice_without_images, class_folders, list_files
from colossal_vit.errors import UserError, blame, in_one_line
from colossal_vit.files import atomic_folder, write_text
from colossal_vit.parallel.ranks import RankLogger
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from tqdm import tqdm

DECODER = b"3"  # differs for caches that another version of `decode` made
TRAIN_FRACTION, SPLIT_SEED = 0.8, 0


class Images(NamedTuple):
    """The files of a data set, sorted.

    Attributes:
        root: the folder that `paths` are relative to.
        caches: the folder in which decoded images are kept.
        classes: their names, in the order of the labels.
        paths: of the files.
        sizes: in bytes.
        times: of their last modification, in ns.
        labels: int64, (N,).
        left_out: what else is in these folders, for the log; empty for nothing.
    """

    root: Path
    caches: Path
    classes: list[str]
    paths: list[str]
    sizes: list[int]
    times: list[int]
    labels: np.ndarray
    left_out: str

    def versions(self) -> list[str]:
        """Name, size and time of each file: what changes with its content."""
        return list(map("{} {} {}".format, self.paths, self.sizes, self.times))

    def digest(self) -> str:
        """A digest of the files' names and sizes, which copying does not change."""
        lines = (f"{path} {size}\n" for path, size in zip(self.paths, self.sizes, strict=True))
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def find_images(root: Path, caches: Path, parts: Sequence[str] = ("",), skip: str | None = None) -> Images:
    """All images in class folders, of every format that `decode` reads.

    Args:
        root: a folder of class folders, or of folders of them.
        caches: see `Images`.
        parts: those folders of class folders; the classes are those of the first one.
        skip: the name of a folder that is no class.

    Raises:
        UserError: if there are no class folders, or one of them has no images, is in another part only, or is a run
            directory.
    """
    known = endings()
    classes: list[str] = []
    files, left_out = [], []
    with blame(root):
        for part in parts:
            names, beside = class_folders(root / part)
            names = [name for name in names if name != skip]
            if not names:
                raise UserError(f"{root / part}: has no class folders")
            classes = classes or names
            if others := sorted(set(names) - set(classes)):
                raise UserError(f"{root / part / others[0]}: there is no such class in {root / parts[0]}")
            left_out += [os.path.join(part, file) for file in beside]
            for name in names:
                folder = os.path.join(part, name)
                own, others = [], []
                for file in list_files(root / folder):
                    (own if Path(file[0]).suffix.lower() in known else others).append(file)
                if not own:
                    kinds = ", ".join(sorted(known))
                    raise UserError(f"{root / folder}: has no images ({kinds}); {advice_without_images(root / folder)}")
                files += [(f"{folder}/{file}", size, time, classes.index(name)) for file, size, time in own]
                left_out += [f"{folder}/{file}" for file, *_ in others]
    paths, sizes, times, labels = map(list, zip(*files, strict=True))
    said = _say_left_out(root, left_out)
    return Images(root, caches, classes, paths, sizes, times, np.array(labels), said)


def _say_left_out(root: Path, files: list[str]) -> str:
    """A line about files that are no images; empty if there are none."""
    if not files:
        return ""
    kinds = Counter(Path(path).suffix.lower() or "no ending" for path in files)
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    first = in_one_line(str(root / files[0]))
    return f"{len(files)} files that are no images are left out ({counts}), the first is {first}"


def split(images: Images, per_class: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices for training and for testing, the same in every run.

    Caltech101 comes without a split. By default four fifths of each class are for training; the paper of the data set
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


def digest_contents(images: Images, log: RankLogger) -> list[str]:
    """A digest of the content of each image file. All cores read; what they find is kept for files that do not change.

    Raises:
        UserError: if one cannot be read.
    """
    kept = images.caches / "contents.json"
    try:
        known = typed_json.read(kept, dict[str, str])
    except UserError:  # missing, or damaged
        known = {}

    def read(path: str) -> str:
        with blame(images.root / path), open(images.root / path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    keys = list(map(ascii, images.versions()))  # names need not be UTF-8, but JSON is
    if new := {key: path for key, path in zip(keys, images.paths, strict=True) if key not in known}:
        log.info(f"splitting {len(keys)} images by their content")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = tqdm(pool.map(read, new.values()), "reading", len(new), unit="img", disable=None)
            known |= dict(zip(new, found, strict=True))
        with suppress(OSError):  # the disk may be full or read-only: then they are read again
            images.caches.mkdir(exist_ok=True)
            write_text(kept, json.dumps({key: known[key] for key in keys}))
    return [known[key] for key in keys]


def split_by_content(images: Images, digests: Sequence[str], fraction: float) -> tuple[Tensor, Tensor]:
    """Indices for training and for testing: of each class the images with the smallest digests are for testing.

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
    except MemoryError:  # has no text
        raise UserError(f"{path}: cannot be decoded: out of memory; scale it down or remove it") from None
    except Exception as error:  # decoders raise nearly any exception for a broken file
        raise UserError(f"{path}: cannot be decoded: {error}; repair or remove it") from None


def find_damage(path: Path) -> str | None:
    """What is wrong with the pixels of a JPEG that `decode` takes; it fills those that are missing with grey."""
    data = path.read_bytes()
    try:
        if data.startswith(b"\xff\xd8"):
            with Image.open(path, formats=FORMATS) as image:
                check_scan(data, cmyk=image.mode == "CMYK")
    except ValueError as error:
        return str(error)
    return None


def cache_folder(images: Images, size: int, img_size: int) -> Path:
    """The folder of the decoded images, see `decode`; its name depends on the names, sizes and times of the files."""
    digest = hashlib.sha256(DECODER)
    for version in images.versions():
        digest.update(os.fsencode(f"{version}\n"))
    return images.caches / f"decoded-{size}px-{img_size}px-{digest.hexdigest()[:12]}"


def open_cache(folder: Path) -> np.ndarray | None:
    """The decoded images, memory-mapped: uint8, (N, S, S, 3); None if they are missing or incomplete."""
    try:
        return np.load(folder / "images.npy", mmap_mode="c")
    except (OSError, ValueError):
        return None


def fill_cache(images: Images, size: int, img_size: int, log: RankLogger) -> bool:
    """Decode all images into the cache, unless it exists. It is written atomically, and outdated caches are removed.

    Returns:
        Whether it is there: not on a disk that is full or read-only.

    Raises:
        UserError: if an image cannot be decoded.
    """
    folder = cache_folder(images, size, img_size)
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
            # Pillow lets other threads run. It warns of what it reads all the same.
            threads = len(os.sched_getaffinity(0))
            with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(threads) as pool:
                decoded = read_ahead(range(len(array)), partial(decode, images, size, img_size), threads)
                for number, image in tqdm(decoded, "decoding", len(array), unit="img", disable=None):
                    array[number] = image
                faults = pool.map(find_damage, (images.root / path for path in images.paths))
                damaged = [(path, fault) for path, fault in zip(images.paths, faults, strict=True) if fault]
            if damaged:
                said = in_one_line(f"{images.root / damaged[0][0]}: {damaged[0][1]}")
                log.info(f"{len(damaged)} images are damaged, and grey where pixels are missing; the first is {said}")
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
        """The images with these numbers, (B,): uint8, (B, S, S, 3)."""
        return torch.from_numpy(np.stack(list(self.pool.map(self.decode, numbers.tolist()))))
