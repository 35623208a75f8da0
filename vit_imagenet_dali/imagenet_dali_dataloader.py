"""ImageNet from TFRecords through DALI: decoded, augmented, batched and prefetched, on the CPU or the GPU.

Records are read one by one, in the order of a `GlobalBatchSampler`, and what is drawn for an image is drawn here, so
that every layout trains on the same images. Evaluation counts each image exactly once, for any number of ranks.
"""

import copy
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import cache, lru_cache, partial
from itertools import chain, islice, pairwise, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from colossal_vit.config.settings import Setting, Settings, SettingsBlock
from colossal_vit.config.types import NonNegativeInt, PositiveInt, Share, one_of, real
from colossal_vit.data.augment import CROP_ASPECT
from colossal_vit.data.batches import IGNORED, Loader, SampledLoader, read_ahead, sees_images
from colossal_vit.data.cropping import source, trim
from colossal_vit.data.devices import to_device
from colossal_vit.data.digits import digits
from colossal_vit.data.folders import INDEX_FILES
from colossal_vit.data.identity import record_dataset, resolve_num_classes
from colossal_vit.data.loaders import data_folder
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.files import atomic_folder
from colossal_vit.parallel.collectives import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossal_vit.run import Run
from colossalai.context import Config
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

import build_tfrecords
from image_files import is_plain, prepare_image, simplify_exif
from tfrecord import (
    NUM_CLASSES,
    NUM_SHARDS,
    Records,
    class_names,
    filtered_index,
    find_records,
    leave_out,
    list_records,
    parse_example,
    read_data,
)

with suppress(ModuleNotFoundError):  # dry runs and random images do without DALI
    from nvidia.dali import Pipeline, fn, pipeline_def, types
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.pipeline import do_not_convert

    import dali_augmentation as augmentation

