"""CIFAR-10 with Mixup and CutMix, as the LOADER of a run: what is mixed has to be the same in every layout."""

import sys
from pathlib import Path

from colossal_vit.data.batches import Loader
from colossal_vit.run import Run

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("vit_cifar10_hybrid", "vit_imagenet_dali")]

import cifar10
from cifar10 import MARKS, NUM_CLASSES, NUM_IMAGES  # noqa: F401 of this loader, too
from mixup import with_mixup


def build(run: Run) -> tuple[Loader, Loader]:
    train, test = cifar10.build(run)
    return with_mixup(train, run.config), test
