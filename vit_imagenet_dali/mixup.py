"""Mixup on the device (H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from colossal_vit import typed_json
from colossal_vit.data.batches import Loader, LoaderWrapper, to_device
from colossal_vit.errors import UserError
from colossal_vit.typed_json import Count
from torch import Tensor
from typing_extensions import TypedDict


def mix(images: Tensor, labels: Tensor, num_classes: int, lam: float, partner: Tensor) -> tuple[Tensor, Tensor]:
    """Blend each image and its label with those of another image of the batch.

    The cross entropy with a blended label is lam times that with the image's label, plus 1 - lam times the other's.

    Args:
        images: (B, C, H, W), floating point.
        labels: (B,), class numbers.
        num_classes: width of the targets.
        lam: weight of the image itself; the other's is 1 - lam.
        partner: (B,), the index of the other image.

    Returns:
        The blended images, of the shape and type of `images`, and float32 targets (B, num_classes).
    """
    targets = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
    return images.lerp(images[partner], 1 - lam), targets.lerp(targets[partner], 1 - lam)


class Position(TypedDict):
    """The position of `Mixup`, and of the loader inside."""

    position: Count
    loader: dict[str, Any]


class Mixup(LoaderWrapper):
    """A training loader that applies Mixup, with one lam ~ Beta(alpha, alpha) per micro-batch.

    The random numbers of a micro-batch depend on the seed, the data-parallel rank and the number of the micro-batch
    since the start of the run, so that a resumed run draws the same ones.

    Args:
        loader: yields images and labels, see `mix`.
        alpha: of the Beta distribution; 0.2 in the published run.
        num_classes: width of the targets.
        seed: of the run.
        rank: the data-parallel rank.

    Attributes:
        position: micro-batches so far.
    """

    def __init__(self, loader: Loader, alpha: float, num_classes: int, seed: int, rank: int):
        super().__init__(loader)
        self.alpha, self.num_classes = alpha, num_classes
        self.seed, self.rank, self.position = seed, rank, 0

    def state_dict(self) -> dict[str, Any]:
        """The position of this loader and the state of the one inside; JSON-serialisable."""
        return {"position": self.position, "loader": super().state_dict()}

    def seek(self, epoch: int, start: int, state: Mapping[str, Any]) -> bool:
        """Resume from a `state_dict`; returns whether the batches continue bit for bit.

        They do not if the run had no Mixup before, whose state is that of the loader inside.
        """
        try:
            state = typed_json.check(state, Position, "")
        except UserError:
            self.position = epoch * len(self) + start
            super().seek(epoch, start, state)
            return False
        self.position = state["position"]
        return super().seek(epoch, start, state["loader"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            generator = np.random.default_rng((self.seed, self.rank, self.position))
            self.position += 1
            lam = generator.beta(self.alpha, self.alpha)
            partner = to_device(torch.from_numpy(generator.permutation(len(labels))), labels.device)
            yield mix(images, labels, self.num_classes, lam, partner)
