"""Caltech101 for a ViT: decoded once into a memory-mapped cache, augmented a batch at a time on the device.

The images (9,144 JPEGs in all, 131 MB) are decoded by all cores when a run first needs them, as RGB squares of
`CACHE_SIZE` pixels, into one file next to them. Your own may have other formats. After that, reading a batch is an
index operation in a background thread, so that training does not wait for data. The augmentation of an image depends
on the seed, the epoch and the image, not on the rank that processes it.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.data.batches import IGNORED, Loader, SampledLoader, read_ahead
from colossal_vit.data.decoding import FORMATS, check_scan, endings, to_rgb
from colossal_vit.data.digits import write_caltech101
from colossal_vit.data.folders import class_folders, download, list_files
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.data.source import build_without_data, describe_data, find_data
from colossal_vit.errors import UserError, in_one_line
from colossal_vit.files import atomic_folder
from colossal_vit.parallel.ranks import RankLogger, raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config
from PIL import Image
from torch import Tensor
from torchvision.datasets import Caltech101
from torchvision.transforms import v2
from tqdm import tqdm

FOLDER = "caltech101/101_ObjectCategories"
NO_CLASS = "BACKGROUND_Google"  # images of no class, which torchvision leaves out, too
DECODER = b"2"  # differs for caches that another version of `decode` made
NUM_TRAINING_IMAGES = 6_941  # four fifths of 8,677, for dry runs
TRAIN_FRACTION, SPLIT_SEED = 0.8, 0
CROP_ASPECT = (3 / 4, 4 / 3)  # as in torchvision's RandomResizedCrop
MEAN = STD = (0.5, 0.5, 0.5)  # the tutorial's


# ---------------------------------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """The files of the data set, sorted.

    Attributes:
        root: the folder of the class folders.
        classes: their names, in the order of the labels.
        paths: relative to `root`.
        sizes: in bytes.
        times: of their last modification, in ns.
        labels: int64, (N,).
        left_out: what else is in these folders, for the log; empty for nothing.
    """

    root: Path
    classes: list[str]
    paths: list[str]
    sizes: list[int]
    times: list[int]
    labels: np.ndarray
    left_out: str

    def digest(self) -> str:
        """A digest of the files' names and sizes, which copying does not change."""
        lines = (f"{path} {size}\n" for path, size in zip(self.paths, self.sizes, strict=True))
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


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
    """All images below `data`, of every format that `decode` reads.

    Raises:
        UserError: if there are no class folders, or one of them is empty or has something else than files.
    """
    root, known = data / FOLDER, endings()
    files, left_out = [], []
    try:
        classes, beside = class_folders(root)
        if NO_CLASS in classes:
            classes.remove(NO_CLASS)
        for label, name in enumerate(classes):
            own, others = [], []
            for file in list_files(root / name):
                (own if Path(file[0]).suffix.lower() in known else others).append(file)
            if not own:
                raise UserError(f"{root / name}: has no images ({', '.join(sorted(known))}); fill it or remove it")
            files += [(f"{name}/{file}", size, time, label) for file, size, time in own]
            left_out += [f"{name}/{file}" for file, *_ in others]
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    if not classes:
        raise UserError(f"{root}: has no class folders")
    paths, sizes, times, labels = map(list, zip(*files, strict=True))
    return Images(root, classes, paths, sizes, times, np.array(labels), _say_left_out(root, beside + left_out))


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
                raise UserError(f"{there}, but 3 are the fewest to train and to test on: add some, or remove the class")
            raise UserError(
                f"{there}, but TRAIN_PER_CLASS = {per_class} needs {per_class + 1}, so that one is left to test: lower "
                f"TRAIN_PER_CLASS, or remove the class"
            )
        train.append(own[:count])
        test.append(own[count:])
    return torch.from_numpy(np.sort(np.concatenate(train))), torch.from_numpy(np.sort(np.concatenate(test)))


