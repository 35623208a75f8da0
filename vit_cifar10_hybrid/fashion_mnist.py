"""Fashion-MNIST from its own files: a real data set that Debian has as a package. `scripts/sample_data.py` writes it.

H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms",
arXiv:1708.07747; MIT licence: 60,000 training and 10,000 test images of 28 x 28 grey pixels in 10 classes.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np
from colossal_vit.data.digits import GreyImages
from colossal_vit.errors import UserError, reason
from colossal_vit.files import atomic_folder
from PIL import Image

SOURCE = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "apt-get install dataset-fashion-mnist"
NAMES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
SIDE = 28
UINT8 = 0x08  # the type of values, in the third byte of an IDX file; the fourth has the number of dimensions


def _read_idx(path: Path) -> np.ndarray:
    """Return the array of bytes in a gzipped IDX file, whose format is described on the page of MNIST.

    Raises:
        UserError: if the file is missing, damaged or of another format.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        hint = f"; Debian has the files: {PACKAGE}" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or reason(error)}{hint}") from None
    kind, num_dimensions = content[2:4] if len(content) >= 4 else (0, 0)
    values = 4 + 4 * num_dimensions
    shape = np.frombuffer(content[4:values], ">u4")
    if kind != UINT8 or len(shape) != num_dimensions or len(content) - values != shape.prod():
        raise UserError(f"{path}: is not an IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=values).reshape(shape)


def read_images(source: Path, side: int = SIDE) -> GreyImages:
    """Return all images, in a black border that makes their sides `side` pixels long.

    Raises:
        UserError: if a file is missing, damaged or of another format.
    """
    border = (side - SIDE) // 2
    parts = []
    for part in ("train", "t10k"):
        images, labels = (_read_idx(source / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        if images.shape[1:] != (SIDE, SIDE) or labels.shape != images.shape[:1] or labels.max() >= len(NAMES):
            raise UserError(f"{source}: the {part} files are not those of Fashion-MNIST")
        parts += [np.pad(images, [(0, 0), (border, border), (border, border)]), labels.astype(np.int64)]
    return GreyImages(*parts)


def write_class_folders(folder: Path, images: GreyImages) -> Path:
    """Write images as `train/<class>/<number>.png` and `val/<class>/<number>.png`, unless the folder exists.

    The names of the classes begin with their labels, so that they are sorted by them.
    """
    if folder.is_dir():
        return folder
    with atomic_folder(folder) as scratch:
        for split, pixels, labels in (("train", *images[:2]), ("val", *images[2:])):
            for label, name in enumerate(NAMES):
                (scratch / split / f"{label} {name}").mkdir(parents=True)
            for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
                path = scratch / split / f"{label} {NAMES[label]}" / f"{number:05d}.png"
                Image.fromarray(image).save(path)
    return folder
