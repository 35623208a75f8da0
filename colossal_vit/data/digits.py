"""The sample: real images for laptops and tests, which loaders write in their own formats.

They are the 1,797 scanned handwritten digits that ship inside scikit-learn (8 x 8 pixels, 17 shades of grey;
E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998).
"""

from typing import NamedTuple

import numpy as np
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
    """Return the digits, enlarged smoothly, split once and for all into 1,437 for training and 360 for testing.

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
