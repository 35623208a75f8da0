"""Your own class folders: which data folders have them, how they are split, and that every script trains on them."""

import csv
import hashlib
import json
import os
import re
import shutil
import warnings
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from colossal_vit import predict
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.timm_model import export_timm
from colossal_vit.config import settings
from colossal_vit.data import class_images, imagenet
from colossal_vit.data.class_images import Images, find_images, split_by_content
from colossal_vit.data.digits import write_caltech101, write_cifar10
from colossal_vit.data.folders import has_class_folders
from colossal_vit.data.source import USUAL, expected_classes, find_format
from colossal_vit.errors import UserError
from colossal_vit.hooks import answers as answers_hook
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config
from PIL import Image

import training
from layouts import LAYOUTS

CLASSES = {"cat": 20, "dog house": 15, "Ähre": 10}  # names, and how many images each has
ORIENTATION = 0x0112  # tag of EXIF
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


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["Train/cat/1.jpg", "Val/cat/2.jpg"], "has Train but no train: call the folder to train on train, or rename"),
        (["training/cat/1.jpg", "validation/cat/2.jpg"], "has training but no train"),
        (["test/cat/1.jpg", "val/cat/2.jpg"], "has test but no train"),
        (["cat/1.jpg", "dog/2.jpg", "test/3.jpg"], "has test but no train"),
        (["cat/1.HEIC", "cat/a.mov", "dog/2.heic"], "no image in it can be read (.heic 2): convert them to JPEG"),
        (["train/cat/1.avif", "val/cat/2.jpg"], "no image in it can be read (.avif 1): convert them to JPEG"),
        (["1.JPG", "notes/a.txt"], "has images such as 1.JPG, but no class folders; a folder for each class is needed"),
        (["1.heic", "2.heic"], "has images such as 1.heic, but no class folders; a folder for each class is needed"),
    ],
)
def test_folders_that_are_no_classes_or_have_no_readable_image_are_refused(paths, words, tmp_path):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for usual in USUAL.values():
        with pytest.raises(UserError, match=f"^{re.escape(f'{tmp_path}: {words}')}"):
            find_format(tmp_path, usual)


# ---------------------------------------------------------------------------------------------------------------------
# Which files
# ---------------------------------------------------------------------------------------------------------------------

COLOUR, GREY = (200, 100, 50), (120, 120, 120)
HALF_WHITE = (227, 177, 152)  # COLOUR at half opacity


def save(name, mode="RGB", value=COLOUR, size=(20, 20), **options):
    """What saves an image of one value in a folder."""
    return lambda folder: Image.new(mode, size, value).save(folder / name, **options)


def save_upside_down(folder):
    image = Image.new("RGB", (20, 20))
    image.paste(COLOUR, (0, 10, 20, 20))
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    image.save(folder / "a.jpg", exif=exif, quality=95)


def save_palette(folder, **options):
    Image.new("RGB", (20, 20), COLOUR).convert("P", palette=Image.Palette.ADAPTIVE).save(folder / "a.png", **options)


def save_frames(name):
    others = [Image.new("RGB", (20, 20), "blue")]
    return save(name, save_all=True, append_images=others)


def save_array(name, array):
    return lambda folder: Image.fromarray(array).save(folder / name)


