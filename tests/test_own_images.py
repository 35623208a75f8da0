"""Your own class folders: which data folders have them, how they are split, and that every script trains on them."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from colossal_vit.checkpoint import storage
from colossal_vit.config import settings
from colossal_vit.data import imagenet
from colossal_vit.data.digits import write_caltech101, write_cifar10
from colossal_vit.data.folders import has_class_folders
from colossal_vit.data.image_folder import Images, find_images, split_by_content
from colossal_vit.data.source import USUAL, find_format
from colossal_vit.errors import UserError
from PIL import Image

import training
from layouts import LAYOUTS

CLASSES = {"cat": 20, "dog house": 15, "Ähre": 10}  # names, and how many images each has
ENDINGS = ("jpg", "png", "webp", "bmp", "tif", "gif", "JPEG")


def write(folder, classes=CLASSES, seed=0):
    """Random images of different sizes and formats, which tell their class by their colour."""
    generator = np.random.default_rng(seed)
    for label, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 60, (24 + number, 30, 3), dtype=np.uint8)
            pixels[..., label] += 150
            Image.fromarray(pixels).save(folder / name / f"{number} x.{ENDINGS[number % len(ENDINGS)]}")
    return folder


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Class folders without a split."""
    return write(tmp_path_factory.mktemp("flat"))


def train(output, folder, *more, script=training.HYBRID, layout=None, steps=4, **values):
    world_size, overrides = LAYOUTS[layout] if layout else (1, {})
    options = {"DATA": str(folder), "BATCH_SIZE": 16, "NUM_EPOCHS": 3, **overrides, **values}
    small = {key: value for key, value in training.SMALL[script].items() if key != "NUM_CLASSES"}  # the data say it
    return training.train(output, world_size, *more, steps=steps, script=script, small=False, **{**small, **options})


# ---------------------------------------------------------------------------------------------------------------------
# Which folders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["cat/1.jpg"], True),
        (["train/cat/1.PNG", "val/cat/2.png"], True),
        (["readme.txt", "cat/notes.txt", "cat/1.webp"], True),
        ([], False),
        (["1.jpg"], False),
        (["cat/notes.txt"], False),
        ([".cache/1.jpg"], False),
        (["train/train-00000-of-00004", "validation/validation-00000-of-00001"], False),
        (["train/cat/1.jpg", "idx_files/train/train-00000-of-00001.idx"], False),
        (["cat/1.jpg", "cifar-10-batches-bin/data_batch_1.bin"], False),
        (["cat/1.jpg", "caltech101/101_ObjectCategories/cat/1.jpg"], False),
    ],
)
def test_class_folders_are_told_from_other_formats(paths, expected, tmp_path):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert has_class_folders(tmp_path) == expected
    assert not has_class_folders(tmp_path / "none")


# ---------------------------------------------------------------------------------------------------------------------
# Split
# ---------------------------------------------------------------------------------------------------------------------


def split(contents, fraction=0.2):
    """The contents of the images to test on, of two classes whose images have these contents."""
    labels = np.array([label for label, own in enumerate(contents) for _ in own])
    digests = [content for own in contents for content in own]
    images = Images(Path("root"), Path("root"), ["a", "b"], [], [], [], labels, "")
    train, test = split_by_content(images, digests, fraction)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    return [[digests[number] for number in test if labels[number] == label] for label in range(len(contents))]


def test_the_split_depends_on_contents_only():
    contents = [[bytes([number]) for number in range(10)], [bytes([number]) for number in range(100, 115)]]
    found = split(contents)
    assert [len(own) for own in found] == [2, 3]
    assert [sorted(own) for own in split([own[::-1] for own in contents])] == [sorted(own) for own in found]
    (more, _) = split([[*contents[0], b"\xff"], contents[1]])
    assert set(found[0]) <= set(more), "another image moves none to the training set here"


def test_copies_of_an_image_are_on_one_side():
    one, other = b"\x00", b"\x01"
    assert split([[one, one, one, other, other], [one, other]])[0] == [one] * 3


def test_a_class_that_cannot_be_split_is_named():
    for own in ([b"\x00"], [b"\x00", b"\x00"]):
        with pytest.raises(UserError, match=f"^root/b: has {len(own)} images?, too few different ones to train and"):
            split([[b"\x00", b"\x01"], own])


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(flat, tmp_path_factory):
    """A run of train_hybrid.py in one process."""
    return train(tmp_path_factory.mktemp("alone"), flat)


@pytest.mark.parametrize("layout", ["PP 2", "1D 2"])
def test_every_layout_trains_on_the_same_images(layout, flat, alone, tmp_path):
    run = train(tmp_path / "run", flat, layout=layout)
    assert [step["loss"] for step in run.steps] == pytest.approx([step["loss"] for step in alone.steps], rel=1e-5)
    assert run.evaluations[-1]["eval_accuracy"] == alone.evaluations[-1]["eval_accuracy"]
    assert f"36 training and 9 test images from {flat}" in run.said


def test_the_run_knows_the_classes(alone):
    data = storage.open_named(alone.output).state["data"]
    assert (data["images"], data["classes"]) == ("class folders", sorted(CLASSES))
    assert json.loads((alone.output / "config.json").read_text())["NUM_CLASSES"] == len(CLASSES)
    assert alone.steps[-1]["loss"] != alone.steps[0]["loss"]


@pytest.mark.parametrize("script", [training.DATA_PARALLEL, training.CALTECH101, training.IMAGENET])
def test_every_script_takes_them(script, tmp_path):
    """With a folder to test on, which is then not split."""
    write(tmp_path / "data" / "train")
    write(tmp_path / "data" / "val", {"cat": 3, "Ähre": 4}, seed=1)
    run = train(tmp_path / "run", tmp_path / "data", script=script, steps=2)
    assert f"45 training and 7 test images from {tmp_path / 'data'}" in run.said
    assert run.evaluations[-1]["eval_images"] == 7
    state = storage.open_named(run.output).state
    assert state["data"]["classes"] == sorted(CLASSES)


