"""Which records the DALI loader gives to whom, what it makes of them, and what becomes of bad ones."""

import functools
import io
import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import nvidia.dali
import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.config.settings import IMAGENET
from colossal_vit.data.batches import IGNORED
from colossal_vit.data.digits import write_imagenet
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config
from PIL import Image
from torchvision.transforms.v2 import functional as F

import augmentation
import build_tfrecords as tfrecords
import fork_ranks
import imagenet_dali_dataloader as loaders
import tfrecord

SIZE, NUM_CLASSES = 48, 10
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (loaders.MEAN, loaders.STD))


def in_fork(test):
    """Run a test in a process of its own: once DALI has run in a process, its forks, which ranks are, hang in it."""
    return functools.wraps(test)(lambda **fixtures: fork_ranks.call(lambda: test(**fixtures), launched=False) and None)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The digits as TFRecords, in 4 and 2 shards."""
    root = tmp_path_factory.mktemp("sample")
    build(write_imagenet(root), root / "tfrecords", 4, 2)
    return root / "tfrecords"


@pytest.fixture(scope="module")
def numbered(sample, tmp_path_factory):
    """The same, but the labels of a split count its records, so that a batch tells which ones it has."""
    root = tmp_path_factory.mktemp("numbered")
    for split in tfrecords.NUM_SHARDS:
        number = 0
        for shard in tfrecords.find_shards(sample, split):
            path = root / split / shard.name
            path.parent.mkdir(exist_ok=True)
            records = []
            for image, _ in examples(shard):
                number += 1
                records.append(tfrecord.encode_record(image, number))
            path.write_bytes(b"".join(records))
            tfrecords.index_shard(path, tfrecords.index_path(root, split, path.name))
    return root


@pytest.fixture
def copied(sample, tmp_path):
    """A copy of the sample, to be damaged."""
    return shutil.copytree(sample, tmp_path / "copied")


def build(source, output, *num_shards):
    shards = zip(("--train-shards", "--validation-shards"), map(str, num_shards), strict=True)
    options = [part for pair in shards for part in pair]
    tfrecords.build(tfrecords.parse([str(source), str(output), "--workers", "1", *options]))


def lines(shard, data=None):
    return tfrecords.parse_index(tfrecords.index_path(data or shard.parents[1], shard.parent.name, shard.name))


def examples(shard):
    """(image, label) of each record."""
    content = shard.read_bytes()
    for offset, size in lines(shard):
        yield tfrecord.parse_example(content[offset + 12 : offset + size - 4])


def config_of(**values):
    """Some values in place of the defaults of a config."""
    always = dict(BATCH_SIZE=32, IMG_SIZE=SIZE, NUM_CLASSES=2000, SEED=1, gradient_accumulation=1)
    return Config(configs.complete({**always, **values}, IMAGENET))


def loader(data, split="train", records=None, rank=None, num_ranks=None, with_images=None, **values):
    records, place = records or loaders.find_records(data, split), dict(rank=rank, num_ranks=num_ranks)
    cpu = torch.device("cpu")
    return loaders.DaliLoader(records, split == "train", config_of(**values), cpu, with_images=with_images, **place)


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


@pytest.mark.parametrize("num_images", [31, 33, 65])
@in_fork
def test_ranks_with_unequal_parts_make_the_same_number_of_batches(numbered, num_images, tmp_path):
    records = loaders.find_records(numbered, "validation")
    index = tmp_path / "index"
    index.write_text("".join(records.indices[0].read_text().splitlines(keepends=True)[:num_images]))
    few = loaders.Records(records.shards[:1], [index], [num_images])
    parts = [list(loader(None, "validation", few, BATCH_SIZE=8, rank=rank, num_ranks=2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-(num_images // 2 + 1) // 8)
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
    tfrecords.index_shard(shard, index)
    ((images, labels),) = loader(None, "validation", loaders.Records([shard], [index], [2]), BATCH_SIZE=2, **crop)
    assert labels.tolist() == [6, 6]
    for image, content in zip(images, contents, strict=True):
        picture = Image.open(io.BytesIO(content))
        width, height = ((longer, shorter), (shorter, longer))[picture.height > picture.width]
        left, top = (width - SIZE) // 2, (height - SIZE) // 2
        picture = picture.resize((width, height), Image.BILINEAR).crop((left, top, left + SIZE, top + SIZE))
        expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        assert ((image * STD + MEAN) * 255 - expected).abs().max() < 3


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def passes(numbered, count, **kwargs):
    """The labels of the first passes over the records, in order; batches of 1 so that passes end where they end."""
    stream = loader(numbered, BATCH_SIZE=1, with_images=False, **kwargs)
    size = stream.end - stream.start
    seen = []
    while len(seen) < count * size:
        seen += labels_of(stream)
    return [seen[number * size : (number + 1) * size] for number in range(count)]


@in_fork
def test_a_pass_has_each_record_of_the_rank_once_in_another_order(numbered):
    ranks = [passes(numbered, 3, rank=rank, num_ranks=2) for rank in range(2)]
    for of_passes in ranks:
        first, *others = of_passes
        assert first != sorted(first)
        assert all(sorted(other) == sorted(first) and other != first for other in others)
    assert sorted(ranks[0][0] + ranks[1][0]) == list(range(1437))
    assert passes(numbered, 3, rank=1, num_ranks=2) == ranks[1], "the same seed, the same order"
    assert passes(numbered, 1, rank=1, num_ranks=2, SEED=2) != ranks[1][:1]


@in_fork
def test_an_epoch_has_a_known_length_and_the_next_one_goes_on(numbered):
    stream = loader(numbered, rank=1, num_ranks=2)
    epochs = [labels_of(stream) for _ in range(3)]
    assert len(stream) == 1437 // 2 // 32
    assert [len(epoch) for epoch in epochs] == [len(stream) * 32] * 3
    in_a_row = list(itertools.chain(*epochs))
    assert len(set(in_a_row[:719])) == 719, "what an epoch leaves over begins the next one"


@in_fork
def test_labels_belong_to_their_images(numbered):
    """The image of a record, cropped by nothing and not mirrored, is the one that PIL reads from it."""
    contents = [image for shard in tfrecords.find_shards(numbered, "train") for image, _ in examples(shard)]
    images, labels = next(iter(loader(numbered, IMG_SIZE=64, CROP_AREA=(1.0, 1.0), FLIP=False)))
    close = 0
    for image, label in zip(images, labels.tolist(), strict=True):
        expected = torch.from_numpy(np.array(Image.open(io.BytesIO(contents[label])))).permute(2, 0, 1)
        close += ((image * STD + MEAN) * 255 - expected).abs().mean() < 3
    assert close == 32


ALL = dict(policy="three", color_jitter=0.3, erase=0.5)


@in_fork
def test_training_images_are_cropped_mirrored_and_augmented_as_the_config_says(numbered):
    def first(**values):
        return next(iter(loader(numbered, **dict(CROP_AREA=(1.0, 1.0), FLIP=False) | values)))

    def same(others, turn=lambda image: image):
        return sum(torch.equal(a, turn(b)) for a, b in zip(others, plain, strict=True))

    plain, labels = first()
    for values in (
        dict(CROP_AREA=(0.08, 1.0)),
        *(dict(augment=how) for how in (ALL, dict(policy="rand"), dict(color_jitter=0.3), dict(erase=1.0))),
    ):
        images, same_labels = first(**values)
        assert torch.equal(labels, same_labels)
        assert images.shape == plain.shape
        assert same(images) < 16
    mirrored, _ = first(FLIP=True)
    turned = same(mirrored, lambda image: image.flip(-1))
    assert 5 < turned < 27
    assert turned + same(mirrored) == 32


@in_fork
def test_repeated_augmentation_uses_a_part_of_each_batch_so_often(numbered):
    """The order of the records stays; copies of an image are augmented each in their own way, and no neighbours."""
    how = dict(CROP_AREA=(0.5, 1.0), REPEATS=3)
    plain, repeated, later = loader(numbered), loader(numbered, **how), loader(numbered, with_images=False, **how)
    epochs = []
    for _ in range(2):
        used = []
        for (_, all_labels), (images, labels), (instead, of_later) in zip(plain, repeated, later, strict=True):
            first = all_labels[:11]
            assert torch.equal(labels, torch.cat([first, first, first[:10]]))
            assert torch.equal(labels, of_later)
            assert torch.equal(labels, instead), "a later stage has labels in place of images"
            assert (labels.view(-1, 2)[:, 0] != labels.view(-1, 2)[:, 1]).all()
            for place in range(10):
                copies = images[place], images[place + 11], images[place + 22]
                assert not any(torch.equal(a, b) for a, b in itertools.combinations(copies, 2))
            used += first.tolist()
        epochs.append(set(used))
        assert len(used) == 44 * 11
    assert len(epochs[0]) == 44 * 11, "an image comes in one batch of an epoch"
    assert len(epochs[0] & epochs[1]) < 44 * 11 / 2, "another epoch has other images"
    assert len(list(loader(numbered, "validation", REPEATS=3))) == len(list(loader(numbered, "validation"))) == 12
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
def test_erasing_replaces_a_rectangle_by_noise():
    """Of the areas and aspects that torchvision draws, with the probability that it is given."""

    def erased(probability):
        fn = nvidia.dali.fn
        far = functools.partial(fn.crop_mirror_normalize, output_layout="CHW", mean=[300.0], std=[1.0])  # below -40
        found = through_dali(lambda images: augmentation.erase(far(images), probability), blocks(64))
        return [image > -20 for image in found if (image > -20).any()]

    assert not erased(0.0)
    assert 15 < len(erased(0.5)) < 49
    masks = erased(1.0)
    assert len(masks) == 64
    for mask in masks:
        rows, columns = mask.any(0).any(1), mask.any(0).any(0)
        assert torch.equal(mask, (rows[:, None] & columns).expand(3, -1, -1)), "a rectangle, in all channels"
        height, width = rows.sum().item() / 48, columns.sum().item() / 48
        assert 0.01 < height * width < 0.36
        assert 0.2 < height / width < 5 or 1.0 in (height, width)


@in_fork
def test_a_graph_with_conditionals_runs_python_functions_as_written(numbered, monkeypatch):
    """DALI's AutoGraph would rewrite the one that resizes, which then takes several times as long."""
    files, interpolate = set(), loaders.F.interpolate

    def record(*args, **options):
        files.add(sys._getframe(1).f_code.co_filename)
        return interpolate(*args, **options)

    monkeypatch.setattr(loaders.F, "interpolate", record)
    next(iter(loader(numbered, augment=dict(erase=0.5))))
    assert files == {loaders.__file__}


