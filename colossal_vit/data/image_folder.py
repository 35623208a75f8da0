"""Batches from class folders of images, augmented on the device.

Reading a batch is an index operation on the images that `class_images.py` keeps decoded, in a background thread, so
that training does not wait for data; where they do not fit on the disk, that thread has them decoded. The augmentation
of an image depends on the seed, the epoch and the image, not on the rank that processes it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from colossal_vit.data.augment import CROP_ASPECT, SMALLEST_BLURRED
from colossal_vit.data.batches import IGNORED, Loader, SampledLoader, read_ahead, sees_images
from colossal_vit.data.class_images import (
    Decoded,
    Images,
    cache_folder,
    check_images,
    digest_contents,
    digest_side,
    fill_cache,
    find_images,
    find_parts,
    open_cache,
    refuse_damaged,
    say_copies,
    say_odd,
    split_by_content,
    split_by_folder,
)
from colossal_vit.data.cropping import cache_size
from colossal_vit.data.identity import OWN, record_dataset, resolve_num_classes
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config
from torch import Tensor
from torchvision.transforms import v2

MEAN = STD = (0.5, 0.5, 0.5)


def draw_crops(count: int, crop_area: tuple[float, float], flip: bool, generator: torch.Generator) -> Tensor:
    """Return random crops as in torchvision's RandomResizedCrop, with `flip` mirrored with probability 0.5.

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


class ClassFolderLoader(SampledLoader):
    """Batches of `(images, labels)` on the device: float32 (B, 3, IMG_SIZE, IMG_SIZE), int64 (B,).

    Pipeline stages after the first get the labels in place of the images, which they do not use.

    Args:
        images: uint8, (N, S, S, 3), S at least IMG_SIZE, or what decodes them.
        labels: int64, (N,).
        chosen: int64; maps the sampler's indices to the N images.
        sampler, config, device: see `SampledLoader`.
        names: of the N images, if they have any.
    """

    usual = MEAN, STD

    def __init__(
        self,
        images: Tensor | Decoded,
        labels: Tensor,
        chosen: Tensor,
        sampler: GlobalBatchSampler | EvalSampler,
        config: Config,
        device: torch.device,
        names: Sequence[str] = (),
    ):
        super().__init__(sampler, config, device)
        self.images, self.labels, self.chosen = images, labels[chosen], chosen
        self.first_stage = sees_images()
        self.names = names

    def name_of(self, number: int) -> str:
        return self.names[self.chosen[number]] if self.names else super().name_of(number)

    def _read(self, indices: Tensor, maps: Tensor | None) -> tuple[Tensor, ...]:
        """Return the tensors of a batch on the CPU: labels, images (B, S, S, 3), and for training the maps of
        `draw_crops`.
        """
        which = indices % len(self.labels)
        parts = [torch.where(indices < 0, IGNORED, self.labels[which])]
        if self.first_stage:
            parts += [self.images[self.chosen[which]], *(() if maps is None else [maps[indices]])]
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
            labels, *images = (part.to(self.device, non_blocking=True) for part in parts)
            if not images:
                yield labels, labels
                continue
            images, *own = images
            images = images.permute(0, 3, 1, 2).float()
            if own and self.augment.does_anything:
                images = self.augment(self._crop(images, *own), numbers, epoch, self.mean, self.std)
            else:
                images = (images - self.mean) / self.std
                size = [self.config.IMG_SIZE] * 2
                images = self._crop(images, *own) if own else v2.functional.center_crop(images, size)
            yield images, labels


def build_batches(
    run: Run, images: Images, digests: Sequence[str], name: str, train: Tensor, test: Tensor
) -> tuple[Loader, Loader]:
    """Return training and test batches of these images, which are decoded unless they have been before. Collective.

    Args:
        run: whose config says how.
        images: of the data set, the same on every rank.
        digests: of their contents.
        name: of the data set.
        train, test: indices of the images for each, int64, the same on every rank.

    Raises:
        UserError: on every rank, if the config does not fit the images, or images cannot be decoded.
    """
    config: Config = run.config
    size = config.get("CACHE_SIZE", cache_size(config.IMG_SIZE))
    with raise_on_all_ranks():
        resolve_num_classes(config, len(images.classes), images.root)
        if size < config.IMG_SIZE:
            raise UserError(f"CACHE_SIZE = {size}: must be at least IMG_SIZE = {config.IMG_SIZE}")
        if (config.augment or {}).get("policy") == "three" and config.IMG_SIZE < SMALLEST_BLURRED:
            raise UserError(f"IMG_SIZE = {config.IMG_SIZE}: augment.policy = 'three' needs at least {SMALLEST_BLURRED}")
        sampler = GlobalBatchSampler(
            len(train), config.BATCH_SIZE, config.gradient_accumulation, config.SEED, repeats=config.REPEATS
        )

    def prepare() -> bool:
        """Check all images before the first step; returns whether they are kept decoded."""
        for line in (*images.left_out, *say_copies(images, digests, train, test)):
            run.log.info(line)
        kept = config.KEEP_DECODED and fill_cache(images, digests, size, config.IMG_SIZE, run.log)
        faults, odd = check_images(images, digests, size, config.IMG_SIZE, run.log)
        refuse_damaged(images, faults, run.log)
        for line in say_odd(images, odd):
            run.log.info(line)
        return kept

    pixels: Tensor | Decoded = Decoded(images, size, config.IMG_SIZE)
    if run_on_rank_0(prepare):
        with raise_on_all_ranks():
            decoded = open_cache(folder := cache_folder(images, digests, size, config.IMG_SIZE))
            if decoded is None:
                raise UserError(f"{folder}: made by rank 0, cannot be read here: DATA must be on a disk of all nodes")
            pixels = torch.from_numpy(decoded)
    contents = digest_side(digests, train), digest_side(digests, test)
    record_dataset(run, name, (len(train), len(test)), images.classes, images.digest(), images.root, contents)
    labels = torch.from_numpy(images.labels)
    rest = config, run.device, images.paths
    return (
        ClassFolderLoader(pixels, labels, train, sampler, *rest),
        ClassFolderLoader(pixels, labels, test, EvalSampler(len(test), config.BATCH_SIZE), *rest),
    )


def build_own_images(run: Run, root: Path) -> tuple[Loader, Loader]:
    """Return training and test batches of the user's class folders: in `train` and `val`, or all in one, which is then
    split.

    Beside `val`, `test` is left alone: it is for the model that is chosen in the end.

    Raises:
        UserError: on every rank, see `find_images`, `split_by_content` and `build_batches`; if it is not clear which
            folder is to evaluate on.
    """
    with raise_on_all_ranks():
        parts, others = find_parts(root)
        output = run.output.resolve()
        within = any(output.is_relative_to((root / part).resolve()) for part in parts)
        if within and not run.args.eval_only:
            raise UserError(f"--output {run.output}: is within the class folders of DATA = {root}: give another one")
        images = find_images(root, root / ".decoded", parts)
        if len(images.classes) == 1:
            raise UserError(
                f"{root}: has one class folder only, {images.classes[0]}; DATA must be what has one for each class"
            )
    if parts[1:] and others:
        run.log.info(f"{root}: evaluates on {parts[1]}; not read: {', '.join(others)}")
    digests = run_on_rank_0(lambda: digest_contents(images, run.log))
    with raise_on_all_ranks():
        if len(parts) == 2:
            train, test = split_by_folder(images)
        else:
            train, test = split_by_content(images, digests, run.config.TEST_FRACTION)
    return build_batches(run, images, digests, OWN, train, test)
