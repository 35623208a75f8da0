"""CIFAR-10: which bytes are which pixels, what augmentation does to them, and what becomes of damaged files."""

import os
import pickle

import numpy as np
import pytest
import torch
import torchvision
from colossal_vit import config as configs
from colossal_vit.data.batches import IGNORED
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torchvision.transforms.v2 import functional as F

import cifar10
import fork_ranks
from conftest import photograph


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("sample")
    cifar10.write_images(root)
    return root


def batches_of_epoch(sample, split="train", **values):
    """The batches of one rank, and the images, labels and sampler that they are of."""
    config = Config(configs.complete(dict(IMG_SIZE=32, CROP_PADDING=0, FLIP=False, SEED=1) | values))
    images, labels, _ = cifar10.read(sample, train=split == "train")
    sampler = GlobalBatchSampler(len(labels), 32, seed=1) if split == "train" else EvalSampler(len(labels), 32)
    return cifar10.Cifar10Loader(images, labels, sampler, config, torch.device("cpu")), images, labels, sampler


def indices_of(sampler):
    """The indices of the next epoch, which stays the next one."""
    indices, sampler.epoch = list(sampler), 0
    return indices


def test_sample_is_split_once_and_for_all(sample):
    train_images, train_labels, _ = cifar10.read(sample, train=True)
    test_images, test_labels, _ = cifar10.read(sample, train=False)
    assert train_images.shape == (1437, 3, 32, 32)
    assert test_images.shape == (360, 3, 32, 32)
    assert train_images.dtype == torch.uint8
    assert set(train_labels.tolist()) == set(test_labels.tolist()) == set(range(10))
    trained_on = {image.numpy().tobytes() for image in train_images}
    assert not any(image.numpy().tobytes() in trained_on for image in test_images)


def write_coloured(root, write):
    """Five files of two coloured images for training, labels 0 to 9, and one of three for testing, labels 9, 4, 0."""
    pixels = [np.asarray(photograph(32, 32, number)).transpose(2, 0, 1) for number in range(13)]
    labels = [*range(10), 9, 4, 0]
    names = [f"data_batch_{number}" for number in range(1, 6)]
    for number, name in enumerate([*names, "test_batch"]):
        chosen = slice(2 * number, 2 * number + 2 if number < 5 else 13)
        write(root, name, np.stack(pixels[chosen]), labels[chosen])
    return pixels[:10], pixels[10:]


def write_binary(root, name, images, labels):
    """As its page describes: the label, then 1,024 bytes of red, of green and of blue, row by row."""
    (root / cifar10.FOLDER).mkdir(exist_ok=True)
    records = [bytes([label]) + bytes(image.ravel().tolist()) for image, label in zip(images, labels, strict=True)]
    (root / cifar10.FOLDER / f"{name}.bin").write_bytes(b"".join(records))


def write_python(root, name, images, labels):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps({"data": images.reshape(len(images), -1), "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(cifar10.NAMES)}))


def test_bytes_of_a_record_are_label_red_green_and_blue_row_by_row(tmp_path):
    for train, expected in zip((True, False), write_coloured(tmp_path, write_binary), strict=True):
        images, labels, _ = cifar10.read(tmp_path, train)
        assert labels.tolist() == (list(range(10)) if train else [9, 4, 0])
        assert np.array_equal(images, expected)
    first = (tmp_path / cifar10.FOLDER / "test_batch.bin").read_bytes()
    assert images[0, :, 5, 7].tolist() == [first[1 + 1024 * plane + 32 * 5 + 7] for plane in range(3)]


def test_python_files_are_read_as_torchvision_shows_them(tmp_path, monkeypatch):
    """And as the binary ones, so that either resumes the other's run."""
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *args: True)  # of the official files
    write_coloured(tmp_path, write_python)
    (binary := tmp_path / "binary").mkdir()
    write_coloured(binary, write_binary)
    for train in (True, False):
        images, labels, digest = cifar10.read(tmp_path, train)
        shown = torchvision.datasets.CIFAR10(str(tmp_path), train)
        assert [label for _, label in shown] == labels.tolist()
        assert all(torch.equal(F.pil_to_tensor(image), own) for (image, _), own in zip(shown, images, strict=True))
        assert digest == cifar10.read(binary, train)[2]
    official = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert cifar10.class_names(tmp_path) == official


def coloured_batch(root, **values):
    """The coloured images for testing, normalised, and as torchvision would read them."""
    _, images = write_coloured(root, write_binary)
    batches = batches_of_epoch(root, "test", **values)[0]
    return next(iter(batches))[0][:3], torch.from_numpy(np.stack(images))


@pytest.mark.parametrize("own", [False, True])
def test_channels_are_normalised_each_by_its_own_mean_and_deviation(own, tmp_path):
    """CIFAR-10's own, or those of the config."""
    values = dict(MEAN=(0.1, 0.5, 0.7), STD=(0.2, 0.4, 0.8)) if own else {}
    mean, std = values.values() if own else ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    found, images = coloured_batch(tmp_path, **values)
    torch.testing.assert_close(found, F.normalize(images / 255, mean, std))


@pytest.mark.parametrize("size", [48, 24])
def test_images_of_another_size_are_resized_as_torchvision_does(size, tmp_path):
    found, images = coloured_batch(tmp_path, IMG_SIZE=size, MEAN=(0, 0, 0), STD=(1, 1, 1))
    torch.testing.assert_close(found, F.resize(images / 255, [size, size], antialias=True))


def test_batches_without_augmentation_are_the_normalised_images(sample):
    batches, images, labels, sampler = batches_of_epoch(sample)
    mean, std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (cifar10.MEAN, cifar10.STD))
    for index, (batch, batch_labels) in zip(indices_of(sampler), batches, strict=True):
        torch.testing.assert_close(batch, (images[index].float() - mean) / std)
        assert torch.equal(batch_labels, labels[index])
    assert next(iter(batches_of_epoch(sample, IMG_SIZE=48)[0]))[0].shape == (32, 3, 48, 48)


