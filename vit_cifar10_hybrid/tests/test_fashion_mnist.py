"""Fashion-MNIST from small files in its own format."""

import gzip
import re
import struct

import numpy as np
import pytest
from colossal_vit.errors import UserError

import fashion_mnist
from fashion_files import COUNTS, idx, write_source


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


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
