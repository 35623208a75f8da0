"""Checkpoints that all ranks write: the bytes of those that rank 0 gathers, in any layout, and as safe."""

import errno
import itertools
import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import safetensors.torch
import torch
from colossal_vit.checkpoint import checkpointer, storage
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.checkpoint.tensor_file import NAMES, TensorFile
from colossalai.legacy.core import global_context as gpc

import fork_ranks
import training
from layouts import LAYOUTS, RANDOM, errors

pytestmark = pytest.mark.usefixtures("few_test_images", "random_weights")
AVERAGED = {"ema.decay": 0.5}
SPLITS = {
    "alone": (1, {}, 1),
    "DP 3, stage 1": (3, {"BATCH_SIZE": 10, "zero.stage": 1}, 3),
    "DP 3, stage 3": (3, {"BATCH_SIZE": 10, "zero.stage": 3}, 3),  # which do not divide the rows
    "DP 4, stage 3": (4, {"BATCH_SIZE": 8, "zero.stage": 3, "OPTIMIZER": "muon"}, 4),
    "DP 2 × PP 2 × 1D 2, stage 3": (8, {**LAYOUTS["DP 2 × PP 2 × 1D 2"][1], "zero.stage": 3}, 8),
    "DP 2 × PP 2": (*LAYOUTS["DP 2 × PP 2"], 2),  # the first replica's
    "2.5D 4": (*LAYOUTS["2.5D 4"], 4),
    "3D 8": (*LAYOUTS["3D 8"], 8),
}


@pytest.fixture
def both_ways(monkeypatch):
    """Each checkpoint is saved twice: gathered, in the folder `gathered`, and by all ranks, in that of checkpoints.

    Ranks say in `writes.jsonl` what they write.
    """
    save, write = Checkpointer.save, TensorFile.write

    def save_twice(self, *args):
        path = save(self, *args)
        self.finish()
        if gpc.get_global_rank() == 0:
            shutil.move(path, self.run.output / "gathered")
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "may_copy", lambda num_bytes: False)
            return save(self, *args)

    def say(self, key, tensor, first=0):
        line = json.dumps([gpc.get_global_rank(), self.path.name, key, tensor.nbytes])
        with open(self.path.parents[2] / "writes.jsonl", "a") as file:
            file.write(line + "\n")
        write(self, key, tensor, first)

    monkeypatch.setattr(Checkpointer, "save", save_twice)
    monkeypatch.setattr(TensorFile, "write", say)


def writes(output):
    """What each rank has written: rank, file, name, bytes."""
    return [json.loads(line) for line in (output / "writes.jsonl").read_text().splitlines()]


def assert_same_bytes(output):
    path = storage.list_steps(output / storage.FOLDER)[0]
    assert training.contents(path) == training.contents(output / "gathered")
    assert os.listdir(path.parent) == [path.name], "nothing else is left"
    return path


@pytest.mark.parametrize("layout", SPLITS)
def test_all_ranks_write_the_bytes_that_rank_0_writes(layout, both_ways, tmp_path):
    """Each element once; and the ranks that make tensors whole, or have rows of them, share the work."""
    world_size, values, writers = SPLITS[layout]
    training.train(tmp_path, world_size, steps=2, **{**RANDOM, **AVERAGED, "DEPTH": 2, **values})
    checkpoint = storage.Checkpoint(assert_same_bytes(tmp_path))
    files = {file: checkpoint.tensors(file) for file in (storage.MODEL, storage.OPTIMIZER, storage.EMA)}
    written = dict.fromkeys([(file, key) for file, tensors in files.items() for key in tensors], 0)
    share = dict.fromkeys(range(world_size), 0)
    for rank, file, key, nbytes in writes(tmp_path):
        written[file, key] += nbytes
        share[rank] += nbytes
    assert written == {(file, key): files[file][key].nbytes for file, key in written}
    assert sum(map(bool, share.values())) == writers
    if layout == "DP 4, stage 3":
        assert max(share.values()) < 1.5 * sum(share.values()) / 4


def test_state_is_copied_where_that_takes_a_quarter_of_the_memory_at_most(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**36))
    assert [checkpointer.may_copy(num_bytes) for num_bytes in (2**34, 2**34 + 1)] == [True, False]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert [checkpointer.may_copy(num_bytes) for num_bytes in (2**32, 2**32 + 1)] == [True, False]


def test_rank_0_writes_alone_if_another_does_not_see_the_folder(both_ways, tmp_path, monkeypatch):
    """As on nodes with disks of their own: stages that rank 0 has no part of send it theirs."""
    is_dir = Path.is_dir
    elsewhere = lambda path: path.name.startswith(".step-") and gpc.get_global_rank() == 1  # noqa: E731
    monkeypatch.setattr(Path, "is_dir", lambda path: not elsewhere(path) and is_dir(path))
    world_size, values = LAYOUTS["DP 2 × PP 2"]
    training.train(tmp_path, world_size, steps=2, **{**RANDOM, **AVERAGED, **values, "zero.stage": 3})
    assert_same_bytes(tmp_path)
    assert {rank for rank, *_ in writes(tmp_path)} == {0}