def test_augmentation_shifts_and_mirrors_each_epoch_anew(sample):
    """Every augmented image is a shifted, perhaps mirrored original, and all variants occur."""
    batches, images, _, sampler = batches_of_epoch(sample, CROP_PADDING=2, FLIP=True)
    order = indices_of(sampler)[0]
    shifts, mirrored = batches.draw_augmentation()
    batch = (next(iter(batches))[0] * batches.std + batches.mean).round().to(torch.uint8)
    padded = torch.nn.functional.pad(images, [2] * 4)
    for image, index in zip(batch, order.tolist(), strict=True):
        row, column = shifts[index].tolist()
        expected = padded[index, :, row : row + 32, column : column + 32]
        assert torch.equal(image, expected.flip(-1) if mirrored[index] else expected)
    assert set(map(tuple, shifts.tolist())) == {(row, column) for row in range(5) for column in range(5)}
    assert 0.4 < mirrored.float().mean() < 0.6
    assert not torch.equal(batches.draw_augmentation()[0], shifts), "the next epoch's"


def test_places_left_over_are_ignored(sample):
    batches, _, labels, _ = batches_of_epoch(sample, "test")
    seen = torch.cat([batch_labels for _, batch_labels in batches])
    assert torch.equal(seen[seen != IGNORED], labels)
    assert (seen == IGNORED).sum() == 24


def test_only_the_first_stage_makes_images(sample):
    def function():
        batch = next(iter(batches_of_epoch(sample)[0]))[0]
        return gpc.get_local_rank(ParallelMode.PIPELINE), batch.shape

    answers = fork_ranks.call(function, 2, parallel={"pipeline": 2, "tensor": {"mode": None, "size": 1}})
    assert answers == [(0, (32, 3, 32, 32)), (1, (32,))]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "data_batch_3.bin").unlink(), ("data_batch_3.bin", "No such file")),
        (lambda f: (f / "data_batch_3.bin").write_bytes(b"\0" * 5000), ("data_batch_3.bin", "5000 bytes", "3073")),
        (lambda f: (f / "test_batch.bin").write_bytes(b""), ("test_batch.bin", "0 bytes")),
        (
            lambda f: ((f / "test_batch.bin").unlink(), os.mkfifo(f / "test_batch.bin")),
            ("test_batch.bin: is not a file",),
        ),
        (lambda f: (f / "data_batch_1.bin").write_bytes(b"\x0b" + b"\0" * 3072), ("label of 11",)),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, words):
    cifar10.write_images(tmp_path)
    damage(tmp_path / cifar10.FOLDER)
    with pytest.raises(UserError) as error:
        cifar10.read(tmp_path, train=True), cifar10.read(tmp_path, train=False)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_python_files_that_are_incomplete_are_to_be_unpacked_again(tmp_path):
    """Torchvision advises a parameter of its own."""
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(UserError) as error:
        cifar10.read(tmp_path, train=True)
    archive = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    words = f"a file is missing or corrupt; unpack {archive} again there"
    assert str(error.value) == f"{tmp_path}/cifar-10-batches-py: {words}"
