"""What build_tfrecords.py writes is read by others, survives any kill, and its own check finds every fault."""

import contextlib
import fcntl
import hashlib
import io
import itertools
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from colossal_vit.data import class_images, decoding
from colossal_vit.data.digits import digits
from colossal_vit.parallel.collectives import RankLogger
from nvidia.dali import fn, pipeline_def
from nvidia.dali import tfrecord as dali_tfrecord
from PIL import Image
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

import build_tfrecords
import image_files
import launchers
import tfrecord
from conftest import encode, photograph
from imagenet_dali_dataloader import write_imagenet
from packing_source import read_synset_map, scan
from tfrecord import class_names, name_faults

FOLDER = Path(__file__).resolve().parents[1]
PATIENCE = 600  # seconds after which a build counts as hanging

WNIDS = [f"n{digit:08d}" for digit in range(10)]
SHARDS = ("--train-shards", "4", "--validation-shards", "2", "--workers", "1")


@pytest.fixture(autouse=True, scope="module")
def synced():
    """Pretend to wait for the disk, and note for which files: it is slow, and only a power cut shows the difference."""
    inodes = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: inodes.add(os.fstat(descriptor).st_ino))
        yield inodes


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The sample: 1,437 and 360 images."""
    return write_imagenet(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def small_source(source, tmp_path_factory):
    """The first 8 training and 2 validation images of each class."""
    small = tmp_path_factory.mktemp("small")
    for split, count in (("train", 8), ("val", 2)):
        for wnid in WNIDS:
            (small / split / wnid).mkdir(parents=True)
            for path in sorted((source / split / wnid).iterdir())[:count]:
                shutil.copy2(path, small / split / wnid)
    return small


@pytest.fixture(scope="module")
def small_built(small_source, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "output"
    assert run(small_source, output) == 0
    return output


@pytest.fixture
def raw(small_source, tmp_path):
    """A copy of the small source, to be changed."""
    return shutil.copytree(small_source, tmp_path / "raw")


@pytest.fixture
def built(small_built, tmp_path):
    """A copy of the small build, to be damaged."""
    return shutil.copytree(small_built, tmp_path / "built")


def run(*arguments, shards=SHARDS):
    return build_tfrecords.main([str(argument) for argument in (*arguments, *shards)])


def start(*arguments, code=None, shards=SHARDS, **kwargs):
    """The command in a process of its own; `code` is Python that runs before."""
    script = [str(FOLDER / "build_tfrecords.py")]
    if code:
        script = ["-c", f"import sys; sys.path[0] = {str(FOLDER)!r}; import build_tfrecords\n{code}"]
        script[1] += "\nsys.exit(build_tfrecords.main(sys.argv[1:]))"
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
    return subprocess.Popen([sys.executable, *script, *map(str, (*arguments, *shards))], **kwargs)


def tree(folder):
    """Every file's content by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shard_of(output, number=1, split="train"):
    return sorted((output / split).iterdir())[number]


def index_of(shard):
    return shard.parents[1] / "idx_files" / shard.parent.name / f"{shard.name}.idx"


def offsets(shard):
    return [tuple(map(int, line.split())) for line in index_of(shard).read_text().splitlines()]


def read(shard):
    """Data of each record by the index, without a look at lengths and CRCs."""
    content = shard.read_bytes()
    return [content[offset + 12 : offset + size - 4] for offset, size in offsets(shard)]


def parse(data):
    """Image and label of a record's data."""
    image, label = tfrecord.parse_example(data)
    return bytes(image), label


def pairs(shard):
    """(image, label) of each record of a shard."""
    return list(map(parse, read(shard)))


def examples(output, split):
    """(image, label) of each record."""
    return [pair for shard in sorted((output / split).iterdir()) for pair in pairs(shard)]


def files(source, split):
    """(content, label) of each image file."""
    paths = sorted((source / split).glob("*/[!.]*"))
    return [(path.read_bytes(), 1 + WNIDS.index(path.parent.name)) for path in paths]


def error_line(capfd):
    """The one line on stderr."""
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("build_tfrecords.py: error: ")
    return line


def jpeg(mode="RGB", size=(40, 30), **kwargs):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1] // 10, size[0] // 10, len(mode)), np.uint8).squeeze()
    encoded = io.BytesIO()
    Image.fromarray(pixels, mode).resize(size, Image.BICUBIC).save(encoded, **{"format": "JPEG", **kwargs})
    return encoded.getvalue()