def test_file_written_by_tensors_has_the_bytes_that_safetensors_writes(tmp_path):
    """Of all types, of names that JSON escapes, empty ones, single numbers and ones of another order in memory."""
    shapes = [(2, 3), (), (0, 4), (5,)]
    tensors = {
        f"{dtype}.{number}": torch.ones(shape, dtype=dtype) for dtype in NAMES for number, shape in enumerate(shapes)
    }
    tensors |= {'a "name"': torch.randn(7), "transposed": torch.randn(6, 4).t().half(), "é": torch.randn(3)}
    safetensors.torch.save_file(
        {name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", {"format": "pt"}
    )
    one, other = (TensorFile(tmp_path / "ours", [(n, t.shape, t.dtype) for n, t in tensors.items()]) for _ in range(2))
    one.create()
    for number, (name, tensor) in enumerate(tensors.items()):
        (one, other)[number % 2].write(name, tensor)
    one.close()
    other.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_long_writes_go_on_where_the_kernel_has_stopped(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    tensor = torch.randn(1234)
    file = TensorFile(tmp_path / "file", [("name", tensor.shape, tensor.dtype)])
    file.create()
    file.write("name", tensor)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "file")["name"], tensor)


# ---- A rank that fails ----

SPLIT = {**RANDOM, "BATCH_SIZE": 16, "zero.stage": 3, "checkpoint.every_steps": 2}


@pytest.fixture
def failing(monkeypatch):
    """All ranks write all checkpoints; in a `with` block, rank 1 acts otherwise in the middle of the one of a step."""

    @contextmanager
    def fail(step, action):
        write, count = TensorFile.write, itertools.count()

        def wrong(self, *args):
            its_own = self.path.parent.name.startswith(f".step-{step:08d}") and gpc.get_global_rank() == 1
            if its_own and next(count) == 3:
                action()
            write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(TensorFile, "write", wrong)
            yield

    monkeypatch.setattr(checkpointer, "may_copy", lambda num_bytes: False)
    return fail


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disk_of_one_rank_that_is_full_costs_no_earlier_checkpoint(failing, tmp_path):
    with failing(4, full):
        run = training.train(tmp_path, 2, steps=6, **SPLIT)
    folder = tmp_path / storage.FOLDER
    assert f"{folder}/step-00000004: cannot be written: No space left on device; training continues" in run.said
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000006"]
    assert all(storage.Checkpoint(path) for path in storage.list_steps(folder))


def test_folder_that_cannot_be_made_costs_no_earlier_checkpoint(monkeypatch, tmp_path):
    """All ranks hear of it from rank 0."""
    create = TensorFile.create

    def fail(self):
        if self.path.parent.name.startswith(".step-00000004"):
            full()
        create(self)

    monkeypatch.setattr(checkpointer, "may_copy", lambda num_bytes: False)
    monkeypatch.setattr(TensorFile, "create", fail)
    run = training.train(tmp_path, 2, steps=4, code=1, **SPLIT)
    assert "step-00000004: cannot be written: No space left on device; training continues" in run.said
    assert os.listdir(tmp_path / storage.FOLDER) == ["step-00000002"]


def test_disk_of_one_rank_that_is_full_ends_a_run_that_is_told_to(failing, tmp_path):
    with failing(4, full):
        run = training.train(tmp_path, 2, "--on-save-error", "stop", steps=8, code=1, **SPLIT)
    assert "step-00000004: cannot be written: No space left on device; earlier checkpoints are as they were" in run.said
    assert os.listdir(tmp_path / storage.FOLDER) == ["step-00000002"]


def test_rank_killed_while_it_writes_leaves_the_earlier_checkpoint(failing, tmp_path):
    """And the run resumes from it, in another layout, to the same weights as without."""
    argv = [*training.flags(**SPLIT), "--output", str(tmp_path), "--max-steps", "6"]
    with failing(4, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        result = fork_ranks.run(training.HYBRID, argv, 2)
    assert result.codes[1] == -signal.SIGKILL
    assert result.codes[0] not in (0, None)
    folder = tmp_path / storage.FOLDER
    assert storage.newest(folder)[0].path.name == "step-00000002"
    other = {**SPLIT, "BATCH_SIZE": 32, "zero.stage": 1}
    resumed = training.train(tmp_path, 1, steps=6, **other)
    expected = training.train(tmp_path.with_name("expected"), 1, steps=6, **other)
    assert max(errors(resumed.steps[2:], expected.steps[2:])) < 1e-5
    assert not list(folder.glob(".step-*"))
