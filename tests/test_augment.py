"""Augmentation is torchvision's, repeated augmentation is DeiT's, and both are the same in every layout."""

import math

import numpy as np
import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.data import image_folder
from colossal_vit.data.augment import Augment
from colossal_vit.data.samplers import GlobalBatchSampler
from colossalai.context import Config
from torchvision.transforms import v2

import cifar10
import schemas
import training
from layouts import LAYOUTS, errors

MEAN, STD = torch.zeros(3, 1, 1), torch.full((3, 1, 1), 255.0)
ALL = {"augment.policy": "three", "augment.color_jitter": 0.3, "augment.erase": 0.5, "REPEATS": 3}
ALL |= {"bce.threshold": 0.2, "ema.decay": 0.9}


def images(count=64, size=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def augmented(numbers, epoch=0, seed=1, **how):
    augmenting = Augment(Config(configs.complete(dict(SEED=seed, augment=how))))
    return augmenting(images()[numbers], torch.tensor(numbers), epoch, MEAN, STD)


THREE = v2.RandomChoice([v2.RandomGrayscale(1.0), v2.RandomSolarize(128, 1.0), v2.GaussianBlur(13, (0.1, 2.0))])
RECIPES = {
    "RandAugment": (dict(policy="rand", n=2, m=10), [v2.RandAugment(2, 10)], None),
    "3-Augment": (dict(policy="three", color_jitter=0.3), [THREE, v2.ColorJitter(0.3, 0.3, 0.3)], None),
    "erasing": (dict(erase=0.7), [], v2.RandomErasing(0.7, value="random")),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_augmented_image_equals_torchvisions_to_the_bit(recipe):
    """With its own seed: the others in the batch do not matter."""
    how, transforms, erasing = RECIPES[recipe]
    numbers = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    found = augmented(numbers, epoch=2, **how)
    changed = 0
    for image, number in zip(found, numbers, strict=True):
        seed = int(np.random.SeedSequence((1, 2, number)).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(seed)
        expected = images()[number]
        for transform in transforms:
            expected = transform(expected)
        expected = expected.float() / 255
        expected = erasing(expected) if erasing else expected
        assert torch.equal(image, expected), number
        changed += not torch.equal(image, images()[number].float() / 255)
    assert changed >= 32
    for other in (augmented(numbers, epoch=3, **how), augmented(numbers, epoch=2, seed=2, **how)):
        assert not torch.equal(found, other)
    assert torch.equal(augmented(numbers[:7], epoch=2, **how), found[:7])


def test_augmentation_leaves_the_random_state_of_torch_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    augmented([0, 1], policy="rand", erase=1.0)
    assert torch.equal(torch.rand(2), expected)


def test_augment_without_a_setting_does_nothing():
    assert not Augment(Config(configs.complete({}))).does_anything
    assert not Augment(Config(configs.complete(dict(augment=dict(n=2))))).does_anything


def deit(num_images, num_ranks, repeats, batch_size):
    """The global batches of DeiT's sampler, as its description says, of an unshuffled data set.

    Each image comes `repeats` times in a row, the row is dealt out to the ranks in turns, and an epoch has as many
    samples as there are images.
    """
    dealt = [number for number in range(num_images) for _ in range(repeats)]
    ranks = [dealt[rank::num_ranks][: num_images // num_ranks] for rank in range(num_ranks)]
    steps = num_images // num_ranks // batch_size
    return [
        sorted(n for own in ranks for n in own[step * batch_size : (step + 1) * batch_size]) for step in range(steps)
    ]


@pytest.mark.parametrize(("num_ranks", "batch_size", "repeats"), [(1, 16, 3), (2, 8, 3), (4, 4, 2), (2, 5, 3)])
def test_repeated_augmentation_makes_deits_global_batches(num_ranks, batch_size, repeats, monkeypatch):
    num_images = 96
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))
    samplers = [GlobalBatchSampler(num_images, batch_size, 1, 0, rank, num_ranks, repeats) for rank in range(num_ranks)]
    steps = [torch.cat(parts) for parts in zip(*samplers, strict=True)]
    assert [sorted((step % num_images).tolist()) for step in steps] == deit(num_images, num_ranks, repeats, batch_size)
    for step in steps:
        assert len(set(step.tolist())) == len(step), "no copy of an image twice"
        neighbours = (step % num_images).view(-1, 2) if len(step) % 2 == 0 else torch.tensor([[0, 1]])
        assert (neighbours[:, 0] != neighbours[:, 1]).all(), "no image is mixed with its own copy"


def of_cifar10(config, sampler):
    return cifar10.Cifar10Loader(images(12, 32), torch.arange(12), sampler, config, torch.device("cpu"))


def of_class_folders(config, sampler):
    pixels = images(12, 32).permute(0, 2, 3, 1).contiguous()
    return image_folder.ClassFolderLoader(
        pixels, torch.arange(12), torch.arange(12), sampler, config, torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("make", "script", "values"),
    [
        (of_cifar10, schemas.HYBRID, dict(CROP_PADDING=4, FLIP=False)),
        (of_cifar10, schemas.HYBRID, dict(CROP_PADDING=0, FLIP=False, augment=dict(erase=1.0))),
        (of_class_folders, schemas.CALTECH101, dict(CROP_AREA=(0.2, 0.5), FLIP=False)),
        (of_class_folders, schemas.CALTECH101, dict(CROP_AREA=(1.0, 1.0), FLIP=False, augment=dict(erase=1.0))),
    ],
)
def test_copies_of_an_image_are_augmented_each_in_its_own_way(make, script, values):
    """By the crop, and by what comes after it."""
    config = Config(configs.complete(dict(IMG_SIZE=32, SEED=1, REPEATS=3, **values), schemas.schema(script)))
    batches = make(config, GlobalBatchSampler(12, 12, seed=1, repeats=3))
    ((made, labels),) = batches
    assert labels.bincount().unique().tolist() == [0, 3]
    for label in labels.unique():
        first, second, third = made[labels == label]
        assert not any(torch.allclose(*pair, atol=0.1) for pair in ((first, second), (first, third), (second, third)))


@pytest.mark.usefixtures("random_weights", "few_test_images")
def test_every_layout_trains_on_the_same_augmented_batches(tmp_path):
    values = {**ALL, **training.MIXED[training.HYBRID], "DEPTH": 2}
    expected = training.train(tmp_path / "one", steps=5, **values).steps
    for name in ("DP 2", "PP 2", "1D 2"):  # loaders know of replicas and stages only
        world_size, layout = LAYOUTS[name]
        steps = training.train(tmp_path / name, world_size, steps=5, **values, **layout).steps
        assert max(errors(steps, expected)) < 1e-4, name
        assert errors(steps, expected)[0] < 1e-5, name


@pytest.mark.usefixtures("few_test_images")
def test_run_with_every_augmentation_resumes_to_the_bit(tmp_path):
    values = {**ALL, **training.RANDOM, "BATCH_SIZE": 64, "NUM_EPOCHS": 2, "DEPTH": 2}
    last = 2 * math.ceil(1437 / 64)
    whole = training.train(tmp_path / "whole", 2, steps=last, **values)
    for steps in (3, 15, last):
        parts = training.train(tmp_path / "parts", 2, steps=steps, **values)
    assert parts.records == whole.records


@pytest.mark.parametrize("script", [training.DATA_PARALLEL, training.CALTECH101, training.IMAGENET])
def test_every_script_with_augmentation_resumes_to_the_bit_and_is_the_same_on_two_processes(script, tmp_path):
    """A run that stops resumes to the bit, and two processes equal one."""

    def train(name, steps, world_size=1):
        values = {
            **ALL,
            **training.MIXED[script],
            "DROP_RATE": 0.1,
            "DROP_PATH_RATE": 0.2,
            "DEPTH": 2,
            "LEARNING_RATE": 0.01,
            "BATCH_SIZE": 32 // world_size,
        }
        return training.train(tmp_path / name, world_size, steps=steps, script=script, **values)

    whole = train("whole", 4)
    for steps in (2, 4):
        parts = train("parts", steps)
    assert parts.records == whole.records
    assert max(errors(train("two", 4, 2).steps, whole.steps)) < 1e-4