def decode(images: Images, size: int, number: int) -> np.ndarray:
    """Image `number`, resized to `size` pixels on its shorter side and centre-cropped: RGB, uint8, (size, size, 3).

    Raises:
        UserError: if it cannot be decoded.
    """
    path = images.root / images.paths[number]
    try:
        with Image.open(path, formats=FORMATS) as image:
            image = to_rgb(image)
        shrunk = v2.functional.resize(image, size, antialias=True)
        return np.asarray(v2.functional.center_crop(shrunk, size))
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


def cache_folder(images: Images, size: int) -> Path:
    """The folder of the decoded images; its name depends on `size` and on the names, sizes and times of the files."""
    digest = hashlib.sha256(DECODER)
    for path, size_in_bytes, time in zip(images.paths, images.sizes, images.times, strict=True):
        digest.update(os.fsencode(f"{path} {size_in_bytes} {time}\n"))
    return images.root.parent / f"decoded-{size}px-{digest.hexdigest()[:12]}"


def open_cache(folder: Path) -> np.ndarray | None:
    """The decoded images, memory-mapped: uint8, (N, S, S, 3); None if they are missing or incomplete."""
    try:
        return np.load(folder / "images.npy", mmap_mode="c")
    except (OSError, ValueError):
        return None


def fill_cache(images: Images, size: int, log: RankLogger) -> None:
    """Decode all images into the cache, unless it exists. It is written atomically, and outdated caches are removed.

    Raises:
        UserError: if an image cannot be decoded, or the disk is full or read-only.
    """
    folder = cache_folder(images, size)
    if open_cache(folder) is not None:
        return
    log.info(f"decoding {len(images.paths)} images into {folder}{', which is damaged' if folder.exists() else ''}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        with atomic_folder(folder) as scratch:
            shape = (len(images.paths), size, size, 3)
            array = np.lib.format.open_memmap(scratch / "images.npy", "w+", np.uint8, shape)
            with open(scratch / "images.npy", "r+b") as file:  # a full disk raises here, but kills with a memory map
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            # Pillow lets other threads run. It warns of what it reads all the same.
            with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                decoded = pool.map(partial(decode, images, size), range(len(array)))
                for number, image in enumerate(tqdm(decoded, "decoding", len(array), unit="img", disable=None)):
                    array[number] = image
                faults = pool.map(find_damage, (images.root / path for path in images.paths))
                damaged = [(path, fault) for path, fault in zip(images.paths, faults, strict=True) if fault]
            if damaged:
                said = in_one_line(f"{images.root / damaged[0][0]}: {damaged[0][1]}")
                log.info(f"{len(damaged)} images are damaged, and grey where pixels are missing; the first is {said}")
            array.flush()
            (scratch / "about.json").write_text(json.dumps({"size": size, "classes": images.classes}) + "\n")
        for other in folder.parent.glob(f"decoded-{size}px-*"):  # outdated: the files have changed since
            if other != folder:
                shutil.rmtree(other)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# In batches
# ---------------------------------------------------------------------------------------------------------------------


def draw_crops(count: int, crop_area: tuple[float, float], flip: bool, generator: torch.Generator) -> Tensor:
    """Random crops as in torchvision's RandomResizedCrop, with `flip` mirrored with probability 0.5.

    Returns:
        float32, (count, 2, 3): affine maps from crop to image coordinates in [-1, 1], for `F.affine_grid`.
    """
    area = torch.empty(count, dtype=torch.float32).uniform_(*crop_area, generator=generator)
    log_ratio = torch.empty(count, dtype=torch.float32).uniform_(*map(math.log, CROP_ASPECT), generator=generator)
    stretch = (log_ratio / 2).exp()
    width, height = ((area.sqrt() * side).clamp(max=1.0) for side in (stretch, 1 / stretch))
    left, top = (torch.rand(count, generator=generator, dtype=torch.float32) * 2 - 1 for _ in range(2))
    mirrored = (torch.rand(count, generator=generator, dtype=torch.float32) < 0.5) & flip
    maps = torch.zeros(count, 2, 3, dtype=torch.float32)
    maps[:, 0, 0] = torch.where(mirrored, -width, width)
    maps[:, 1, 1] = height
    maps[:, 0, 2], maps[:, 1, 2] = left * (1 - width), top * (1 - height)
    return maps


class Batches(SampledLoader):
    """Batches of `(images, labels)` on the device: float32 (B, 3, IMG_SIZE, IMG_SIZE), int64 (B,).

    Args:
        images: uint8, (N, S, S, 3), S at least IMG_SIZE.
        labels: int64, (N,).
        chosen: int64; maps the sampler's indices to the N images.
        sampler, config, device: see `SampledLoader`.
    """

    normalization = MEAN, STD

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        chosen: Tensor,
        sampler: GlobalBatchSampler | EvalSampler,
        config: Config,
        device: torch.device,
    ):
        super().__init__(sampler, config, device)
        self.images, self.labels, self.chosen = images, labels[chosen], chosen

    def _read(self, indices: Tensor, maps: Tensor | None) -> tuple[Tensor, ...]:
        """The tensors of a batch on the CPU: images (B, S, S, 3), labels, and for training the maps of `draw_crops`."""
        which = indices % len(self.labels)
        labels = torch.where(indices < 0, IGNORED, self.labels[which])
        parts = [self.images[self.chosen[which]], labels, *(() if maps is None else [maps[indices]])]
        return tuple(part.pin_memory() for part in parts) if self.device.type == "cuda" else tuple(parts)

    def _crop(self, images: Tensor, maps: Tensor) -> Tensor:
        size = self.config.IMG_SIZE
        grid = F.affine_grid(maps.to(images.dtype), [len(maps), 3, size, size], align_corners=False)
        return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        maps = epoch = None
        if self.train:
            epoch = self.sampler.epoch
            generator = self.sampler.generator(-1 - epoch)  # not the random numbers of the sampling order
            count = len(self.chosen) * self.sampler.repeats
            maps = draw_crops(count, self.config.CROP_AREA, self.config.FLIP, generator)
        for numbers, parts in read_ahead(self.sampler, partial(self._read, maps=maps)):
            images, labels, *own = (part.to(self.device, non_blocking=True) for part in parts)
            images = images.permute(0, 3, 1, 2).float()
            if own and self.augment.does_anything:
                images = self.augment(self._crop(images, *own), numbers, epoch, self.mean, self.std)
            else:
                images = (images - self.mean) / self.std
                size = [self.config.IMG_SIZE] * 2
                images = self._crop(images, *own) if own else v2.functional.center_crop(images, size)
            yield images, labels


