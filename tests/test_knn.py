"""Evaluation by nearest neighbours: scikit-learn's, and the same features in every layout."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from colossal_vit.engine.knn import classify, gather_features
from colossalai.context import Config
from colossalai.legacy.core import global_context as gpc
from safetensors.torch import save_file
from sklearn.neighbors import KNeighborsClassifier

import caltech101
import cifar10
import training
from conftest import NUM_TEST_IMAGES
from layouts import LAYOUTS
from test_finetune import build_engine, call, full_vit, full_weights

K_NN = r"k-NN accuracy (\S+)% \((\d+) of (\d+) images\), 20 neighbours of (\d+) training images"


def test_vote_equals_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 16, generator=generator)
    labels = torch.randint(5, (3000,), generator=generator)
    features = (centres[labels] + 1.5 * torch.randn(3000, 16, generator=generator)) * torch.rand(3000, 1)
    # 20 neighbours and a temperature of 0.07, as in DINO (M. Caron et al., arXiv:2104.14294).
    theirs = KNeighborsClassifier(20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    theirs.fit(features[:1500], labels[:1500])
    found = classify(features[:1500], labels[:1500], features[1500:])
    assert torch.equal(found, torch.from_numpy(theirs.predict(features[1500:])))
    assert 0.5 < (found == labels[1500:]).float().mean() < 0.95


def test_votes_are_weighted_by_cosines():
    """By hand: one neighbour at a cosine of 1 outvotes e^(0.2 / 0.07) = 17.4 at 0.8, whatever the lengths are."""

    def winner(number):
        near, far = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.4, 0.3]])
        labels = torch.tensor([1] + [0] * number)
        return classify(torch.cat([near, far.expand(number, 2)]), labels, torch.tensor([[0.5, 0.0]])).item()

    assert [winner(number) for number in (16, 17, 18, 19)] == [1, 1, 0, 0]


def test_vote_of_fewer_images_than_neighbours_is_of_all():
    assert classify(torch.eye(3), torch.arange(3), torch.eye(3)).tolist() == [0, 1, 2]


IMAGES = torch.randint(256, (45, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(10, (45,), generator=torch.Generator().manual_seed(4))
AUGMENTED = dict(CROP_PADDING=4, FLIP=True, augment=None)
POOLS = ("token", "avg")


def features():
    """Of 45 training images, one by one as the test images come: without the shift and the mirror of training."""
    config, found = gpc.config, []
    for config.POOL in POOLS:
        engine, _ = build_engine()
        sampler = cifar10.GlobalBatchSampler(len(LABELS), config.BATCH_SIZE)
        train = cifar10.Batches(IMAGES, LABELS, sampler, Config({**config, **AUGMENTED}), torch.device("cpu"))
        found.append(gather_features(engine, train.in_order()))
    return found


@pytest.mark.parametrize(
    "layout", ["DP 2", "PP 2", "PP 2 interleaved × 2", "1D 2", "2D 4", "2.5D 8", "3D 8", "DP 2 × 2D 4", "PP 2 × 2D 4"]
)
def test_every_layout_has_the_same_features(layout, random_weights):
    world_size, values = LAYOUTS[layout]
    depth = 4 if "PP" in layout else 2
    first, *others = call(features, world_size, **{**values, "BATCH_SIZE": 8, "DEPTH": depth})
    assert others == [[None, None]] * (world_size - 1)
    mean, std = (torch.tensor(value).view(3, 1, 1) * 255 for value in (cifar10.MEAN, cifar10.STD))
    for pool, (own, labels) in zip(POOLS, first, strict=True):
        assert torch.equal(labels, LABELS)
        reference = full_vit(DEPTH=depth, POOL=pool)
        with torch.no_grad():
            seen = reference.forward_features((IMAGES.float() - mean) / std)
            expected = reference.forward_head(seen, pre_logits=True)
        ours, theirs = (F.normalize(features) @ F.normalize(features).T for features in (own, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(full_weights(), path)
    return {"finetune.weights": str(path), "finetune.head": "keep"}


def evaluate(output, world_size=1, *, flag="--eval-knn", **options):
    return training.train(output, world_size, flag, steps=None, **options)


def test_weights_are_evaluated_without_training(weights, few_test_images, tmp_path):
    """By neighbours and by the head that they have; in one process and in others the same to the image."""
    accuracy, correct, count, known = re.search(K_NN, evaluate(tmp_path / "no", **weights).said).groups()
    assert (int(count), int(known)) == (NUM_TEST_IMAGES, 1437)
    assert float(accuracy) == pytest.approx(100 * int(correct) / int(count), abs=0.01)
    assert float(accuracy) > 30, "even random features tell some digits apart"
    by_head = evaluate(tmp_path / "no", flag="--eval-only", **weights).said
    assert by_head.count(f"of {NUM_TEST_IMAGES} images), loss ") == 1
    for layout in ("DP 2", "PP 2"):
        world_size, values = LAYOUTS[layout]
        run = evaluate(tmp_path / "no", world_size, **{**weights, **values})
        assert re.search(K_NN, "".join(run.stdout)).groups() == (accuracy, correct, count, known), layout
    assert not (tmp_path / "no").exists()


def test_checkpoint_is_evaluated_and_its_average(weights, few_test_images, tmp_path):
    values = {**weights, "ema.decay": 0.5, "LEARNING_RATE": 0.1}
    training.train(tmp_path, steps=3, **values)
    said = evaluate(tmp_path, **values).said
    assert "step-00000003, step 3" in said
    (own,), (average,) = re.findall(r"k-NN accuracy (\S+%)", said), re.findall(r"k-NN accuracy of the EMA (\S+%)", said)
    assert own != average


SMALL = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=4, NUM_HEADS=4, NUM_CLASSES=10, BATCH_SIZE=64)


@pytest.mark.parametrize("script", [training.CALTECH101, training.IMAGENET])
def test_other_data_are_evaluated_alike_by_one_and_two(script, weights, tmp_path, monkeypatch):
    if script == training.CALTECH101:
        caltech101.write_sample(tmp_path)
        monkeypatch.setenv("DATA", str(tmp_path))
    else:
        monkeypatch.delenv("DATA", raising=False)
    values = {**SMALL, **weights, "gradient_accumulation": 1}
    one, two = (evaluate(tmp_path / "no", size, script=script, small=False, **values) for size in (1, 2))
    found = re.search(K_NN, one.said)
    assert int(found[3]) + int(found[4]) == 1797
    assert float(found[1]) > 30
    assert re.search(K_NN, two.said).groups() == found.groups(), str(two)


@pytest.mark.parametrize(
    ("script", "values", "said"),
    [
        (training.CALTECH101, {}, "--eval-knn: no checkpoint in"),
        (
            training.CALTECH101,
            {**SMALL, "SYNTHETIC": True},
            "--eval-knn needs the images of a data set",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(script, values, said, weights, tmp_path):
    values = {**values, **weights} if values else {}
    assert said in training.refused(tmp_path / "no", 1, "--eval-knn", steps=None, script=script, small=False, **values)
