"""Which samples a rank gets, what augmentation does to them, and what becomes of damaged files."""

import contextlib
import errno
import functools
import hashlib
import http.server
import os
import shutil
import signal
import socket
import threading
import time

import numpy as np
import pytest
import sklearn.datasets
import torch
import torchvision
from colossal_vit import files
from colossal_vit.data import folders
from colossal_vit.data.batches import SyntheticLoader, read_ahead
from colossal_vit.data.digits import digits
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import RankLogger, run_on_rank_0
from colossalai.context import Config
from torchvision.datasets.utils import download_and_extract_archive

import caltech101
import cifar10
import fork_ranks
import imagenet_dali_dataloader


def global_batches(num_ranks, batch_size, accumulation, epochs=2):
    """The set of indices of every optimizer step, in order."""
    samplers = [GlobalBatchSampler(100, batch_size, accumulation, 7, rank, num_ranks) for rank in range(num_ranks)]
    steps = []
    for _ in range(epochs):
        parts = [list(sampler) for sampler in samplers]
        for start in range(0, len(samplers[0]), accumulation):
            steps.append(sorted(torch.cat([i for part in parts for i in part[start : start + accumulation]]).tolist()))
    return steps


@pytest.mark.parametrize(("num_ranks", "batch_size", "accumulation"), [(2, 8, 1), (4, 4, 1), (1, 4, 4), (2, 2, 4)])
def test_a_global_batch_is_the_same_set_for_every_layout(num_ranks, batch_size, accumulation):
    expected = global_batches(1, 16, 1)
    assert global_batches(num_ranks, batch_size, accumulation) == expected
    assert len(expected) == 2 * (100 // 16)
    for epoch in (expected[:6], expected[6:]):
        seen = [index for step in epoch for index in step]
        assert len(seen) == len(set(seen)) == 96
    assert expected[:6] != expected[6:], "another order each epoch"


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UserError, match=r"global batch of 128 .*training set of 100"):
        GlobalBatchSampler(100, 32, 2, 0, 0, 2)


def test_places_in_an_epoch_are_those_worked_out_by_hand():
    """Global batches of 2 ranks × 2 micro-batches × 3 samples, from one permutation for each seed and epoch."""
    for seed, epoch in ((1, 0), (1, 1), (2, 0), (2, 1)):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        for rank in range(2):
            sampler = GlobalBatchSampler(30, 3, 2, seed, rank, 2)
            sampler.epoch = epoch
            expected = [
                order[start : start + 3] for start in (0 + 3 * rank, 6 + 3 * rank, 12 + 3 * rank, 18 + 3 * rank)
            ]
            assert [batch.tolist() for batch in sampler] == expected, "6 samples fill no global batch"