def png(width, height, bits, colour, pixels, *chunks):
    """A PNG of these bytes; `colour` is 0 for grey, 2 for RGB."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + pixels[row * len(pixels) // height :][: len(pixels) // height] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [("IHDR", header), *chunks, ("IDAT", zlib.compress(rows)), ("IEND", b"")]
    return image_files.PNG_START + b"".join(chunk(name.encode(), data) for name, data in parts)


def decode(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


# ---- The sample ----


def test_sample_is_the_digits_in_imagenets_folders(source):
    train_images, train_labels, test_images, test_labels = digits(64)
    for split, images, labels in (("train", train_images, train_labels), ("val", test_images, test_labels)):
        assert sorted(path.name for path in (source / split).iterdir()) == WNIDS
        paths = list((source / split).glob("*/*.JPEG"))
        assert len(paths) == len(images)
        for path in random.Random(0).sample(paths, 20):
            number = int(path.stem.split("_")[-1]) - 1
            image = Image.open(path)
            assert (image.mode, image.size, path.parent.name) == ("RGB", (64, 64), WNIDS[labels[number]])
            assert abs(np.asarray(image)[..., 0].astype(int) - images[number]).mean() < 2


# ---- What is written ----


def test_dali_reads_what_was_built(source, tmp_path, capfd):
    """Bytes and labels are those of the source, and the decoded pixels what Pillow decodes."""
    assert run(source, tmp_path, shards=()) == 0
    assert run("--verify", tmp_path, shards=()) == 0
    features = {
        "image/encoded": dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
        "image/class/label": dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, -1),
    }

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline(shards):
        paths, indices = [str(shard) for shard in shards], [str(index_of(shard)) for shard in shards]
        record = fn.readers.tfrecord(path=paths, index_path=indices, features=features)
        return record["image/encoded"], record["image/class/label"], fn.decoders.image(record["image/encoded"])

    for split, folder, num_images in (("train", "train", 1437), ("validation", "val", 360)):
        shards = sorted((tmp_path / split).iterdir())
        assert len(shards) == num_images // 256, "fewer shards for a small set"
        reader, found = pipeline(shards), []
        reader.build()
        for number in range(num_images):
            data, label, pixels = (output.at(0) for output in reader.run())
            found.append((data.tobytes(), int(label[0])))
            if number % 20 == 0:
                assert abs(decode(found[-1][0]) - pixels).max() <= 2
        assert sorted(found) == sorted(files(source, folder))


def test_tensorboard_reads_the_records(built, small_source):
    """Its reader checks both CRCs, with tables of its own."""
    found = []
    for shard in sorted((built / "validation").iterdir()):
        reader = PyRecordReader_New(str(shard))
        with contextlib.suppress(errors.OutOfRangeError):
            while True:
                reader.GetNext()
                found.append(parse(reader.record()))
    assert found == files(small_source, "val"), "in order"


def test_the_same_image_and_label_make_the_same_bytes():
    """Whatever version of protobuf encodes them: a build resumes, and a run knows its data, by their bytes."""
    label = "0a1b0a11696d6167652f636c6173732f6c6162656c12061a040a02ac02"
    image = "0a170a0d696d6167652f656e636f64656412060a040a02ffd8"
    record = f"3800000000000000a3797d570a36{label}{image}e9113c3a"
    assert tfrecord.encode_record(b"\xff\xd8", 300).hex() == record


def test_an_example_of_others_is_parsed():
    """In any order, with keys and lists that are not looked at, integers packed or one by one; or without the two."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    def entry(key, value):
        return field(1, field(1, key) + field(2, value))

    image, packed = entry(b"image/encoded", field(1, field(1, b"\xff"))), field(3, field(1, b"\x07"))
    for label in (packed, field(3, b"\x08\x07")):
        boxes = entry(b"image/object/bbox/xmin", field(2, field(1, struct.pack("<2f", 0.5, 0.25))))
        entries = [image, boxes, entry(b"image/class/label", label), entry(b"empty", b"")]
        for ordered in itertools.permutations(entries):
            assert tfrecord.parse_example(field(1, b"".join(ordered))) == (b"\xff", 7)
    assert tfrecord.parse_example(field(1, boxes)) == (None, None)
    others = b"\x65" + bytes(4) + b"\x61" + bytes(8)  # fields 12, of type fixed32 or fixed64
    minus_1 = entry(b"image/class/label", others + field(3, field(1, b"\xff" * 9 + b"\1")))
    assert tfrecord.parse_example(others + field(1, minus_1)) == (None, -1), "as data sets label what is not labelled"


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\2\0", b"\x61" + bytes(7), b"\x0b", b"\x08" + b"\xff" * 10 + b"\0"],
    ids=["no length", "cut off", "a part of a number", "a group", "more than 64 bits"],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match=r"the record's data is not a tf\.train\.Example"):
        tfrecord.parse_example(data)


def test_a_part_of_an_example_is_refused():
    data = tfrecord.encode_record(jpeg(), 300)[12:-4]
    for size in range(1, len(data)):
        with pytest.raises(ValueError, match=r"the record's data is not a tf\.train\.Example"):
            tfrecord.parse_example(data[:size])


def test_nothing_has_its_name_before_it_is_on_disk(small_source, tmp_path, synced, monkeypatch, capfd):
    rename, renamed = os.replace, []

    def replace(temporary, path):
        assert temporary.stat().st_ino in synced
        assert not renamed or renamed[-1].parent.stat().st_ino in synced
        synced.clear()
        rename(temporary, path)
        renamed.append(path)

    monkeypatch.setattr(os, "replace", replace)
    assert run(small_source, tmp_path) == 0
    assert renamed[-1].parent.stat().st_ino in synced
    assert {str(path.relative_to(tmp_path)) for path in renamed} == set(tree(tmp_path)) - {".lock"}


def test_training_images_are_shuffled_by_the_seed(source, tmp_path, capfd):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run(source, tmp_path / name, "--seed", seed) == 0
    for shard in (tmp_path / "a" / "train").iterdir():
        _, labels = zip(*pairs(shard), strict=True)
        assert set(labels) == set(range(1, 11))
        assert len(labels) in (1437 // 4, 1437 // 4 + 1)
    a, b, c = (tree(tmp_path / name) for name in "abc")
    assert a == b
    assert (tmp_path / "a" / "classes.txt").read_text().split() == WNIDS
    assert sorted(examples(tmp_path / "a", "train")) == sorted(examples(tmp_path / "c", "train"))
    differing = {name for name in a if a[name] != c[name]}
    assert differing == {name for name in a if "train" in name} | {"build.json"}


def test_png_and_cmyk_become_rgb_jpeg_and_grey_stays(raw, tmp_path, capfd):
    """Under whatever name; a grey JPEG is one that decoders know."""
    png, cmyk, grey = contents = jpeg(format="PNG"), jpeg("CMYK"), jpeg("L")
    for number, data in enumerate(contents):
        (raw / "train" / WNIDS[0] / f"{number}.JPEG").write_bytes(data)
    assert run(raw, tmp_path / "out") == 0
    assert run("--verify", tmp_path / "out", "--check", "decode") == 0
    originals = {data for data, _ in files(raw, "train")}
    packed = {data for data, _ in examples(tmp_path / "out", "train")}
    assert originals - packed == {png, cmyk}
    assert len(packed - originals) == 2
    for data in packed - originals:
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (40, 30))
    for original in (png, cmyk):
        assert min(abs(decode(data) - decode(original)).mean() for data in packed - originals) < 3
    assert grey in packed
    assert not (tmp_path / "out" / "skipped.txt").exists()


RAMP = np.linspace(0, 65535, 64).round()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (png(8, 8, 16, 2, RAMP.repeat(3).astype(">u2").tobytes()), RAMP / 257),
        (png(8, 8, 16, 0, RAMP.astype(">u2").tobytes(), ("gAMA", struct.pack(">I", 45455))), RAMP / 257),
        (
            png(8, 8, 16, 0, RAMP.astype(">u2").tobytes(), ("tRNS", RAMP[:1].astype(">u2").tobytes())),
            np.where(np.arange(64) == 0, 255, RAMP / 257),
        ),
    ],
    ids=["RGB of 16 bits", "gamma", "a transparent grey"],
)
def test_pixels_of_png_are_kept_in_eight_bits_on_white(content, expected):
    pixels = np.asarray(decoding.to_rgb(Image.open(io.BytesIO(content)))).astype(int)
    assert abs(pixels - expected.reshape(*pixels.shape[:2], 1)).max() <= 1
    assert abs(decode(image_files.prepare_image(content, quality=100)) - pixels).max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_rounded(kind):
    """Each of its 65,536 levels, to the nearest of 256."""
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(levels).save(file := io.BytesIO(), kind)
    pixels = np.asarray(decoding.to_rgb(Image.open(io.BytesIO(file.getvalue()))))
    assert np.array_equal(pixels, np.rint(levels / 257)[..., None].repeat(3, 2))