def build_caltech101(run: Run) -> tuple[Loader, Loader | None]:
    """Training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot get or read the images.
    """
    if batches := build_without_data(run, "Caltech101", NUM_TRAINING_IMAGES, endless=True):
        return batches
    config: Config = run.config
    root = find_data(run, "Caltech101", lambda folder: write_caltech101(folder).parent, fetch)
    size = config.get("CACHE_SIZE", round(config.IMG_SIZE * 8 / 7))  # 256 for 224, as in the tutorial
    with raise_on_all_ranks():
        images = find_images(root)
        if len(images.classes) > config.NUM_CLASSES:
            raise UserError(f"NUM_CLASSES = {config.NUM_CLASSES}, but {images.root} has {len(images.classes)} classes")
        if size < config.IMG_SIZE:
            raise UserError(f"CACHE_SIZE = {size}: must be at least IMG_SIZE = {config.IMG_SIZE}")
        train, test = split(images, config.get("TRAIN_PER_CLASS"))
        sampler = GlobalBatchSampler(
            len(train), config.BATCH_SIZE, config.gradient_accumulation, config.SEED, repeats=config.REPEATS
        )
    if images.left_out:
        run.log.info(images.left_out)
    run_on_rank_0(lambda: fill_cache(images, size, run.log))
    with raise_on_all_ranks():
        pixels = open_cache(folder := cache_folder(images, size))
        if pixels is None:
            raise UserError(f"{folder}: made by rank 0, cannot be read here: DATA must be a disk that all nodes share")
    describe_data(run, "Caltech101", (len(train), len(test)), images.classes, images.digest(), images.root)
    pixels, labels = torch.from_numpy(pixels), torch.from_numpy(images.labels)
    return (
        Batches(pixels, labels, train, sampler, config, run.device),
        Batches(pixels, labels, test, EvalSampler(len(test), config.BATCH_SIZE), config, run.device),
    )