def test_an_epoch_of_shards_is_the_one_worked_out_by_hand():
    """Shards of 2, 3, 4 and 5 samples, two of them shuffled together at a time."""
    shards = [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]
    for seed, epoch in ((3, 0), (3, 1), (4, 0)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        first, second, third, fourth = torch.randperm(4, generator=generator).tolist()
        expected = []
        for window in (shards[first] + shards[second], shards[third] + shards[fourth]):
            expected += [window[place] for place in torch.randperm(len(window), generator=generator).tolist()]
        sampler = GlobalBatchSampler(14, 1, 1, seed, 0, 1, shards=[2, 3, 4, 5], window=2)
        assert sampler.order(epoch).tolist() == expected


def test_places_in_an_evaluation_are_those_worked_out_by_hand():
    """Seven images, two ranks, batches of two; -1 is no image."""
    first, second = ([batch.tolist() for batch in EvalSampler(7, 2, rank, 2)] for rank in range(2))
    assert (first, second) == ([[0, 1], [4, 5]], [[2, 3], [6, -1]])


@pytest.mark.parametrize("num_samples", [1, 7, 8, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_evaluation_counts_each_sample_once(num_samples, num_ranks):
    batches = [list(EvalSampler(num_samples, 4, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(part) for part in batches}) == 1, "ranks must make the same number of calls"
    assert all(batch.shape == (4,) for part in batches for batch in part)
    seen = torch.cat([batch for part in batches for batch in part])
    assert sorted(seen[seen >= 0].tolist()) == list(range(num_samples))


def test_digits_are_those_of_scikit_learn():
    """Each as it was scanned, upright, black on white's scale of 16 levels; and each in one part only."""
    scanned = sklearn.datasets.load_digits()
    expected = [(image, label) for image, label in zip(scanned.images.astype(int), scanned.target, strict=True)]
    images, labels, test_images, test_labels = digits(8)
    found = zip(np.concatenate([images, test_images]), np.concatenate([labels, test_labels]), strict=True)
    levels = np.array([0, 16, 32, 48, 64, 80, 96, 112, 128, 143, 159, 175, 191, 207, 223, 239, 255], np.uint8)
    assert sorted((image.tobytes(), label) for image, label in found) == sorted(
        (levels[image].tobytes(), label) for image, label in expected
    )


def test_random_images_are_not_learnt():
    """A CPU is slow with the gradients of memorised images. A run that resumes has the same labels."""
    config, num_images = Config(dict(SEED=0, NUM_CLASSES=10, IMG_SIZE=4)), 40 * SyntheticLoader.DISTINCT
    batches = SyntheticLoader(GlobalBatchSampler(num_images, num_images // 2), config, torch.device("cpu"))
    first, second = batches
    batches.seek(0, 1)
    (resumed,) = batches
    assert all(map(torch.equal, resumed, second))
    images, labels = map(torch.cat, zip(first, second, strict=True))
    _, which = images.flatten(1).unique(dim=0, return_inverse=True)
    assert which.unique().tolist() == list(range(SyntheticLoader.DISTINCT))
    assert all(len(labels[which == image].unique()) > 4 for image in range(SyntheticLoader.DISTINCT))


def test_random_images_are_those_of_the_seed():
    first, again, other = (
        SyntheticLoader(EvalSampler(1000, 8), Config(dict(SEED=seed, NUM_CLASSES=10, IMG_SIZE=4)), torch.device("cpu"))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert not torch.equal(first.labels, other.labels)
    assert first.images.mean().abs() < 0.2
    assert first.images.std() == pytest.approx(1, abs=0.1)


def test_batches_come_in_order_whichever_thread_is_the_first():
    """The first of each three waits for the last one."""
    events = [threading.Event() for _ in range(9)]

    def read(key):
        events[key].set()
        return events[key // 3 * 3 + 2].wait(fork_ranks.PATIENCE) and key * 10

    assert list(read_ahead(range(9), read, 3)) == [(key, key * 10) for key in range(9)]


def test_a_loader_is_left_without_waiting_for_what_is_read():
    """The garbage collector may do so in any thread, whatever locks that holds."""
    over = threading.Event()
    stream = read_ahead([0, 1], lambda number: number and over.wait())
    assert next(stream) == (0, 0)
    timer = threading.Timer(10, over.set)
    timer.start()
    stream.close()
    assert not over.is_set()
    timer.cancel()
    over.set()


def test_a_batch_is_read_ahead_while_the_one_before_is_in_use():
    read, two = [], threading.Event()

    def note(key):
        read.append(key)
        if key == 2:
            two.set()
        return key * 10

    batches = read_ahead(iter([1, 2, 3]), note)
    assert next(batches) == (1, 10)
    assert two.wait(fork_ranks.PATIENCE), "before it is asked for"
    assert 3 not in read, "but not the one after it"
    assert list(batches) == [(2, 20), (3, 30)]
    assert list(read_ahead([], note)) == []


# ---- Files ----


@pytest.mark.parametrize(
    "write", [cifar10.write_images, imagenet_dali_dataloader.write_imagenet, caltech101.write_sample]
)
def test_sample_is_left_alone_when_it_is_there(tmp_path, write):
    written = write(tmp_path)
    [folder] = tmp_path.iterdir()
    (folder / "mark").touch()
    before = sorted(tmp_path.rglob("*"))
    assert write(tmp_path) == written
    assert sorted(tmp_path.rglob("*")) == before
    assert list(tmp_path.iterdir()) == [folder]


ODD = {  # what may be in a data folder, and what is said of it
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    "links in a circle": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "a FIFO": (os.mkfifo, "is neither a file nor a folder"),
    "a socket": (lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)), "is neither a file nor a"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is neither a file nor a folder"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("look", [folders.class_folders, folders.list_files])
def test_what_is_no_file_is_refused_by_name(tmp_path, look, name):
    make, words = ODD[name]
    (tmp_path / "image.jpg").touch()
    make(tmp_path / "odd.jpg")
    with pytest.raises(UserError, match=f"^{tmp_path}/odd.jpg: {words}.*; repair or remove it$"):
        look(tmp_path)


def test_files_below_the_folder_of_a_class_are_its_own(tmp_path):
    for path in ("b.jpg", "a/c.jpg", "a/a/d.jpg", "c/.hidden.jpg", ".cache/e.jpg"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "d").symlink_to("a")
    found = [path for path, *_ in folders.list_files(tmp_path)]
    assert found == ["a/a/d.jpg", "a/c.jpg", "b.jpg", "d/a/d.jpg", "d/c.jpg"]


@pytest.mark.parametrize("target", [".", "../.."])
def test_a_link_to_a_folder_that_it_is_in_is_refused_by_name(target, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/loop").symlink_to(target)
    with pytest.raises(UserError, match=rf"^{tmp_path}/a/b/loop: is a link to a folder that it is in; remove it$"):
        folders.list_files(tmp_path)


def write_archive(module, folder):
    """The sample as the archive of a data set, packed as the official one."""
    made = folder / "made"
    if module is cifar10:
        shutil.make_archive(folder / "archive", "gztar", cifar10.write_images(made).parent, cifar10.FOLDER)
        return folder / "archive.tar.gz"
    (caltech101.write_sample(made) / caltech101.FOLDER / caltech101.NO_CLASS).mkdir()
    (folder / "zip" / "caltech-101").mkdir(parents=True)
    inner = folder / "zip" / "caltech-101" / "101_ObjectCategories"
    shutil.make_archive(inner, "gztar", made / "caltech101", "101_ObjectCategories")
    shutil.make_archive(folder / "archive", "zip", folder / "zip")
    return folder / "archive.zip"


@pytest.fixture(params=[cifar10, caltech101], ids=["cifar10", "caltech101"])
def download(request, tmp_path, monkeypatch):
    """A module, and what downloads the archive that a web server on this machine offers in the official one's place."""
    file = write_archive(request.param, tmp_path)
    whole = file.read_bytes()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    original, data = download_and_extract_archive, tmp_path / "data"
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def from_here(url, *args, md5, **options):
            assert url.startswith("https://")
            assert len(md5) == 32
            url = f"http://localhost:{server.server_port}/{file.name}"
            original(url, *args, md5=hashlib.md5(whole).hexdigest(), **options)

        def fetch(share=1.0):
            file.write_bytes(whole[: int(len(whole) * share)])
            request.param.fetch(data, RankLogger())

        where = cifar10 if request.param is cifar10 else torchvision.datasets.caltech
        monkeypatch.setattr(where, "download_and_extract_archive", from_here)
        yield request.param, data, fetch
        server.shutdown()


def test_download_is_taken_whole_or_leaves_nothing(download):
    """A folder may have other data sets of these scripts, and hidden files."""
    module, data, fetch = download
    words = (
        r"cannot be downloaded \(File not found or corrupted\.\); unpack .* there by hand, or unset DATA for the sample"
    )
    with pytest.raises(UserError, match=words):
        fetch(0.5)
    assert not list(data.iterdir())
    (cifar10.write_images if module is caltech101 else caltech101.write_sample)(data)
    (data / ".DS_Store").touch()
    fetch()
    assert sorted(path.name for path in data.iterdir()) == [".DS_Store", "caltech101", cifar10.FOLDER]
    assert len(cifar10.read(data, train=True)[1]) == 1437
    assert len(caltech101.find_images(data).paths) == 1797


TYPOS = {  # what DATA is, by the name of a folder and what is in it, and what is said of it
    "typo/deep": ([], "{data}: no such folder, and no {parent} to make it in; correct the path"),
    "own images": (
        ["cats/1.jpg"],
        "{data}: has no {set}/.*; it is downloaded to an empty or a new folder only, but cats",
    ),
    "a file": (None, "{data}: has no {set}/.*Not a directory"),
    "an archive": (["caltech101/caltech-101.zip", "cifar/x"], "is in this one: set DATA to another folder, or unpack"),
}


@pytest.mark.parametrize("name", TYPOS)
@pytest.mark.parametrize("module", [cifar10, caltech101])
def test_nothing_is_downloaded_to_a_folder_that_is_probably_a_mistake(tmp_path, monkeypatch, module, name):
    files, words = TYPOS[name]
    data = tmp_path / name
    if files is None:
        data.touch()
    for file in files or []:
        (data / file).parent.mkdir(parents=True)
        (data / file).touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(module, "download_and_extract_archive" if module is cifar10 else "Caltech101", None)
    expected = words.format(data=f"DATA = {data}", set=module.FOLDER, parent=data.parent)
    with pytest.raises(UserError, match=expected):
        module.fetch(data, RankLogger())
    assert sorted(tmp_path.rglob("*")) == before


# ---- Scratch folders ----


@contextlib.contextmanager
def process(work):
    """A fork that calls `work` with a function that stays for ever; yields once it is called, and kills the fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        fork_ranks.end_as(lambda: work(lambda: (os.write(writing, b"."), signal.pause())))
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("make", [files.atomic_folder, lambda folder: files.scratch_folder(folder.parent)])
def test_scratch_folders_of_killed_processes_are_removed_and_those_of_others_kept(tmp_path, make):
    """Those of any folder beside it: a cache's name changes with the data."""

    def fill(wait):
        with make(tmp_path / "one") as scratch:
            (scratch / "large").write_bytes(bytes(1000))
            wait()

    with process(fill):
        (scratch,) = tmp_path.iterdir()
        assert list(scratch.rglob("large"))
        (tmp_path / f"{files.SCRATCH}of-the-user").mkdir()
        with files.atomic_folder(tmp_path / "other"):
            pass
        assert list(scratch.rglob("large")), "its process is alive"
        assert len(list(tmp_path.iterdir())) == 3
    with files.atomic_folder(tmp_path / "third") as made:
        assert not scratch.exists()
        assert not any(made.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{files.SCRATCH}of-the-user", "other", "third"]


def test_a_scratch_folder_that_is_taken_for_a_stale_one_is_made_again(tmp_path, monkeypatch):
    """Between its making and its locking another process may begin, or have ended, to remove it."""
    lock, removed = files._lock, []

    def late(path):
        if len(removed) == 0:
            removed.append(path)
            shutil.rmtree(path.parent)
        elif len(removed) == 1:
            removed.append(path)
            descriptor = lock(path)
            shutil.rmtree(path.parent)
            return descriptor
        elif len(removed) == 2:
            removed.append(path)
            lock(path)  # by the other process
        return lock(path)

    monkeypatch.setattr(files, "_lock", late)
    with files.atomic_folder(tmp_path / "made") as made:
        assert len(removed) == 3
        assert made.parent not in [path.parent for path in removed]
        assert made.is_dir()
    assert (tmp_path / "made").is_dir()


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with files.atomic_folder(tmp_path / "one"), files.atomic_folder(tmp_path / "two"):
        assert len(list(tmp_path.iterdir())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_one_rank_works_while_the_others_wait(tmp_path):
    """Longer than the ranks' own rhythm of a second; the error of the one is the error of all."""

    def function():
        def work():
            time.sleep(1.5)
            (tmp_path / str(torch.distributed.get_rank())).touch()

        run_on_rank_0(work)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]

        def fail():
            raise UserError("no space")

        try:
            run_on_rank_0(fail)
        except UserError as error:
            return str(error)

    assert fork_ranks.call(function, 2) == ["no space"] * 2
