"""ImageNet from TFRecords through DALI: decoded, augmented, batched and prefetched, on the GPU if possible.

Each rank's training images are an endless stream: DALI keeps shuffling and prefetching across epochs, and an epoch
continues where the last one stopped. Evaluation counts each image exactly once, for any number of ranks.
"""

import base64
import hashlib
import os
import random
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali
import torch
import torch.nn.functional as F
from colossal_vit import config as configs
from colossal_vit import typed_json
from colossal_vit.data.batches import IGNORED, Loader, sees_images, to_device
from colossal_vit.data.digits import write_imagenet
from colossal_vit.data.samplers import check_global_batch, data_place
from colossal_vit.data.source import build_without_data, describe_data, find_data
from colossal_vit.errors import UserError
from colossal_vit.files import write_text
from colossal_vit.parallel.ranks import RankLogger, all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from colossal_vit.typed_json import Count
from colossalai.context import Config
from nvidia.dali import Pipeline, fn, pipeline_def, tfrecord, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import do_not_convert
from pydantic import Base64Bytes
from torch import Tensor
from typing_extensions import TypedDict

import augmentation
import build_tfrecords as tfrecords
from planning import NUM_IMAGES
from tfrecord import record_size

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # each channel's over ImageNet's training set
CROP_ASPECT = (3 / 4, 4 / 3)  # as in "Going deeper with convolutions", arXiv:1409.4842, like CROP_AREA = (0.08, 1)
EMPTY_RECORD = 16  # bytes
INITIAL_FILL = 4096  # records in the shuffle buffer; pointers into memory-mapped files, so they take hardly any memory
PREFETCH = 3  # batches
FEATURES = {
    "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
    "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
}


# ---------------------------------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """The non-empty shards of a split, the index file of each, and the number of records it lists."""

    shards: list[Path]
    indices: list[Path]
    counts: list[int]

    @property
    def num_images(self) -> int:
        return sum(self.counts)

    def digest(self) -> str:
        """A digest of the position of each record in its shard. It needs no image data, and nearly any change shows."""
        digest = hashlib.sha256()
        for shard, index in zip(self.shards, self.indices, strict=True):
            digest.update(f"{shard.name}\n{index.read_text()}".encode())
        return digest.hexdigest()


def find_records(data: Path, split: str) -> Records:
    """The records in `data/train` or `data/validation`.

    Raises:
        UserError: if there are none, shards are missing or from two sets, an index is missing or does not match, or
            DALI cannot read paths like theirs.
    """
    shards = tfrecords.find_shards(data, split)
    if not shards:
        raise UserError(f"DATA = {data}: has no TFRecords in {split}/; build_tfrecords.py makes them from the images")
    for fault in tfrecords.name_faults(data, split, shards):
        raise UserError(fault)
    indices = [tfrecords.index_path(data, split, shard.name) for shard in shards]
    try:
        "".join(map(str, shards)).encode()
    except UnicodeEncodeError:
        raise UserError(f"DATA = {data}: DALI reads paths in UTF-8 only; rename it, or set DATA to a link") from None
    return list_records(shards, indices, whole=True)


def list_records(shards: list[Path], indices: list[Path], whole: bool) -> Records:
    """Count the records; with `whole`, check that each index covers its shard from the first byte to the last."""
    found = []
    for shard, index in zip(shards, indices, strict=True):
        lines, size, end = tfrecords.parse_index(index), shard.stat().st_size, 0
        for number, (offset, length) in enumerate(lines if whole else [], start=1):
            if offset != end or length <= EMPTY_RECORD:
                fault = f"{index}: line {number} is '{offset} {length}', but a record begins at byte {end}"
                raise tfrecords.wrong_index(index, fault)
            end += length
        if whole and end != size:
            raise tfrecords.wrong_index(index, f"{index}: ends at byte {end}, but {shard} has {size}")
        if lines:
            found.append((shard, index, len(lines)))
    return Records(*map(list, zip(*found, strict=True))) if found else Records([], [], [])


def find_bad(shard: Path, index: Path, num_classes: int, check: str) -> list[tuple[int, str]]:
    """Offset of each unusable record, and the reason; for `check` see `prepare_image`."""
    bad, end = [], shard.stat().st_size
    with open(shard, "rb") as file:
        for offset, _ in tfrecords.parse_index(index):
            try:
                length = record_size(file, offset, end) - 16
                faults = tfrecords.record_faults(file.read(length), file.read(4), num_classes, check)
                bad += [(offset, fault) for fault in faults][:1]
            except ValueError as error:
                bad.append((offset, str(error)))
    return bad