def test_resized_image_keeps_its_aspect_and_is_never_enlarged():
    large, small = jpeg(size=(300, 200)), jpeg(size=(90, 200))
    sizes = [Image.open(io.BytesIO(image_files.prepare_image(data, resize=100))).size for data in (large, small)]
    assert sizes == [(150, 100), (90, 200)]
    assert image_files.prepare_image(small, resize=100) == small, "never enlarged, nor encoded again"
    assert (
        len(image_files.prepare_image(large, quality=10))
        < len(image_files.prepare_image(large, quality=90))
        < len(large) * 4
    )
    assert image_files.prepare_image(large, check="decode") == large
    picture = photograph(300, 200)
    packed = decode(image_files.prepare_image(encode(picture), resize=100, quality=100))
    for filtered, close in ((Image.Resampling.BICUBIC, True), (Image.Resampling.NEAREST, False)):
        expected = np.asarray(picture.resize((150, 100), filtered)).astype(int)
        assert (abs(packed - expected).mean() < 4) == close


def test_a_turned_image_is_upright_once_its_exif_is_gone():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = jpeg(size=(300, 200), exif=exif)
    assert image_files.prepare_image(turned) == turned
    upright = Image.open(io.BytesIO(image_files.prepare_image(turned, resize=100)))
    assert upright.size == (100, 150)
    assert not upright.getexif()


# ---- Bad images ----


def broken_huffman_table(data):
    at = data.index(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


def with_size(data, height, width):
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


BAD = {
    "cut.JPEG": (jpeg()[:-200], "without an end marker"),
    "cut_early.JPEG": (jpeg()[:100], "cut off"),
    "empty.JPEG": (b"", "0 bytes"),
    "page.JPEG": (b"<html>404</html>", "none of BMP, GIF, JPEG"),
    "cut.png": (jpeg(format="PNG")[:-300], "cannot be decoded"),
    "cut.webp": (jpeg(format="WEBP")[:-200], "cannot be decoded"),
    "bits.JPEG": (jpeg().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), "12 bits a channel: save it with 8"),
    "bomb.JPEG": (with_size(jpeg(), 65500, 65500), "JPEG of 65500 x 65500 pixels"),
    "bomb.png": (png(65500, 65500, 8, 0, b""), "cannot be decoded: Image size (4290250000 pixels) exceeds limit"),
    "thumbnail.JPEG": (jpeg()[:2] + b"\xff\xe1\x00\x08\xff\xd9\xff\xd9??" + jpeg()[2:-2], "without an end marker"),
}


def test_class_folders_without_a_split_are_split_as_in_training(raw, tmp_path, capfd):
    """By their contents; of a bad image the part is said, so that the check knows how many records there are."""
    folder = (raw / "train").rename(tmp_path / "flat")
    Image.new("RGB", (9, 9), "red").save(folder / WNIDS[0] / "red.webp", lossless=True)
    (folder / WNIDS[1] / "page.JPEG").write_bytes(b"<html>")
    assert run(folder, tmp_path / "out", "--max-bad", 5, "--test-fraction", "0.25") == 0
    images = class_images.find_images(folder, folder / ".decoded")
    _, chosen = class_images.split_by_content(images, class_images.digest_contents(images, RankLogger()), 0.25)
    expected = {(folder / images.paths[number]).read_bytes() for number in chosen} - {b"<html>"}
    packed = {split: {image for image, _ in examples(tmp_path / "out", split)} for split in ("train", "validation")}
    webp = (folder / WNIDS[0] / "red.webp").read_bytes()
    assert expected - {webp} <= packed["validation"]
    assert len(packed["train"]) + len(packed["validation"]) == len(images.paths) - 1
    (red,) = set.union(*packed.values()) - {path.read_bytes() for path in folder.rglob("*.JPEG")}
    assert Image.open(io.BytesIO(red)).getpixel((4, 4)) == pytest.approx((255, 0, 0), abs=3)
    assert run("--verify", tmp_path / "out") == 0, capfd.readouterr()
    for output in (folder, folder / "packed"):
        before = sorted(folder.rglob("*"))
        assert run(folder, output) == 2
        assert f"{output}: would be among the class folders of {folder}; take one outside of them" in error_line(capfd)
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("place", ["train/packed", f"val/{WNIDS[0]}/packed"])
def test_nothing_is_packed_into_the_class_folders_of_a_split(place, raw, capfd):
    """Of which it would be one, from the next command on."""
    assert run(raw, raw / place) == 2
    assert f"{raw / place}: would be among the class folders of {raw}; take one outside" in error_line(capfd)
    assert not (raw / place).exists()


def test_test_folder_is_for_validation(raw, tmp_path):
    (raw / "val").rename(raw / "test")
    assert run(raw, tmp_path / "out") == 0
    assert len(examples(tmp_path / "out", "validation")) == 20


def test_classes_may_have_no_test_images_and_names_with_accents_two_forms(raw, tmp_path, capfd):
    """As where a script trains on the same folders; and what a file server has made is left out."""
    (raw / "train" / WNIDS[1]).rename(raw / "train" / "caf\u00e9")
    (raw / "val" / WNIDS[1]).rename(raw / "val" / "cafe\u0301")
    for name, folder in ("@eaDir", raw / "train" / WNIDS[0]), ("#recycle", raw / "train"), ("lost+found", raw / "val"):
        shutil.copytree(raw / "val" / WNIDS[0], folder / name)
    shutil.rmtree(raw / "val" / WNIDS[2])
    [path.unlink() for path in (raw / "val" / WNIDS[3]).iterdir()]
    assert run(raw, tmp_path / "out") == 0
    out = capfd.readouterr().out
    first = min(raw / "train" / "#recycle", raw / "train" / WNIDS[0] / "@eaDir")
    assert f"3 folders of file servers or operating systems are left out, the first is {first}" in out
    assert f"{raw}/val: 2 of 10 classes have no images here, the first is {WNIDS[2]}" in out
    classes = class_names(tmp_path / "out")
    assert classes == sorted(["caf\u00e9", WNIDS[0], *WNIDS[2:]])
    packed = [label for _, label in examples(tmp_path / "out", "validation")]
    assert sorted(packed) == sorted(2 * [n for n in range(1, 11) if classes[n - 1] not in WNIDS[2:4]])
    assert len(examples(tmp_path / "out", "train")) == 80
    images = class_images.find_images(raw, raw / ".decoded", ["train", "val"])
    assert images.classes == classes
    assert np.bincount(images.labels).tolist() == [10 if n in WNIDS[:1] or n not in WNIDS[2:4] else 8 for n in classes]
    assert run("--verify", tmp_path / "out") == 0