@pytest.mark.parametrize(
    ("augment", "earlier"),
    [
        (None, [None]),
        (dict(policy="rand", n=1), [{"n": 1, "m": 9}]),
        (dict(policy="rand", n=1), [None, {"policy": "rand", "n": 1}]),
        (dict(policy="rand", erase=0.5), [{"n": 2, "m": 9}, {"erase": 0.5}]),
    ],
)
@in_fork
def test_a_stream_of_an_earlier_version_goes_on(numbered, augment, earlier):
    """RandAugment then stood in the block `dali`, blocks had no defaults, and Mixup was a loader around this one."""
    stream = loader(numbered, augment=augment)
    state = stream.state_dict() | {"batches": 3}
    state["of"] = state["of"] | {"augmentation": [[0.08, 1.0], True, *earlier]}
    assert stream.seek(0, 3, state)
    assert not stream.seek(0, 3, {"position": 3, "loader": state}), "its images do, but not what was drawn for Mixup"
    assert (stream.batches, stream.begun) == (3, 0)
    assert not stream.seek(0, 3, state | {"of": {**state["of"], "augmentation": [[0.08, 1.0], True, {"n": 3, "m": 9}]}})
    assert stream.begun == 3


@pytest.mark.parametrize("options", [{}, dict(augment=dict(policy="rand", n=1, m=9)), dict(augment=ALL, REPEATS=3)])
@in_fork
def test_a_saved_stream_resumes_to_the_bit(numbered, options):
    stream = loader(numbered, rank=1, num_ranks=2, **options)
    list(stream)  # 22 batches
    part = iter(stream)
    for _ in range(5):
        next(part)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [next(part) for _ in range(len(stream) - 5)] + list(stream)
    again = loader(numbered, rank=1, num_ranks=2, **options)
    assert again.seek(0, 0, state)
    assert again.state_dict() == state
    resumed = (list(again) + list(again))[: len(expected)]
    for (images, labels), (of_again, labels_again) in zip(expected, resumed, strict=True):
        assert torch.equal(images, of_again)
        assert torch.equal(labels, labels_again)


