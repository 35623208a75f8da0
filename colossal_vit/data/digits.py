"""Small real data sets in the formats of the big ones, for laptops and tests.

By default the images are the 1,797 scanned handwritten digits that ship inside scikit-learn (8 x 8 pixels, 17 shades of
grey; E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998). A
folder with them appears in one rename, and one that exists is left as it is.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from colossal_vit.files import atomic_folder
from PIL import Image

DIGITS = tuple("0123456789")  # the names of the classes
TEST_FRACTION = 0.2
SPLIT_SEED = 0


class GreyImages(NamedTuple):
    """Square grey images, uint8 (N, side, side), and their labels from 0, (N,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits(side: int) -> GreyImages:
    """The digits, enlarged smoothly, split once and for all into 1,437 for training and 360 for testing.

    The split is stratified: each digit has the same share of both parts.

    Args:
        side: height and width of the images, in pixels.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    grey = (data.images * (255 / 16)).round().astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(image).resize((side, side), Image.BICUBIC)) for image in grey])
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, data.target, test_size=TEST_FRACTION, stratify=data.target, random_state=SPLIT_SEED
    )
    return GreyImages(train_images, train_labels, test_images, test_labels)


def write_imagenet(root: Path) -> Path:
    """Write the digits as ImageNet's folders to `root/imagenet`; returns this folder.

    `train/<wnid>/<wnid>_<number>.JPEG` and `val/<wnid>/ILSVRC2012_val_<number>.JPEG`, RGB of 64 x 64 pixels, with the
    wnids n00000000 to n00000009 for the digits 0 to 9; the split is that of `digits`.
    """
    folder = root / "imagenet"
    if folder.is_dir():
        return folder
    train_images, train_labels, test_images, test_labels = digits(64)
    with atomic_folder(folder) as scratch:
        for split, images, labels in (("train", train_images, train_labels), ("val", test_images, test_labels)):
            for number, (image, label) in enumerate(zip(images, labels, strict=True), start=1):
                wnid = f"n{label:08d}"
                stem = f"{wnid}_{number}" if split == "train" else f"ILSVRC2012_val_{number:08d}"
                path = scratch / split / wnid / f"{stem}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).convert("RGB").save(path, "JPEG", quality=95)
    return folder