def test_copies_in_two_classes_are_said(raw, tmp_path, capfd):
    shutil.copy(next((raw / "train" / WNIDS[0]).iterdir()), raw / "train" / WNIDS[1] / "copy.JPEG")
    assert run(raw / "train", tmp_path / "out") == 0
    assert f"1 images are in another class too, the first is {WNIDS[0]}/" in capfd.readouterr().out


def test_a_build_of_class_folders_does_not_resume_with_other_contents(tmp_path, capfd):
    """Of two images for training that exchange their places, neither names nor sizes nor times tell."""
    folder = tmp_path / "flat"
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (9, 9), 20 * number + 100 * label).save(folder / name / f"{number}.bmp")
            os.utime(folder / name / f"{number}.bmp", ns=(0, 0))
    assert run(folder, tmp_path / "out", shards=()) == 0
    images = sorted((folder / "a").iterdir(), key=lambda path: hashlib.sha256(path.read_bytes()).digest())
    one, other = images[-2:]  # the one with the smallest digest is for validation
    for old, new in (one, folder / "x"), (other, one), (folder / "x", other):
        old.rename(new)
    assert run(folder, tmp_path / "out", shards=()) == 2
    assert "(digest of names, sizes and contents) instead of " in error_line(capfd)


def test_bad_images_are_listed(raw, tmp_path, capfd):
    folder = raw / "train" / WNIDS[3]
    for name, (data, _) in BAD.items():
        (folder / name).write_bytes(data)
    (folder / ".DS_Store").write_bytes(b"hidden files are none")
    (raw / "val" / WNIDS[0] / "page.JPEG").write_bytes(b"<html>")
    assert run(raw, tmp_path / "out", "--max-bad", 10) == 0
    assert f"{len(BAD) + 1} bad images" in capfd.readouterr().out
    lines = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert lines == sorted(lines)
    skipped = dict(line.split("\t") for line in lines)
    assert set(skipped) == {f"train/{WNIDS[3]}/{name}" for name in BAD} | {f"val/{WNIDS[0]}/page.JPEG"}
    assert all(reason in skipped[f"train/{WNIDS[3]}/{name}"] for name, (_, reason) in BAD.items())
    bad = {data for data, _ in BAD.values()}
    assert sorted(examples(tmp_path / "out", "train")) == sorted(
        file for file in files(raw, "train") if file[0] not in bad
    )
    assert run("--verify", tmp_path / "out") == 0


def test_names_that_are_not_utf8_or_have_odd_characters_are_kept(raw, tmp_path, capfd):
    """In classes.txt, skipped.txt and a map of a flat val/; only a line break ends a line."""
    odd = [os.fsdecode(b"fl\xf6wer"), "form\x0cfeed", "next\x85line", "\u2028separator"]
    for old, new in zip(WNIDS, odd, strict=False):
        for split in ("train", "val"):
            (raw / split / old).rename(raw / split / new)
    bad = [os.fsdecode(b"b\xe4d.JPEG"), "of\ntwo lines\\", "a\ttab"]
    for name in bad:
        (raw / "train" / odd[0] / name).write_bytes(b"<html>")
    (raw / "train" / "archive.tar").touch()
    out = tmp_path / os.fsdecode(b"out\xff")
    assert run(raw, out, "--max-bad", 5) == 0
    assert "1 files beside the class folders are left out, the first is archive.tar" in capfd.readouterr().out
    assert class_names(out) == sorted([*odd, *WNIDS[4:]])
    assert sorted(build_tfrecords.read_skipped(out)) == sorted(
        f"train/{odd[0]}/{name}" for name in (bad[0], r"of\ntwo lines\\", bad[2])
    )
    said, errors = start("--verify", out, shards=()).communicate(timeout=PATIENCE)
    assert (said, errors) == (rf"{tmp_path}/out\udcff: 0 faults in 6 shards with 100 records" + "\n", "")
    (tmp_path / "map").write_bytes(b"\xf6 n1\r\nb n2")
    assert read_synset_map(tmp_path / "map", ["val/b.JPEG", os.fsdecode(b"val/\xf6.png")]) == ["n2", "n1"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("build.json", "[]", "should be a"),
        ("build.json", '{"images": {"train": "3"}}', "images.train = '3': should be a valid integer"),
        ("build.json", "\ufffd", "is no JSON"),
        ("skipped.txt", "no tab\n", "has a line without a tab"),
    ],
)
def test_damaged_files_of_a_build_are_one_line(built, small_source, capfd, name, content, words):
    (built / name).write_text(content)
    for arguments in ((small_source, built), ("--verify", built)):
        assert run(*arguments) == 2
        line = error_line(capfd)
        assert f"{built}/{name}: {words}" in line
        assert line.endswith("; no build wrote this: take another folder")


def test_trailing_bytes_and_fill_bytes_are_no_fault():
    data = jpeg()
    inside = data[:-2] + bytes(40) + data[-2:]
    for odd in (data + bytes(100), inside, data[:2] + b"\xff\xff" + data[2:], data[:2] + b"\xff\xe1\0\4??" + data[2:]):
        assert image_files.prepare_image(odd, check="decode") == odd


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_damage_that_decoders_fill_with_grey_is_found(mode, progressive):
    """Cut at nine tenths, or overwritten from one third on; the header and an end marker are there."""
    data = jpeg(mode, (500, 370), progressive=progressive)
    image_files.prepare_image(data, check="decode")
    third, most = len(data) // 3, len(data) * 9 // 10
    lost = len(data) - third - 2
    noise = np.random.default_rng(0).integers(0, 255, lost, dtype=np.uint8).tobytes()
    for start in (data[:most], data[:third], data[:third] + bytes(lost), data[:third] + noise):
        with pytest.raises(
            ValueError, match=r"cannot be decoded: Corrupt JPEG data: (premature|bad Huff|\d+ extraneous)"
        ):
            image_files.prepare_image(start + b"\xff\xd9", check="decode")