def save_and(name, change, **options):
    """What saves a photograph, and then changes the file or its folder."""

    def make(folder):
        save(name, **options)(folder)
        change(folder / name)

    return make


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def save_bomb(folder):
    """A PNG whose header says 60,000 × 60,000 pixels."""
    save("a.png")(folder)
    data = bytearray((folder / "a.png").read_bytes())
    data[16:24] = (60_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    (folder / "a.png").write_bytes(data)


def in_folder(make, *names):
    def nested(folder):
        inner = folder.joinpath(*names)
        inner.mkdir(parents=True)
        make(inner)

    return nested


def link(target, name, make=None):
    def linked(folder):
        if make:
            (folder.parent.parent / "elsewhere").mkdir()
            make(folder.parent.parent / "elsewhere")
        (folder / name).symlink_to(target)

    return linked


ODD_FILES = {  # what is in the folder of a class; the colour it is taken with, or what is said of it
    "JPEG": (save("a.jpg", quality=95), COLOUR),
    "progressive JPEG": (save("a.jpeg", quality=95, progressive=True), COLOUR),
    "PNG": (save("a.png"), COLOUR),
    "WebP": (save("a.webp", quality=95), COLOUR),
    "WebP without loss": (save("a.webp", lossless=True), COLOUR),
    "BMP": (save("a.bmp"), COLOUR),
    "TIFF": (save("a.tif"), COLOUR),
    "TIFF with LZW": (save("a.tiff", compression="tiff_lzw"), COLOUR),
    "TIFF of two pages": (save_frames("a.tif"), COLOUR),
    "GIF": (save("a.gif"), COLOUR),
    "animated GIF": (save_frames("a.gif"), COLOUR),
    "animated PNG": (save_frames("a.png"), COLOUR),
    "PPM": (save("a.ppm"), COLOUR),
    "alpha": (save("a.png", "RGBA", (*COLOUR, 128)), HALF_WHITE),
    "grey with alpha": (save("a.png", "LA", (0, 0)), (255, 255, 255)),
    "palette": (save_palette, COLOUR),
    "palette with a transparent colour": (partial(save_palette, transparency=0), (255, 255, 255)),
    "grey": (save("a.png", "L", GREY[0]), GREY),
    "grey JPEG": (save("a.jpg", "L", GREY[0]), GREY),
    "black and white": (save("a.png", "1", 1), (255, 255, 255)),
    "grey of 16 bits": (save_array("a.png", np.full((20, 20), 120 * 257, np.uint16)), GREY),
    "grey TIFF of 16 bits": (save_array("a.tif", np.full((20, 20), 120 * 257, np.uint16)), GREY),
    "CMYK": (save("a.jpg", "CMYK", (*(255 - value for value in COLOUR), 0), quality=95), COLOUR),
    "EXIF orientation": (save_upside_down, COLOUR),
    "another format's ending": (save_and("a.webp", lambda path: path.rename(path.with_suffix(".jpg"))), COLOUR),
    "ending in upper case": (save_and("a.jpg", lambda path: path.rename(path.with_suffix(".JPG"))), COLOUR),
    "spaces and a line break": (save(" a \n b.png"), COLOUR),
    "unicode": (save("Ä 猫 🐈.png"), COLOUR),
    "a name that is not UTF-8": (save_and("a.png", lambda path: os.rename(path, f"{path.parent}/\udcff.png")), COLOUR),
    "a long name": (save("a" * 251 + ".png"), COLOUR),
    "one pixel": (save("a.png", size=(1, 1)), COLOUR),
    "a panorama": (save("a.png", size=(900, 9)), COLOUR),
    "a folder in it": (in_folder(save("a.png"), "inner", "most"), COLOUR),
    "a link to an image": (link("../../elsewhere/a.png", "b.png", save("a.png")), COLOUR),
    "a link to a folder": (link("../../elsewhere", "b", save("a.png")), COLOUR),
    "a hidden file": (save(".a.png"), ""),
    "a hidden folder": (in_folder(save("a.png"), ".cache"), ""),
    "text": (lambda folder: (folder / "a.txt").touch(), "1 files that are no images are left out (.txt 1)"),
    "no ending": (save_and("a.png", lambda path: path.rename(path.with_suffix(""))), "left out (no ending 1)"),
    "an ending that no format has": (lambda folder: (folder / "Thumbs.db").touch(), "left out (.db 1)"),
    "text in a folder in it": (in_folder(lambda inner: (inner / "a.csv").touch(), "inner"), "left out (.csv 1)"),
    "an empty file": (lambda folder: (folder / "a.jpg").touch(), "/odd/a.jpg: cannot be decoded: cannot identify"),
    "text with an image's ending": (
        lambda folder: (folder / "a.jpg").write_text("<html>"),
        "/odd/a.jpg: cannot be decoded: cannot identify",
    ),
    "a JPEG cut off": (
        save_and("a.jpg", cut, size=(400, 400)),
        "/odd/a.jpg: cannot be decoded: image file is truncated",
    ),
    "a PNG cut off": (save_and("a.png", cut, size=(99, 99)), "/odd/a.png: cannot be decoded: "),
    "too many pixels": (save_bomb, "/odd/a.png: cannot be decoded: Image size (3600000000 pixels) exceeds limit"),
    "grey in floating point": (
        save_array("a.tif", np.zeros((20, 20), np.float32)),
        "/odd/a.tif: cannot be decoded: which grey is white is not known; save it with 8 bits a channel",
    ),
    "grey of 32 bits": (
        save_array("a.tif", np.zeros((20, 20), np.int32)),
        "/odd/a.tif: cannot be decoded: which grey is white is not known",
    ),
    "a link to nothing": (link("nowhere", "a.png"), "/odd/a.png: No such file or directory; repair or remove it"),
    "a link to itself": (link("a.png", "a.png"), "/odd/a.png: Too many levels of symbolic links; repair or"),
    "a link to its folder": (link(".", "b"), "/odd/b: is a link to a folder that it is in; remove it"),
    "a FIFO": (lambda folder: os.mkfifo(folder / "a.png"), "/odd/a.png: is neither a file nor a folder; repair or"),
    "nothing": (lambda folder: (folder / "good.png").unlink(), "/odd: has no images (.apng, "),
}


def read_all(root):
    """All images of a folder, and their pixels."""
    images = find_images(root, root / ".decoded")
    with warnings.catch_warnings(action="ignore"):
        return images, [class_images.decode(images, 8, number) for number in range(len(images.paths))]


@pytest.mark.parametrize("name", ODD_FILES)
def test_an_odd_file_is_taken_or_named(name, tmp_path):
    make, expected = ODD_FILES[name]
    root = tmp_path / "data"
    for folder in ("even", "odd"):
        (root / folder).mkdir(parents=True)
        save("good.png", value="black")(root / folder)
    make(root / "odd")
    if isinstance(expected, str) and expected.startswith("/"):
        with pytest.raises(UserError, match=re.escape(f"{root}{expected}")):
            read_all(root)
        return
    images, pixels = read_all(root)
    colours = [image[0, 0].tolist() for image in pixels if image.any()]
    if isinstance(expected, tuple):
        (colour,) = colours
        assert colour == pytest.approx(expected, abs=3)  # JPEG and WebP round
        assert (images.classes, images.labels.tolist()) == (["even", "odd"], [0, 1, 1])
        assert not images.left_out
    else:
        assert not colours
        assert expected in images.left_out
        assert bool(expected) == bool(images.left_out)


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
    contents = [[f"{number:03}" for number in range(10)], [f"{number:03}" for number in range(100, 115)]]
    found = split(contents)
    assert [len(own) for own in found] == [2, 3]
    assert [sorted(own) for own in split([own[::-1] for own in contents])] == [sorted(own) for own in found]
    (more, _) = split([[*contents[0], "999"], contents[1]])
    assert set(found[0]) <= set(more), "another image moves none to the training set here"


def test_copies_of_an_image_are_on_one_side():
    one, other = "0", "1"
    assert split([[one, one, one, other, other], [one, other]])[0] == [one] * 3


def test_a_class_that_cannot_be_split_is_named():
    for own in (["0"], ["0", "0"]):
        words = f"^root/b: has {len(own)} images?, too few different ones .*: add some, or leave it out$"
        with pytest.raises(UserError, match=words):
            split([["0", "1"], own])


def test_only_new_and_changed_images_are_read_for_the_split(flat, tmp_path, monkeypatch):
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    read, original = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, *more: read.append(file.name) or original(file, *more))

    def digests():
        return class_images.digest_contents(find_images(root, root / ".decoded"), RankLogger())

    first = digests()
    assert first == digests()
    assert len(read) == len(first) == sum(CLASSES.values())
    shutil.copy(root / "cat" / "0 x.jpg", root / "cat" / "9.jpg")
    os.utime(root / "Ähre" / "1 x.png", ns=(1, 1))
    digests()
    assert sorted(read[len(first) :]) == [f"{root}/cat/9.jpg", f"{root}/Ähre/1 x.png"]  # by several threads
    (root / ".decoded" / "contents.json").write_text("[")
    assert sorted(digests()) == sorted([*first, first[0]])


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
    """With a folder to evaluate on, which is then not split, and another one to test on, which is left alone."""
    write(tmp_path / "data" / "train")
    write(tmp_path / "data" / "val", {"cat": 3, "Ähre": 4}, seed=1)
    write(tmp_path / "data" / "test", {"cat": 2}, seed=2)
    run = train(tmp_path / "run", tmp_path / "data", script=script, steps=2)
    assert f"45 training and 7 test images from {tmp_path / 'data'}" in run.said
    assert f"{tmp_path / 'data'}: evaluates on val; not read: test" in run.said
    assert run.evaluations[-1]["eval_images"] == 7
    state = storage.open_named(run.output).state
    assert state["data"]["classes"] == sorted(CLASSES)