def test_more_classes_of_the_config_than_of_the_data_are_kept(flat, tmp_path):
    run = train(tmp_path / "run", flat, steps=1, NUM_CLASSES=7)
    assert storage.open_named(run.output).state["config"]["NUM_CLASSES"] == 7


@pytest.mark.parametrize("flag", ["--dry-run", "--plan"])
def test_a_dry_run_has_a_class_for_each_folder(flag, flat, tmp_path):
    said = []
    for classes in ({}, {"NUM_CLASSES": 3}, {"NUM_CLASSES": 1000}):
        more = ["--plan", "h100"] if flag == "--plan" else [flag]
        said.append(train(tmp_path / "run", flat, *more, steps=None, **classes).said)
    assert said[0] == said[1] != said[2]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The digits in every format."""
    folder = tmp_path_factory.mktemp("sample")
    write_cifar10(folder / "CIFAR-10")
    write_caltech101(folder / "Caltech101")
    imagenet.write_sample(folder).rename(folder / "ImageNet")
    return folder


@pytest.mark.parametrize(
    ("script", "name", "layout", "counts"),
    [
        (training.DATA_PARALLEL, "ImageNet", None, "1437 training and 360 test"),
        (training.DATA_PARALLEL, "Caltech101", None, "1438 training and 359 test"),
        (training.HYBRID, "ImageNet", "PP 2", "1437 training and 360 test"),
        (training.HYBRID, "Caltech101", "1D 2", "1438 training and 359 test"),
        (training.CALTECH101, "CIFAR-10", None, "1437 training and 360 test"),
        (training.CALTECH101, "ImageNet", None, "1437 training and 360 test"),
        (training.IMAGENET, "CIFAR-10", None, "1437 training and 360 test"),
        (training.IMAGENET, "Caltech101", None, "1438 training and 359 test"),
    ],
)
def test_every_script_takes_every_format(script, name, layout, counts, sample, tmp_path):
    run = train(tmp_path / "run", sample / name, script=script, layout=layout, steps=1)
    assert f"{counts} images from {sample / name}" in run.said
    data = storage.open_named(run.output).state
    assert (data["data"]["images"], data["config"]["NUM_CLASSES"]) == (name, 10)


def test_of_several_formats_the_own_one_is_taken(tmp_path):
    for name in ("cifar-10-batches-bin", "caltech101/101_ObjectCategories", "idx_files", "cat"):
        (tmp_path / name).mkdir(parents=True)
    for script, usual in USUAL.items():
        assert find_format(tmp_path, usual) is usual, script
    shutil.rmtree(tmp_path / "idx_files")
    assert find_format(tmp_path, USUAL[settings.IMAGENET]).name == "CIFAR-10"


def test_records_without_an_index_are_named_in_every_script(sample, tmp_path):
    shutil.copytree(sample / "ImageNet", tmp_path / "data", ignore=shutil.ignore_patterns("idx_files"))
    line = training.refused(tmp_path / "run", DATA=str(tmp_path / "data"))
    assert "No such file or directory; run `python build_tfrecords.py --index-only" in line


MISTAKES = {
    "too few classes": (lambda root: None, {"NUM_CLASSES": 2}, "NUM_CLASSES = 2, but {root} has 3 classes"),
    "one image": (
        lambda root: write(root, {"few": 1}),
        {"NUM_CLASSES": 4},
        "{root}/few: has 1 image, too few different ones to train and to test on",
    ),
    "no image": (lambda root: (root / "none").mkdir(), {}, "{root}/none: has no images (.apng, "),
    "a folder in a class": (lambda root: (root / "cat" / "in").mkdir(), {}, "{root}/cat/in: is a folder, but images"),
    "a broken image": (
        lambda root: (root / "cat" / "b.png").write_bytes(b"no image"),
        {},
        "{root}/cat/b.png: cannot be decoded",
    ),
    "a small cache": (lambda root: None, {"CACHE_SIZE": 8}, "CACHE_SIZE = 8: must be at least IMG_SIZE"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line(name, flat, tmp_path):
    damage, values, words = MISTAKES[name]
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    damage(root)
    options = {"DATA": str(root), "BATCH_SIZE": 16, "NUM_CLASSES": 3, **values}
    line = training.refused(tmp_path / "run", steps=1, **options)
    assert re.search(f": error: {re.escape(words.format(root=root))}", line), line


def test_two_folders_to_test_on_are_refused(tmp_path):
    root = tmp_path / "data"
    for name in ("train", "test", "val"):
        write(root / name)
    line = training.refused(tmp_path / "run", steps=1, DATA=str(root), BATCH_SIZE=16)
    assert f"{root}: has val and test beside train; only one can be to test on" in line


def test_a_class_without_training_images_is_refused(tmp_path):
    write(tmp_path / "data" / "train", {"cat": 3})
    write(tmp_path / "data" / "val", {"dog": 3})
    with pytest.raises(UserError, match=f"^{tmp_path}/data/val/dog: there is no such class in {tmp_path}/data/train$"):
        find_images(tmp_path / "data", tmp_path, ["train", "val"])


def test_what_is_left_out_is_said(flat, tmp_path):
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    (root / "cat" / "notes.txt").touch()
    (root / "movie.mp4").touch()
    run = train(tmp_path / "run", root, steps=1)
    assert "2 files that are no images are left out (.mp4 1, .txt 1), the first is" in run.said
    assert sorted(os.listdir(root)) == sorted([".decoded", *CLASSES, "movie.mp4"])