def test_check_by_decoding_finds_what_headers_do_not_show(raw, tmp_path, capfd):
    bad = raw / "train" / WNIDS[3] / "broken.JPEG"
    bad.write_bytes(broken_huffman_table(jpeg()))
    assert run(raw, tmp_path / "kept") == 0
    assert run("--verify", tmp_path / "kept") == 0
    assert run("--verify", tmp_path / "kept", "--check", "decode") == 1
    assert "cannot be decoded" in capfd.readouterr().out
    assert run(raw, tmp_path / "decoded", "--check", "decode", "--max-bad", 2) == 0
    assert (tmp_path / "decoded" / "skipped.txt").read_text().startswith(f"train/{WNIDS[3]}/broken.JPEG\tcannot be")


def test_too_many_bad_images_are_an_error_until_allowed(raw, tmp_path, capfd):
    """What was done until then is kept, and the result is as if they had been allowed from the start."""
    for wnid in WNIDS[:2]:
        (raw / "train" / wnid / "page.JPEG").write_bytes(b"<html>")
    assert run(raw, tmp_path / "out", "--max-bad", 1) == 2
    line = error_line(capfd)
    assert "skipped.txt" in line
    assert "--max-bad 1 % of 102" in line
    assert len((tmp_path / "out" / "skipped.txt").read_text().splitlines()) == 2
    assert run(raw, tmp_path / "out", "--max-bad", 2) == 0
    assert run(raw, tmp_path / "at_once", "--max-bad", 2) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "at_once")


# ---- Layouts of val/ ----


@pytest.mark.parametrize("form", ["wnids in order", "caffe", "kaggle"])
def test_flat_validation_folder_takes_labels_from_its_list(raw, small_built, tmp_path, capfd, form):
    flat = tmp_path / "flat"
    shutil.copytree(raw / "train", flat / "train")
    (flat / "validation").mkdir()
    paths = sorted((raw / "val").glob("*/*"), key=lambda path: path.name)
    for path in paths:
        shutil.copy2(path, flat / "validation")
    lines = {
        "wnids in order": [path.parent.name for path in paths],
        "caffe": [f"{path.name} {path.parent.name}" for path in reversed(paths)],
        "kaggle": ["ImageId,PredictionString", *(f"{path.stem},{path.parent.name} 85 1 499 272" for path in paths)],
    }[form]
    (tmp_path / "map").write_text("\n".join(lines) + "\n")
    assert run(flat, tmp_path / "out", "--synset-map", tmp_path / "map") == 0
    assert sorted(examples(tmp_path / "out", "validation")) == sorted(examples(small_built, "validation"))
    assert examples(tmp_path / "out", "train") == examples(small_built, "train")
    (tmp_path / "map").write_text("\n".join([*lines[:-1], lines[-1].replace("n0", "x0")]) + "\n")
    assert run(flat, tmp_path / "out", "--synset-map", tmp_path / "map") == 2
    assert "is not a class folder" in error_line(capfd)


# ---- Interruptions ----

KILL_BEFORE_RENAME = """
import os, signal
os.fsync = lambda descriptor: None
rename, left = os.replace, [{}]
def replace(*paths):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    rename(*paths)
os.replace = replace
"""


@pytest.fixture(scope="module")
def with_bad(small_source, tmp_path_factory):
    """A source with a bad image, and the build of it that nothing disturbs."""
    folder = tmp_path_factory.mktemp("with_bad")
    raw = shutil.copytree(small_source, folder / "raw")
    (raw / "train" / WNIDS[0] / "page.JPEG").write_bytes(b"<html>")
    assert run(raw, folder / "out", "--max-bad", 1) == 0
    return raw, tree(folder / "out")


@pytest.mark.parametrize("renames", [0, 1, 2, 3, 8, 14])
def test_killed_and_resumed_is_as_undisturbed(with_bad, tmp_path, renames, capfd):
    """With 6 shards there are 15 renames: build.json, classes.txt, skipped.txt, and 2 a shard."""
    raw, expected = with_bad
    arguments = (raw, tmp_path, "--max-bad", 1)
    process = start(*arguments, code=KILL_BEFORE_RENAME.format(renames), shards=(*SHARDS, "--workers", "2"))
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    left = tree(tmp_path)
    for name, content in left.items():
        assert name.endswith(".tmp") or name not in expected or content == expected[name], f"{name} is not whole"
    assert len(set(left) & set(expected)) == 1 + renames, ".lock and what was renamed"
    assert run(*arguments) == 0
    assert tree(tmp_path) == expected


# A worker makes a shard of 4 images and half of another, then waits to be killed.
STUCK = f"""
import time
prepare, images = build_tfrecords.prepare_image, iter(range(6))
def prepare_image(*arguments):
    if next(images, None) is None:
        time.sleep({PATIENCE})
    return prepare(*arguments)
build_tfrecords.prepare_image = prepare_image
"""