@pytest.mark.parametrize("layout", [None, "PP 2"])
def test_images_that_are_decoded_for_each_batch_are_the_same(layout, flat, alone, tmp_path):
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    run = train(tmp_path / "run", root, layout=layout, KEEP_DECODED=False)
    assert [step["loss"] for step in run.steps] == pytest.approx([step["loss"] for step in alone.steps], rel=1e-5)
    assert os.listdir(root / ".decoded") == ["contents.json"]


def test_classes_of_any_name_are_evaluated_and_asked_about(tmp_path, capfd, monkeypatch):
    """The images are alike, so that some are mistaken; two `$` in a line are a formula for matplotlib."""
    root, names = tmp_path / "data", ["A$", "US$", "fl\udcf6wer$"]
    for seed, name in enumerate(names):
        write(root, {name: 10}, seed)
    run = train(tmp_path / "run", root)
    assert "the most confident mistakes are in" in train(run.output, root, "--eval-only", steps=None).said
    with open(run.output / "evaluation" / "classes.csv", newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == names
    assert any(row["mostly mistaken for"] in names for row in rows)
    assert sorted(os.listdir(run.output / "evaluation")) == ["classes.csv", "confusion.png", "mistakes.png"]
    answers = tmp_path / "answers.csv"
    assert predict.main([str(run.output), str(root), "--top", "3", "--output", str(answers)]) == 0
    with open(answers, newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [{row[f"class_{k}"] for k in (1, 2, 3)} for row in rows] == [set(names)] * 30
    monkeypatch.setattr(answers_hook, "SHOWN", 0)
    train(run.output, root, "--eval-only", steps=None)
    assert sorted(os.listdir(run.output / "evaluation")) == ["classes.csv", "confusion.png"], "none of an earlier one"


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


@pytest.mark.parametrize(("name", "classes"), [("CIFAR-10", 10), ("Caltech101", 101), ("ImageNet", 1000), (".", 10)])
def test_a_dry_run_expects_the_classes_of_the_format_in_its_folder(name, classes, sample):
    """Which is another script's, or class folders of one's own."""
    folder = sample / name if name != "." else sample / "Caltech101" / "caltech101" / "101_ObjectCategories"
    assert expected_classes(Config({"DATA": str(folder)}), "train_hybrid") == classes


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
    "one class": (
        lambda root: [(root / "all").mkdir(), *[(root / name).rename(root / "all" / name) for name in CLASSES]],
        {},
        "{root}: has one class folder only, all; DATA must be what has one for each class",
    ),
    "too few classes": (lambda root: None, {"NUM_CLASSES": 2}, "NUM_CLASSES = 2, but {root} has 3 classes"),
    "one image": (
        lambda root: write(root, {"few": 1}),
        {"NUM_CLASSES": 4},
        "{root}/few: has 1 image, too few different ones to train and to test on",
    ),
    "no image": (lambda root: (root / "none").mkdir(), {}, "{root}/none: has no images (.apng, "),
    "a broken image": (
        lambda root: (root / "cat" / "b.png").write_bytes(b"no image"),
        {},
        "{root}/cat/b.png: cannot be decoded",
    ),
    "a small cache": (lambda root: None, {"CACHE_SIZE": 8}, "CACHE_SIZE = 8: must be at least IMG_SIZE"),
    "a small blurred image": (
        lambda root: None,
        {"IMG_SIZE": 6, "PATCH_SIZE": 2, "augment.policy": "three"},
        "IMG_SIZE = 6: augment.policy = 'three' needs at least 7",
    ),
}


def test_a_run_is_not_written_among_the_classes(tmp_path):
    """Of which it would be one, from the next command on."""
    write(tmp_path / "images")
    for part in ("train", "val"):
        write(tmp_path / "split" / part)
    for data, place in ("images", "."), ("images", "run"), ("split", "train/cat/run"), ("split", "val/run"):
        root, output = tmp_path / data, tmp_path / data / place
        line = training.refused(output, steps=1, DATA=str(root), BATCH_SIZE=16)
        assert f"--output {output}: is within the class folders of DATA = {root}: give another one" in line


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line(name, flat, tmp_path):
    damage, values, words = MISTAKES[name]
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    damage(root)
    options = {"DATA": str(root), "BATCH_SIZE": 16, "NUM_CLASSES": 3, **values}
    line = training.refused(tmp_path / "run", steps=1, **options)
    assert re.search(f": error: {re.escape(words.format(root=root))}", line), line


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("train", "validation", "val"), "has val and validation; only one can be to evaluate on"),
        (("train", "bus", "car"), "has bus beside train: call it val if it is to evaluate on, or move all into train"),
    ],
)
def test_folders_beside_train_are_not_left_out_in_silence(names, words, tmp_path):
    root = tmp_path / "data"
    for name in names:
        write(root / name)
    assert f"{root}: {words}" in training.refused(tmp_path / "run", steps=1, DATA=str(root), BATCH_SIZE=16)