@in_fork
def test_another_layout_begins_another_stream(numbered):
    stream = loader(numbered)
    list(stream)
    state = stream.state_dict()
    halves = [loader(numbered, rank=rank, num_ranks=2) for rank in range(2)]
    assert not any(half.seek(0, 0, state) for half in halves)
    labels = labels_of(halves[0])
    assert labels != labels_of(loader(numbered, rank=0, num_ranks=2)), "no order comes twice"
    state = halves[0].state_dict()
    again = loader(numbered, rank=0, num_ranks=2)
    assert again.seek(0, 0, state)
    assert labels_of(again) == labels_of(halves[0])


@in_fork
def test_a_state_of_another_loader_or_a_damaged_one_begins_another_stream(numbered):
    """As when SYNTHETIC is switched off; the order is that of no stream before."""
    good = json.loads(json.dumps(loader(numbered).state_dict()))
    states = [{}, *({**good, key: "x"} for key in good), {**good, "batches": -1}]
    first = labels_of(loader(numbered))
    for state in states:
        stream = loader(numbered)
        assert not stream.seek(1, 4, state)
        assert stream.state_dict()["batches"] == len(stream) + 4
    assert labels_of(stream) != first


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------


def index_of(data, number=1):
    return tfrecords.index_path(data, "train", f"train-0000{number}-of-00004")


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
    (lambda data: shutil.rmtree(data / "train"), "DATA = {data}: has no TFRecords in train/"),
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
        loaders.find_records(copied, "train")
    assert "\n" not in str(error.value)