@pytest.fixture
def slow_build(small_source, tmp_path):
    """A build that makes one or two shards and no more; its workers' process ids; how to do it again."""
    shards = ("--train-shards", "20", "--validation-shards", "2", "--workers", "2")
    process = start(small_source, tmp_path / "out", code=STUCK, shards=shards, start_new_session=True)
    while not list((tmp_path / "out" / "train").glob("train-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    yield process, workers, lambda output=tmp_path / "out": run(small_source, output, shards=shards)
    process.kill()
    process.communicate()


def gone(pids):
    """Whether the processes end."""
    for _ in range(20 * PATIENCE):
        if all(map(launchers.has_ended, pids)):
            return True
        time.sleep(0.05)
    return False


def test_kill_9_ends_the_workers_and_any_moment_will_do(slow_build, tmp_path, capfd):
    process, workers, build = slow_build
    process.kill()
    process.wait()
    assert gone(workers)
    done = len(list((tmp_path / "out").glob("*/[!.]*-of-*")))
    assert 0 < done < 22
    assert build() == 0
    assert f"{22 - done} of 22 shards to be made" in capfd.readouterr().out
    assert build(tmp_path / "undisturbed") == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("strike", "code", "words"),
    [
        (lambda process, workers: os.killpg(process.pid, signal.SIGINT), 130, "interrupted"),
        (
            lambda process, workers: os.kill(int(workers[0]), signal.SIGKILL),
            1,
            "error: a worker was killed, perhaps",
        ),
    ],
    ids=["Ctrl-C", "a worker dies"],
)
def test_a_build_that_is_interrupted_ends_in_one_line_with_its_workers(slow_build, tmp_path, strike, code, words):
    process, workers, _ = slow_build
    strike(process, workers)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert re.fullmatch(f"build_tfrecords.py: {words}.*; the same command resumes from here\n", errors)
    assert gone(workers)
    assert len(list((tmp_path / "out").glob("*/*-of-*"))) < 22, "what was not begun is left"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("--seed", 1), "seed 0 instead of 1"),
        (("--quality", 80), "quality None instead of 80"),
        (("--train-shards", 5), "shards"),
        (lambda raw: (raw / "val" / WNIDS[0] / "new.JPEG").write_bytes(jpeg()), "images"),
        (lambda raw: next((raw / "train" / WNIDS[0]).iterdir()).write_bytes(jpeg()), "source"),
    ],
)
def test_another_build_is_not_mixed_in(built, raw, change, word, capfd):
    shutil.rmtree(built / "validation")
    if callable(change):
        change(raw)
    before = tree(built)
    assert run(raw, built, shards=(*SHARDS, *map(str, () if callable(change) else change))) == 2
    line = error_line(capfd)
    assert f"{built}: was begun with {word}" in line
    assert tree(built) == before


