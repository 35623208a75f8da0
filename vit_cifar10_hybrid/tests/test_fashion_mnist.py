"""Fashion-MNIST from small files in its own format, in the three formats of the examples."""

import gzip
import re
import struct
import sys

import numpy as np
import pytest
from colossal_vit.errors import UserError
from PIL import Image

import cifar10
import fashion_mnist
import fork_ranks
import launchers
import tfrecord

COUNTS = {"train": 40, "t10k": 20}


def idx(array):
    """An array of bytes as a gzipped IDX file."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def source(tmp_path):
    """A folder with its files, of random images whose labels count up."""
    (folder := tmp_path / "source").mkdir()
    generator = np.random.default_rng(0)
    for part, count in COUNTS.items():
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    return folder


def write(root, source):
    """Exit code and output of the script."""
    command = [sys.executable, "scripts/sample_data.py", "fashion-mnist", str(root), "--source", str(source)]
    return launchers.run(command, cwd=fork_ranks.ROOT)


def test_all_formats_have_the_same_images_and_labels(source, tmp_path):
    root = tmp_path / "written"
    code, said = write(root, source)
    assert code == 0, said
    assert "60 images of 10 classes" in said
    expected = fashion_mnist.read_images(source)
    assert len(expected.train_images) == COUNTS["train"]
    for train, (images, labels) in {True: expected[:2], False: expected[2:]}.items():
        pixels, of_cifar, _ = cifar10.read(root, train)
        assert (pixels[:, :, 2:-2, 2:-2].numpy() == images[:, None]).all()
        assert pixels.double().sum() == 3 * images.sum(dtype=float), "the border is black"
        assert of_cifar.tolist() == labels.tolist()
        folder = root / "images" / ("train" if train else "val")
        assert sorted(path.name for path in folder.iterdir()) == cifar10_names(root)
        for number, label in enumerate(labels.tolist()):
            (path,) = folder.glob(f"{label} */{number:05d}.png")
            assert (np.asarray(Image.open(path)) == pixels[number, 0].numpy()).all()
    assert tfrecord.class_names(root / "imagenet_tfrecords") == cifar10_names(root)


def test_images_are_those_of_the_files(source):
    """As their format says: big-endian, row by row; the border is on all sides."""
    found = fashion_mnist.read_images(source, 32)
    for part, images, labels in (("train", *found[:2]), ("t10k", *found[2:])):
        content = gzip.decompress((source / f"{part}-images-idx3-ubyte.gz").read_bytes())
        assert struct.unpack(">4I", content[:16]) == (0x803, COUNTS[part], 28, 28)
        for number, row, column in ((0, 0, 0), (3, 5, 20), (COUNTS[part] - 1, 27, 1)):
            assert images[number, 2 + row, 2 + column] == content[16 + 28 * (28 * number + row) + column]
        assert labels.tolist() == [number % 10 for number in range(COUNTS[part])]
        assert images.shape == (COUNTS[part], 32, 32)


def cifar10_names(root):
    """The names of the classes in the binary format, as class folders have them."""
    return [f"{label} {name}" for label, name in enumerate(cifar10.class_names(root))]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda good: good[:-20], "{path}: "),
        (lambda good: good[:10] + b"\xff" * 20 + good[30:], "{path}: Error -3 while decompressing"),
        (lambda good: b"no gzip", "{path}: Not a gzipped file"),
        (lambda good: gzip.compress(gzip.decompress(good)[:-1]), "{path}: is not an IDX file of bytes"),
        (lambda good: gzip.compress(b""), "{path}: is not an IDX file of bytes"),
        (lambda good: idx(np.zeros((20, 14, 56), np.uint8)), "{source}: the t10k files are not those of Fashion-MNIST"),
    ],
)
def test_damaged_files_are_named(damage, words, source):
    path = source / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"^{re.escape(words.format(path=path, source=source))}"):
        fashion_mnist.read_images(source)


def test_without_its_files_there_is_one_line(tmp_path):
    code, said = write(tmp_path / "written", tmp_path)
    assert code == 2
    hint = "No such file or directory; Debian has the files: apt-get install dataset-fashion-mnist"
    assert said == f"sample_data.py: error: {tmp_path}/train-images-idx3-ubyte.gz: {hint}\n"


@pytest.mark.parametrize("what", [[], ["--imagenet"], ["fashion-mnist"]])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(what, source, tmp_path):
    """There is a file of its name; a mistake of `sample_data.py`'s user, whatever it is to write."""
    (tmp_path / "taken").touch()
    command = [sys.executable, "scripts/sample_data.py", *what, str(tmp_path / "taken"), "--source", str(source)]
    code, said = launchers.run(command, cwd=fork_ranks.ROOT)
    assert (code, said) == (2, f"sample_data.py: error: {tmp_path}/taken: File exists\n")


def test_a_folder_that_has_other_images_is_refused(source, tmp_path):
    """Training on them would look like training on Fashion-MNIST."""
    cifar10.write_images(tmp_path)
    code, said = write(tmp_path, source)
    assert code == 2
    words = "has other images than Fashion-MNIST's; give another folder"
    assert said == f"sample_data.py: error: {tmp_path}/cifar-10-batches-bin: {words}\n"
    assert not (tmp_path / "images").exists()