MARKS = (INDEX_FILES, "train/train-*-of-*")  # a data folder with one of them has TFRecords
NUM_IMAGES = 1_281_167  # for training
# Of a rank, to decode for a GPU: an H100 trains ViT-B/16 on 3,650 images/s, each of which takes a core 1.54 ms.
ENOUGH_CORES = 6
SETTINGS: Settings = {
    "EVAL_CROP": Setting(real(0.1, 1), "side of the centre that is evaluated ÷ image's shorter side", 224 / 256),
    "dali": SettingsBlock(
        "the pipeline that reads TFRecords",
        {
            "gpu_aug": Setting(
                one_of(False, True, "auto"),
                f"decode and augment on the GPU, where there is one; auto: unless a rank has {ENOUGH_CORES} CPU cores",
                "auto",
                affects_training=False,
            ),
            "hw_decoder_load": Setting(
                Share,
                "share of the JPEGs that the GPU's JPEG engines decode, where it has some and decodes",
                0.65,  # DALI's default
                needs={"gpu_aug": (True, "auto")},
                affects_training=False,
            ),
            "max_bad": Setting(NonNegativeInt, "check all records first, and leave out up to so many damaged ones"),
            "window": Setting(
                PositiveInt,
                "training images are shuffled within so many shards at a time, which are in random order",
                32,
            ),
        },
        {},
    ),
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # each channel's over ImageNet's training set
OPEN_FILES = 128  # a process may mostly have 1,024
READERS, PREFETCH = 4, 3  # batches that are read at a time, each by a thread; batches that DALI works on
REMEDY = "to train without such records, set dali = dict(max_bad=...)"


@cache
def _normalizer() -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """Writes a normalised image (3, H, W), from one (H, W, 3) and the results for each channel's values, (3, 256)."""
    import numba  # here, since a GPU needs none

    def normalize(image, table, normalized):
        for row in range(image.shape[0]):
            for channel in range(3):
                pixels, results, line = image[row], table[channel], normalized[channel, row]
                for column in range(len(line)):
                    line[column] = results[pixels[column, channel]]

    image = numba.types.Array(numba.uint8, 3, "C")
    table, normalized = (numba.types.Array(numba.float32, dims, "C") for dims in (2, 3))
    signature = numba.void(image, table, normalized)
    try:
        return numba.njit(signature, nogil=True, cache=True)(normalize)
    except (RuntimeError, OSError):  # no folder to keep it in, or no space
        return numba.njit(signature, nogil=True)(normalize)


class Batch(NamedTuple):
    """What is read and drawn for a batch.

    Attributes:
        numbers: of its records, (B,).
        buffer: what they were read into.
        encoded: the image files, uint8.
        labels: int64 (B,).
        draws: None in evaluation.
        erased: None if nothing is erased.
    """

    numbers: np.ndarray
    buffer: np.ndarray
    encoded: list[np.ndarray]
    labels: Tensor
    draws: "augmentation.AugmentParams | None" = None
    erased: "augmentation.Erased | None" = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What DALI's graph is fed with."""
        return self.encoded, *(self.draws or ())


def where_to_decode(config: Config, device: torch.device, cores: int) -> tuple[bool, str]:
    """Return whether a rank with so many CPU cores decodes on its GPU, and a sentence for the log that says why."""
    if device.type != "cuda":
        return False, "images are decoded on the CPU, without a GPU"
    choice = config.dali.gpu_aug
    on_gpu = cores < ENOUGH_CORES if choice == "auto" else choice
    place, why = ("GPU", "fewer than") if on_gpu else ("CPU", "at least")
    because = f"{cores} CPU cores for this rank are {why} {ENOUGH_CORES}" if choice == "auto" else "as the config says"
    return on_gpu, f"dali.gpu_aug = {choice!r}: images are decoded on the {place}, {because}"


def _from_here_on(sampler: GlobalBatchSampler, num_epochs: int) -> Iterator[tuple[int, Tensor]]:
    """Epoch and indices of each batch, until the epochs are over."""
    for epoch in range(sampler.epoch, num_epochs):
        yield from ((epoch, numbers) for numbers in sampler)


class DaliLoader(SampledLoader):
    """Batches of `(images, labels)` on the device, for this rank's place in the layout.

    Images are float32 of shape (B, 3, IMG_SIZE, IMG_SIZE), normalised; labels are int64 of shape (B,), from 0. Pipeline
    stages after the first get the labels in place of the images, which they do not use. In training, DALI already works
    on the next of NUM_EPOCHS while one ends.

    Args:
        records: the shards to read.
        train: whether to crop at random, augment and shuffle; otherwise images are centre-cropped, in order.
        config: of the run.
        device: of the batches.
        num_threads: CPU threads.
        rank, num_ranks: see `data_place`.
        with_images: whether to read images, or labels only; default: whether this is the first pipeline stage.
    """

    usual = MEAN, STD

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
        count, size = records.num_images, config.BATCH_SIZE
        if train:
            order = dict(repeats=config.REPEATS, shards=records.counts, window=config.dali.window)
            sampler = GlobalBatchSampler(
                count, size, config.gradient_accumulation, config.SEED, rank, num_ranks, **order
            )
        else:
            sampler = EvalSampler(count, size, rank, num_ranks)
        super().__init__(sampler, config, device)
        self.records, self.num_threads = records, num_threads
        self.ends = np.cumsum(records.counts)  # of the shards, in records
        self.with_images = sees_images() if with_images is None else with_images
        self.on_gpu, _ = where_to_decode(config, device, num_threads)
        self.sends_bytes = device.type == "cuda" and not self.on_gpu  # a quarter of the normalised images
        self.augments = train and augmentation.changes_pixels(config)
        self.workers = ThreadPoolExecutor(num_threads)
        self.open = lru_cache(OPEN_FILES)(partial(open, mode="rb", buffering=0))
        self.unused: list[np.ndarray] = []  # buffers of batches that DALI is done with; the system clears new ones
        self.ahead: dict[tuple[int, int], Iterator] = {}  # by epoch and micro-batch: what DALI already works on

    # ---- Read ----

    def _place(self, number: int) -> tuple[Path, int, int]:
        """Return the shard of a record, and its offset and size in bytes."""
        shard = int(np.searchsorted(self.ends, number, side="right"))
        return self.records.shards[shard], *self.records.places[shard][number - self.ends[shard]].tolist()

    def _read_record(self, place: tuple[Path, int, int], record: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the image file and the label of the record at a place; read into `record`, uint8 and of its size.

        Raises:
            UserError: if the record cannot be read, is damaged, or its label is out of range; naming its place.
        """
        shard, offset, _ = place
        try:
            file = self.open(shard)  # which another thread may put out of the cache, and so close, but for this name
            image, label = parse_example(read_data(file.fileno(), offset, record))
            if image is None:
                raise ValueError("image/encoded is missing")
            if not is_plain(image):
                image = prepare_image(bytes(image))
            simplify_exif(memoryview(image))
        except OSError as error:
            raise UserError(f"{shard}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{shard} at byte {offset}: {error}; {REMEDY}") from None
        if label is None or not 1 <= label <= self.config.NUM_CLASSES:
            raise UserError(
                f"{shard} at byte {offset}: image/class/label is {label}, not from 1 to NUM_CLASSES = "
                f"{self.config.NUM_CLASSES}"
            )
        return np.frombuffer(image, np.uint8), label - 1

    def _read(self, place: tuple[int, Tensor]) -> Batch:
        """Read and draw for the images of an epoch with these numbers (B,)."""
        epoch, numbers = place
        records = (numbers % self.records.num_images).numpy()
        places = list(map(self._place, records.tolist()))
        ends = np.cumsum([size for *_, size in places])
        try:
            buffer = self.unused.pop()
        except IndexError:  # if it was asked first whether there is one, another thread could take it in between
            buffer = np.empty(0, np.uint8)
        if len(buffer) < ends[-1]:
            buffer = np.empty(ends[-1] * 5 // 4, np.uint8)  # with room for the images of a later batch
        parts = np.split(buffer[: ends[-1]], ends[:-1])
        encoded, labels = zip(*map(self._read_record, places, parts), strict=True)
        labels = torch.where(numbers < 0, IGNORED, torch.tensor(labels))
        drawn = augmentation.draw(self.config, epoch, numbers.numpy()) if self.train and self.with_images else ()
        return Batch(records, buffer, list(encoded), labels, *drawn)

    # ---- Decode ----

    def _train_graph(self, batches: Iterator[tuple[Any, ...]]) -> "DataNode":
        """Return images to train on: of each file a random part is decoded, resized, mirrored and augmented."""
        encoded, *draws = self._fed(batches, (types.UINT8, 1), *augmentation.KINDS)
        draws = augmentation.AugmentParams(*draws)
        header = fn.peek_image_shape(encoded, dtype=types.FLOAT)
        corner, shape = fn.python_function(
            header, draws.crop, function=self._crops, batch_processing=True, num_outputs=2
        )
        images = fn.decoders.image_slice(encoded, corner, shape, axis_names="HW", **self._decoding)
        if self.augments or self.on_gpu:
            # In graphs with conditionals DALI would rewrite the Python functions in it, which makes them slow.
            images = do_not_convert(self._resize)(images, header, draws.mirror)
        if self.augments:
            images = augmentation.augment(images, self.config, draws)
        return self._normalized(images)

    def _test_graph(self, batches: Iterator[tuple[Any, ...]]) -> "DataNode":
        """Return images to evaluate on: each file is decoded whole, resized, and cropped in its centre."""
        (encoded,) = self._fed(batches, (types.UINT8, 1))
        header = fn.peek_image_shape(encoded, dtype=types.FLOAT)
        encoded = fn.reshape(encoded, rel_shape=header[:1] * 0.0 + 1.0)  # so that the decoder waits for the header
        images = fn.decoders.image(encoded, **self._decoding)
        if self.on_gpu:
            images = self._resize(images, header, 0)
        return self._normalized(images)

    def _fed(self, batches: Iterator[tuple[Any, ...]], *kinds: tuple[Any, int]) -> list["DataNode"]:
        """Return what the graph is fed with, each of a type and with so many dimensions.

        DALI 2.4.0 may crash the process if the decoder finds no header. `fn.peek_image_shape` raises an error instead,
        and has to run before the decoder.
        """
        return fn.external_source(
            batches, len(kinds), dtype=[kind for kind, _ in kinds], ndim=[ndim for _, ndim in kinds], no_copy=True
        )

    @property
    def _decoding(self) -> dict[str, Any]:
        """Options of a decoder."""
        where = dict(device="mixed", hw_decoder_load=self.config.dali.hw_decoder_load) if self.on_gpu else {}
        return dict(where, output_type=types.RGB)

    def _normalized(self, images: "DataNode") -> "DataNode":
        """Return the end of a graph: on the GPU CHW, float32; else the images as they are, HWC and uint8, of which
        `_finish` is faster than DALI on a CPU.
        """
        if not self.on_gpu:
            return images
        mean, std = ([value * 255 for value in values] for values in self.normalization)
        return fn.crop_mirror_normalize(images, device="gpu", mean=mean, std=std, output_layout="CHW")

    def _crops(self, headers: list[np.ndarray], draws: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Corner and shape of each image's crop."""
        sizes = np.stack(headers)[:, :2]
        crops = augmentation.place_rectangles(sizes, np.stack(draws), self.config.CROP_AREA, CROP_ASPECT)
        crops = crops.astype(np.int32)
        return list(crops[:, :2]), list(crops[:, 2:])

    def _centres(self, headers: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Start and end of what is evaluated of each image, see `source`."""
        parts = [source(header[:2].astype(int), self._shorter, self.config.IMG_SIZE) for header in headers]
        starts, ends = zip(*parts, strict=True)
        return list(np.float32(starts)), list(np.float32(ends))

    @property
    def _shorter(self) -> int:
        """Pixels of the shorter side of an image that is resized for evaluation."""
        return int(self.config.IMG_SIZE / self.config.EVAL_CROP)

    def _resized(self, image: np.ndarray, mirrored: int) -> np.ndarray:
        """Resized bilinearly with antialiasing, by torch, whose operators are faster than DALI's, and for evaluation
        cropped: (IMG_SIZE, IMG_SIZE, 3), uint8."""
        size, pixels = [self.config.IMG_SIZE] * 2, torch.from_numpy(image).permute(2, 0, 1)
        if self.train:
            pixels = v2.functional.resize(pixels, size)
            pixels = pixels.flip(2) if mirrored else pixels
        else:
            pixels = v2.functional.center_crop(v2.functional.resize(trim(pixels), self._shorter), size)
        return pixels.permute(1, 2, 0).numpy()

    def _map(self, function: Callable[[int], Any], count: int) -> list[Any]:
        """Return the function's values for 0, 1, ..., each thread computes as many."""
        bounds = [count * part // self.num_threads for part in range(self.num_threads + 1)]
        parts = self.workers.map(lambda part: [function(number) for number in range(*part)], pairwise(bounds))
        return list(chain.from_iterable(parts))

    def _resize(self, images: "DataNode", header: "DataNode", mirror: "DataNode | int") -> "DataNode":
        """Resize as `_resized` does, but in the graph; on the GPU if possible."""
        if self.on_gpu:
            options = dict(size=[self.config.IMG_SIZE] * 2, interp_type=types.INTERP_LINEAR)
            if self.train:
                return fn.flip(fn.resize(images, **options), horizontal=mirror)
            start, end = fn.python_function(header, function=self._centres, batch_processing=True, num_outputs=2)
            return fn.resize(images, roi_start=start, roi_end=end, **options)

        def resize(images: list[np.ndarray], mirrored: list[np.ndarray]) -> list[np.ndarray]:
            return self._map(lambda number: self._resized(images[number], mirrored[number]), len(images))

        images = fn.python_function(images, mirror, function=resize, batch_processing=True)
        return fn.reshape(images, layout="HWC")  # the Python function's output has no layout

    def _finish(self, images: list[np.ndarray], mirror: Sequence[int]) -> Tensor:
        """Resize and crop (unless the graph does), and for a CPU normalise.

        Returns:
            (B, 3, IMG_SIZE, IMG_SIZE), float32; for a GPU (B, IMG_SIZE, IMG_SIZE, 3), uint8, in pinned memory.
        """
        size, values = self.config.IMG_SIZE, np.arange(256) / 255
        if self.sends_bytes:
            pinned = self.device.type == "cuda"
            finished = torch.empty(len(images), size, size, 3, dtype=torch.uint8, pin_memory=pinned)
        else:
            table = np.float32([(values - mean) / std for mean, std in zip(*self.normalization, strict=True)])
            finished = torch.empty(len(images), 3, size, size, dtype=torch.float32)

        def finish(number: int) -> None:
            image = images[number] if self.augments else self._resized(images[number], mirror[number])
            if self.sends_bytes:
                finished[number].numpy()[:] = image
                return
            # Of exactly the type that was compiled: threads that convert others at the same time disturb each other.
            _normalizer()(np.ascontiguousarray(image), table, finished[number].numpy())

        self._map(finish, len(images))
        return finished

    def _build(self, batches: Iterator[tuple[Any, ...]]) -> "Pipeline":
        """Return a pipeline for what it is fed with, batch by batch."""

        def graph() -> "DataNode":
            return self._train_graph(batches) if self.train else self._test_graph(batches)

        with warnings.catch_warnings(record=True):  # DALI itself uses features that it deprecates
            conditional = self.train and bool((self.config.augment or {}).get("policy"))
            pipeline = pipeline_def(graph, enable_conditionals=conditional)(
                batch_size=self.config.BATCH_SIZE,
                num_threads=self.num_threads,
                device_id=self.device.index if self.on_gpu else None,
                prefetch_queue_depth=PREFETCH,
            )
            pipeline.build()
        return pipeline

    def _decoded(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Batch]]:
        """Yield images, as `_normalized` or `_finish` returns them, and their batch."""
        waiting: deque[Batch] = deque()  # those that DALI works on, which may read them until it is done

        def feed() -> Iterator[tuple[Any, ...]]:
            for batch in batches:
                waiting.append(batch)
                yield batch.inputs

        pipeline = self._build(feed())
        while True:
            try:
                (images,) = pipeline.run()
            except StopIteration:
                return
            except RuntimeError:
                if culprit := self._culprit(waiting):
                    raise UserError(f"{culprit}; {REMEDY}") from None
                raise
            batch = waiting.popleft()
            if self.on_gpu:
                images = torch.from_dlpack(images.as_tensor())
            else:
                arrays = [np.asarray(image) for image in images]
                images = self._finish(arrays, batch.draws.mirror if batch.draws else [0] * len(arrays))
            # All of it has been read, on a GPU too: without a stream, `run` waits until its images are computed.
            self.unused.append(batch.buffer)
            yield images, batch

    def _culprit(self, batches: Iterable[Batch]) -> str | None:
        """Return the record that DALI failed at, one of these: shard, byte and fault; None if it cannot be found."""
        for batch in batches:
            for number, image in zip(batch.numbers.tolist(), batch.encoded, strict=True):
                try:
                    prepare_image(image.tobytes(), check="decode")
                except ValueError as error:
                    shard, offset, _ = self._place(number)
                    return f"{shard} at byte {offset}: {error}"
        return None

    # ---- Deliver ----

    def _ahead(self, decoded: Iterator[tuple[Tensor, Batch]]) -> Iterator[tuple[Tensor, Batch]]:
        """Yield the same, which a thread prepares while the GPU has to be given work."""
        batches = (batch for _, batch in read_ahead(repeat(decoded), lambda decoded: next(decoded, None)))
        return takewhile(lambda batch: batch is not None, batches)

    def _delivered(self, images: Tensor, batch: Batch) -> Tensor:
        """Images on the device, normalised, and with parts erased."""
        if self.sends_bytes:
            images = to_device(images, self.device).permute(0, 3, 1, 2).contiguous()
            images = (images - self.mean).div_(self.std)
        if batch.erased:
            augmentation.erase(images, batch.erased)
        return images

    def _batches(self, places: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels of these images of these epochs."""
        batches = (batch for _, batch in read_ahead(places, self._read, READERS))
        decoded = self._decoded(batches) if self.with_images else zip(repeat(None), batches)
        for images, batch in self._ahead(decoded) if self.sends_bytes else decoded:
            labels = to_device(batch.labels, self.device)
            yield (labels if images is None else self._delivered(images, batch)), labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.train:
            yield from self._batches((0, numbers) for numbers in self.sampler)
            return
        epoch, start = self.sampler.epoch, self.sampler.start
        # What training does not need is not read: a damaged record in it would end the last epoch before its last step.
        num_epochs = max(self.config.NUM_EPOCHS, epoch + 1)
        places = _from_here_on(copy.copy(self.sampler), num_epochs)
        batches = self.ahead.pop((epoch, start), None) or self._batches(places)
        self.ahead.clear()
        self.sampler.epoch, self.sampler.start = epoch + 1, 0
        yield from islice(batches, len(self) - start - 1)
        if epoch + 1 < num_epochs:
            self.ahead[epoch + 1, 0] = batches  # before the last batch: nobody asks for one after it
        yield next(batches)


def build_dali_train(records: Records, config: Config, device: torch.device, num_threads: int = 2) -> DaliLoader:
    """Batches to train on: shuffled records, cropped at random and augmented; see `DaliLoader`."""
    return DaliLoader(records, True, config, device, num_threads)


def build_dali_test(records: Records, config: Config, device: torch.device, num_threads: int = 2) -> DaliLoader:
    """Batches to evaluate on: all records in order, each once, cropped in the centre; see `DaliLoader`."""
    return DaliLoader(records, False, config, device, num_threads)


def write_imagenet(root: Path) -> Path:
    """Write the digits as ImageNet's folders to `root/imagenet`; returns this folder.

    `train/<wnid>/<wnid>_<number>.JPEG` and `val/<wnid>/ILSVRC2012_val_<number>.JPEG`, RGB of 64 x 64 pixels, with the
    wnids n00000000 to n00000009 for the digits 0 to 9; the split is that of `digits`.
    """
    folder = root / "imagenet"
    if folder.is_dir():
        return folder
    train_images, train_labels, test_images, test_labels = digits(64)
    with atomic_folder(folder) as scratch:
        for split, images, labels in (("train", train_images, train_labels), ("val", test_images, test_labels)):
            for number, (image, label) in enumerate(zip(images, labels, strict=True), start=1):
                wnid = f"n{label:08d}"
                stem = f"{wnid}_{number}" if split == "train" else f"ILSVRC2012_val_{number:08d}"
                path = scratch / split / wnid / f"{stem}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).convert("RGB").save(path, "JPEG", quality=95)
    return folder


def write_sample(folder: Path) -> Path:
    """Make the digits sample's TFRecords in a folder, unless they exist; returns where they are."""
    output = folder / "imagenet_tfrecords"
    if not output.is_dir():
        with redirect_stdout(None), atomic_folder(output) as scratch:
            build_tfrecords.build(build_tfrecords.parse([str(write_imagenet(folder)), str(scratch)]))
    return output


def threads_per_rank() -> int:
    """Return the CPU cores that this rank may run on, divided by the ranks that may run on the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    place = socket.gethostname(), cores
    return max(1, len(cores) // all_gather_object(place).count(place))


def count_images(folder: Path) -> int:
    """Return the number of training images in a data folder, by its index files."""
    return sum(index.read_bytes().count(b"\n") for index in (folder / INDEX_FILES / "train").glob("*.idx"))


def build(run: Run) -> tuple[Loader, Loader]:
    """Return training and test batches for a run.

    Raises:
        UserError: on every rank, if any rank cannot read the records, or they do not fit the config.
    """
    import nvidia.dali  # noqa: F401 whose absence is an error from here on

    config, data = run.config, data_folder(run, "ImageNet", write_sample)
    with raise_on_all_ranks():
        splits = [find_records(data, split) for split in NUM_SHARDS]
        classes = class_names(data)
        if classes:
            resolve_num_classes(config, len(classes), data / "classes.txt")
        config.setdefault("NUM_CLASSES", NUM_CLASSES)
    if (max_bad := config.dali.get("max_bad")) is not None:
        run_on_rank_0(lambda: leave_out(splits, run.output, config.NUM_CLASSES, max_bad, run.log))
        filtered = partial(filtered_index, run.output)
        with raise_on_all_ranks():
            splits = [list_records(r.shards, list(map(filtered, r.indices)), whole=False) for r in splits]
    num_threads = threads_per_rank()
    run.log.info(where_to_decode(config, run.device, num_threads)[1])
    with raise_on_all_ranks():
        if not all(records.num_images for records in splits):
            raise UserError(f"DATA = {data}: has no good record in train/ or in validation/")
        train = build_dali_train(splits[0], config, run.device, num_threads)
        test = build_dali_test(splits[1], config, run.device, num_threads)
    counts, digest = [r.num_images for r in splits], " ".join(records.digest() for records in splits)
    record_dataset(run, "ImageNet", tuple(counts), classes or config.NUM_CLASSES, digest, data)
    return train, test
