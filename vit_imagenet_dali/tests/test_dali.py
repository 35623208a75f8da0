"""Which records the DALI loader gives to whom, what it makes of them, and what becomes of bad ones."""

import errno
import functools
import importlib
import io
import itertools
import math
import os
import shutil
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import nvidia.dali
import pytest
import timm
import torch
from colossal_vit import config as configs
from colossal_vit.checkpoint import timm_model
from colossal_vit.data.augment import CROP_ASPECT
from colossal_vit.data.batches import IGNORED
from colossal_vit.data.decoding import read_rgb
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.rng import philox
from colossalai.context import Config
from numba.core import caching
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import build_tfrecords
import dali_augmentation as augmentation
import fork_ranks
import imagenet_dali_dataloader as loaders
import schemas
import tfrecord
from buffers import Dropped, Overwritten
from conftest import encode, photograph
from image_files import is_plain, prepare_image
from mixup import MixedLoader
from tfrecord import (
    NUM_SHARDS,
    Records,
    filtered_index,
    find_records,
    find_shards,
    index_path,
    leave_out,
    list_records,
    parse_index,
)

SIZE, NUM_CLASSES = 48, 10
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (loaders.MEAN, loaders.STD))


def in_fork(test):
    """Run a test in a process of its own: once DALI has run in a process, its forks, which ranks are, hang in it."""
    return functools.wraps(test)(lambda **fixtures: fork_ranks.call(lambda: test(**fixtures), launched=False) and None)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The digits as TFRecords, in 4 and 2 shards."""
    root = tmp_path_factory.mktemp("sample")
    build(loaders.write_imagenet(root), root / "tfrecords", 4, 2)
    return root / "tfrecords"


@pytest.fixture(scope="module")
def numbered(sample, tmp_path_factory):
    """The same, but the labels of a split count its records, so that a batch tells which ones it has."""
    root = tmp_path_factory.mktemp("numbered")
    for split in NUM_SHARDS:
        number = 0
        for shard in find_shards(sample, split):
            path = root / split / shard.name
            path.parent.mkdir(exist_ok=True)
            records = []
            for image, _ in examples(shard):
                number += 1
                records.append(tfrecord.encode_record(image, number))
            path.write_bytes(b"".join(records))
            build_tfrecords.index_shard(path, index_path(root, split, path.name))
    return root


@pytest.fixture
def copied(sample, tmp_path):
    """A copy of the sample, to be damaged."""
    return shutil.copytree(sample, tmp_path / "copied")


def build(source, output, *num_shards):
    shards = zip(("--train-shards", "--validation-shards"), map(str, num_shards), strict=True)
    options = [part for pair in shards for part in pair]
    build_tfrecords.build(build_tfrecords.parse([str(source), str(output), "--workers", "1", *options]))


def lines(shard, data=None):
    return parse_index(index_path(data or shard.parents[1], shard.parent.name, shard.name))


def examples(shard):
    """(image, label) of each record."""
    content = shard.read_bytes()
    for offset, size in lines(shard):
        image, label = tfrecord.parse_example(content[offset + 12 : offset + size - 4])
        yield bytes(image), label


def config_of(**values):
    """Some values in place of the defaults of a config."""
    always = dict(BATCH_SIZE=32, IMG_SIZE=SIZE, NUM_CLASSES=2000, SEED=1, NUM_EPOCHS=300, gradient_accumulation=1)
    return Config(configs.complete({**always, **values}, schemas.schema(schemas.IMAGENET)))


def loader(data, split="train", records=None, rank=None, num_ranks=None, with_images=None, **values):
    records, place = records or find_records(data, split), dict(rank=rank, num_ranks=num_ranks)
    cpu = torch.device("cpu")
    return loaders.DaliLoader(records, split == "train", config_of(**values), cpu, with_images=with_images, **place)


def records_of(folder, contents):
    """Records of image files in one shard, whose labels count them from 1."""
    shard, index = folder / "shard", folder / "index"
    shard.write_bytes(b"".join(tfrecord.encode_record(data, label) for label, data in enumerate(contents, start=1)))
    build_tfrecords.index_shard(shard, index)
    return list_records([shard], [index], whole=True)


def labels_of(batches):
    return torch.cat([labels for _, labels in batches]).tolist()


def damage(shard, record=50, place=b"\xff\xd8"):
    """Flip a bit of the second byte of what `place` begins with in a record; returns the record's offset."""
    content, (offset, _) = bytearray(shard.read_bytes()), lines(shard)[record]
    content[content.index(place, offset) + 1] ^= 1
    shard.write_bytes(content)
    return offset


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 4])
@in_fork
def test_evaluation_counts_each_image_once(numbered, num_ranks):
    ranks = [loader(numbered, "validation", rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for _ in range(2):  # the second time as the first
        parts = [list(rank) for rank in ranks]
        assert {len(part) for part in parts} == {len(ranks[0])} == {math.ceil(360 / num_ranks / 32)}
        assert all(images.shape == (32, 3, SIZE, SIZE) and labels.shape == (32,) for p in parts for images, labels in p)
        seen = [label for part in parts for label in labels_of(part)]
        assert sorted(label for label in seen if label != IGNORED) == list(range(360))


@in_fork
def test_more_images_than_a_batch_are_picked_as_the_evaluation_has_them(numbered):
    images, labels = (torch.cat(parts) for parts in zip(*loader(numbered, "validation", BATCH_SIZE=8), strict=True))
    numbers = torch.tensor([30, 2, 359, *range(100, 117)])
    picked, labels_of_picked = loader(numbered, "validation", BATCH_SIZE=8).pick(numbers)
    assert labels_of_picked.tolist() == labels[numbers].tolist() == numbers.tolist()
    assert torch.equal(picked, images[numbers])


@in_fork
def test_dali_goes_on_from_epoch_to_epoch(numbered):
    """As the trainer takes batches: after the last one of an epoch it asks for no more."""
    other = loader(numbered)
    expected = [labels_of(other) for _ in range(3)]
    made, build = [], loaders.DaliLoader._build
    loaders.DaliLoader._build = lambda self, batches: made.append(self) or build(self, batches)
    batches = TrainLoader(loader(numbered), 1)
    assert [labels_of(batches) for _ in range(3)] == expected
    assert len(made) == 1


@in_fork
def test_what_training_does_not_need_is_not_read(copied):
    """A damaged record that is left over in the last epoch; more epochs than the config has may be asked for."""
    values = dict(NUM_EPOCHS=1, BATCH_SIZE=256, NUM_CLASSES=NUM_CLASSES)
    expected = loader(copied, **values)
    order, next_order = (expected.sampler.order(epoch).tolist() for epoch in range(2))
    left_over = set(order[len(expected) * 256 :])
    first = next(number for number in next_order if number in left_over)
    labels = [labels_of(expected) for _ in range(2)]
    shard, offset, _ = expected._place(first)
    damage(shard, [place for place, _ in lines(shard)].index(offset))
    other = loader(copied, **values)
    assert labels_of(other) == labels[0]
    with pytest.raises(UserError, match=f"{shard} at byte {offset}: "):
        list(other)


@pytest.mark.parametrize("num_images", [31, 33, 65])
@in_fork
def test_ranks_with_unequal_parts_make_the_same_number_of_batches(numbered, num_images, tmp_path):
    records = find_records(numbered, "validation")
    index = tmp_path / "index"
    index.write_text("".join(records.indices[0].read_text().splitlines(keepends=True)[:num_images]))
    few = list_records(records.shards[:1], [index], whole=False)
    parts = [list(loader(None, "validation", few, BATCH_SIZE=8, rank=rank, num_ranks=2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-num_images // 16)
    seen = [label for part in parts for label in labels_of(part) if label != IGNORED]
    assert sorted(seen) == list(range(num_images))


@pytest.mark.parametrize(("crop", "shorter", "longer"), [({}, 54, 90), (dict(EVAL_CROP=1.0), 48, 80)])
@in_fork
def test_evaluation_takes_the_centre_and_keeps_the_aspect(crop, shorter, longer, tmp_path):
    """As PIL does it: the shorter side to 54 pixels, or to 48, then 48 x 48 from the middle."""
    grid = np.add.outer(np.linspace(0, 120, 90), np.linspace(0, 130, 150))
    pictures = [np.stack([grid, grid[::-1], grid[:, ::-1]], axis=-1).astype(np.uint8)]
    pictures.append(pictures[0].transpose(1, 0, 2))
    contents = []
    for picture in pictures:
        Image.fromarray(picture).save(encoded := io.BytesIO(), "JPEG", quality=98, subsampling=0)
        contents.append(encoded.getvalue())
    shard, index = tmp_path / "shard", tmp_path / "index"
    shard.write_bytes(b"".join(tfrecord.encode_record(content, 7) for content in contents))
    build_tfrecords.index_shard(shard, index)
    records = list_records([shard], [index], whole=True)
    ((images, labels),) = loader(None, "validation", records, BATCH_SIZE=2, **crop)
    assert labels.tolist() == [6, 6]
    for image, content in zip(images, contents, strict=True):
        picture = Image.open(io.BytesIO(content))
        width, height = ((longer, shorter), (shorter, longer))[picture.height > picture.width]
        left, top = (width - SIZE) // 2, (height - SIZE) // 2
        picture = picture.resize((width, height), Image.BILINEAR).crop((left, top, left + SIZE, top + SIZE))
        expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        assert ((image * STD + MEAN) * 255 - expected).abs().max() < 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@in_fork
def test_what_is_transparent_in_a_png_is_white(mode, tmp_path):
    """As in class folders and in what build_tfrecords.py packs."""
    picture, options = Image.new(mode, (SIZE, SIZE)), dict(transparency=0) if mode == "P" else {}
    picture.save(encoded := io.BytesIO(), "PNG", **options)
    records = records_of(tmp_path, [encoded.getvalue()])
    ((images, _),) = loader(None, "validation", records, BATCH_SIZE=1)
    assert images.mul(STD).add(MEAN).min() > 0.99


SHORT, LONG, RATIONAL, SIGNED, SRATIONAL = 3, 4, 5, 8, 10  # types of EXIF


def entry(tag, kind, value, count=1, order="<"):
    """A field of EXIF data."""
    value = struct.pack(order + {SHORT: "H", LONG: "I", SIGNED: "h"}[kind], value)
    return struct.pack(f"{order}HHI", tag, kind, count) + value.ljust(4, b"\0")


def exif(*entries, order="<", behind=b""):
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8)
    return b"Exif\0\0" + head + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4) + behind


def turned(orientation, kind=SHORT, **options):
    return entry(0x112, kind, orientation, **options)


XMP = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>'
AT = struct.pack("<I", 38)  # where the value of the second of two fields lies
ODD_EXIF = {  # segments of a JPEG, and how the image is turned, clockwise
    "plain": ([exif(turned(6))], 90),
    "in the other byte order": ([exif(turned(8, order=">"), order=">")], 270),
    "a negative fraction": (
        [exif(turned(6), struct.pack("<HHI", 0x11A, SRATIONAL, 1) + AT, behind=struct.pack("<ii", -1, 1))],
        90,
    ),
    "a fraction as a width": (
        [exif(struct.pack("<HHI", 0x100, RATIONAL, 1) + AT, turned(3), behind=struct.pack("<II", 48, 1))],
        180,
    ),
    "a negative number of bits": ([exif(entry(0x102, SIGNED, -1), turned(6))], 90),
    "a field that is too long": ([exif(struct.pack("<HHII", 0x10F, 2, 99, 60000), turned(6))], 90),
    "more fields than there are": ([exif(turned(6)).replace(b"\x01\0\x12\1", b"\x09\0\x12\1")], 90),
    "cut off": ([exif(entry(0x102, SHORT, 8), turned(6))[:-12]], 0),
    "no EXIF": ([b"Exif\0\0<html>"], 0),
    "an orientation that there is not": ([exif(turned(9))], 0),
    "an orientation of another type": ([exif(turned(6, LONG))], 0),
    "two orientations": ([exif(turned(6, SHORT, count=2))], 0),
    "two segments": ([exif(turned(6)), exif(turned(3))], 90),
    "a second segment that turns": ([exif(turned(3)), exif(turned(6))], 180),
    "in XMP only": ([XMP], 0),
}


def with_segments(*segments):
    """A JPEG whose left half is dark, with these segments."""
    picture = np.zeros((32, 96, 3), np.uint8)
    picture[:, 48:] = 255
    Image.fromarray(picture).save(encoded := io.BytesIO(), "JPEG", quality=98)
    data = encoded.getvalue()
    return data[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments) + data[2:]


def sides(pixels):
    """Which side of an image is dark, if any: "left", "right", "top" or "bottom"."""
    pixels = np.asarray(pixels, float)
    halves = dict(zip(("left", "right"), np.array_split(pixels, 2, axis=1), strict=True))
    halves |= dict(zip(("top", "bottom"), np.array_split(pixels, 2, axis=0), strict=True))
    return min(halves, key=lambda side: halves[side].mean())


@pytest.mark.parametrize("name", ODD_EXIF)
@in_fork
def test_every_reader_turns_a_photograph_alike_whatever_its_exif_says_beside(name, tmp_path):
    segments, clockwise = ODD_EXIF[name]
    data = with_segments(*segments)
    expected = {0: "left", 90: "top", 180: "right", 270: "bottom"}[clockwise]
    (tmp_path / "a.jpg").write_bytes(data)
    assert sides(read_rgb(tmp_path / "a.jpg")) == expected
    packed = prepare_image(data, resize=16)
    assert sides(Image.open(io.BytesIO(packed))) == expected
    shard, index = tmp_path / "shard", tmp_path / "index"
    for content in (data, packed):
        shard.write_bytes(tfrecord.encode_record(content, 7))
        build_tfrecords.index_shard(shard, index)
        records = list_records([shard], [index], whole=True)
        ((images, _),) = loader(None, "validation", records, BATCH_SIZE=1)
        seen = images.mul(STD).add(MEAN)[0].permute(1, 2, 0)
        assert sides(seen) == expected


def test_the_exif_data_behind_the_pixels_of_a_png_count(tmp_path):
    picture = Image.open(io.BytesIO(with_segments()))
    picture.save(tmp_path / "a.png")
    chunk = b"eXIf" + exif(turned(6)).removeprefix(b"Exif\0\0")
    data = (tmp_path / "a.png").read_bytes()
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    for at in (33, -12):  # behind the header, before the end
        (tmp_path / "a.png").write_bytes(data[:at] + chunk + data[at:])
        assert sides(read_rgb(tmp_path / "a.png")) == "top"
        assert not is_plain((tmp_path / "a.png").read_bytes()), "DALI is not asked"
    assert is_plain(data)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


THREE = dict(policy="three", color_jitter=0.3, erase=0.5)
RAND = dict(policy="rand", n=2, m=9, color_jitter=0.0, erase=0.5)
LAST = 1437 // 24 - 1  # a global batch of 24 images
SHARED = [
    (1, 24, 1),
    (1, 6, 4),
    (2, 12, 1),
    (2, 3, 4),
    (3, 8, 1),
    (4, 6, 1),
    (4, 2, 3),
]  # ranks, BATCH_SIZE, accumulation


def global_batches(data, num_ranks, batch_size, accumulation, epoch, step, count, **values):
    """Labels and images of so many global batches, from optimizer step `step` of an epoch on."""
    values |= dict(BATCH_SIZE=batch_size, gradient_accumulation=accumulation)
    ranks = [loader(data, rank=rank, num_ranks=num_ranks, **values) for rank in range(num_ranks)]
    for rank in ranks:
        rank.sampler.epoch, rank.sampler.start = epoch, step * accumulation
    dealt = zip(*(itertools.chain(rank, rank) for rank in ranks), strict=True)
    for _ in range(count):
        batches = itertools.chain(*itertools.islice(dealt, accumulation))
        images, labels = map(torch.cat, zip(*batches, strict=True))
        yield labels, images


@pytest.mark.parametrize("augment", [THREE, RAND, None])
@in_fork
def test_a_global_batch_is_the_same_on_any_number_of_ranks_after_any_resume(numbered, augment):
    """To the bit, with every random number on; resumed before the end of an epoch, and going on to the next one."""
    how = dict(augment=augment, REPEATS=3 if augment else 1, FLIP=True, CROP_AREA=(0.2, 1.0), dali=dict(window=2))
    whole = list(global_batches(numbered, *SHARED[0], 0, 0, LAST + 4, **how))
    for place, shared in enumerate(SHARED[1:]):
        epoch, step = divmod(LAST + place % 3, LAST + 1)
        again = global_batches(numbered, *shared, epoch, step, 2, **how)
        for (labels, images), (same, others) in zip(whole[LAST + place % 3 :], again, strict=False):
            assert torch.equal(labels, same), shared
            assert torch.equal(images, others), shared
    first, second = ({label for labels, _ in part for label in labels.tolist()} for part in (whole[:3], whole[-3:]))
    assert len(first) == (3 * 8 if how["REPEATS"] == 3 else 3 * 24)
    assert first != second, "another epoch has another order"
    other = next(global_batches(numbered, *SHARED[0], 0, 0, 1, **how, SEED=2))
    assert not torch.equal(other[0], whole[0][0])


@in_fork
def test_an_epoch_has_each_record_once_in_windows_of_shards(numbered):
    """Of every two shards, all images come before those of the next two."""
    records = find_records(numbered, "train")
    stream = loader(numbered, BATCH_SIZE=1, with_images=False, dali=dict(window=2))
    ends = np.cumsum(records.counts)
    for _ in range(2):
        labels = labels_of(stream)
        assert sorted(labels) == list(range(1437))
        shards = np.searchsorted(ends, labels, side="right")
        half = len(set(shards)) // 2
        first = set(shards[: sum(records.counts[shard] for shard in set(shards[:100]))])
        assert len(first) == half == 2
        assert 300 < np.count_nonzero(np.diff(shards)) < 1100, "and within these they are mixed"
    everything = labels_of(loader(numbered, BATCH_SIZE=1, with_images=False, dali=dict(window=4)))
    assert len(set(np.searchsorted(ends, everything[:50], side="right"))) == 4


@in_fork
def test_labels_belong_to_their_images(numbered):
    """The image of a record, cropped by nothing and not mirrored, is the one that PIL reads from it."""
    contents = [image for shard in find_shards(numbered, "train") for image, _ in examples(shard)]
    images, labels = next(iter(loader(numbered, IMG_SIZE=64, CROP_AREA=(1.0, 1.0), FLIP=False)))
    close = 0
    for image, label in zip(images, labels.tolist(), strict=True):
        expected = torch.from_numpy(np.array(Image.open(io.BytesIO(contents[label])))).permute(2, 0, 1)
        close += ((image * STD + MEAN) * 255 - expected).abs().mean() < 3
    assert close == 32


@in_fork
def test_training_images_are_cropped_mirrored_and_augmented_as_the_config_says(numbered):
    def first(**values):
        return next(iter(loader(numbered, **dict(CROP_AREA=(1.0, 1.0), FLIP=False) | values)))

    def same(others, turn=lambda image: image):
        return sum(torch.equal(a, turn(b)) for a, b in zip(others, plain, strict=True))

    plain, labels = first()
    for values in (
        dict(CROP_AREA=(0.08, 1.0)),
        *(dict(augment=how) for how in (THREE, dict(policy="rand"), dict(color_jitter=0.3), dict(erase=1.0))),
    ):
        images, same_labels = first(**values)
        assert torch.equal(labels, same_labels)
        assert images.shape == plain.shape
        assert same(images) < 16
    mirrored, _ = first(FLIP=True)
    turned = same(mirrored, lambda image: image.flip(-1))
    assert 5 < turned < 27
    assert turned + same(mirrored) == 32
    plain, _ = first(augment=dict(policy="rand"))
    mirrored, _ = first(augment=dict(policy="rand"), FLIP=True)
    assert 0 < same(mirrored, lambda image: image.flip(-1)) < turned  # RandAugment turned some that were mirrored


def as_on_a_gpu(batches):
    """Have a loader make the graph that it makes for a GPU, all of whose operators work on the CPU then."""
    fn = nvidia.dali.fn
    for module, name in ((fn, "crop_mirror_normalize"), (fn.decoders, "image"), (fn.decoders, "image_slice")):
        operator = getattr(module, name)
        setattr(module, name, lambda *args, device=None, operator=operator, **options: operator(*args, **options))
    batches.on_gpu = True
    return batches


def as_sent(batches):
    """Have a loader decode as for a GPU: it sends bytes, which the GPU normalises, here the CPU in its place."""
    batches.sends_bytes = True
    return batches


def normalised(pixels):
    """Images of torchvision's as timm normalises those of ImageNet."""
    return F.normalize(pixels / 255, timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)


LEVELS = 3.5 / 255 / 0.224  # of pixels, after normalisation: DALI and torchvision round otherwise
WAYS = [(lambda batches: batches, 1e-5), (as_sent, 1e-5), (as_on_a_gpu, LEVELS)]
WAYS = pytest.mark.parametrize(("on", "tolerance"), WAYS)


@WAYS
@in_fork
def test_training_images_are_what_torchvision_makes_of_their_crops(on, tolerance, tmp_path):
    """Of coloured images, no two of one shape: cropped, resized, mirrored and normalised, otherwise in each epoch."""
    pictures = [photograph(150 + 9 * number, 190 - 7 * number, number) for number in range(12)]
    records = records_of(tmp_path, list(map(encode, pictures)))
    values = dict(BATCH_SIZE=4, CROP_AREA=(0.3, 0.9), FLIP=True, NUM_EPOCHS=3)
    batches, config = on(loader(None, records=records, **values)), config_of(**values)
    before, mirrored = {}, 0
    for epoch in range(3):
        order = batches.sampler.order(epoch).split(4)
        for numbers, (images, labels) in zip(order, batches, strict=True):
            assert torch.equal(labels, numbers)
            draws, _ = augmentation.draw(config, epoch, numbers.numpy())
            for number, image, crop, mirror in zip(numbers.tolist(), images, draws.crop, draws.mirror, strict=True):
                size = np.array(pictures[number].size[::-1])
                (crop,) = augmentation.place_rectangles(size, crop[None], (0.3, 0.9), (3 / 4, 4 / 3)).tolist()
                expected = F.resized_crop(F.pil_to_tensor(pictures[number]), *crop, [SIZE] * 2, antialias=True)
                expected = normalised(expected.flip(2) if mirror else expected)
                torch.testing.assert_close(image, expected, atol=tolerance, rtol=0)
                assert not torch.allclose(before.get(number, -image), expected, atol=0.5), "another epoch, another crop"
                before[number] = expected
                mirrored += mirror
    assert 5 < mirrored < 31


@WAYS
@pytest.mark.parametrize(("crop", "shorter"), [(0.75, 64), (1.0, 48)])
@in_fork
def test_evaluated_images_are_what_torchvision_makes_of_them(on, tolerance, crop, shorter, tmp_path):
    """Wide and high ones, resized without distortion and cropped in the middle."""
    pictures = [
        photograph(*size, number) for number, size in enumerate([(192, 128), (128, 192), (128, 128), (64, 192)])
    ]
    records = records_of(tmp_path, list(map(encode, pictures)))
    ((images, labels),) = on(loader(None, "validation", records, BATCH_SIZE=4, EVAL_CROP=crop))
    assert labels.tolist() == [0, 1, 2, 3]
    for image, picture in zip(images, pictures, strict=True):
        resized = F.resize(F.pil_to_tensor(picture), shorter, antialias=True)
        torch.testing.assert_close(image, normalised(F.center_crop(resized, SIZE)), atol=tolerance, rtol=0)


@in_fork
def test_images_that_a_gpu_normalises_equal_those_that_a_cpu_does(tmp_path):
    """All that is done to them included, and Mixup afterwards: to 5e-7, two units in the last place of the largest."""
    pictures = [photograph(150 + 9 * number, 190 - 7 * number, number) for number in range(12)]
    records = records_of(tmp_path, list(map(encode, pictures)))
    values = dict(
        BATCH_SIZE=4, augment=THREE, FLIP=True, mix=dict(mixup=0.8, cutmix=1.0, mode="elem"), MEAN=(0.5, 0.4, 0.3)
    )
    values["STD"] = (0.2, 0.25, 0.3)
    for way in (lambda batches: batches, lambda batches: MixedLoader(batches, config_of(**values), 0, 1)):
        both = [
            itertools.islice(way(on(loader(None, records=records, **values))), 3)
            for on in (lambda plain: plain, as_sent)
        ]
        for (images, labels), (sent, same) in zip(*both, strict=True):
            assert torch.equal(labels, same)
            assert sent.is_contiguous()
            torch.testing.assert_close(sent, images, atol=5e-7, rtol=0)


@in_fork
def test_a_batch_for_a_gpu_is_made_while_the_one_before_is_in_use(numbered):
    """The main thread, which gives the GPU its work, does not wait for it."""
    made, batches = [threading.Event() for _ in range(45)], as_sent(loader(numbered))
    finish, uncounted = batches._finish, iter(made)
    batches._finish = lambda *images: [finish(*images), next(uncounted).set()][0]
    taken = iter(batches)
    for number in range(3):
        next(taken)
        assert made[number + 1].wait(60)


@pytest.mark.parametrize("on", [lambda batches: batches, as_sent, as_on_a_gpu])
@in_fork
def test_a_buffer_is_free_once_its_images_are_there(on, numbered):
    """However slow the consumer is. tests/test_gpu.py has the same of a GPU."""

    def epoch(buffers):
        batches = on(loader(numbered, BATCH_SIZE=96, NUM_EPOCHS=1))
        batches.unused = buffers
        for images, labels in batches:
            time.sleep(0.02)
            yield images.clone(), labels

    expected, used = list(epoch(Dropped())), Overwritten()
    for (images, labels), (others, same) in zip(expected, epoch(used), strict=True):
        assert torch.equal(labels, same)
        assert torch.equal(images, others)
    assert 0 < len(used) < len(expected), "used again"


@in_fork
def test_exported_preprocessing_makes_the_pixels_of_the_evaluation(tmp_path):
    pictures = [photograph(192, 128, 1), photograph(128, 192, 2)]
    records = records_of(tmp_path, list(map(encode, pictures)))
    batches = loader(None, "validation", records, BATCH_SIZE=2, EVAL_CROP=0.75)
    state = {"data": {"images": "ImageNet"}, "normalization": batches.normalization}
    transform = timm.data.create_transform(**timm_model._preprocessing(state, batches.config))
    ((images, _),) = batches
    torch.testing.assert_close(images, torch.stack(list(map(transform, pictures))), atol=LEVELS, rtol=0)


@in_fork
def test_copies_of_an_image_are_augmented_each_in_its_own_way(numbered):
    """And no neighbours, which may be mixed; a later pipeline stage has the same labels in place of images."""
    how = dict(CROP_AREA=(0.5, 1.0), REPEATS=3)
    both = zip(loader(numbered, **how), loader(numbered, with_images=False, **how), strict=True)
    for (images, labels), (instead, of_later) in itertools.islice(both, 4):
        assert torch.equal(labels, instead)
        assert torch.equal(labels, of_later)
        assert (labels.view(-1, 2)[:, 0] != labels.view(-1, 2)[:, 1]).all()
        found = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        assert [len(places) for places in found].count(3) >= 10
        for places in found:
            assert not any(torch.equal(images[a], images[b]) for a, b in itertools.combinations(places, 2))
    assert labels_of(loader(numbered, "validation", REPEATS=3)) == labels_of(loader(numbered, "validation"))


def through_dali(operation, images):
    """What a graph of one operation makes of images (H, W, 3), uint8."""

    @nvidia.dali.pipeline_def(batch_size=len(images), num_threads=1, device_id=None, seed=3, enable_conditionals=True)
    def graph():
        return operation(nvidia.dali.fn.external_source(source=lambda: images, layout="HWC", batch=True))

    pipeline = graph()
    pipeline.build()
    (made,) = pipeline.run()
    return [torch.from_numpy(np.array(made[number])) for number in range(len(images))]


def blocks(count=4):
    """Images of random squares of 4 pixels, (48, 48, 3)."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8)
    return [np.ascontiguousarray(image.repeat(4, 0).repeat(4, 1)) for image in drawn]


OPERATIONS = {  # DALI's, torchvision's with its arguments, and how far they may be apart: rounded or cut off
    "grayscale": (augmentation.grayscale, F.rgb_to_grayscale, (3,), 1),
    "solarize": (augmentation.solarize, F.solarize, (128,), 0),
    "blur": (lambda images: augmentation.blur(images, 1.3), F.gaussian_blur, ([13, 13], [1.3]), 1),
    "brightness": (lambda images: augmentation.jitter(images, 1.2, 1.0, 1.0), F.adjust_brightness, (1.2,), 1),
    "contrast": (lambda images: augmentation.jitter(images, 1.0, 0.7, 1.0), F.adjust_contrast, (0.7,), 1),
    "saturation": (lambda images: augmentation.jitter(images, 1.0, 1.0, 1.3), F.adjust_saturation, (1.3,), 1),
}


@in_fork
def test_operations_equal_torchvisions_image_by_image():
    for name, (ours, theirs, arguments, rounding) in OPERATIONS.items():
        for found, image in zip(through_dali(ours, blocks()), blocks(), strict=True):
            expected = theirs(torch.from_numpy(image).permute(2, 0, 1), *arguments)
            apart = (found.permute(2, 0, 1).int() - expected.int()).abs()
            assert apart.max() <= rounding, name
            assert (expected.permute(1, 2, 0).int() - torch.from_numpy(image).int()).abs().max() > 10, name


@in_fork
def test_rand_augment_does_the_operations_that_it_is_given():
    """Each of them on an image of its own, with either sign; a turn to the other side is the mirrored one's turn."""
    names = [operation.name for operation in augmentation.RAND_AUGMENT]
    (image,) = blocks(1)
    mirrored = np.ascontiguousarray(image[:, ::-1])
    numbers = np.repeat(np.arange(len(names), dtype=np.int32), 2)[:, None]
    signs = np.tile(np.array([0, 1], np.int32), len(names))[:, None]

    def made(image):
        given = [image] * len(numbers), numbers, signs

        def operation(images):
            fed = (nvidia.dali.fn.external_source(itertools.repeat(part), batch=True) for part in given[1:])
            return augmentation.rand_augment(images, 48, 1, 9, *fed)

        return dict(zip(itertools.product(names, (0, 1)), through_dali(operation, given[0]), strict=True))

    found, others = made(image), made(mirrored)
    for name in names:
        same = torch.equal(found[name, 0], found[name, 1])
        assert same == (name in ("posterize", "solarize", "equalize", "auto_contrast", "identity")), name
        changed = (found[name, 0].int() - torch.from_numpy(image).int()).abs().float().mean()
        assert (changed == 0) == (name == "identity"), name
    for name in ("translate_x", "shear_x", "rotate"):
        apart = (found[name, 0].int() - others[name, 1].flip(1).int()).abs().float().mean()
        assert apart < 6 < (found[name, 0].int() - found[name, 1].int()).abs().float().mean(), name


@in_fork
def test_rand_augment_does_its_turns_in_their_order():
    names = [operation.name for operation in augmentation.RAND_AUGMENT]
    turns = [(names.index("rotate"), 0), (names.index("translate_x"), 1), (names.index("solarize"), 0)]

    def made(image, turns):
        fed = [np.array([values], np.int32) for values in zip(*turns, strict=True)]

        def operation(images):
            operations, signs = (nvidia.dali.fn.external_source(itertools.repeat(part), batch=True) for part in fed)
            return augmentation.rand_augment(images, 48, len(turns), 9, operations, signs)

        return through_dali(operation, [image])[0].numpy()

    (image,) = blocks(1)
    one_by_one = functools.reduce(lambda pixels, turn: made(pixels, [turn]), turns, image)
    assert np.array_equal(made(image, turns), one_by_one)
    assert not np.array_equal(made(image, turns[::-1]), one_by_one)


def test_what_is_drawn_for_an_image_is_worked_out_from_seed_epoch_and_number():
    """By hand, from the same uniform numbers, which no two epochs share, nor two images."""
    how, numbers, before = dict(policy="rand", n=3, m=9, color_jitter=0.3, erase=0.6), np.array([1437, 0, 70, 12]), None
    numbers = np.concatenate([numbers, np.arange(100, 160)])
    for epoch in (0, 1, 7):
        draws, erased = augmentation.draw(config_of(SEED=5, FLIP=True, augment=how), epoch, numbers)
        uniform = philox.uniform(5, "augmentation", epoch, numbers, count=57)
        assert np.array_equal(draws.crop, uniform[:, :22])
        assert np.array_equal(draws.mirror, uniform[:, 22] < 0.5)
        assert np.array_equal(draws.choice, uniform[:, 23] // (1 / 3))
        assert np.allclose(draws.sigma, 0.1 + 1.9 * uniform[:, 24])
        assert np.allclose(draws.factors, 0.7 + 0.6 * uniform[:, 25:28])
        assert np.array_equal(draws.operations, np.floor(uniform[:, 51:54] * len(augmentation.RAND_AUGMENT)))
        assert np.array_equal(draws.signs, uniform[:, 54:57] < 0.5)
        assert np.array_equal(erased.images, np.flatnonzero(uniform[:, 28] < 0.6))
        noise = []
        for place, rectangle in zip(erased.images, erased.rectangles.tolist(), strict=True):
            (top, left), tries = uniform[place, 49:51], zip(uniform[place, 29:39], uniform[place, 39:49], strict=True)
            for area, aspect in tries:
                area, aspect = SIZE**2 * (0.02 + 0.31 * area), 0.3 * 11**aspect
                height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
                if max(height, width) <= SIZE:
                    break
            assert rectangle == [int(top * (SIZE - height + 1)), int(left * (SIZE - width + 1)), height, width]
            generator = philox.generator(5, "erasing", epoch, int(numbers[place]))
            noise.append(generator.standard_normal(3 * height * width, np.float32))
        assert np.array_equal(erased.noise, np.concatenate(noise))
        drawn = [*draws, erased.images, erased.noise[:100]]
        assert before is None or not any(map(np.array_equal, drawn, before))
        before = drawn


FAR = 0.045  # Kolmogorov and Smirnov: of two times 4,000 numbers below 0.043 in 999 of 1,000 cases


@pytest.mark.parametrize("aspect", [(0.3, 3.3), (0.9, 4.0)])
def test_shapes_of_rectangles_are_distributed_as_torchvisions(aspect):
    """Widths ÷ heights and areas, over a range so wide, and to one side, that logarithms and directions count."""
    area, size = (0.02, 0.33), (400, 300)
    uniform = philox.uniform(1, "test", 0, np.arange(4000), count=2 * augmentation.TRIES + 2)
    *_, height, width = augmentation.place_rectangles(np.array(size), uniform, area, aspect).T
    picture, crop = torch.empty(1, *size), v2.RandomResizedCrop(1, area, aspect)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = [crop.make_params([picture]) for _ in range(4000)]
    their_height, their_width = (np.array([one[key] for one in theirs]) for key in ("height", "width"))
    assert ks_2samp(np.log(width / height), np.log(their_width / their_height)).statistic < FAR
    assert ks_2samp(width * height, their_width * their_height).statistic < FAR


@pytest.mark.parametrize("size", [(375, 500), (60, 500)])
def test_crops_are_placed_as_torchvision_places_them(size):
    """Areas, aspects and places; in a long image mostly none fits, and it is the largest one in the middle."""
    height, width = size
    area = (0.08, 1.0)
    uniform = philox.uniform(1, "test", 0, np.arange(4000), count=2 * augmentation.TRIES + 2)
    ours = augmentation.place_rectangles(np.array(size), uniform, area, CROP_ASPECT)
    picture, crop = torch.empty(1, height, width), v2.RandomResizedCrop(1, area, CROP_ASPECT)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = [crop.make_params([picture]) for _ in range(4000)]
    theirs = np.array([[one[key] for key in ("top", "left", "height", "width")] for one in theirs])
    assert (ours[:, 2:] > 0).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    for mine, others in zip(ours.T, theirs.T, strict=True):
        assert ks_2samp(mine, others).statistic < FAR
    (top, left), (tops, lefts) = ours.T[:2], theirs.T[:2]
    assert ks_2samp(top - left, tops - lefts).statistic < FAR, "whatever the column, any row"
    if size == (60, 500):
        assert 0.5 < (ours == [0, 210, 60, 80]).all(1).mean() < 1


def test_erasing_replaces_a_rectangle_by_noise_drawn_by_image():
    """Of the areas and aspects that torchvision draws, with the probability that it is given."""

    def erased(probability, numbers):
        _, drawn = augmentation.draw(config_of(augment=dict(erase=probability)), 2, numbers)
        images = torch.full((len(numbers), 3, SIZE, SIZE), -40.0)
        if drawn:
            augmentation.erase(images, drawn)
        return images

    assert (erased(0.0, np.arange(64)) == -40).all()
    assert 15 < (erased(0.5, np.arange(64)) > -20).any(1).any(1).any(1).sum() < 49
    images = erased(1.0, np.arange(64))
    for image in images:
        mask = image > -20
        rows, columns = mask.any(0).any(1), mask.any(0).any(0)
        assert torch.equal(mask, (rows[:, None] & columns).expand(3, -1, -1)), "a rectangle, in all channels"
        height, width = rows.sum().item() / 48, columns.sum().item() / 48
        assert 0.01 < height * width < 0.36
        assert 0.2 < height / width < 5
    noise = images[images > -20]
    assert abs(noise.mean()) < 0.02
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert torch.equal(erased(1.0, np.arange(63, -1, -1)).flip(0), images), "wherever an image is in its batch"


@in_fork
def test_a_graph_with_conditionals_runs_python_functions_as_written(numbered, monkeypatch):
    """DALI's AutoGraph would rewrite the one that resizes, which then takes several times as long."""
    files, resize = set(), loaders.v2.functional.resize

    def record(*args, **options):
        files.add(sys._getframe(1).f_code.co_filename)
        return resize(*args, **options)

    monkeypatch.setattr(loaders.v2.functional, "resize", record)
    next(iter(loader(numbered, augment=dict(policy="three"))))
    assert files == {loaders.__file__}


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------


def index_of(data, number=1):
    return index_path(data, "train", f"train-0000{number}-of-00004")


def with_line(line, number=3):
    """A change of an index file: another line in the place of line `number`; {offset} and {size} are what it was."""

    def change(data):
        lines = index_of(data).read_text().splitlines()
        offset, size = map(int, lines[number - 1].split())
        lines[number - 1] = line.format(offset=offset, size=size, over=offset - 1, long=size + 10**18)
        index_of(data).write_text("\n".join(lines) + "\n")

    return change


def cut_index(data):
    index_of(data).write_text("".join(index_of(data).read_text().splitlines(keepends=True)[:-1]))


SHARD = "train/train-00001-of-0000"
REMEDY = "run `python build_tfrecords.py --index-only {data}`"
NO_LINE = "{index}: line 3 is .*, not offset and size of a record; " + REMEDY
NO_BEGIN = "{index}: line 3 is .*, but a record begins at byte \\d+; " + REMEDY
WRONG = [  # what is done to the data, and what is said of it
    (lambda data: index_of(data).unlink(), "{index}: No such file.*; " + REMEDY),
    (cut_index, "{index}: ends at byte \\d+, but .*train-00001-of-00004 has \\d+; " + REMEDY),
    (with_line("0 12 3", 1), "{index}: line 1 is '0 12 3', not offset and size of a record; " + REMEDY),
    (lambda data: (data / f"{SHARD}4").unlink(), "train: 1 of 4 shards are missing, the first is number 1"),
    (
        lambda data: shutil.copy(data / f"{SHARD}4", data / f"{SHARD}5"),
        "train-00001-of-00005: is one of 5 shards, but .* is one of 4",
    ),
    (
        lambda data: shutil.rmtree(data / "train"),
        "DATA = {data}: has no TFRecords in train/; build_tfrecords.py makes them from the images",
    ),
    *(
        (with_line(line), NO_LINE)
        for line in ("-5 {size}", "{offset} -{size}", "1e3 {size}", "{offset} 5_0", "", "²5 5")
    ),
    *((with_line(line), NO_BEGIN) for line in ("{over} {size}", "{offset} 0", "{offset} 16", "0 {size}")),
    (with_line("{offset} {long}"), "{index}: line 4 is .*, but a record begins at byte 1000000000000\\d+; " + REMEDY),
    (with_line("{offset} {long}", 359), "{index}: ends at byte 1000000000000\\d+, but .*-of-00004 has \\d+; " + REMEDY),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_wrong_files_are_refused(copied, change, words):
    change(copied)
    with pytest.raises(UserError, match=words.format(data=copied, index=index_of(copied))) as error:
        find_records(copied, "train")
    assert "\n" not in str(error.value)


def test_a_path_that_is_not_utf8_is_read(numbered, tmp_path):
    odd = tmp_path / os.fsdecode(b"d\xe4ta")
    odd.symlink_to(numbered)
    assert len(labels_of(loader(odd, "validation", with_images=False))) == 12 * 32


def test_a_run_in_the_folder_of_the_data_does_not_replace_its_index_files(sample):
    splits = [find_records(sample, split) for split in NUM_SHARDS]
    before = [index.read_bytes() for records in splits for index in records.indices]
    with pytest.raises(UserError, match=f"^--output {sample}: is the data's folder"):
        leave_out(splits, sample, 10, 5, None)
    assert [index.read_bytes() for records in splits for index in records.indices] == before


@pytest.mark.parametrize("repeats", [1, 3])
@in_fork
def test_labels_out_of_range_are_refused(sample, repeats):
    with pytest.raises(UserError, match=r"train-0000\d-of-00004 at byte \d+: image/class/label is 10, not from 1 to"):
        list(loader(sample, NUM_CLASSES=9, REPEATS=repeats))


def cut_last_image(shard, end_marker=b""):
    """Cut the last record's image in half, and write a record of what is left; returns its offset."""
    content, (offset, _) = shard.read_bytes(), lines(shard)[-1]
    image, label = list(examples(shard))[-1]
    shard.write_bytes(content[:offset] + tfrecord.encode_record(image[: len(image) // 2] + end_marker, label))
    build_tfrecords.index_shard(shard, index_path(shard.parents[1], "train", shard.name))
    return offset


@pytest.mark.parametrize("change", [damage, cut_last_image, functools.partial(damage, place=b"image/class/label")])
@in_fork
def test_a_bad_record_ends_training_with_its_place(copied, change):
    """A flipped bit, what looks like a JPEG but is none, and what is no Example; also for a GPU, in a thread."""
    shard = find_shards(copied, "train")[3]
    offset = change(shard)
    for batches in (loader, lambda *args, **values: as_sent(loader(*args, **values))):
        with pytest.raises(UserError, match=f"{shard} at byte {offset}: .*max_bad") as error:
            list(batches(copied, NUM_CLASSES=NUM_CLASSES, BATCH_SIZE=479))  # a third of them: none is left over
        assert "\n" not in str(error.value)


@in_fork
def test_bad_records_are_left_out(copied, tmp_path, capfd):
    shards = find_shards(copied, "train")
    places = [(shards[0], damage(shards[0], 0)), (shards[3], cut_last_image(shards[3], end_marker=b"\xff\xd9"))]
    splits = [find_records(copied, split) for split in NUM_SHARDS]
    with pytest.raises(UserError, match=r"dali.max_bad = 1, but 2 records are bad; .*train-00000-of-00004 at byte 0: "):
        leave_out(splits, tmp_path, NUM_CLASSES, 1, RankLogger())
    leave_out(splits, tmp_path, NUM_CLASSES, 2, RankLogger())
    log = capfd.readouterr().out
    assert "2 bad records of 1797 are left out" in log
    for (shard, offset), reason in zip(places, ("the CRC", "cannot be decoded: Corrupt JPEG data"), strict=True):
        assert f"left out: {shard} at byte {offset}: {reason}" in log
    indices = [filtered_index(tmp_path, index) for index in splits[0].indices]
    kept = list_records(splits[0].shards, indices, whole=False)
    assert kept.num_images == 1435
    assert len(labels_of(loader(None, records=kept, NUM_CLASSES=NUM_CLASSES))) == 44 * 32


def test_a_run_directory_that_cannot_be_written_is_one_line(sample, tmp_path):
    splits = [find_records(sample, split) for split in NUM_SHARDS]
    (tmp_path / "idx_files").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/idx_files.*: (Not a directory|File exists)$"):
        leave_out(splits, tmp_path, NUM_CLASSES, 0, RankLogger())


def test_a_sample_is_made_whole_or_not_at_all_and_left_as_it_is(sample, tmp_path, monkeypatch):
    """Copies have other times of modification, and may be read-only."""

    def stopped(args):
        (args.output / "train").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(loaders, "write_imagenet", lambda folder: folder / "imagenet")
    monkeypatch.setattr(build_tfrecords, "build", stopped)
    with pytest.raises(KeyboardInterrupt):
        loaders.write_sample(tmp_path)
    assert not os.listdir(tmp_path)
    shutil.copytree(sample, tmp_path / "imagenet_tfrecords")
    assert loaders.write_sample(tmp_path) == tmp_path / "imagenet_tfrecords"
    assert os.listdir(tmp_path) == ["imagenet_tfrecords"]


# ---------------------------------------------------------------------------------------------------------------------
# In a run
# ---------------------------------------------------------------------------------------------------------------------


def run_of(data, output, **config):
    config = config_of(**{**dict(BATCH_SIZE=8, NUM_CLASSES=10, DATA=str(data)), **config})
    rank, layout = torch.distributed.get_rank(), SimpleNamespace(data=torch.distributed.get_world_size())
    device = torch.device("cpu")
    return SimpleNamespace(
        config=config, layout=layout, output=output, device=device, log=RankLogger(rank), alone=False, source={}
    )


def test_a_run_gets_its_loaders_and_every_rank_its_mistakes(copied, tmp_path):
    damage(find_shards(copied, "train")[0])

    def function():
        augment = dict(policy=None, n=1, m=5, color_jitter=0.3, erase=0.0)
        run = run_of(copied, tmp_path, dali=dict(max_bad=1), augment=augment, REPEATS=3, EVAL_CROP=1.0)
        run.log.info, said = lambda message: said.append(message), []
        train, test = loaders.build(run)
        assert "images are decoded on the CPU, without a GPU" in said
        images, labels = next(iter(train))
        assert images.shape == (8, 3, SIZE, SIZE)
        counted = sum(int((labels != IGNORED).sum()) for _, labels in test)
        for key, value, words in (
            ("NUM_CLASSES", 9, r"NUM_CLASSES = 9, but .*classes.txt has 10"),
            ("gradient_accumulation", 200, r"global batch of 3200 .*training set of 1437"),
        ):
            with pytest.raises(UserError, match=words):
                loaders.build(run_of(copied, tmp_path, **{key: value}))
        if run.log.rank == 1:
            run.config.DATA = str(tmp_path / "nowhere")
        with pytest.raises(UserError, match=r"nowhere: has no TFRecords in train/"):
            loaders.build(run)
        return train.records.num_images, len(train), counted, labels.tolist()

    first, second = fork_ranks.call(function, 2)
    assert first[:2] == second[:2] == (1436, 1436 // 2 // 8)
    assert first[2] + second[2] == 360
    assert first[3] != second[3]


def test_a_dry_run_does_without_dali(monkeypatch):
    """And so do random images."""
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for name in ("imagenet_dali_dataloader", "dali_augmentation"):
        monkeypatch.delitem(sys.modules, name)
    loader = importlib.import_module("imagenet_dali_dataloader")
    assert loader.NUM_IMAGES == 1_281_167
    with pytest.raises(ModuleNotFoundError, match="dali"):
        loader.build(None)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

GRAPHS = {  # name: whether for training, arguments of the loader, operators on images
    "published": (True, {}, "ImageSlice Resize CropMirrorNormalize"),
    "evaluation": (False, {}, "Image Resize CropMirrorNormalize"),
    "RandAugment": (
        True,
        {"augment": {"policy": "rand", "n": 2, "m": 9}},
        "ImageSlice Resize Brightness Equalize Filter Rotate Saturation WarpAffine CropMirrorNormalize",
    ),
    "3-Augment": (
        True,
        {"augment": {"policy": "three", "color_jitter": 0.3}},
        "ImageSlice Resize ColorSpaceConversion GaussianBlur BrightnessContrast Saturation CropMirrorNormalize",
    ),
}
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name", GRAPHS)
@in_fork
def test_graphs_for_a_gpu_are_valid_and_work_on_images_there(name, monkeypatch):
    """The pipeline is not built, for which DALI needs a GPU; operators check their arguments and devices before."""
    train, options, expected = GRAPHS[name]
    monkeypatch.setattr(nvidia.dali.Pipeline, "build", nvidia.dali.Pipeline._build_graph)
    records = Records([Path("shard")], [Path("index")], [np.zeros((100, 2), int)])
    config = config_of(BATCH_SIZE=8, IMG_SIZE=32, **options)
    pipeline = loaders.DaliLoader(records, train, config, CUDA, loaders.ENOUGH_CORES - 1)._build(iter(()))
    assert [output.device for output in pipeline._graph_outputs] == ["gpu"]
    there = {op.name.strip("_0123456789") for op in pipeline._ops if {out.device for out in op.outputs} == {"gpu"}}
    assert there.issuperset(expected.split())
    [decoder] = [op for op in pipeline._ops if "Image" in op.name and "Peek" not in op.name]
    assert "mixed" in str(decoder.spec), decoder.spec
    assert "hw_decoder_load" in str(decoder.spec), decoder.spec


@pytest.mark.parametrize("augment", [None, THREE, RAND])
@pytest.mark.parametrize("split", ["train", "validation"])
@in_fork
def test_graphs_for_a_gpu_beside_many_cores_make_bytes_on_the_cpu(split, augment, numbered):
    """These need no GPU, and run here."""
    records, config = find_records(numbered, split), config_of(augment=augment)
    batches = loaders.DaliLoader(records, split == "train", config, CUDA, loaders.ENOUGH_CORES)
    batch = batches._read((0, torch.arange(32)))
    pipeline = batches._build(iter([batch.inputs]))
    assert {output.device for op in pipeline._ops for output in op.outputs} == {"cpu"}
    (images,) = pipeline.run()
    assert images.dtype == nvidia.dali.types.UINT8
    assert len(images) == 32


@pytest.mark.parametrize(
    ("choice", "cores", "on_gpu", "words"),
    [
        ("auto", 5, True, "'auto': images are decoded on the GPU, 5 CPU cores for this rank are fewer than 6"),
        ("auto", 6, False, "'auto': images are decoded on the CPU, 6 CPU cores for this rank are at least 6"),
        (True, 64, True, "True: images are decoded on the GPU, as the config says"),
        (False, 1, False, "False: images are decoded on the CPU, as the config says"),
    ],
)
def test_where_images_are_decoded_is_chosen_by_cores_and_logged(choice, cores, on_gpu, words):
    config = config_of(dali=dict(gpu_aug=choice))
    assert loaders.where_to_decode(config, CUDA, cores) == (on_gpu, f"dali.gpu_aug = {words}")
    assert not loaders.where_to_decode(config, torch.device("cpu"), cores)[0]


@pytest.mark.parametrize("lacking", ["folder", "space"])
def test_images_are_normalised_where_the_program_cannot_be_cached(lacking, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if lacking == "folder":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(caching.IndexDataCacheFile, "load", lambda *_: None)
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (5, 7, 3), np.uint8)
    table, found = random.random((3, 256), np.float32), np.empty((3, 5, 7), np.float32)
    loaders._normalizer.__wrapped__()(image, table, found)
    assert np.array_equal(found, [table[channel][image[..., channel]] for channel in range(3)])