@pytest.mark.parametrize("script", training.SMALL)
def test_a_run_directory_is_no_data(script, alone, tmp_path):
    """Neither one that has the pictures of an evaluation, nor one that has index files of DALI."""
    root = shutil.copytree(alone.output, tmp_path / "data")
    for name in ("evaluation/mistakes.png", "idx_files/train/train-00000-of-00001.idx"):
        words = f"{root}: is a run directory, not images: give another folder, or move it out of the data"
        assert training.refused(tmp_path / "run", script=script, DATA=str(root)).endswith(f" error: {words}")
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()


@pytest.mark.parametrize(
    ("parts", "place"),
    [(("",), "run"), (("",), "dog house/run"), (("train", "val"), "run"), (("train", "val"), "cat/a/run")],
)
def test_a_run_directory_is_no_class_and_none_of_its_images(parts, place, flat, alone, tmp_path):
    for part in parts:
        shutil.copytree(flat, tmp_path / "data" / part, ignore=shutil.ignore_patterns(".decoded"), dirs_exist_ok=True)
    run = shutil.copytree(alone.output, tmp_path / "data" / parts[0] / place)
    save("mistakes.png")(run)
    line = training.refused(tmp_path / "run", steps=1, DATA=str(tmp_path / "data"), BATCH_SIZE=16)
    assert f" error: {run}: is a run directory, not images" in line


