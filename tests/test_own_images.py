"""Your own class folders: which data folders have them, how they are split, and that every script trains on them."""

import csv
import hashlib
import json
import os
import re
import shutil
import struct
import warnings
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from colossal_vit import predict
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.export import export
from colossal_vit.data import class_images
from colossal_vit.data.class_images import Images, find_images, split_by_content
from colossal_vit.data.folders import has_class_folders
from colossal_vit.data.identity import differences
from colossal_vit.data.loaders import expected_classes, is_class_folders
from colossal_vit.errors import UserError
from colossal_vit.hooks import confusion
from colossal_vit.parallel.collectives import RankLogger
from colossalai.context import Config
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import build_tfrecords
import caltech101
import cifar10
import imagenet_dali_dataloader
import training
from layouts import LAYOUTS
from tfrecord import find_shards

CLASSES = {"cat": 20, "dog house": 15, "Ähre": 10}  # names, and how many images each has
ORIENTATION = 0x0112  # tag of EXIF
LOADERS = {"CIFAR-10": cifar10, "Caltech101": caltech101, "ImageNet": imagenet_dali_dataloader}
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
    for loader in LOADERS.values():
        with pytest.raises(UserError, match=f"^{re.escape(f'{tmp_path}: {words}')}"):
            is_class_folders(tmp_path, loader)


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


def save_with_text(folder):
    text = PngInfo()
    text.add_text("exif", "orientation 6")
    save("a.png", pnginfo=text)(folder)


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


def save_masked_bmp(folder, alpha):
    """32 bits a pixel, with a mask for alpha, which is the same throughout."""
    pixels = bytes([*COLOUR[::-1], alpha]) * 400
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 56, 20, 20, 1, 32, 3, len(pixels), 2835, 2835, 0, 0) + masks
    head = struct.pack("<2sIII", b"BM", 14 + len(header + pixels), 0, 14 + len(header))
    (folder / "a.bmp").write_bytes(head + header + pixels)


def save_tiff(folder, alpha, meaning):
    """With a fourth channel whose meaning (the tag ExtraSamples) is not said if it is None."""
    Image.new("RGBA", (20, 20), (*COLOUR, alpha)).save(folder / "a.tif")
    content = (folder / "a.tif").read_bytes()
    field = struct.pack("<HHIHH", 338, 3, 1, 2, 0)
    assert content.count(field) == 1
    said = struct.pack("<HHIHH", 337, 3, 1, 2, 0) if meaning is None else struct.pack("<HHIHH", 338, 3, 1, meaning, 0)
    (folder / "a.tif").write_bytes(content.replace(field, said))


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
    "BMP with alpha 0 throughout": (partial(save_masked_bmp, alpha=0), COLOUR),
    "BMP with alpha": (partial(save_masked_bmp, alpha=128), HALF_WHITE),
    "TIFF with an unknown channel of 0": (partial(save_tiff, alpha=0, meaning=None), COLOUR),
    "TIFF with an unknown channel": (partial(save_tiff, alpha=128, meaning=None), HALF_WHITE),
    "TIFF with a channel that is no alpha": (partial(save_tiff, alpha=128, meaning=0), COLOUR),
    "TIFF with alpha 0 throughout": (partial(save_tiff, alpha=0, meaning=2), (255, 255, 255)),
    "PNG with alpha 0 throughout": (save("a.png", "RGBA", (*COLOUR, 0)), (255, 255, 255)),
    "WebP with alpha 0 throughout": (save("a.webp", "RGBA", (*COLOUR, 0)), (255, 255, 255)),
    "palette": (save_palette, COLOUR),
    "palette with a transparent colour": (partial(save_palette, transparency=0), (255, 255, 255)),
    "grey": (save("a.png", "L", GREY[0]), GREY),
    "grey JPEG": (save("a.jpg", "L", GREY[0]), GREY),
    "black and white": (save("a.png", "1", 1), (255, 255, 255)),
    "grey of 16 bits": (save_array("a.png", np.full((20, 20), 120 * 257, np.uint16)), GREY),
    "grey TIFF of 16 bits": (save_array("a.tif", np.full((20, 20), 120 * 257, np.uint16)), GREY),
    "CMYK": (save("a.jpg", "CMYK", (*(255 - value for value in COLOUR), 0), quality=95), COLOUR),
    "EXIF orientation": (save_upside_down, COLOUR),
    "text that is called exif": (save_with_text, COLOUR),
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
    "a file server's folder": (
        in_folder(save("a.png"), "@eaDir", "good.png"),
        "1 folders of file servers or operating systems are left out, the first is ",
    ),
    "a folder of deleted files": (in_folder(save("a.png"), "deep", "#RECYCLE"), "1 folders of file servers or "),
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


