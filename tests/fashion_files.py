"""Small files in Fashion-MNIST's own format."""

import gzip
import struct

import numpy as np

COUNTS = {"train": 40, "t10k": 20}


def idx(array):
    """An array of bytes as a gzipped IDX file."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def write_source(folder):
    """Write them to a folder that is made, with random images whose labels count up; returns it."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for part, count in COUNTS.items():
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    return folder