@pytest.mark.parametrize("script", training.SMALL)
def test_the_folder_of_one_class_is_no_data(script, flat, tmp_path):
    line = training.refused(tmp_path / "run", script=script, DATA=str(flat / "cat"))
    assert f" error: {flat}/cat: has images such as 0 x.jpg, but no class folders; a folder for each class" in line


@pytest.mark.parametrize("script", training.SMALL)
def test_a_file_is_no_data(script, flat, tmp_path):
    file = flat / "cat" / "0 x.jpg"
    line = training.refused(tmp_path / "run", script=script, DATA=str(file))
    assert line.endswith(f" error: {file}: is a file, not a folder")


def test_a_run_directory_beside_train_and_val_is_left_alone(alone, tmp_path):
    """Where `--output` may be; and the data's folder may be a run directory itself."""
    for part in ("train", "val"):
        write(tmp_path / "data" / part)
    shutil.copytree(alone.output, tmp_path / "data" / "run")
    shutil.copytree(alone.output, tmp_path / "data", dirs_exist_ok=True)
    before = training.contents(tmp_path / "data")
    run = train(tmp_path / "run", tmp_path / "data", steps=1)
    count = sum(CLASSES.values())
    assert f"{count} training and {count} test images from {tmp_path}/data" in run.said
    assert storage.open_named(run.output).state["data"]["classes"] == sorted(CLASSES)
    after = training.contents(tmp_path / "data")
    assert {name: after[name] for name in after if not name.startswith(".decoded/")} == before