SYSTEM = ["@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "$Recycle.Bin", "System Volume Information", "lost+found"]
SYSTEM += ["__MACOSX"]


@pytest.mark.parametrize("name", SYSTEM)
def test_what_file_servers_and_systems_make_is_no_class_and_no_image(name, tmp_path):
    """Nor is it a shard, or asked about."""
    for root in (tmp_path / "train", tmp_path / "val"):
        write(root, {"cat": 3, "dog": 3})
        for folder in (root / name / "old", root / "cat" / name, root / "dog" / "deep" / name):
            folder.mkdir(parents=True)
            save("a.png")(folder)
    for parts, root in ([""], tmp_path / "train"), (["train", "val"], tmp_path):
        assert has_class_folders(root)
        images = find_images(root, root / ".decoded", parts)
        assert images.classes == ["cat", "dog"]
        assert len(images.paths) == 6 * len(parts)
        count, first = 3 * len(parts), root / parts[0] / name
        words = f"{count} folders of file servers or operating systems are left out, the first is "
        assert images.left_out == [f"{words}{min(str(root / parts[0] / 'cat' / name), str(first))}"]
    assert expected_classes(Config({"DATA": str(tmp_path)}), cifar10) == 2
    found, left_out = predict.find_images([tmp_path / "train"])
    assert len(found) == 6
    assert left_out[0].startswith("3 folders of file servers or operating systems are left out, the first is ")
    (tmp_path / "tfrecords" / "train" / name).mkdir(parents=True)
    for path in ("train-00000-of-00001", f"{name}/train-00000-of-00001"):
        (tmp_path / "tfrecords" / "train" / path).touch()
    assert [path.parent.name for path in find_shards(tmp_path / "tfrecords", "train")] == ["train"]


def test_a_folder_that_only_a_system_has_made_is_no_data(tmp_path):
    (tmp_path / "lost+found").mkdir()
    save("a.png")(tmp_path / "lost+found")
    assert not has_class_folders(tmp_path)


def test_a_class_without_test_images_is_said(tmp_path):
    """In build_tfrecords.py alike; an empty folder is as good as none."""
    root = tmp_path / "data"
    for names in ({"cat": 4, "dog": 3}, {"owl": 3, "yak": 3}):
        write(root / "train", names)
    write(root / "val", {"cat": 3, "dog": 3})
    (root / "val" / "owl").mkdir()
    words = f"{root}/val: 2 of 4 classes have no images here, the first is owl"
    images = find_images(root, root / ".decoded", ["train", "val"])
    assert images.left_out == [words]
    assert np.bincount(images.labels).tolist() == [7, 6, 3, 3]
    shutil.rmtree(root / "train" / "owl")
    (root / "train" / "owl").mkdir()
    with pytest.raises(UserError, match=rf"^{root}/train/owl: has no images \(.*; fill it or remove it$"):
        find_images(root, root / ".decoded", ["train", "val"])
    shutil.rmtree(root / "train" / "owl")
    words = f"^{root}/val/owl: there is no such class in {root}/train; add it there, or remove it$"
    with pytest.raises(UserError, match=words):
        find_images(root, root / ".decoded", ["train", "val"])
    shutil.rmtree(root / "val" / "owl")
    assert find_images(root, root / ".decoded", ["train", "val"]).classes == ["cat", "dog", "yak"]


COMPOSED, DECOMPOSED = "café", "cafe\u0301"  # as Linux and as macOS write it


@pytest.mark.parametrize(
    ("train", "val"),
    [((COMPOSED,), (DECOMPOSED,)), ((DECOMPOSED,), (COMPOSED,)), ((COMPOSED, DECOMPOSED), (DECOMPOSED,))],
)
def test_an_accent_that_is_written_in_two_ways_is_the_same_class(train, val, tmp_path):
    for part, names in ("train", train), ("val", val):
        write(tmp_path / part, {**dict.fromkeys(names, 3), "cafz": 3})
    images = find_images(tmp_path, tmp_path / ".decoded", ["train", "val"])
    assert images.classes == ["cafz", COMPOSED]
    assert np.bincount(images.labels).tolist() == [6, 3 * (len(train) + len(val))]
    assert expected_classes(Config({"DATA": str(tmp_path)}), cifar10) == 2


def test_data_that_went_through_macos_are_the_same(tmp_path):
    """Where the names of all files are changed, and sorted otherwise."""
    found = []
    for name in (COMPOSED, DECOMPOSED):
        root = write(tmp_path / name, {name: 3, "cafz": 3})
        (root / name / "0 x.jpg").rename(root / name / f"{name}.jpg")
        shutil.copy(root / name / "1 x.png", root / name / "cafz.png")
        found.append(find_images(root, root))
    one, other = found
    assert one.classes == other.classes
    assert one.digest() == other.digest()
    assert one.paths != other.paths
    data = [{"classes": names} for names in ([COMPOSED, "b"], [DECOMPOSED, "b"])]  # of a checkpoint, and of the data
    assert differences(*data) == ""


def read_all(root):
    """All images of a folder, and their pixels."""
    images = find_images(root, root / ".decoded")
    with warnings.catch_warnings(action="ignore"):
        return images, [class_images.decode(images, 8, 8, number) for number in range(len(images.paths))]


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
        assert expected in "".join(images.left_out)
        assert bool(expected) == bool(images.left_out)


# ---------------------------------------------------------------------------------------------------------------------
# Split
# ---------------------------------------------------------------------------------------------------------------------


def split(contents, fraction=0.2):
    """The contents of the images to test on, of two classes whose images have these contents."""
    labels = np.array([label for label, own in enumerate(contents) for _ in own])
    digests = [content for own in contents for content in own]
    images = Images(Path("root"), Path("root"), ["a", "b"], [], [], [], labels, [])
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


def save_bmps(folder, classes=("cat", "dog"), count=8):
    """Images whose files have all the same size and time, as those of many archives have."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 100, (24, 24, 3)) + 120 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.bmp")
            os.utime(folder / name / f"{number}.bmp", ns=(0, 0))
    return folder


def exchange(one, other):
    one.rename(one.with_name("x"))
    other.rename(one)
    one.with_name("x").rename(other)


def mirror(path):
    """In place, and with the time that it had."""
    Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    os.utime(path, ns=(0, 0))


def copy_over(source, path):
    """Its content only, in place, as `cp` does."""
    path.write_bytes(source.read_bytes())
    os.utime(path, ns=(0, 0))


CHANGES = {  # of which neither size nor time tells
    "two classes exchange their names": lambda root: exchange(root / "cat", root / "dog"),
    "two files of a class exchange theirs": lambda root: exchange(root / "cat" / "0.bmp", root / "cat" / "1.bmp"),
    "two files of two classes do": lambda root: exchange(root / "cat" / "0.bmp", root / "dog" / "0.bmp"),
    "a file is edited in place": lambda root: mirror(root / "cat" / "3.bmp"),
    "a file is written over": lambda root: copy_over(root / "dog" / "3.bmp", root / "cat" / "3.bmp"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_kept_image_is_taken_for_another_one(name, tmp_path):
    root, log = save_bmps(tmp_path / "data"), RankLogger()
    for change in (lambda root: None, CHANGES[name]):
        change(root)
        images, pixels = read_all(root)
        status = (root / images.paths[0]).stat()  # files that are written at once may have the same times
        assert images.versions[0].endswith(f" {status.st_ctime_ns} {status.st_ino}")
        digests = class_images.digest_contents(images, log)
        assert digests == [hashlib.sha256((root / path).read_bytes()).hexdigest() for path in images.paths]
        assert class_images.fill_cache(images, digests, 8, 8, log)
        assert np.array_equal(
            class_images.open_cache(class_images.cache_folder(images, digests, 8, 8)), np.stack(pixels)
        )


@pytest.mark.parametrize("move", [shutil.copytree, lambda old, new: old.rename(new)])
def test_data_that_are_copied_or_moved_are_not_decoded_again(move, tmp_path, monkeypatch):
    """With what is kept of them, to a file system of other inodes and times, or under another name."""
    root, log = save_bmps(tmp_path / "data"), RankLogger()
    folders = []
    for place in (root, tmp_path / "other"):
        if folders:
            move(root, place)
            monkeypatch.setattr(class_images, "decode", None)
        images = find_images(place, place / ".decoded")
        digests = class_images.digest_contents(images, log)
        assert class_images.fill_cache(images, digests, 8, 8, log)
        assert class_images.check_images(images, digests, 8, 8, log) == ({}, {})
        folders.append(class_images.cache_folder(images, digests, 8, 8).name)
    assert folders[0] == folders[1]


def test_images_of_the_same_content_on_both_sides_or_in_two_classes_are_said(tmp_path, capfd):
    root = write(tmp_path / "data" / "train", {"cat": 6, "dog": 5}).parent
    write(root / "val", {"cat": 4, "dog": 3}, seed=1)

    def said():
        images = find_images(root, root / ".decoded", ["train", "val"])
        digests = class_images.digest_contents(images, RankLogger())
        return list(class_images.say_copies(images, digests, *class_images.split_by_folder(images)))

    assert said() == []
    shutil.copy(root / "train" / "cat" / "2 x.webp", root / "train" / "cat" / "copy.webp")
    assert said() == [], "copies in a class do no harm"
    for number in (0, 1):
        shutil.copy(root / "train" / "dog" / f"{number} x.{ENDINGS[number]}", root / "val" / "dog" / f"z{number}.jpg")
    first = "the first is val/dog/z0.jpg, which is train/dog/0 x.jpg"
    assert said() == [f"2 of 9 test images are training images too, {first}"]
    shutil.copy(root / "train" / "dog" / "4 x.tif", root / "train" / "cat" / "4 x.tif")
    classes = "1 images are in another class too, the first is train/cat/4 x.tif and train/dog/4 x.tif"
    assert said() == [f"2 of 9 test images are training images too, {first}", classes]
    assert build_tfrecords.main(["--verify", str(root)]) == 0
    assert said() == capfd.readouterr().out.splitlines()[-4:-2]


def test_images_of_one_colour_are_said(tmp_path):
    root, log = write(tmp_path, {"cat": 4, "dog": 4}), RankLogger()
    save("a.png", "RGBA", (*COLOUR, 0), size=(50, 20))(root / "cat")
    save("b.jpg", "L", 7)(root / "cat")
    picture = Image.new("RGB", (60, 20), COLOUR)
    picture.paste(GREY, (0, 0, 10, 20))
    picture.save(root / "dog" / "c.png")  # which is cut to a square of one colour
    images = find_images(root, root / ".decoded")
    for _ in range(2):
        faults, odd = class_images.check_images(images, class_images.digest_contents(images, log), 8, 8, log)
        assert not faults
        words = f"2 images are of one colour, the first is {root}/cat/a.png"
        assert list(class_images.say_odd(images, odd)) == [words]


def save_damaged(root):
    """One cut off, one that is none, one that is empty."""
    save_and("1 damaged.jpg", cut, size=(400, 400))(root / "dog")
    (root / "cat" / "a.png").write_text("<html>")
    (root / "dog" / "b.webp").touch()


def test_each_image_is_checked_once_and_all_that_are_damaged_are_listed(tmp_path, monkeypatch, capfd):
    root, log, tried, decode = write(tmp_path, {"cat": 4, "dog": 4}), RankLogger(), [], class_images.decode
    monkeypatch.setattr(class_images, "decode", lambda *args: tried.append(args[0].paths[args[-1]]) or decode(*args))

    def check():
        tried.clear()
        images = find_images(root, root / ".decoded")
        faults, _ = class_images.check_images(images, class_images.digest_contents(images, log), 8, 8, log)
        class_images.refuse_damaged(images, faults, log)

    check()
    assert len(tried) == 8
    check()
    assert tried == []
    save_damaged(root)
    listed, said = root / ".decoded" / "damaged.txt", []
    for _ in range(2):
        with pytest.raises(UserError) as error:
            check()
        said.append(str(error.value))
        assert sorted(tried) == ["cat/a.png", "dog/1 damaged.jpg", "dog/b.webp"]
    assert said[0] == said[1]
    assert said[0].startswith(f"{root}/cat/a.png: cannot be decoded: cannot identify image file")
    assert said[0].endswith(f"repair or remove it. Images that cannot be decoded: 3, listed in {listed}")
    lines = listed.read_text().splitlines()
    assert [line.split(": cannot be decoded")[0] for line in lines] == [f"{root}/{path}" for path in sorted(tried)]
    assert build_tfrecords.main(["--verify", str(root)]) == 1
    out = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line not in out] == []
    assert out[-1] == f"{root}: 3 faults in 11 images"
    for line in lines:
        Path(line.split(": cannot be decoded")[0]).unlink()
    check()
    assert not listed.exists()
    assert build_tfrecords.main(["--verify", str(root)]) == 0
    assert tried == []


def test_without_a_place_for_a_list_the_log_has_it(tmp_path, capfd):
    root, log = write(tmp_path, {"cat": 3, "dog": 3}), RankLogger()
    save_damaged(root)
    (root / ".decoded").touch()  # as on a disk that is full or read-only
    images = find_images(root, root / ".decoded")
    faults, _ = class_images.check_images(images, class_images.digest_contents(images, log), 8, 8, log)
    with pytest.raises(UserError, match=r"Images that cannot be decoded: 3, listed above$"):
        class_images.refuse_damaged(images, faults, log)
    assert sum("cannot be decoded" in line for line in capfd.readouterr().out.splitlines()) == 3


def test_lack_of_memory_is_not_kept_as_damage(tmp_path, monkeypatch):
    root, log, decode = write(tmp_path, {"cat": 3, "dog": 3}), RankLogger(), class_images.read_rgb
    images = find_images(root, root / ".decoded")
    digests = class_images.digest_contents(images, log)
    for error, words in (MemoryError(), "out of memory"), (OSError(5, "Input/output error"), "[Errno 5] Input"):
        monkeypatch.setattr(class_images, "read_rgb", lambda path, error=error: (_ for _ in ()).throw(error))
        faults, _ = class_images.check_images(images, digests, 8, 8, log)
        assert len(faults) == 6
        assert f"cannot be decoded: {words}" in faults[0]
    monkeypatch.setattr(class_images, "read_rgb", decode)
    assert class_images.check_images(images, digests, 8, 8, log) == ({}, {})


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"KEEP_DECODED": False}])
def test_damaged_images_end_a_run_before_its_first_step(values, tmp_path):
    """Of the test set, too, which is read after the first epoch."""
    root = write(tmp_path / "data" / "train", {"cat": 20, "dog": 20}).parent
    save_damaged(write(root / "val", {"cat": 3, "dog": 3}))
    line = training.refused(tmp_path / "run", NUM_CLASSES=2, DATA=str(root), BATCH_SIZE=16, **values)
    assert f" error: {root}/val/cat/a.png: cannot be decoded: " in line
    assert line.endswith(f"Images that cannot be decoded: 3, listed in {root}/.decoded/damaged.txt")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_files_that_change_behind_a_runs_back_are_refused_by_name(tmp_path):
    """Contents decide the split: an image that was trained on must not be tested on from then on."""
    root = save_bmps(tmp_path / "data")
    options = {"BATCH_SIZE": 4, "IMG_SIZE": 16, "NUM_CLASSES": 2}
    train(tmp_path / "run", root, steps=1, **options)
    words = r"was trained with other data \((content of (training|test) images(, )?)+\): change that back"
    for name in CHANGES.keys() - {"two files of a class exchange theirs"}:  # which then are the images that they were
        other = shutil.copytree(root, tmp_path / name)
        CHANGES[name](other)
        line = training.refused(tmp_path / "run", DATA=str(other), steps=2, NUM_EPOCHS=3, **options)
        assert re.search(words, line)
    said = train(tmp_path / "run", other, "--eval-only", steps=None, **options).said
    assert "this run's data are others than those of the checkpoint (content of t" in said
    run = shutil.copytree(tmp_path / "run", tmp_path / "accepted")
    train(run, other, "--accept-changes", steps=2, **options)
    train(tmp_path / "run", shutil.copytree(root, tmp_path / "copy"), steps=2, **options)


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
    assert sorted(os.listdir(root / ".decoded")) == ["checked.json", "contents.json"]


def test_classes_of_any_name_are_evaluated_and_asked_about(tmp_path, capfd, monkeypatch):
    """The images are alike, so that some are mistaken; two `$` in a line are a formula for matplotlib."""
    root, names = tmp_path / "data", ["A$", "US$", "fl\udcf6wer$"]
    for seed, name in enumerate(names):
        write(root, {name: 10}, seed)
    run = train(tmp_path / "run", root)
    said = train(run.output, root, "--eval-only", steps=None).said
    assert "the most confident mistakes are in" in said
    assert "top-5" not in said, "there are three classes"
    with open(run.output / "evaluation" / "classes.csv", newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == names
    assert any(row["mostly mistaken for"] in names for row in rows)
    tables = ["classes.csv", "confusion.csv", "confusion.png", "mistakes.png", "predictions.csv"]
    assert sorted(os.listdir(run.output / "evaluation")) == tables
    with open(run.output / "evaluation" / "predictions.csv", newline="", errors="surrogateescape") as file:
        own = {row["image"]: row["true label"] for row in csv.DictReader(file)}
    assert own
    assert all(image.startswith(f"{label}/") for image, label in own.items()), "paths in the folder of the data"
    answers = tmp_path / "answers.csv"
    assert predict.main([str(run.output), str(root), "--top", "3", "--output", str(answers)]) == 0
    with open(answers, newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [{row[f"class_{k}"] for k in (1, 2, 3)} for row in rows] == [set(names)] * 30
    monkeypatch.setattr(confusion, "SHOWN", 0)
    train(run.output, root, "--eval-only", steps=None)
    tables.remove("mistakes.png")
    assert sorted(os.listdir(run.output / "evaluation")) == tables, "none of an earlier one"


def test_more_classes_of_the_config_than_of_the_data_are_kept(flat, tmp_path):
    run = train(tmp_path / "run", flat, steps=1, NUM_CLASSES=7)
    assert storage.open_named(run.output).state["config"]["NUM_CLASSES"] == 7


def test_a_dry_run_has_a_class_for_each_folder(flat, tmp_path):
    said = []
    for classes in ({}, {"NUM_CLASSES": 3}, {"NUM_CLASSES": 1000}):
        said.append(train(tmp_path / "run", flat, "--dry-run", steps=None, **classes).said)
    assert said[0] == said[1] != said[2]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The digits in every format."""
    folder = tmp_path_factory.mktemp("sample")
    cifar10.write_images(folder / "CIFAR-10")
    caltech101.write_sample(folder / "Caltech101")
    imagenet_dali_dataloader.write_sample(folder).rename(folder / "ImageNet")
    return folder


@pytest.mark.parametrize(("name", "classes"), [("CIFAR-10", 10), ("Caltech101", 101), ("ImageNet", 1000)])
def test_expected_classes_are_those_of_the_loader_or_the_class_folders(name, classes, sample):
    loader, own = LOADERS[name], sample / "Caltech101" / "caltech101" / "101_ObjectCategories"
    assert expected_classes(Config({"DATA": str(sample / name)}), loader) == classes
    assert expected_classes(Config({"DATA": str(own)}), loader) == 10


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
def test_every_script_takes_the_loader_of_another_one(script, name, layout, counts, sample, tmp_path):
    path = Path(LOADERS[name].__file__)
    loader = f"../{path.parent.name}/{path.name}"  # from the script's folder
    run = train(tmp_path / "run", sample / name, script=script, layout=layout, steps=1, LOADER=loader)
    assert f"{counts} images from {sample / name}" in run.said
    data = storage.open_named(run.output).state
    assert (data["data"]["images"], data["config"]["NUM_CLASSES"]) == (name, 10)


def test_data_sets_of_several_loaders_are_no_class_folders(tmp_path):
    for name in ("cifar-10-batches-bin", "caltech101/101_ObjectCategories", "idx_files", "cat"):
        (tmp_path / name).mkdir(parents=True)
    for loader in LOADERS.values():
        assert not is_class_folders(tmp_path, loader)


def test_records_without_an_index_are_named_in_every_script(sample, tmp_path):
    shutil.copytree(sample / "ImageNet", tmp_path / "data", ignore=shutil.ignore_patterns("idx_files"))
    loader = imagenet_dali_dataloader.__file__
    line = training.refused(tmp_path / "run", DATA=str(tmp_path / "data"), LOADER=loader)
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
def test_own_images_with_a_mistaken_command_end_in_one_line(name, flat, tmp_path):
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
    export(storage.open_named(alone.output), tmp_path / "exported", torch.float32, ema=False)
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
    with pytest.raises(UserError, match=f"^{tmp_path}/data/val/dog: there is no such class in {tmp_path}/data/train; "):
        find_images(tmp_path / "data", tmp_path, ["train", "val"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"DATA": "{}"}, "class folders, for which there is TEST_FRACTION, do"),
        ({"LOADER": "../vit_cifar10_hybrid/cifar10.py"}, "cifar10.py does"),
    ],
)
def test_a_key_of_the_scripts_own_loader_is_refused_where_other_data_are_read(values, words, flat, tmp_path):
    values = {key: value.format(flat) for key, value in values.items()}
    line = training.refused(tmp_path / "run", script=training.CALTECH101, TRAIN_PER_CLASS=4, **values)
    assert line.endswith(f"TRAIN_PER_CLASS = 4: {words} not use it: leave it out")


def test_what_is_left_out_is_said(flat, tmp_path):
    root = shutil.copytree(flat, tmp_path / "data", ignore=shutil.ignore_patterns(".decoded"))
    (root / "cat" / "notes.txt").touch()
    (root / "movie.mp4").touch()
    (root / "cat" / "@eaDir").mkdir()
    save("plain.png")(root / "cat")
    shutil.copy(root / "cat" / "plain.png", root / "Ähre" / "plain.png")
    for _ in range(2):  # also of images that were decoded before
        said = train(tmp_path / "run", root, steps=1).said
        assert "2 files that are no images are left out (.mp4 1, .txt 1), the first is" in said
        assert f"1 folders of file servers or operating systems are left out, the first is {root}/cat/@eaDir" in said
        assert f"2 images are of one colour, the first is {root}/cat/plain.png" in said
        assert "1 images are in another class too, the first is cat/plain.png and Ähre/plain.png" in said
    assert sorted(os.listdir(root)) == sorted([".decoded", *CLASSES, "movie.mp4"])