def test_two_builds_take_turns(small_source, small_built, tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(small_source, tmp_path)
        assert process.stdout.readline() == f"waiting for another build that writes to {tmp_path}\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert process.wait(timeout=PATIENCE) == 0
    assert tree(tmp_path) == tree(small_built)
    process.communicate()


# ---- Verify ----


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def repack(shard, image=None, label=None, data=None):
    """Write a shard again, with right CRCs and index, but something else in its third record."""
    examples = pairs(shard)
    records = [tfrecord.encode_record(*pair) for pair in examples]
    old_image, old_label = examples[2]
    records[2] = tfrecord.encode_record(image or old_image, old_label if label is None else label)
    if data is not None:
        records[2] = tfrecord.wrap(data)
    shard.write_bytes(b"".join(records))
    build_tfrecords.index_shard(shard, index_of(shard))


def keep_of_last(shard, size):
    """Cut a shard off after so many bytes of its last record; below 0, before so many."""
    offset, whole = offsets(shard)[-1]
    os.truncate(shard, offset + size % whole)


def rename(shard, name):
    index_of(shard).rename(index_of(shard).with_name(f"{name}.idx"))
    shard.rename(shard.with_name(name))


def copy_shard(shard, name):
    copy, index = shard.parent / name, index_of(shard)
    copy.parent.mkdir(exist_ok=True)
    content = index.read_bytes()
    shutil.copy(shard, copy)
    index.with_name(f"{copy.name}.idx").write_bytes(content)


PLACE = "{first} at byte {third}: "
CUT = "{first} at byte {last}: cut off after "
COPY = "has the same records as {first}"
COUNT = "has {} records, but 80 images were to be packed"
FAULTS = {  # what is done to the second training shard of four, and what the lines of its check begin with or have
    "bit of a length": (lambda s: flip(s, offsets(s)[2][0] + 1), [PLACE + "the CRC of the record's length"]),
    "bit of a JPEG": (lambda s: flip(s, sum(offsets(s)[2]) - 500), [PLACE + "the CRC of the record's data"]),
    "label 0": (lambda s: repack(s, label=0), [PLACE + "image/class/label is 0, not from 1 to 10"]),
    "label 11": (lambda s: repack(s, label=11), [PLACE + "image/class/label is 11, not from 1 to 10"]),
    "JPEG that was cut off": (lambda s: repack(s, image=jpeg()[:-9]), [PLACE + "JPEG without an end marker"]),
    "no Example": (lambda s: repack(s, data=b"\xff" * 50), [PLACE + "the record's data is not a tf.train.Example"]),
    "no keys": (
        lambda s: repack(s, data=b""),
        [PLACE + "image/class/label is None", PLACE + "image/encoded is missing"],
    ),
    "cut off in the last CRC": (lambda s: keep_of_last(s, -1), [CUT + "{less} of {size} bytes", COUNT.format(79)]),
    "cut off in a header": (lambda s: keep_of_last(s, 5), [CUT + "5 bytes", COUNT.format(79)]),
    "cut off between records": (
        lambda s: keep_of_last(s, 0),
        ["{first} at byte {last}: line 20 of its index", COUNT.format(79)],
    ),
    "index of another shard": (
        lambda s: shutil.copy(index_of(shard_of(s.parents[1], 0)), index_of(s)),
        ["{first} at byte 0: line 1 of its index"],
    ),
    "empty index": (
        lambda s: index_of(s).write_text(""),
        ["{first} at byte 0: line 1 of its index {name}.idx says None"],
    ),
    "index of words": (
        lambda s: index_of(s).write_text("0 x\n"),
        ["{index}: line 1 is '0 x', not offset and size of a record; run `python "],
    ),
    "no index": (
        lambda s: index_of(s).unlink(),
        ["{index}: No such file or directory; run `python build_tfrecords.py --index-only {out}`"],
    ),
    "no validation": (
        lambda s: [shutil.rmtree(s.parents[1] / name / "validation") for name in (".", "idx_files")],
        ["{out}/validation: has no shards", "{out}/validation: has 0 records, but 20 images"],
    ),
    "a shard is missing": (
        lambda s: [s.unlink(), index_of(s).unlink()],
        ["{out}/train: 1 of 4 shards are missing, the first is number 1", "{out}/train: " + COUNT.format(60)],
    ),
    "two shards of one number": (
        lambda s: copy_shard(s, "train-1-of-4"),
        ["train-1-of-4: has the number of {first}", "train-1-of-4: " + COPY, COUNT.format(100)],
    ),
    "two shards of one name": (
        lambda s: copy_shard(s, "train/train-00001-of-00004"),
        ["{first}: has the number of {out}/train/train/{name}", "has the same records", COUNT.format(100)],
    ),
    "another total": (
        lambda s: rename(s, "train-00001-of-00005"),
        ["{out}/train/train-00001-of-00005: is one of 5 shards, but {out}/train/train-00000-of-00004 is one of 4"],
    ),
    "a number above all": (
        lambda s: rename(s, "train-00007-of-00004"),
        [
            "train-00007-of-00004: has a number that is not below 4",
            "{out}/train: 1 of 4 shards are missing, the first is number 1",
        ],
    ),
    "a copy in another's place": (
        lambda s: copy_shard(s, "train-00002-of-00004"),
        ["train-00002-of-00004: has the same records as {first}"],
    ),
    "an empty shard": (lambda s: os.truncate(s, 0), ["{first} at byte 0: cut off after 0 bytes", COUNT.format(60)]),
    "a strange file": (
        lambda s: (s.parent / "README").write_bytes(b""),
        ["{out}/train/README: is not named like train-00000-of-01024", "README.idx: No such file", "README at byte 0"],
    ),
    "an index too many": (
        lambda s: index_of(s).with_name("train-00009-of-00004.idx").touch(),
        ["train-00009-of-00004.idx: is the index of no shard"],
    ),
}


def verify(output, capfd, *arguments):
    """The lines of faults, each with its file, from a check that found some."""
    capfd.readouterr()
    assert run("--verify", output, *arguments) == 1
    *lines, summary = capfd.readouterr().out.splitlines()
    assert summary.startswith(f"{output}: {len(lines)} faults in ")
    return lines


@pytest.mark.parametrize("name", FAULTS)
def test_verify_finds_a_fault_and_its_place(built, capfd, name):
    damage, expected = FAULTS[name]
    shard = shard_of(built)
    (third, _), (last, size) = offsets(shard)[2], offsets(shard)[-1]
    places = dict(out=built, first=shard, name=shard.name, index=index_of(shard), third=third, last=last, size=size)
    damage(shard)
    lines = verify(built, capfd)
    assert len(lines) == len(expected), lines
    for line, words in zip(lines, expected, strict=True):
        assert words.format(**places, less=size - 1) in line


def test_verify_goes_on_after_a_fault(built, capfd):
    """The index tells where the next record is. Without it, that the rest is not known is said."""
    shard = shard_of(built)
    for number in (1, 4, 6):
        flip(shard, offsets(shard)[number][0] + 8)
    other = shard_of(built, 0, "validation")
    flip(other, offsets(other)[2][0] + 100)
    places = [*((shard, number) for number in (1, 4, 6)), (other, 2)]
    expected = [f"{path} at byte {offsets(path)[number][0]}" for path, number in places]
    assert [line.split(":")[0] for line in verify(built, capfd)] == expected
    start = offsets(shard)[1][0]
    index_of(shard).unlink()
    missing, first, *_ = verify(built, capfd)
    assert missing.startswith(f"{index_of(shard)}: No such file")
    assert first.startswith(f"{shard} at byte {start}: ")
    assert first.endswith("the rest is not checked")


def test_a_name_may_claim_any_number_of_shards(tmp_path):
    faults = name_faults(tmp_path, "train", [tmp_path / f"train-0-of-{10**17}"])
    assert list(faults) == [
        f"{tmp_path}/train: {10**17 - 1} of {10**17} shards are missing, the first is number 1",
    ]


def test_verify_takes_labels_up_to_1000_without_a_class_list(built, capfd):
    repack(shard_of(built), label=1000)
    (built / "classes.txt").unlink()
    assert run("--verify", built) == 0
    repack(shard_of(built), label=1001)
    (line,) = verify(built, capfd)
    assert "image/class/label is 1001, not from 1 to 1000" in line


def test_index_only_is_what_the_build_wrote(built, small_built, capfd):
    """Of TFRecords made elsewhere there is nothing else."""
    shutil.rmtree(built / "idx_files")
    for name in ("build.json", "classes.txt"):
        (built / name).unlink()
    assert run("--index-only", built) == 0
    assert tree(built / "idx_files") == tree(small_built / "idx_files")
    assert run("--verify", built) == 0
    shard = shard_of(built)
    os.truncate(shard, shard.stat().st_size - 10)
    assert run("--index-only", built) == 2
    assert f"{shard} at byte {offsets(shard)[-1][0]}: cut off" in error_line(capfd)


# ---- The user's mistakes ----


def make_run(folder):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")


MISTAKES = {
    "no source": (lambda raw: shutil.rmtree(raw), "{raw}: has no train/"),
    "no train": (lambda raw: shutil.rmtree(raw / "train"), "{raw}: has val but no train: call the folder"),
    "train in capitals": (lambda raw: (raw / "train").rename(raw / "Train"), "{raw}: has Train but no train: call"),
    "no val": (lambda raw: shutil.rmtree(raw / "val"), "{raw}: has train/; train/ and one of"),
    "two validations": (lambda raw: (raw / "validation").mkdir(), "has train/ and val/ and validation/"),
    "no classes": (lambda raw: [shutil.rmtree(raw / "train"), (raw / "train").mkdir()], "{raw}/train: has no class"),
    "an empty class": (
        lambda raw: (raw / "train" / "n00000010").mkdir(),
        "{raw}/train/n00000010: has no images; fill",
    ),
    "no images": (
        lambda raw: [path.unlink() for path in (raw / "train" / WNIDS[4]).iterdir()],
        "{raw}/train/n00000004: has no images; fill it or remove it",
    ),
    "only a folder in a class": (
        lambda raw: (
            [path.unlink() for path in (raw / "train" / WNIDS[4]).iterdir()]
            + [(raw / "train" / WNIDS[4] / "a").mkdir()]
        ),
        "{raw}/train/n00000004: has no images; put images in it or move it out of the data",
    ),
    "a file": (lambda raw: [shutil.rmtree(raw), raw.touch()], "{raw}: is a file, not a folder"),
    "images without class folders": (
        lambda raw: [shutil.rmtree(raw), raw.mkdir(), (raw / "a.JPEG").touch()],
        "{raw}: has images such as a.JPEG, but no class folders; a folder for each class is needed",
    ),
    "a run directory": (lambda raw: [shutil.rmtree(raw), make_run(raw)], "{raw}: is a run directory, not images"),
    "a run directory with index files": (
        lambda raw: [shutil.rmtree(raw), make_run(raw), (raw / "idx_files").mkdir()],
        "{raw}: is a run directory, not images",
    ),
    "a run directory as a class": (
        lambda raw: [make_run(raw / split / WNIDS[4]) for split in ("train", "val")],
        "{raw}/train/n00000004: is a run directory, not images",
    ),
    "no test images": (
        lambda raw: [path.unlink() for path in (raw / "val").glob("*/*")],
        "{raw}/val: has no images; put images in it or move it out of the data",
    ),
    "an unknown class": (
        lambda raw: (raw / "val" / "new").mkdir(),
        "{raw}/val/new: there is no such class in {raw}/train; add it there, or remove it",
    ),
    "a flat val": (
        lambda raw: [shutil.rmtree(raw / "val"), (raw / "val").mkdir(), (raw / "val" / "a.JPEG").touch()],
        "{raw}/val: has no class folders; name the file with its wnids with --synset-map",
    ),
    "a link with a line break": (
        lambda raw: (raw / "train" / WNIDS[1] / "a\nb").symlink_to("."),
        "{raw}/train/n00000001/a\\nb: is a link to a folder that it is in; remove it",
    ),
    "a dangling link": (
        lambda raw: (raw / "train" / WNIDS[1] / "link.JPEG").symlink_to("nowhere"),
        "{raw}/train/n00000001/link.JPEG: No such file or directory; repair or remove it",
    ),
    "a class name of two lines": (
        lambda raw: [(raw / split / WNIDS[9]).rename(raw / split / "b\nc") for split in ("train", "val")],
        "{raw}/train: has a class folder 'b\\nc'; rename it without the line break",
    ),
    "one class": (
        lambda raw: [shutil.rmtree(raw / split / name) for split in ("train", "val") for name in WNIDS[1:]],
        "{raw}/train: has one class folder only, n00000000; one for each class is needed",
    ),
    "the folder above": (
        lambda raw: [(raw / "train").rename(raw / "photos"), shutil.rmtree(raw / "val")],
        "{raw}: has one class folder only, photos; one for each class is needed",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_build_of_a_mistaken_source_is_refused(raw, tmp_path, capfd, name):
    damage, words = MISTAKES[name]
    damage(raw)
    assert run(raw, tmp_path / "out") == 2
    assert words.format(raw=raw) in error_line(capfd)
    assert not (tmp_path / "out").exists(), "nothing is made for nothing"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{raw}",), "give SOURCE OUTPUT, or"),
        ((), "give SOURCE OUTPUT, or"),
        (("{raw}", "{out}", "--verify", "{out}"), "give SOURCE OUTPUT, or"),
        (("{raw}", "{out}", "--resize", "x"), "argument --resize: invalid int value: 'x'"),
        (("{raw}", "{out}", "--quality", "101"), "--quality 101: must be from 1 to 100"),
        (("{raw}", "{out}", "--workers", "0"), "--workers 0: must be from 1"),
        (("{raw}", "{out}", "--shards", "4"), "unrecognized arguments: --shards"),
        (("{raw}", "{out}", "--train-shards", "81"), "--train-shards 81: at most 80, the number of images"),
        (("{raw}", "{out}", "--synset-map", "{file}"), "--synset-map {file}: is for images without class folders"),
        (
            ("{raw}/train", "{out}", "--synset-map", "{file}"),
            "--synset-map {file}: is for images without class folders, which {raw}/train has",
        ),
        (("{raw}", "{out}", "--test-fraction", "0.1"), "--test-fraction 0.1: {raw} is no folder of class folders"),
        (("{raw}", "{file}"), "{file}: File exists"),
        (("{raw}", "{file}/out"), "{file}/out: Not a directory"),
        (("{raw}", "/proc/out"), "/proc/out: "),
        (("{raw}", "{raw}"), "{raw}: has train/ but no build.json"),
        (("--verify", "{out}"), "{out}: no such folder"),
        (("--index-only", "{out}"), "{out}: has no TFRecords in train/ or validation/"),
    ],
)
def test_build_with_mistaken_flags_is_refused(small_source, tmp_path, capfd, arguments, words):
    (tmp_path / "file").touch()
    names = {"raw": small_source, "out": tmp_path / "out", "file": tmp_path / "file"}
    assert run(*(argument.format(**names) for argument in arguments), shards=()) == 2
    assert words.format(**names) in error_line(capfd)


def test_build_on_a_full_disk_ends_in_one_line(small_source, tmp_path):
    """Here a limit on the size of files, which the kernel tells in the same way."""
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))}
    process = start(small_source, tmp_path, **limit)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors.startswith(f"build_tfrecords.py: error: {tmp_path}/train/train-0000")
    assert errors.endswith(": File too large\n")
    assert errors.count("\n") == 1
    assert not list(tmp_path.glob("*/[!.]*-of-*"))