def leave_out(splits: list[Records], output: Path, num_classes: int, max_bad: int, log: RankLogger) -> None:
    """Check every record, and write index files without the bad ones to `output/idx_files`.

    Raises:
        UserError: if more than `max_bad` records are bad, or `output` has the data's own index files.
    """
    indices = {shard: index for records in splits for shard, index, _ in zip(*records, strict=True)}
    if any(filtered_index(output, index) == index.resolve() for index in indices.values()):
        raise UserError(f"--output {output}: is the data's folder, whose index files a run would replace: give another")
    tasks = [(shard, index, num_classes, "decode") for shard, index in indices.items()]
    bad = []
    with tfrecords.worker_pool(len(os.sched_getaffinity(0))) as pool:
        sizes = [shard.stat().st_size for shard in indices]
        for (shard, index, *_), found in tfrecords.run_all(pool, find_bad, tasks, sizes, "B"):
            offsets = {offset for offset, _ in found}
            bad += [f"{shard} at byte {offset}: {reason}" for offset, reason in found]
            filtered = filtered_index(output, index)
            filtered.parent.mkdir(parents=True, exist_ok=True)
            kept = [f"{offset} {size}\n" for offset, size in tfrecords.parse_index(index) if offset not in offsets]
            write_text(filtered, "".join(kept))  # atomically: a run that is being evaluated reads it again
    for line in sorted(bad)[: max_bad + 1]:
        log.info(f"left out: {line}")
    if len(bad) > max_bad:
        raise UserError(f"dali.max_bad = {max_bad}, but {len(bad)} records are bad; {min(bad)}")
    log.info(f"{len(bad)} bad records of {sum(records.num_images for records in splits)} are left out")


def filtered_index(output: Path, index: Path) -> Path:
    """The path, in the run directory, of the copy of an index file without bad records."""
    return output / "idx_files" / index.parent.name / index.name


# ---------------------------------------------------------------------------------------------------------------------
# In batches
# ---------------------------------------------------------------------------------------------------------------------


class Position(TypedDict):
    """A rank's position in its stream, see `DaliLoader.state_dict`; `checkpoint` is DALI's own."""

    batches: Count
    begun: Count
    checkpoint: Base64Bytes | None
    of: dict[str, Any]


def _as_now(identity: dict[str, Any]) -> dict[str, Any]:
    """An earlier stream's identity as it would be now: RandAugment had its own place, and defaults were left out."""
    match identity.get("augmentation"):
        case [crop_area, flip, dict() | None as rand, *blocks] if all(isinstance(block, dict) for block in blocks):
            augment = {"policy": "rand", **rand} if rand else {}
            augment = configs.complete({"augment": augment | (blocks[0] if blocks else {})})["augment"]
            return {**identity, "augmentation": [crop_area, flip, None, *([augment] if augment else [])]}
    return identity


