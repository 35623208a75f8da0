"""Data loaders: what all have in common, and which rank needs images."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from colossal_vit.data.augment import Augment
from colossal_vit.data.devices import to_device
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor

IGNORED = -100  # the label that torch's cross entropy ignores


def sees_images() -> bool:
    """Tell whether this rank's pipeline stage takes images; the others look at labels only, if at all."""
    return not gpc.is_initialized(ParallelMode.PIPELINE) or gpc.is_first_rank(ParallelMode.PIPELINE)


def read_ahead(keys: Iterable[Any], read: Callable[[Any], Any], num_threads: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yield each key and what `read` returns for it, which threads do for the next ones while this one is in use."""
    # Not in `with`, which would wait for the threads: if the garbage collector closes this generator while a thread
    # starts, both wait for the same lock. The threads of an unreferenced pool end by themselves.
    pool = ThreadPoolExecutor(num_threads)
    reading: deque[tuple[Any, Future]] = deque()
    for key in keys:
        reading.append((key, pool.submit(read, key)))
        if len(reading) > num_threads:
            first, future = reading.popleft()
            yield first, future.result()
    for key, future in reading:
        yield key, future.result()


Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


class Loader:
    """Batches of `(images, labels)` on the device, and where among them training is, so that a run resumes.

    Attributes:
        normalization: mean and standard deviation of each channel, which images were normalised with; None for none.
    """

    normalization: Normalization | None = None

    def __len__(self) -> int:
        """Batches of an epoch, on this rank."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the next epoch, or what `seek` has left of it."""
        raise NotImplementedError

    def seek(self, epoch: int, start: int) -> None:
        """Go to batch `start` of `epoch`. All that is drawn for a batch depends on them and the seed only."""


class SampledLoader(Loader):
    """A loader whose batches are those of a sampler.

    Args:
        sampler: yields the indices of each batch; those of a `GlobalBatchSampler` are for training.
        config: of the run.
        device: of the batches.
    """

    usual: Normalization  # unless the config has MEAN or STD

    def __init__(self, sampler: GlobalBatchSampler | EvalSampler, config: Config, device: torch.device):
        self.sampler, self.config, self.device = sampler, config, device
        # Set in the config, so that it is on record.
        self.normalization = config.setdefault("MEAN", self.usual[0]), config.setdefault("STD", self.usual[1])

    @cached_property
    def augment(self) -> Augment:
        """What is done to images for training."""
        return Augment(self.config)

    def _of_channels(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, device=self.device).view(3, 1, 1) * 255

    @cached_property
    def mean(self) -> Tensor:
        """What is subtracted from images, (3, 1, 1)."""
        return self._of_channels(self.normalization[0])

    @cached_property
    def std(self) -> Tensor:
        """What images are then divided by, (3, 1, 1)."""
        return self._of_channels(self.normalization[1])

    @property
    def train(self) -> bool:
        """Whether its images are for training."""
        return isinstance(self.sampler, GlobalBatchSampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def seek(self, epoch: int, start: int) -> None:
        self.sampler.seek(epoch, start)

    def pick(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels by their numbers (B,), as evaluated; on a rank of the first pipeline stage."""
        other = copy.copy(self)
        other.sampler = numbers.split(self.config.BATCH_SIZE)  # DALI makes no larger batches
        images, labels = zip(*other, strict=True)
        return torch.cat(images), torch.cat(labels)

    def name_of(self, number: int) -> str:
        """Return what the image with this number is called."""
        return f"image {number}"


class LoaderWrapper(Loader):
    """A loader that changes the batches of another one, and resumes with it.

    Args:
        loader: the other one.
    """

    def __init__(self, loader: Loader):
        self.loader = loader

    @property
    def normalization(self):
        return self.loader.normalization

    def __len__(self) -> int:
        return len(self.loader)

    def seek(self, epoch: int, start: int) -> None:
        self.loader.seek(epoch, start)


class SyntheticLoader(Loader):
    """Random images on the device, the same few over and over: what training takes without its data.

    A sampler says which image is where, so that each global batch is the same in every layout. An image's label
    is not the same whenever it comes, so that labels are not memorised: gradients would become so small that a CPU
    takes several times as long for a product.

    Args:
        sampler: of a data set of any size; image i has the pixels of image i modulo `DISTINCT`, and a label of its own.
        config: of the run.
        device: where images and labels are.

    Attributes:
        DISTINCT: how many different images there are.
    """

    DISTINCT = 128

    def __init__(self, sampler: GlobalBatchSampler | EvalSampler, config: Config, device: torch.device):
        self.sampler, self.device, self.first_stage = sampler, device, sees_images()
        generator = torch.Generator().manual_seed(config.SEED)
        self.labels = torch.randint(config.NUM_CLASSES, (sampler.num_samples,), generator=generator).to(device)
        if self.first_stage:
            shape = self.DISTINCT, 3, config.IMG_SIZE, config.IMG_SIZE
            self.images = torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in self.sampler:
            indices = to_device(numbers, self.device)
            images = indices % len(self.labels)  # a repeated one has another index
            labels = torch.where(indices < 0, IGNORED, self.labels[images])
            yield self.images[images % self.DISTINCT] if self.first_stage else indices, labels

    def seek(self, epoch: int, start: int) -> None:
        self.sampler.seek(epoch, start)


class FakeLoader(Loader):
    """A loader of `(images, labels)` for dry runs: zeros in the shape of images, int64 labels (B,).

    Pipeline stages after the first get the labels in place of the images.

    Args:
        num_batches: per epoch, on this rank.
        shape: of a batch of images, (B, 3, H, W).
        device: of both.
    """

    def __init__(self, num_batches: int, shape: tuple[int, ...], device: torch.device):
        self.num_batches, self.shape, self.device = num_batches, shape, device
        self.first_stage = sees_images()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.num_batches):
            labels = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
            yield torch.zeros(self.shape, device=self.device) if self.first_stage else labels, labels
