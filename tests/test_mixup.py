"""Mixup blends images and labels alike, and the same again for the same seed."""

import pytest
import torch
import torch.nn.functional as F
from colossal_vit.data.batches import Loader

from mixup import Mixup, mix


def batch(size=8, classes=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 4, 4, generator=generator), torch.randint(classes, (size,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_equal_the_two_losses(smoothing):
    images, labels = batch()
    partner, lam = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]), 0.3
    mixed, targets = mix(images, labels, 5, lam, partner)
    torch.testing.assert_close(mixed[0], 0.3 * images[0] + 0.7 * images[3])
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    options = dict(label_smoothing=smoothing)
    two = lam * F.cross_entropy(logits, labels, **options) + (1 - lam) * F.cross_entropy(
        logits, labels[partner], **options
    )
    torch.testing.assert_close(F.cross_entropy(logits, targets, **options), two)


def test_draws_depend_on_seed_rank_and_position():
    def stream(seed, rank, count, position=0):
        loader = Mixup([batch()] * count, alpha=0.2, num_classes=5, seed=seed, rank=rank)
        loader.position = position
        return [torch.cat([images.flatten(), targets.flatten()]) for images, targets in loader]

    first = stream(1, 0, 4)
    assert all(map(torch.equal, first, stream(1, 0, 4)))
    assert all(map(torch.equal, first[2:], stream(1, 0, 2, position=2)))
    for other in (stream(2, 0, 4), stream(1, 1, 4), first[1:]):
        assert not any(map(torch.equal, first, other))


def test_one_share_a_batch_from_the_beta_distribution():
    labels = torch.arange(4)
    shares = []
    for _, targets in Mixup([(torch.zeros(4, 1, 1, 1), labels)] * 4000, 0.2, 4, seed=3, rank=0):
        own = targets.diagonal()[targets.diagonal() < 1]  # an image may be its own partner
        assert len(own) == 0 or own.std(correction=0) < 1e-6
        shares += own[:1].tolist()
    mean, variance = torch.tensor(shares).mean().item(), torch.tensor(shares).var().item()
    assert mean == pytest.approx(0.5, abs=0.03)
    assert variance == pytest.approx(0.25 / 1.4, rel=0.05)  # of Beta(α, α): 1 / (4 (2α + 1))


def test_mixup_begins_where_a_run_without_it_stopped():
    """That run's state is of the loader inside, or of another one."""

    class Inside(Loader):
        def __len__(self):
            return 10

        def seek(self, epoch, start, state):
            self.sought = epoch, start, state
            return True

    for state in ({}, {"batches": 3}, {"position": -1, "loader": {}}, {"position": 3, "loader": []}):
        mixed = Mixup(Inside(), alpha=0.2, num_classes=5, seed=0, rank=0)
        assert not mixed.seek(2, 7, state)
        assert mixed.position == 27
        assert mixed.loader.sought == (2, 7, state)
    assert mixed.seek(2, 7, {"position": 3, "loader": {"batches": 1}})
    assert mixed.position == 3
    assert mixed.loader.sought == (2, 7, {"batches": 1})