def test_a_path_that_is_not_utf8_is_refused_and_a_link_to_it_taken(sample, tmp_path):
    odd = tmp_path / os.fsdecode(b"d\xe4ta")
    odd.symlink_to(sample)
    with pytest.raises(UserError, match=r"ta: DALI reads paths in UTF-8 only; rename it, or set DATA to a link"):
        loaders.find_records(odd, "train")
    (tmp_path / "link").symlink_to(odd)
    assert loaders.find_records(tmp_path / "link", "train").num_images == 1437


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        (dict(NUM_CLASSES=9), 1, r"NUM_CLASSES = 9, but .*classes.txt has 10"),
        (dict(BATCH_SIZE=400, gradient_accumulation=2), 2, r"global batch of 1600 .*training set of 1437"),
        (dict(BATCH_SIZE=4, REPEATS=4, mix={"mixup": 0.8}), 2, r"REPEATS = 4: must be below BATCH_SIZE = 4 with mix"),
        ({}, 361, r"has 360 images, but there are 361"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sample, settings, num_ranks, expected):
    config = config_of(**dict(NUM_CLASSES=10, BATCH_SIZE=1) | settings)
    splits = [loaders.find_records(sample, split) for split in tfrecords.NUM_SHARDS]
    with pytest.raises(UserError, match=expected):
        loaders.check_sizes(*splits, sample, config, num_ranks)


def test_a_run_in_the_folder_of_the_data_does_not_replace_its_index_files(sample):
    splits = [loaders.find_records(sample, split) for split in tfrecords.NUM_SHARDS]
    before = [index.read_bytes() for records in splits for index in records.indices]
    with pytest.raises(UserError, match=f"^--output {sample}: is the data's folder"):
        loaders.leave_out(splits, sample, 10, 5, None)
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
    tfrecords.index_shard(shard, tfrecords.index_path(shard.parents[1], "train", shard.name))
    return offset


@pytest.mark.parametrize("change", [damage, cut_last_image, functools.partial(damage, place=b"image/class/label")])
@in_fork
def test_a_bad_record_ends_training_with_its_place(copied, change):
    """A flipped bit, what looks like a JPEG but is none, and what is no Example."""
    shard = tfrecords.find_shards(copied, "train")[3]
    with pytest.raises(UserError, match=f"{shard} at byte {change(shard)}: .*max_bad") as error:
        list(loader(copied, NUM_CLASSES=NUM_CLASSES, rank=1, num_ranks=2))
    assert "\n" not in str(error.value)


@in_fork
def test_bad_records_are_left_out(copied, tmp_path, capfd):
    shards = tfrecords.find_shards(copied, "train")
    places = [(shards[0], damage(shards[0], 0)), (shards[3], cut_last_image(shards[3], end_marker=b"\xff\xd9"))]
    splits = [loaders.find_records(copied, split) for split in tfrecords.NUM_SHARDS]
    with pytest.raises(UserError, match=r"dali.max_bad = 1, but 2 records are bad; .*train-00000-of-00004 at byte 0: "):
        loaders.leave_out(splits, tmp_path, NUM_CLASSES, 1, RankLogger())
    loaders.leave_out(splits, tmp_path, NUM_CLASSES, 2, RankLogger())
    log = capfd.readouterr().out
    assert "2 bad records of 1797 are left out" in log
    for (shard, offset), reason in zip(places, ("the CRC", "cannot be decoded: Corrupt JPEG data"), strict=True):
        assert f"left out: {shard} at byte {offset}: {reason}" in log
    indices = [loaders.filtered_index(tmp_path, index) for index in splits[0].indices]
    kept = loaders.list_records(splits[0].shards, indices, whole=False)
    assert kept.num_images == 1435
    stream = loader(None, records=kept, NUM_CLASSES=NUM_CLASSES)
    assert len(labels_of(stream) + labels_of(stream)) == 2 * 44 * 32


