"""CIFAR-10 for a ViT: uint8 images in memory, augmented a batch at a time on the device.

The images (180 MB) are read once; after that, a batch is an index operation, so that training never waits for data. The
augmentation of an image depends on the seed, the epoch and the image, not on the rank that processes it, so that every
layout trains on the same images.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.config.settings import Setting, Settings
from colossal_vit.config.types import whole
from colossal_vit.data.batches import IGNORED, Loader, SampledLoader, sees_images
from colossal_vit.data.devices import to_device
from colossal_vit.data.digits import DIGITS, GreyImages, digits
from colossal_vit.data.folders import download
from colossal_vit.data.identity import record_dataset, resolve_num_classes
from colossal_vit.data.loaders import data_folder
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError, oserror_as_user_error
from colossal_vit.files import atomic_folder
from colossal_vit.parallel.collectives import RankLogger, raise_on_all_ranks
from colossal_vit.run import Run
from colossalai.context import Config
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import download_and_extract_archive

ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
SETTINGS: Settings = {
    "CROP_PADDING": Setting(whole(0, 32), "pixels of border, of 32, that a random crop may reach into", 4),
}
MARKS = (FOLDER, CIFAR10.base_folder)  # the latter is the Python version's
NUM_IMAGES, NUM_CLASSES = 50_000, 10
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
IMAGE_SHAPE = (3, 32, 32)
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes
# Each channel's, over CIFAR-10's training set.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


# ---------------------------------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------------------------------


def fetch(root: Path, log: RankLogger) -> None:
    """Download the images to `root`, unless it has `cifar-10-batches-bin` or `cifar-10-batches-py`.

    Raises:
        UserError: if they cannot be downloaded.
    """
    if any((root / folder).is_dir() for folder in MARKS):
        return

    def download_to(scratch: Path) -> None:
        log.info(f"downloading CIFAR-10 to {root}")
        download_and_extract_archive(ARCHIVE, str(scratch), md5=ARCHIVE_MD5)

    download(root, FOLDER, download_to, f"has no {FOLDER}/", f"unpack {ARCHIVE} there by hand")


def write_sample(folder: Path) -> Path:
    """Write the digits sample to a folder, unless it is there; returns what DATA would be for it."""
    return write_images(folder).parent


def write_images(root: Path, read: Callable[[int], GreyImages] = digits, names: Sequence[str] = DIGITS) -> Path:
    """Write images in the binary format to `root/cifar-10-batches-bin`, unless it exists; returns this folder.

    Each record is a label byte and three planes of 32 x 32 bytes; the three are equal, since the images are grey.

    Args:
        root: where the folder is to be.
        read: the images, of a side in pixels.
        names: of the classes.
    """
    folder = root / FOLDER
    if folder.is_dir():
        return folder
    train_images, train_labels, test_images, test_labels = read(32)

    def records(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        plane = images.reshape(len(images), -1)
        return np.column_stack([labels.astype(np.uint8), plane, plane, plane])

    with atomic_folder(folder) as scratch:
        for name, part in zip(TRAIN_FILES, np.array_split(records(train_images, train_labels), 5), strict=True):
            part.tofile(scratch / name)
        records(test_images, test_labels).tofile(scratch / TEST_FILES[0])
        (scratch / "batches.meta.txt").write_text("".join(f"{name}\n" for name in names))
    return folder


def read(root: Path, train: bool) -> tuple[Tensor, Tensor, str]:
    """Read one split.

    Returns:
        images: uint8, (N, 3, 32, 32).
        labels: int64, (N,).
        digest: of images and labels, the same for the binary and the Python version of the files.

    Raises:
        UserError: if a file is missing, truncated or not CIFAR-10, naming it.
    """
    if not (root / FOLDER).is_dir():
        try:
            dataset = CIFAR10(str(root), train=train)  # checks the MD5 of each file before it reads it
        except OSError as error:
            raise UserError(f"{root / CIFAR10.base_folder}: {error}") from None
        except RuntimeError:
            folder = root / CIFAR10.base_folder
            raise UserError(f"{folder}: a file is missing or corrupt; unpack {CIFAR10.url} again there") from None
        images, labels = dataset.data.transpose(0, 3, 1, 2), np.array(dataset.targets, dtype=np.uint8)
        return _split_records(np.concatenate([labels[:, None], images.reshape(len(labels), -1)], axis=1))
    parts = []
    for name in TRAIN_FILES if train else TEST_FILES:
        path = root / FOLDER / name
        if path.exists() and not path.is_file():  # reading a FIFO would wait for whoever writes to it
            raise UserError(f"{path}: is not a file; put CIFAR-10's there")
        with oserror_as_user_error(path):
            content = np.fromfile(path, dtype=np.uint8)
        if content.size == 0 or content.size % RECORD_BYTES:
            raise UserError(
                f"{path}: {content.size} bytes are not a whole number of {RECORD_BYTES}-byte images; cut off?"
            )
        parts.append(content.reshape(-1, RECORD_BYTES))
    records = np.concatenate(parts)
    if records[:, 0].max() > 9:
        raise UserError(f"{root / FOLDER}: a label of {records[:, 0].max()}; CIFAR-10 has 0 to 9")
    return _split_records(records)


def class_names(root: Path) -> list[str]:
    """Return the names of the classes in the order of their labels; empty if no file beside the images has them."""
    if not (root / FOLDER).is_dir():
        return list(NAMES)  # of the Python version, whose files are the official ones
    path = root / FOLDER / "batches.meta.txt"
    return path.read_text(errors="replace").strip().splitlines() if path.is_file() else []


def _split_records(records: np.ndarray) -> tuple[Tensor, Tensor, str]:
    """Return the result of `read` from uint8 records (N, RECORD_BYTES)."""
    digest = hashlib.sha256(records).hexdigest()
    records = torch.from_numpy(records)
    return records[:, 1:].reshape(-1, *IMAGE_SHAPE).contiguous(), records[:, 0].long(), digest


# ---------------------------------------------------------------------------------------------------------------------
# In batches
# ---------------------------------------------------------------------------------------------------------------------


class Cifar10Loader(SampledLoader):
    """Batches of `(images, labels)` on the device, for this rank's place in the layout.

    Images are float32 of shape (B, 3, IMG_SIZE, IMG_SIZE), labels int64 of shape (B,). Pipeline stages after the first
    get the indices in place of the images, which they do not use.

    Args:
        images: uint8, (N, 3, 32, 32).
        labels: int64, (N,).
        sampler, config, device: see `SampledLoader`.
    """

    usual = MEAN, STD

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        sampler: GlobalBatchSampler | EvalSampler,
        config: Config,
        device: torch.device,
    ):
        super().__init__(sampler, config, device)
        self.first_stage = sees_images()
        self.images = images.to(device) if self.first_stage else None
        self.labels = labels.to(device)

    def draw_augmentation(self) -> tuple[Tensor, Tensor]:
        """Per copy of each image in this epoch: offsets of its crop in pixels (N, 2), and whether mirrored (N,)."""
        count = len(self.labels) * self.sampler.repeats
        generator = self.sampler.generator(-1 - self.sampler.epoch)  # not the random numbers of the sampling order
        shifts = torch.randint(0, 2 * self.config.CROP_PADDING + 1, (count, 2), generator=generator)
        mirrored = torch.rand(count, generator=generator, dtype=torch.float32) < 0.5
        return to_device(shifts, self.device), to_device(mirrored, self.device)

    def _crop(self, images: Tensor, shifts: Tensor, mirrored: Tensor) -> Tensor:
        if padding := self.config.CROP_PADDING:
            batch, _, height, width = images.shape
            padded = F.pad(images, [padding] * 4)
            rows = shifts[:, :1] + torch.arange(height, device=self.device)  # (B, H)
            columns = shifts[:, 1:] + torch.arange(width, device=self.device)  # (B, W)
            which = torch.arange(batch, device=self.device)[:, None, None]
            images = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if self.config.FLIP:
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        return images

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.train:
            epoch, (shifts, mirrored) = self.sampler.epoch, self.draw_augmentation()
        for numbers in self.sampler:
            indices = to_device(numbers, self.device)
            images = indices % len(self.labels)
            labels = torch.where(indices < 0, IGNORED, self.labels[images])
            if not self.first_stage:
                yield indices, labels
                continue
            images = self.images[images]
            if self.train:
                images = self._crop(images, shifts[indices], mirrored[indices])
            if self.train and self.augment.does_anything:
                images = self.augment(images, numbers, epoch, self.mean, self.std)
            else:
                images = (images.float() - self.mean) / self.std
            if images.shape[-1] != self.config.IMG_SIZE:
                images = F.interpolate(images, size=self.config.IMG_SIZE, mode="bilinear", antialias=True)
            yield images, labels


def build(run: Run) -> tuple[Loader, Loader]:
    """Return training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot read the images.
    """
    config, root = run.config, data_folder(run, "CIFAR-10", write_sample, fetch)
    with raise_on_all_ranks():
        images, labels, digest = read(root, train=True)
        test_images, test_labels, test_digest = read(root, train=False)
        names, classes = class_names(root), int(torch.cat([labels, test_labels]).max()) + 1
        classes = names if len(names) >= classes else [str(label) for label in range(classes)]
        resolve_num_classes(config, len(classes), root)
        sampler = GlobalBatchSampler(
            len(labels), config.BATCH_SIZE, config.gradient_accumulation, config.SEED, repeats=config.REPEATS
        )
    counts, digests = (len(labels), len(test_labels)), f"{digest} {test_digest}"
    record_dataset(run, "CIFAR-10", counts, classes, digests, root)
    test_sampler = EvalSampler(len(test_labels), config.BATCH_SIZE)
    return (
        Cifar10Loader(images, labels, sampler, config, run.device),
        Cifar10Loader(test_images, test_labels, test_sampler, config, run.device),
    )