def test_too_little_space_is_said_at_once(small_source, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2000, 1000, 1000))
    assert run(small_source, tmp_path / "new" / "out") == 2
    assert f"{tmp_path}/new/out: the disk has 0 MB left, and 1 MB are needed" in error_line(capfd)
    assert not (tmp_path / "new").exists(), "nothing is made for nothing"


def test_too_little_space_is_said_in_units_that_fit_it(small_source, tmp_path, capfd, monkeypatch):
    """Rounded so that what is left is less than what is needed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1_280_000_000))
    images = [("a.jpg", 1, 645_000_000)]
    monkeypatch.setattr(build_tfrecords, "scan", lambda *_: (["a"], {"train": images, "validation": images}, ""))
    assert run(small_source, tmp_path, shards=()) == 2
    assert "the disk has 1.2 GB left, and 1.3 GB are needed" in error_line(capfd)


def test_image_removed_during_a_build_is_named(raw, tmp_path, capfd, monkeypatch):
    def scan_then_lose(*arguments):
        scanned = scan(*arguments)
        (raw / scanned[1]["train"][5][0]).unlink()
        return scanned

    monkeypatch.setattr(build_tfrecords, "scan", scan_then_lose)
    assert run(raw, tmp_path / "out") == 2
    assert f"{raw}/train/n00000000/" in (line := error_line(capfd))
    assert line.endswith("No such file or directory")


def test_build_on_a_terminal_shows_progress(source, tmp_path):
    """A bar with images/s and the time left; neither torch nor Colossal-AI is imported."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    code = "assert not {'torch', 'colossalai', 'numpy'} & set(sys.modules)"
    process = start(source, tmp_path, code=code, stderr=end)
    os.close(end)
    output = process.communicate(timeout=PATIENCE)[0]
    shown = ""
    with contextlib.suppress(OSError):  # Linux says so that the other end is closed
        while True:
            shown += os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert process.returncode == 0, shown
    assert "1797/1797" in shown
    assert "img/s" in shown
    assert "complete after" in output
