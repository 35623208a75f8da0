"""Mixup and CutMix of training batches, the same in every layout.

H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412; S. Yun et al., "CutMix: Regularization
Strategy to Train Strong Classifiers with Localizable Features", arXiv:1905.04899. Draws, boxes and targets are those of
timm's `Mixup`. What differs is the partner of an image: its neighbour in the batch, so that a pair is never split
however many ranks and micro-batches share a global batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from colossal_vit.config.settings import Setting, Settings, SettingsBlock
from colossal_vit.config.types import NonNegative, Share, ShareAbove0, one_of
from colossal_vit.data.batches import Loader, LoaderWrapper
from colossal_vit.data.devices import to_device
from colossal_vit.data.samplers import data_place
from colossal_vit.errors import UserError
from colossalai.context import Config
from torch import Tensor

SETTINGS: Settings = {
    "mix": SettingsBlock(
        "Mixup and CutMix: each training image with its neighbour in the batch",
        {
            "mixup": Setting(NonNegative, "α of Mixup's Beta distribution; 0 is off", 0.0),
            "cutmix": Setting(NonNegative, "α of CutMix's Beta distribution; 0 is off", 0.0),
            "prob": Setting(ShareAbove0, "how often it mixes", 1.0),
            "switch_prob": Setting(
                Share, "how often it is CutMix, where both are on", 0.5, needs={"mixup": (), "cutmix": ()}
            ),
            "mode": Setting(one_of("batch", "pair", "elem"), "scope of one random draw: batch, pair or image", "batch"),
        },
        switches=("mixup", "cutmix"),
    ),
}


class MixParams(NamedTuple):
    """Parameters by which images are mixed, each with its partner.

    Attributes:
        blend: (N,), share of the image itself in a blend of both; 1 leaves the pixels as they are.
        boxes: (N, 4), the part of the partner that is pasted: top, bottom, left, right, in pixels; empty for none.
        target: (N,), share of the image's own label.
    """

    blend: np.ndarray
    boxes: np.ndarray
    target: np.ndarray


def draw(
    generator: np.random.Generator,
    count: int,
    img_size: int,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    prob: float = 1.0,
    switch_prob: float = 0.5,
) -> MixParams:
    """Draw for `count` images, or batches, of `img_size` pixels a side; the values are those of the block `mix`."""
    pasted = generator.random(count) < (switch_prob if mixup and cutmix else float(cutmix > 0))
    shares = [generator.beta(alpha or 1.0, alpha or 1.0, count) for alpha in (mixup, cutmix)]
    share = np.where(generator.random(count) < prob, np.where(pasted, shares[1], shares[0]), 1.0)
    side = (img_size * np.sqrt(1 - share)).astype(int)
    middle = generator.integers(img_size, size=(2, count))  # row, column
    low, high = np.clip(middle - side // 2, 0, img_size), np.clip(middle + (side + 1) // 2, 0, img_size)
    area = (high - low).prod(0)
    boxes = np.stack([low[0], high[0], low[1], high[1]], 1) * pasted[:, None]
    return MixParams(np.where(pasted, 1.0, share), boxes, np.where(pasted, 1 - area / img_size**2, share))


def _swap(batch: Tensor) -> Tensor:
    """Return each row's partner: the first and the second, the third and the fourth, ... change places."""
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mix(images: Tensor, labels: Tensor, num_classes: int, draws: MixParams) -> tuple[Tensor, Tensor]:
    """Mix each image and its label with those of its neighbour.

    Args:
        images: (B, C, H, W), B even; or (B,), what a later pipeline stage has in their place and keeps.
        labels: (B,), class numbers.
        num_classes: C of the targets.
        draws: of B images.

    Returns:
        The mixed images, of the shape and type of `images`, and targets (B, num_classes) of the default data type.
    """
    packed = np.column_stack([draws.blend, draws.target, draws.boxes])
    blend, target, *box = to_device(torch.from_numpy(packed).to(torch.get_default_dtype()), labels.device).unbind(1)
    targets = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
    targets = _swap(targets).lerp(targets, target[:, None])
    if images.ndim == 1:
        return images, targets
    partners = _swap(images)
    if (draws.blend < 1).any():
        images = partners.lerp(images, blend.to(images.dtype).view(-1, 1, 1, 1))
    if draws.boxes.any():
        top, bottom, left, right = (side.view(-1, 1, 1, 1) for side in box)
        rows = torch.arange(images.shape[-2], device=images.device)[:, None]
        columns = torch.arange(images.shape[-1], device=images.device)
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # (B, 1, H, W)
        images = torch.where(inside, partners, images)
    return images, targets


class MixedLoader(LoaderWrapper):
    """A training loader whose batches are mixed, on the device.

    What is drawn depends on the seed, the epoch, the optimizer step and the image's place in the global batch only:
    it is the same in every layout, and in a run that resumes.

    Args:
        loader: yields images and labels, see `mix`.
        config: of the run; its block `mix` says how.
        rank, num_ranks: see `data_place`.

    Raises:
        UserError: if BATCH_SIZE is odd, which leaves an image without a partner; or more than half of a global batch
            may be copies of one image, which leaves some with none but their own copies.
    """

    def __init__(self, loader: Loader, config: Config, rank: int | None = None, num_ranks: int | None = None):
        super().__init__(loader)
        if config.BATCH_SIZE % 2:
            raise UserError(f"BATCH_SIZE = {config.BATCH_SIZE}: must be even for mix, which mixes pairs of images")
        how = dict(config.mix)
        self.mode = how.pop("mode")
        self.config, self.how = config, how
        self.rank, self.num_ranks = data_place(rank, num_ranks)
        global_batch = config.BATCH_SIZE * config.gradient_accumulation * self.num_ranks
        if (repeats := config.REPEATS) > global_batch // 2:
            raise UserError(
                f"REPEATS = {repeats}: must be at most {global_batch // 2} with mix, half of the global batch of "
                f"{global_batch}, else images are mixed with their own copies"
            )
        self.epoch = self.start = 0

    def seek(self, epoch: int, start: int) -> None:
        self.epoch, self.start = epoch, start
        super().seek(epoch, start)

    def draws(self, epoch: int, micro_batch: int) -> MixParams:
        """Return what is drawn for one of this rank's micro-batches."""
        size, accumulation = self.config.BATCH_SIZE, self.config.gradient_accumulation
        step, part = divmod(micro_batch, accumulation)
        places = np.arange(size) + (part * self.num_ranks + self.rank) * size  # in the global batch
        every = {"batch": size * accumulation * self.num_ranks, "pair": 2, "elem": 1}[self.mode]  # images a draw is for
        generator = np.random.default_rng((self.config.SEED, epoch, step))
        drawn = draw(generator, size * accumulation * self.num_ranks // every, self.config.IMG_SIZE, **self.how)
        return MixParams(*(values[places // every] for values in drawn))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        for number, (images, labels) in enumerate(self.loader, start):
            yield mix(images, labels, self.config.NUM_CLASSES, self.draws(epoch, number))


def with_mixup(loader: Loader, config: Config) -> Loader:
    """Return the loader, with its batches mixed if the config has the block `mix`.

    Raises:
        UserError: see `MixedLoader`.
    """
    return MixedLoader(loader, config) if config.mix else loader