class DaliLoader(Loader):
    """Batches of `(images, labels)` on the device, for one data-parallel rank.

    Images are float32 of shape (B, 3, IMG_SIZE, IMG_SIZE), normalised; labels are int64 of shape (B,), from 0. Pipeline
    stages after the first get the labels in place of the images, which they do not use.

    In training, each `iter()` takes the next `len()` batches of an endless stream: repeated passes through the rank's
    part of the records, each in another order. In evaluation it starts over; all ranks have the same number of full
    batches, and padding in the last ones has the label `IGNORED`.

    With REPEATS, a training image comes so often in its batch, each time with other random numbers. Of each batch that
    is read only as many records are used as it then has images; which ones they are differs from epoch to epoch.

    Args:
        records: the shards to read.
        train: whether to crop at random, augment and shuffle; otherwise images are centre-cropped, in order.
        config: of the run.
        device: of the batches.
        num_threads: CPU threads.
        rank, num_ranks: see `data_place`.
        with_images: whether to read images, or labels only; default: whether this is the first pipeline stage.
    """

    normalization = MEAN, STD

    def __init__(
        self,
        records: Records,
        train: bool,
        config: Config,
        device: torch.device,
        num_threads: int = 2,
        rank: int | None = None,
        num_ranks: int | None = None,
        with_images: bool | None = None,
    ):
        self.records, self.train, self.config, self.device = records, train, config, device
        self.batch_size, self.num_threads = config.BATCH_SIZE, num_threads
        self.rank, self.num_ranks = data_place(rank, num_ranks)
        self.with_images = sees_images() if with_images is None else with_images
        self.on_gpu = device.type == "cuda" and config.dali.gpu_aug
        self.augment = dict(config.augment or {})
        # The bounds of this rank's records, as DALI's reader computes them. No rank may be without records.
        self.start, self.end = (records.num_images * part // self.num_ranks for part in (self.rank, self.rank + 1))
        self.resizers = ThreadPoolExecutor(num_threads)
        self.pipeline: Pipeline | None = None
        self.checkpoint: bytes | None = None
        self.batches = 0  # training batches taken so far
        self.begun = 0  # the value of `batches` at which this stream began: above 0 if it restarted in another layout

    def __len__(self) -> int:
        if self.train:
            return self.records.num_images // self.num_ranks // self.batch_size
        most = -(-self.records.num_images // self.num_ranks)  # images of a rank
        return -(-most // self.batch_size)

    def _graph(self) -> tuple[DataNode, ...]:
        device = "gpu" if self.on_gpu else "cpu"
        record = fn.readers.tfrecord(
            name="reader",
            path=list(map(str, self.records.shards)),
            index_path=list(map(str, self.records.indices)),
            features=FEATURES,
            shard_id=self.rank,
            num_shards=self.num_ranks,
            stick_to_shard=True,  # so that the rank's records stay in its machine's page cache
            random_shuffle=self.train,
            initial_fill=INITIAL_FILL,
            pad_last_batch=not self.train,
            seed=self._pipeline_seed(),  # DALI's default depends on later operators, which differ between stages
        )
        labels, encoded = record["image/class/label"], record["image/encoded"]
        if self.train and self.config.REPEATS > 1:
            # Copies are far apart: neighbours, which may be mixed, are different images.
            number = -(-self.batch_size // self.config.REPEATS)
            chosen = [place % number for place in range(self.batch_size)]
            labels, encoded = (fn.permute_batch(part, indices=chosen) for part in (labels, encoded))
        if not self.with_images:
            return (labels,)
        # DALI 2.4.0 may crash the process if the decoder finds no header. This operator raises an error instead, and
        # has to run before the decoder.
        header = fn.peek_image_shape(encoded, dtype=types.FLOAT)
        encoded = fn.reshape(encoded, rel_shape=header[:1] * 0.0 + 1.0)
        options = dict(device="mixed" if self.on_gpu else "cpu", output_type=types.RGB)
        size, mirror = self.config.IMG_SIZE, 0
        if self.train:
            images = fn.decoders.image_random_crop(
                encoded, random_area=list(self.config.CROP_AREA), random_aspect_ratio=CROP_ASPECT, **options
            )
            images = self._resize(images, size=[size, size])
            images = augmentation.augment(images, size, **{k: v for k, v in self.augment.items() if k != "erase"})
            mirror = fn.random.coin_flip() if self.config.FLIP else 0
        else:
            images = fn.decoders.image(encoded, **options)
            images = self._resize(images, resize_shorter=int(size / self.config.EVAL_CROP))
        mean, std = ([value * 255 for value in values] for values in (MEAN, STD))
        images = fn.crop_mirror_normalize(
            images, device=device, crop=[size, size], mirror=mirror, mean=mean, std=std, output_layout="CHW"
        )
        if self.train and self.augment.get("erase"):
            images = augmentation.erase(images, self.augment["erase"])
        return labels, images.gpu() if self.device.type == "cuda" else images

    @do_not_convert  # in graphs with conditionals DALI would rewrite the Python functions in it, which makes them slow
    def _resize(self, images: DataNode, size: list[int] | None = None, resize_shorter: int | None = None) -> DataNode:
        """Resize bilinearly with antialiasing. On the CPU with torch, since DALI's own takes as long as decoding."""
        if self.on_gpu:
            target = dict(size=size) if size else dict(resize_shorter=resize_shorter)
            return fn.resize(images, interp_type=types.INTERP_LINEAR, **target)

        def resize(images: list[np.ndarray]) -> list[np.ndarray]:  # each (H, W, 3), uint8
            resized = []
            for image in images:
                sides = size or [side * resize_shorter // min(image.shape[:2]) for side in image.shape[:2]]
                pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
                pixels = F.interpolate(pixels, sides, mode="bilinear", antialias=True)
                resized.append(pixels[0].permute(1, 2, 0).numpy())
            return resized

        def resize_all(images: list[np.ndarray]) -> list[np.ndarray]:
            bounds = [len(images) * part // self.num_threads for part in range(self.num_threads + 1)]
            return list(chain(*self.resizers.map(resize, [images[a:b] for a, b in pairwise(bounds)])))

        images = fn.python_function(images, function=resize_all, batch_processing=True)
        return fn.reshape(images, layout="HWC")  # the Python function's output has no layout

    def _pipeline_seed(self) -> int:
        return random.Random(f"{self.config.SEED} {self.rank} {self.begun}").getrandbits(31)

    def _build(self) -> Pipeline:
        with warnings.catch_warnings(record=True):  # DALI itself uses features that it deprecates
            conditional = self.train and bool(self.augment.get("policy") or self.augment.get("erase"))
            pipeline = pipeline_def(self._graph, enable_conditionals=conditional)(
                batch_size=self.batch_size,
                num_threads=self.num_threads,
                device_id=self.device.index if self.device.type == "cuda" else None,
                seed=self._pipeline_seed(),
                prefetch_queue_depth=PREFETCH,
                enable_checkpointing=self.train,
                checkpoint=self.checkpoint,
            )
            pipeline.build()
        return pipeline

    def _next(self, pipeline: Pipeline) -> tuple[Tensor, Tensor]:
        try:
            records, *images = pipeline.run()
        except RuntimeError as error:
            if culprit := self._culprit(str(error)):
                raise UserError(f"{culprit}; to train without such records, set dali = dict(max_bad=...)") from None
            raise
        numbers = records.as_array().ravel()  # (B,), on the host
        strange = (numbers < 1) | (numbers > self.config.NUM_CLASSES)
        if strange.any():
            place = int(strange.argmax())
            where = records[place].source_info().replace(" at index ", " at byte ")
            raise UserError(
                f"{where}: image/class/label is {numbers[place]}, not from 1 to NUM_CLASSES = {self.config.NUM_CLASSES}"
            )
        return (torch.from_dlpack(images[0].as_tensor()) if images else None), torch.from_numpy(numbers - 1)

    def _culprit(self, message: str) -> str | None:
        """The record that DALI failed at: shard, byte and fault; None if it cannot be found."""
        if named := re.search(r"(?:sample #\d+ |file): ?(/.+) at index (\d+)", message):
            return f"{named[1]} at byte {named[2]}: the record cannot be decoded"
        if not re.search(r"peek_image_shape|readers\.tfrecord|decoders\.image", message):
            return None
        first = 0
        for shard, index, count in zip(*self.records, strict=True):
            if first < self.end and first + count > self.start:
                for offset, reason in find_bad(shard, index, self.config.NUM_CLASSES, "header"):
                    return f"{shard} at byte {offset}: {reason}"
            first += count
        return None

    def _deliver(self, images: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        labels = to_device(labels, self.device)
        return (labels if images is None else images), labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.train:
            self.pipeline = self.pipeline or self._build()
            for _ in range(len(self)):
                images, labels = self._next(self.pipeline)
                self.batches += 1
                yield self._deliver(images, labels)
            return
        pipeline = self._build()  # deleted after the evaluation, to free its memory for training
        for number in range(len(self)):
            images, labels = self._next(pipeline)
            labels[max(self.end - self.start - number * self.batch_size, 0) :] = IGNORED
            yield self._deliver(images, labels)

    def _identity(self) -> dict[str, Any]:
        """What has to be unchanged for a stream to resume."""
        config, repeats = self.config, self.config.REPEATS
        crop_and_flip = list(config.CROP_AREA), config.FLIP
        return {
            "seed": config.SEED,
            "place": [self.rank, self.num_ranks, self.with_images, self.on_gpu],
            "sizes": [self.records.num_images, self.batch_size, config.IMG_SIZE],
            "augmentation": [*crop_and_flip, None, *([self.augment] if self.augment else [])],
            **({"repeats": repeats} if repeats > 1 else {}),  # added later: older streams resume
            "dali": nvidia.dali.__version__,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in its stream, after the last batch it returned; JSON-serialisable.

        Prefetched batches do not count.
        """
        checkpoint = self.pipeline.checkpoint() if self.batches > self.begun and self.pipeline else self.checkpoint
        return {
            "batches": self.batches,
            "begun": self.begun,
            "checkpoint": base64.b64encode(checkpoint).decode() if checkpoint else None,
            "of": self._identity(),
        }

    def seek(self, epoch: int, start: int, state: Mapping[str, Any] = {}) -> bool:
        """Resume from a `state_dict`; `epoch` and `start` are only needed if it is another loader's, or damaged.

        Returns:
            Whether the stream continues bit for bit. If the state is from another rank, layout, batch size or version,
            a new stream begins, with an order that was not used before.
        """
        mixed_otherwise = state.keys() == {"position", "loader"}  # by a loader around this one, which is no more
        try:
            place = typed_json.check(state["loader"] if mixed_otherwise else state, Position, "")
            same = _as_now(place["of"]) == self._identity()
        except UserError:
            place, same = {"batches": epoch * len(self) + start}, False
        self.pipeline, self.batches = None, place["batches"]
        self.begun = place["begun"] if same else self.batches
        self.checkpoint = place["checkpoint"] if same else None
        return same and not mixed_otherwise


# ---------------------------------------------------------------------------------------------------------------------
# For a run
# ---------------------------------------------------------------------------------------------------------------------


def write_sample(folder: Path) -> Path:
    """Make the digits sample's TFRecords in a folder, unless they exist; returns where they are."""
    output = folder / "imagenet_tfrecords"
    with redirect_stdout(None):
        tfrecords.build(tfrecords.parse([str(write_imagenet(folder)), str(output)]))
    return output


def check_sizes(train: Records, validation: Records, data: Path, config: Config, num_ranks: int) -> None:
    """Check that every rank has images for a step and an evaluation, and the model one output per class.

    Raises:
        UserError: if not.
    """
    if (num_classes := len(tfrecords.class_names(data))) > config.NUM_CLASSES:
        raise UserError(f"NUM_CLASSES = {config.NUM_CLASSES}, but {data / 'classes.txt'} has {num_classes}")
    batch_size, accumulation = config.BATCH_SIZE, config.gradient_accumulation
    if config.mix and batch_size <= config.REPEATS:
        raise UserError(
            f"REPEATS = {config.REPEATS}: must be below BATCH_SIZE = {batch_size} with mix, else a batch has one image "
            f"only, which is mixed with its own copies"
        )
    check_global_batch(train.num_images, batch_size, accumulation, num_ranks)
    if validation.num_images < num_ranks:
        here = data / "validation"
        raise UserError(f"{here}: has {validation.num_images} images, but there are {num_ranks} data-parallel ranks")


def threads_per_rank() -> int:
    """This rank's share of the CPU cores that it may run on, divided by the ranks that may run on the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    place = socket.gethostname(), cores
    return max(1, len(cores) // all_gather_object(place).count(place))


def build_imagenet(run: Run) -> tuple[Loader, Loader | None]:
    """Training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot read the records, or they do not fit the config.
    """
    config: Config = run.config
    if batches := build_without_data(run, "ImageNet", NUM_IMAGES):
        return batches
    data = find_data(run, "ImageNet", write_sample)
    with raise_on_all_ranks():
        splits = [find_records(data, split) for split in tfrecords.NUM_SHARDS]
    if (max_bad := config.dali.get("max_bad")) is not None:
        run_on_rank_0(lambda: leave_out(splits, run.output, config.NUM_CLASSES, max_bad, run.log))
        filtered = partial(filtered_index, run.output)
        with raise_on_all_ranks():
            splits = [list_records(r.shards, list(map(filtered, r.indices)), whole=False) for r in splits]
    train, validation = splits
    with raise_on_all_ranks():
        check_sizes(train, validation, data, config, run.layout.data)
    classes, counts = tfrecords.class_names(data) or config.NUM_CLASSES, (train.num_images, validation.num_images)
    describe_data(run, "ImageNet", counts, classes, f"{train.digest()} {validation.digest()}", data)
    num_threads = threads_per_rank()
    return (
        DaliLoader(train, True, config, run.device, num_threads),
        DaliLoader(validation, False, config, run.device, num_threads),
    )
