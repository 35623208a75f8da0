"""Mixup on batches that are on the device already (H. Zhang et al., "mixup: Beyond Empirical Risk Minimization",
arXiv:1710.09412)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from colossal_vit.data.batches import Loader, to_device
from torch import Tensor


def mix(images: Tensor, labels: Tensor, num_classes: int, lam: float, partner: Tensor) -> tuple[Tensor, Tensor]:
    """Blend each image and its label with another one of the batch.

    The cross entropy with the blended label is lam times that with the one class plus 1 - lam times the other.

    Args:
        images: (B, C, H, W), floating point.
        labels: (B,), class numbers.
        num_classes: C of the targets.
        lam: share of the image itself; the other's is 1 - lam.
        partner: (B,), the number of the other image.

    Returns:
        The blended images, of the shape and type of `images`, and float32 targets (B, num_classes).
    """
    targets = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
    return images.lerp(images[partner], 1 - lam), targets.lerp(targets[partner], 1 - lam)


class Mixup(Loader):
    """A training loader whose batches are mixed, with one lam from Beta(alpha, alpha) a micro-batch.

    What is drawn for a micro-batch depends on the seed, the data-parallel rank and the number of the micro-batch since
    the start of the run, so that a run that is resumed draws on.

    Args:
        loader: yields images and labels, see `mix`.
        alpha: of the Beta distribution; published 0.2.
        num_classes: of the targets.
        seed: the run's.
        rank: the data-parallel rank.

    Attributes:
        position: micro-batches so far.
    """

    def __init__(self, loader: Loader, alpha: float, num_classes: int, seed: int, rank: int):
        self.loader, self.alpha, self.num_classes = loader, alpha, num_classes
        self.seed, self.rank, self.position = seed, rank, 0

    @property
    def normalization(self):
        return self.loader.normalization

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, and the loader's."""
        return {"position": self.position, "loader": self.loader.state_dict()}

    def seek(self, epoch: int, start: int, state: Mapping[str, Any]) -> bool:
        """Resume from a `state_dict`; returns what the loader's answers."""
        self.position = state["position"]
        return self.loader.seek(epoch, start, state["loader"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            generator = np.random.default_rng((self.seed, self.rank, self.position))
            self.position += 1
            lam = generator.beta(self.alpha, self.alpha)
            partner = to_device(torch.from_numpy(generator.permutation(len(labels))), labels.device)
            yield mix(images, labels, self.num_classes, lam, partner)
