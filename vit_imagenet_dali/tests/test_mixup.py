"""Mixup and CutMix equal timm's, and are the same on any number of processes and after a resume."""

from unittest import mock

import numpy as np
import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.data.batches import Loader
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.errors import UserError
from colossalai.context import Config
from timm.data import mixup as timm_mixup

import mixup
import schemas
import training
from mixup import with_mixup

SIZE, CLASSES = 12, 5


def batch(size=8):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, SIZE, SIZE, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def mix_as_timm(images, labels, mode, shares, pasted, middles):
    """What timm's `Mixup` makes of a batch whose neighbours it takes for partners, with these draws."""
    theirs = timm_mixup.Mixup(0.8, 1.0, mode=mode, label_smoothing=0.0, num_classes=CLASSES)
    order = torch.cat([torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2).flip(0)])
    numbers = {"batch": [0], "pair": order[: len(order) // 2] // 2, "elem": order}[mode]
    shares, pasted, middles = shares[numbers].astype(np.float32), pasted[numbers], middles[:, numbers]
    sides = middles[:, (shares < 1) & pasted].T.ravel()  # row and column of one box after the other
    each, all_alike = lambda size: (shares, pasted), lambda: (float(shares[0]), bool(pasted[0]))
    with (
        mock.patch.multiple(theirs, _params_per_elem=each, _params_per_batch=all_alike),
        mock.patch.object(np.random, "randint", side_effect=sides),
    ):
        mixed, targets = theirs(images[order].clone(), labels[order])
    back = order.argsort()
    return mixed[back], targets[back]


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_images_and_targets_equal_timms_for_the_same_draws(mode):
    every = {"batch": 8, "pair": 2, "elem": 1}[mode]
    count, seen = 8 // every, set()
    for seed in range(20):
        images, labels = batch()
        drawn = mixup.draw(np.random.default_rng(seed), count, SIZE, mixup=0.8, cutmix=1.0, prob=0.5)
        again = np.random.default_rng(seed)
        pasted = again.random(count) < 0.5
        blended, cut = again.beta(0.8, 0.8, count), again.beta(1.0, 1.0, count)
        applied = again.random(count) < 0.5
        shares = np.where(applied, np.where(pasted, cut, blended), 1.0)
        expected = mix_as_timm(images, labels, mode, shares, pasted, again.integers(SIZE, size=(2, count)))
        draws = mixup.MixParams(*(values[np.arange(8) // every] for values in drawn))
        found = mixup.mix(images, labels, CLASSES, draws)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
        seen |= set(zip(applied.tolist(), pasted.tolist(), strict=True))
    assert len(seen) == 4, "mixed and not, pasted and blended"


def test_a_later_pipeline_stage_has_the_same_targets():
    """Without images: it gets labels in their place, and keeps these."""
    images, labels = batch()
    draws = mixup.draw(np.random.default_rng(0), len(labels), SIZE, mixup=0.8, cutmix=1.0)
    kept, targets = mixup.mix(labels, labels, CLASSES, draws)
    assert torch.equal(kept, labels)
    assert torch.equal(targets, mixup.mix(images, labels, CLASSES, draws)[1])


class Same(Loader):
    """The same batch in every place of an epoch."""

    def __init__(self, count, size=4):
        self.count, self.batch = count, batch(size)

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter([self.batch] * self.count)


def config(batch_size=4, accumulation=2, **mix):
    sizes = dict(IMG_SIZE=SIZE, NUM_CLASSES=CLASSES, BATCH_SIZE=batch_size, gradient_accumulation=accumulation)
    return Config(configs.complete(dict(**sizes, SEED=1, mix=mix), schemas.schema(schemas.IMAGENET)))


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_a_global_batch_is_mixed_alike_however_it_is_shared(mode):
    """One rank with 16 images, two with 4 and 2 micro-batches, four with 2 and 2; another step and epoch are others."""

    def whole(batch_size, accumulation, num_ranks, epoch=0, step=0):
        settings = config(batch_size, accumulation, mixup=0.8, cutmix=1.0, mode=mode)
        parts = [
            mixup.MixedLoader(Same(1), settings, rank, num_ranks).draws(epoch, step * accumulation + part)
            for part in range(accumulation)
            for rank in range(num_ranks)
        ]
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    expected = whole(16, 1, 1)
    for shared in (whole(4, 2, 2), whole(2, 2, 4)):
        assert all(map(np.array_equal, shared, expected))
    for other in (whole(16, 1, 1, step=1), whole(16, 1, 1, epoch=1)):
        assert not np.array_equal(other[2], expected[2])


def test_what_is_drawn_for_a_batch_is_that_of_the_seed_the_epoch_and_the_step():
    """By hand for the second of two ranks with two micro-batches of four: places 4 to 7, then 12 to 15."""
    mixed = mixup.MixedLoader(Same(1), config(mixup=0.8, cutmix=1.0, mode="elem", prob=0.7, switch_prob=0.3), 1, 2)
    mixed.config.SEED = 5
    for epoch, step in ((0, 0), (0, 1), (1, 0)):
        generator = np.random.default_rng((5, epoch, step))
        pasted = generator.random(16) < 0.3
        shares = np.where(pasted, *[generator.beta(alpha, alpha, 16) for alpha in (0.8, 1.0)][::-1])
        shares[generator.random(16) >= 0.7] = 1.0
        for part, places in enumerate((slice(4, 8), slice(12, 16))):
            drawn = mixed.draws(epoch, 2 * step + part)
            assert np.array_equal(drawn.blend, np.where(pasted, 1.0, shares)[places])
            assert np.array_equal(drawn.target[~pasted[places]], shares[places][~pasted[places]])


def test_a_loader_that_resumes_mixes_as_one_that_did_not_stop():
    def stream(loader, count):
        return [torch.cat([part.flatten() for part in mixed]) for _, mixed in zip(range(count), loader, strict=False)]

    through = mixup.MixedLoader(Same(6), config(mixup=0.8, cutmix=1.0))
    first, second = stream(through, 6), stream(through, 6)
    resumed = mixup.MixedLoader(Same(2), config(mixup=0.8, cutmix=1.0))
    resumed.seek(1, 4)
    assert all(map(torch.equal, stream(resumed, 2), second[4:]))
    assert not any(map(torch.equal, first, second))


@pytest.mark.parametrize("repeats", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [4, 6, 8, 10, 16])
def test_an_image_is_not_mixed_with_its_copies(size, repeats):
    """As long as not more than half of a global batch may be copies of one image; else some are, and it is refused."""
    order = torch.cat(list(GlobalBatchSampler(90, size, repeats=repeats)))
    one, other = (order % 90).view(-1, 2).unbind(1)
    settings = Config({**config(size, 1, mixup=0.8), "REPEATS": repeats})
    if repeats > size // 2:
        with pytest.raises(UserError, match="are mixed with their own copies"):
            mixup.MixedLoader(Same(1), settings)
    else:
        assert not (one == other).any()
        mixup.MixedLoader(Same(1), settings)


def test_a_loader_without_mix_is_left_alone():
    off = Same(1)
    assert with_mixup(off, config(3)) is off


@pytest.mark.parametrize("images", ["records", "random"])
def test_replicas_mix_as_one_process(images, tmp_path):
    """And a run that stops resumes to the bit."""

    def train(name, steps, world_size=1):
        values = {**training.MIX, "SYNTHETIC": images == "random", "BATCH_SIZE": 16 // world_size}
        return training.train(
            tmp_path / name, world_size, steps=steps, script=training.IMAGENET, gradient_accumulation=2, **values
        )

    one, two = train("one", 4), train("two", 4, 2)
    for here, there in zip(two.steps, one.steps, strict=True):
        assert [here[key] for key in ("loss", "grad_norm")] == pytest.approx(
            [there["loss"], there["grad_norm"]], rel=1e-4
        )
    train("parts", 2)
    assert train("parts", 4).records == one.records


def test_an_epoch_that_is_not_mixed_is_another_one(tmp_path):
    runs = [
        training.train(tmp_path / str(len(mix)), steps=1, script=training.IMAGENET, **mix) for mix in ({}, training.MIX)
    ]
    assert runs[0].steps[0]["loss"] != runs[1].steps[0]["loss"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mix.mixup": 0.8, "mix.mode": "half"}, "mix.mode = 'half', but it must be one of 'batch', 'pair', 'elem'"),
        ({"mix.mixup": 0.8, "BATCH_SIZE": 15}, "BATCH_SIZE = 15: must be even for mix"),
        ({"mix.mixup": 0.8, "REPEATS": 17}, "REPEATS = 17: must be at most 16 with mix, half of the global batch"),
    ],
)
def test_mix_with_a_mistaken_setting_is_refused_in_one_line(values, words, tmp_path):
    assert words in training.refused(tmp_path / "run", script=training.IMAGENET, **values)
    assert not (tmp_path / "run").exists()