# ---------------------------------------------------------------------------------------------------------------------
# In a run
# ---------------------------------------------------------------------------------------------------------------------


def run_of(data, output, **config):
    config = config_of(BATCH_SIZE=8, NUM_CLASSES=10, DATA=str(data), **config)
    rank, layout = torch.distributed.get_rank(), SimpleNamespace(data=torch.distributed.get_world_size())
    device = torch.device("cpu")
    return SimpleNamespace(
        config=config, layout=layout, output=output, device=device, log=RankLogger(rank), observe=None
    )


def test_a_run_gets_its_loaders_and_every_rank_its_mistakes(copied, tmp_path):
    damage(tfrecords.find_shards(copied, "train")[0])

    def function():
        augment = dict(policy=None, n=1, m=5, color_jitter=0.3, erase=0.0)
        run = run_of(copied, tmp_path, dali=dict(max_bad=1), augment=augment, REPEATS=3, EVAL_CROP=1.0)
        train, test = loaders.build_imagenet(run)
        images, labels = next(iter(train))
        assert images.shape == (8, 3, SIZE, SIZE)
        assert train.augment == augment
        counted = sum(int((labels != IGNORED).sum()) for _, labels in test)
        if run.log.rank == 1:
            run.config.DATA = str(tmp_path / "nowhere")
        with pytest.raises(UserError, match=r"nowhere: has no TFRecords in train/"):
            loaders.build_imagenet(run)
        return train.records.num_images, len(train), counted, labels.tolist()

    first, second = fork_ranks.call(function, 2)
    assert first[:2] == second[:2] == (1436, 1436 // 2 // 8)
    assert first[2] + second[2] == 360
    assert first[3] != second[3]


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

GRAPHS = {  # name: whether for training, arguments of the loader, operators on images
    "published": (True, {}, "ImageRandomCrop Resize CropMirrorNormalize"),
    "evaluation": (False, {}, "Image Resize CropMirrorNormalize"),
    "RandAugment": (
        True,
        {"augment": {"policy": "rand", "n": 2, "m": 9}},
        "ImageRandomCrop Resize Brightness Equalize Filter Rotate Saturation WarpAffine CropMirrorNormalize",
    ),
    "erasing": (True, {"augment": {"erase": 0.25}}, "ImageRandomCrop Resize CropMirrorNormalize Erase Normal"),
    "3-Augment": (
        True,
        {"augment": {"policy": "three", "color_jitter": 0.3}},
        "ImageRandomCrop Resize ColorSpaceConversion GaussianBlur BrightnessContrast Saturation CropMirrorNormalize",
    ),
    "repeats": (True, {"REPEATS": 3}, "ImageRandomCrop Resize CropMirrorNormalize"),
    "on the CPU": (True, {"dali": {"gpu_aug": False}, "augment": {"policy": "three", "erase": 0.25}}, ""),
}


@pytest.mark.parametrize("name", GRAPHS)
@in_fork
def test_graphs_for_a_gpu_are_valid_and_work_on_images_there(name, monkeypatch):
    """The pipeline is not built, for which DALI needs a GPU; operators check their arguments and devices before."""
    train, options, expected = GRAPHS[name]
    monkeypatch.setattr(nvidia.dali.Pipeline, "build", nvidia.dali.Pipeline._build_graph)
    records = loaders.Records([Path("shard")], [Path("index")], [100])
    config = config_of(BATCH_SIZE=8, IMG_SIZE=32, **options)
    pipeline = loaders.DaliLoader(records, train, config, torch.device("cuda", 0))._build()
    assert [output.device for output in pipeline._graph_outputs] == ["cpu", "gpu"]
    there = {op.name.strip("_0123456789") for op in pipeline._ops if {out.device for out in op.outputs} == {"gpu"}}
    assert there.issuperset(expected.split()) if expected else not there