def test_classes_that_the_model_has_not_learned_are_not_evaluated(alone, flat, tmp_path):
    """A name in capitals comes before the others."""
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    (root / "dog house").rename(root / "Dog house")
    line = training.refused(alone.output, 1, "--eval-only", DATA=str(root), BATCH_SIZE=16)
    said = "was trained with other classes (without dog house with Dog house): "
    assert f"{said}set DATA to images of its" in line
    export_timm(storage.open_named(alone.output), tmp_path / "exported", torch.float32, ema=False)
    for source in (alone.output, tmp_path / "exported"):
        head = {"finetune.weights": str(source), "finetune.head": "keep"}
        line = training.refused(tmp_path / "run", 1, "--eval-only", DATA=str(root), BATCH_SIZE=16, **head)
        assert f"{said}set finetune.head to 'new'" in line


def test_class_folders_may_be_links(tmp_path):
    write(tmp_path / "elsewhere", {"cat": 3})
    (tmp_path / "data" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "cat" / "all").symlink_to(tmp_path / "elsewhere" / "cat")
    assert has_class_folders(tmp_path / "data")


def test_a_class_without_training_images_is_refused(tmp_path):
    write(tmp_path / "data" / "train", {"cat": 3})
    write(tmp_path / "data" / "val", {"dog": 3})
    with pytest.raises(UserError, match=f"^{tmp_path}/data/val/dog: there is no such class in {tmp_path}/data/train$"):
        find_images(tmp_path / "data", tmp_path, ["train", "val"])


@pytest.mark.parametrize(
    ("script", "own", "words"),
    [
        (training.CALTECH101, True, "class folders, for which there is TEST_FRACTION"),
        (training.HYBRID, False, "CIFAR-10's, which are split"),
    ],
)
def test_a_number_of_training_images_is_for_caltech101_only(script, own, words, flat, tmp_path):
    values = {"DATA": str(flat)} if own else {}
    line = training.refused(tmp_path / "run", script=script, TRAIN_PER_CLASS=4, **values)
    assert line.endswith(f"TRAIN_PER_CLASS = 4: is for Caltech101's images, but these are {words}: leave it out")


def test_neighbours_are_no_more_than_the_training_images(tmp_path):
    folder = write(tmp_path / "data", {"cat": 10, "dog": 5})
    train(tmp_path / "run", folder, steps=1, BATCH_SIZE=4)
    said = train(tmp_path / "run", folder, "--eval-knn", steps=None, BATCH_SIZE=4).said
    assert " of 3 images), 12 neighbours of 12 training images" in said


def test_what_is_left_out_is_said(flat, tmp_path):
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    (root / "cat" / "notes.txt").touch()
    (root / "movie.mp4").touch()
    run = train(tmp_path / "run", root, steps=1)
    assert "2 files that are no images are left out (.mp4 1, .txt 1), the first is" in run.said
    assert sorted(os.listdir(root)) == sorted([".decoded", *CLASSES, "movie.mp4"])
