"""Checkpoints on disk: whole or not there, whatever happens; checked before they are read; nothing in them can run."""

import copy
import csv
import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint import __main__, host_memory, storage
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.checkpoint.contents import Manifest, State
from colossal_vit.data import class_images
from colossal_vit.errors import UserError
from colossal_vit.hooks import checkpoint as checkpoint_hook
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.results import read_metrics
from colossalai.legacy.core import global_context as gpc
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score

import cifar10
import fork_ranks
import launchers
import training

FORK = multiprocessing.get_context("fork")
OLD = fork_ranks.ROOT / "tests/old_checkpoints/hybrid/checkpoints/step-00000003"


def save(folder, step, size=100):
    """A small checkpoint of `step`, filled with that number."""
    path = folder / f"step-{step:08d}"
    tensors = {"a.weight": torch.full((size,), float(step)), "b": torch.zeros(3, 2)}
    files = {storage.MODEL: tensors, storage.OPTIMIZER: {"exp_avg.a.weight": torch.ones(size)}}
    storage.write(path, files, {**training.UNTRAINED, "step": step})
    return path


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_tensors_of_a_gpu_share_blocks_of_pinned_memory(monkeypatch, tmp_path):
    """Of 512 bytes here, each tensor from a multiple of 64 on; worked out by hand. The same bits are written."""
    pinned, empty = [], torch.empty

    def count(size, pin_memory, dtype):
        pinned.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(host_memory.Host, "BLOCK", 512)
    host = host_memory.Host()
    monkeypatch.setattr(torch, "empty", count)
    there = {
        "first": torch.randn(7, 3),  # 84 bytes, so that 384 of the block are left
        "half": torch.randn(5).bfloat16(),  # 320
        "number": torch.tensor(42),  # 256
        "transposed": torch.randn(6, 8).T,  # 64
        "second": torch.randn(20),  # 80 bytes: another block
        "large": torch.randn(300),  # 1,200 bytes: one of its own
    }
    here = {name: host.copy(tensor.as_subclass(OnGpu), needed=True) for name, tensor in there.items()}
    assert pinned == [512, 512, 1200]
    monkeypatch.undo()
    storage.write(tmp_path / "step-00000001", {storage.MODEL: here, storage.OPTIMIZER: {}}, training.UNTRAINED)
    read = safetensors.torch.load_file(tmp_path / "step-00000001" / storage.MODEL)
    assert read.keys() == there.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in there.items())
    assert all(read[name].dtype == tensor.dtype for name, tensor in there.items())


def newest_path(folder):
    checkpoint, skipped = storage.newest(folder)
    return checkpoint and checkpoint.path, skipped


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def test_checkpoint_written_is_read_back_equal(tmp_path):
    path = save(tmp_path, 7)
    assert sorted(file.name for file in path.iterdir()) == sorted([*storage.CONTENTS, storage.MANIFEST])
    assert storage.Checkpoint(path).state == {**training.UNTRAINED, "step": 7}
    assert safetensors.torch.load_file(path / storage.MODEL)["a.weight"].unique().tolist() == [7]
    assert os.listdir(tmp_path) == ["step-00000007"], "nothing else is left"
    assert {oct(file.stat().st_mode)[-3:] for file in path.iterdir()} == {"644"}


FILE_EVENTS = {"open", "os.mkdir", "os.chmod", "os.rename", "os.remove", "os.rmdir"}


def test_a_save_killed_at_any_moment_leaves_whole_checkpoints_only(tmp_path):
    """Before each change of a file or folder: two steps are kept, the third is saved, the first removed."""
    results = set()
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        for step in (1, 2):
            save(folder, step)

        def third(moment=moment, folder=folder):
            survived = iter(range(moment))

            def kill(event, arguments):
                if event in FILE_EVENTS and next(survived, None) is None:
                    for file in folder.glob(".step-*/*"):  # as the kill would leave it in the middle of a write
                        os.truncate(file, file.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill)
            save(folder, 3)
            storage.prune(folder, 2, None)

        process = FORK.Process(target=third)
        process.start()
        process.join()
        results.add(tuple(storage.Checkpoint(path).state["step"] for path in storage.list_steps(folder)))
        storage.clean(folder)
        assert all(name.startswith("step-") for name in os.listdir(folder))
        assert save(folder, 4).exists(), "and the next save works"
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert moment > 20
    assert results == {(2, 1), (3, 2, 1), (3, 2)}, "killed before the rename, before the removal, after it"


def test_a_run_keeps_the_newest_and_the_best(tmp_path, monkeypatch):
    """Rank 0 hears of accuracies from the last stage; here the second evaluation is said to be the best."""
    original = MetricsHook.after_test

    def after_test(hook, trainer):
        original(hook, trainer)
        hook.accuracy = [0.2, 0.6, 0.4, 0.5][trainer.cur_epoch] if hook.sees_loss else -1.0

    monkeypatch.setattr(MetricsHook, "after_test", after_test)
    values = {"parallel.pipeline": 2, "DEPTH": 2, "BATCH_SIZE": 128, "NUM_EPOCHS": 4, "checkpoint.keep": 1}
    training.train(tmp_path, 2, steps=30, **values)
    training.train(tmp_path, 2, steps=None, **values)
    kept = storage.list_steps(tmp_path / storage.FOLDER)
    assert [storage.step_of(path) for path in kept] == [44, 22]
    assert storage.Checkpoint(kept[0]).state["best"] == {"accuracy": 0.6, "step": 22}


FULL, NO_MEMORY = OSError(errno.ENOSPC, "No space left on device"), MemoryError()
BEST_CASES = {  # accuracies of four epochs, what each write raises, keep, what is done, epochs that are kept, the best
    "the best fails": ([0.5, 0.6, 0.4, 0.3], {2: FULL}, 1, "", [4, 1], 1),
    "a later one is better than what is there": ([0.2, 0.6, 0.4, 0.3], {2: NO_MEMORY}, 1, "", [4, 3], 3),
    "two best ones fail": ([0.3, 0.5, 0.6, 0.2], {2: FULL, 3: NO_MEMORY}, 1, "", [4, 1], 1),
    "the best fails, keep = 2": ([0.5, 0.6, 0.4, 0.3], {2: NO_MEMORY}, 2, "", [4, 3, 1], 1),
    "all fail but the last": ([0.5, 0.6, 0.4, 0.3], {1: FULL, 2: FULL, 3: FULL}, 1, "", [4], 4),
    "the best is written late": ([0.5, 0.6, 0.55, 0.2], {}, 1, "late", [4, 2], 2),
    "the best fails late": ([0.5, 0.6, 0.55, 0.2], {2: FULL}, 1, "late", [4, 3], 3),
    "the best fails before a resume": ([0.5, 0.6, 0.4, 0.3], {2: FULL}, 1, "resume", [4, 1], 1),
    "the best is damaged": ([0.5, 0.6, 0.4, 0.3], {}, 1, "damage", [4], 4),
    "the best is damaged, an earlier one is there": ([0.5, 0.6, 0.4, 0.3], {}, 3, "damage", [4, 3, 2, 1], 1),
    "the best is removed": ([0.5, 0.6, 0.4, 0.5], {}, 1, "remove", [4], 4),
    "killed before old ones are removed": ([0.5, 0.6, 0.4, 0.3], {}, 1, "kill", [4, 2], 2),
    "the average's accuracy is higher": ([0.5, 0.6, 0.4, 0.3], {2: FULL}, 1, "average", [4, 1], 1),
}


@pytest.mark.parametrize("case", BEST_CASES)
def test_the_best_of_the_checkpoints_that_are_written_stays(case, tmp_path, monkeypatch, few_test_images):
    """Of epochs of two steps. What is done is done after the third epoch, or while the second is written."""
    accuracies, failures, keep, done, kept, best = BEST_CASES[case]
    after_test, write, save, third = MetricsHook.after_test, storage.write, Checkpointer.save, threading.Event()

    def say(hook, trainer):
        after_test(hook, trainer)
        hook.accuracy = 0.9 if trainer.evaluating_ema else accuracies[trainer.cur_epoch]

    def fail(path, tensors, state):
        if done == "late" and state["epoch"] == 2:
            third.wait()
        if state["epoch"] in failures:
            raise failures[state["epoch"]]
        write(path, tensors, state)

    def begin_to_save(checkpointer, epoch, *args):
        if epoch == 3:
            third.set()
        return save(checkpointer, epoch, *args)

    monkeypatch.setattr(MetricsHook, "after_test", say)
    monkeypatch.setattr(storage, "write", fail)
    monkeypatch.setattr(Checkpointer, "save", begin_to_save)
    values = {"BATCH_SIZE": 512, "NUM_EPOCHS": 4, "checkpoint.every_steps": 2, "checkpoint.keep": keep}
    values |= {"ema.decay": 0.9} if done == "average" else {}
    folder = tmp_path / storage.FOLDER
    if done in ("resume", "damage", "remove", "kill"):
        with monkeypatch.context() as patch:
            if done == "kill":
                patch.setattr(storage, "prune", lambda *_: None)
            training.train(tmp_path, steps=6, DEPTH=1, **values)
        if done == "damage":
            os.truncate(folder / "step-00000004" / storage.OPTIMIZER, 300)
        if done == "remove":
            shutil.rmtree(folder / "step-00000004")
    training.train(tmp_path, steps=None, DEPTH=1, **values)
    assert [storage.step_of(path) // 2 for path in storage.list_steps(folder)] == kept
    assert storage.newest(folder)[0].state["best"] == {"accuracy": accuracies[best - 1], "step": 2 * best}


def test_the_best_checkpoint_of_another_run_is_not_a_runs_own(trained, tmp_path, monkeypatch):
    original = MetricsHook.after_test

    def after_test(hook, trainer):
        original(hook, trainer)
        hook.accuracy = 0.01

    monkeypatch.setattr(MetricsHook, "after_test", after_test)
    run = training.train(tmp_path, 1, "--resume", str(trained.output), steps=None, **EVERY_20, NUM_EPOCHS=2)
    assert storage.open_named(run.output).state["best"] == {"accuracy": 0.01, "step": 88}


def test_the_clock_makes_a_checkpoint_due(tmp_path):
    """A hundredth of a second after the last one, found by rank 0 and heard by the other a step later."""
    values = {"checkpoint.every_minutes": 1e-4, "checkpoint.keep": 1000, "parallel.pipeline": 2}
    training.train(tmp_path, 2, **values)
    steps = [storage.step_of(path) for path in storage.list_steps(tmp_path / storage.FOLDER)]
    assert 20 in steps
    assert len(steps) > 5


@pytest.fixture(scope="module")
def num_bytes(tmp_path_factory):
    """Of the tensors in a checkpoint of the runs below."""
    run = training.train(tmp_path_factory.mktemp("size"), steps=1, **EIGHT_EPOCHS)
    files = storage.newest(run.output / storage.FOLDER)[0].path.glob("*.safetensors")
    return sum(tensor.nbytes for file in files for tensor in safetensors.torch.load_file(file).values())


EIGHT_EPOCHS = {"DEPTH": 2, "BATCH_SIZE": 128, "NUM_EPOCHS": 8, "checkpoint.keep": 100}  # of 11 steps each
AFTER_EPOCHS = {  # how many checkpoints an epoch BYTES_PER_S amounts to; config values; epochs that are saved
    "small": (1000, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
    "worth it after one and a half epochs": (1 / 1.5, {}, [1, 3, 5, 7, 8]),
    "five minutes at most": (1e-9, {}, [1, 4, 5, 8]),
    "every_steps": (1e-9, {"checkpoint.every_steps": 33}, [1, 3, 5, 6, 8]),
    "every_minutes, due in the last step": (1e-9, {"checkpoint.every_minutes": 1.6}, [1, 2, 3, 4, 5, 6, 7, 8]),
}


@pytest.mark.parametrize("case", AFTER_EPOCHS)
def test_after_an_epoch_a_checkpoint_is_saved_if_that_is_worth_it(case, num_bytes, tmp_path, monkeypatch):
    """On a clock by which a step takes 10 s; that of rank 1, which is fast, does not count.

    The best evaluations are the first and the fifth.
    """
    checkpoints_an_epoch, values, saved = AFTER_EPOCHS[case]
    after_train_iter, after_test, clock = MetricsHook.after_train_iter, MetricsHook.after_test, 0.0

    def step(hook, *args):
        nonlocal clock
        clock += 10 * (1 + 1000 * gpc.get_global_rank())
        after_train_iter(hook, *args)

    def evaluation(hook, trainer):
        after_test(hook, trainer)
        hook.accuracy = 0.2 + 0.1 * (trainer.cur_epoch == 4)

    monkeypatch.setattr(checkpoint_hook, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(checkpoint_hook, "BYTES_PER_S", checkpoints_an_epoch * num_bytes / 110)
    monkeypatch.setattr(MetricsHook, "after_train_iter", step)
    monkeypatch.setattr(MetricsHook, "after_test", evaluation)
    training.train(tmp_path, 2, steps=None, **EIGHT_EPOCHS, **values, **{"parallel.pipeline": 2})
    kept = [storage.step_of(path) for path in storage.list_steps(tmp_path / storage.FOLDER)]
    assert sorted(kept) == [11 * epoch for epoch in saved]


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------


def open_files(folder):
    """What this process has open below a folder, by descriptor."""
    names = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return {descriptor: name for descriptor, name in names.items() if name.startswith(str(folder))}


def refused(folder, path, words):
    """One line that names the file; the earlier checkpoint is taken, and no file of the later one stays open."""
    with pytest.raises(UserError, match=words) as caught:
        storage.Checkpoint(path)
    assert "\n" not in str(caught.value)
    opened = open_files(path)
    taken, skipped = storage.newest(folder)
    assert taken.path.name == "step-00000001"
    assert skipped == [str(caught.value)]
    assert open_files(path) == opened


@pytest.mark.parametrize("name", [*storage.CONTENTS, storage.MANIFEST])
def test_one_flipped_bit_is_found(tmp_path, name):
    """Every bit of the manifest, and fifty of each of the others."""
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    good = file.read_bytes()
    bits = range(len(good) * 8)
    for bit in bits if name == storage.MANIFEST else random.Random(0).sample(bits, 50):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(UserError) as caught:
            storage.Checkpoint(file.parent)
        assert str(file) in str(caught.value) or name == storage.MANIFEST, "names the file"
    refused(tmp_path, file.parent, re.escape(f"{file}: its SHA-256" if name != storage.MANIFEST else str(file)))


def rewrite(path, change):
    """Change a manifest as its writer would have written it."""
    manifest = json.loads((path / storage.MANIFEST).read_text())
    change(manifest)
    (path / storage.MANIFEST).write_text(storage._to_text(manifest))


def forge(path, name, content):
    """Replace a file and have the manifest vouch for it, as somebody would who means harm."""
    (path / name).write_bytes(content)
    rewrite(path, lambda manifest: manifest["files"].update({name: storage._fingerprint(path / name)}))


DAMAGES = {
    "cut off": (
        lambda p: os.truncate(p / "model.safetensors", 300),
        r"model.safetensors: has 300 bytes instead of \d+",
    ),
    "missing": (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors: No such file"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: No such file"),
    "a link to nowhere": (lambda p: (shutil.rmtree(p), p.symlink_to("nowhere")), "manifest.json: No such file"),
    "an empty manifest": (lambda p: (p / "manifest.json").write_text(""), "manifest.json: is no JSON: Expecting value"),
    "a later version": (lambda p: rewrite(p, lambda m: m.update(version=2)), "version = 2: only 1 is known here"),
    "a file outside": (
        lambda p: rewrite(p, lambda m: m["files"].update({"../../x": {"bytes": 0, "sha256": ""}})),
        "manifest.json: does not list",
    ),
    "no safetensors": (lambda p: forge(p, "model.safetensors", b"x" * 100), "model.safetensors: "),
    "another state": (lambda p: forge(p, "state.json", b'{"step": 2}'), "state.json: lacks best, config"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_in_one_line_and_the_earlier_one_is_taken(damage, tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    act, words = DAMAGES[damage]
    act(path)
    refused(tmp_path, path, words)


FULL_STATE = {
    **json.loads((OLD / storage.STATE).read_text()),
    "best": {"accuracy": 0.5, "step": 2},
    "scaler": {"loss_scale": 65536.0, "growth_step": 3, "hysteresis_step": 0},
    "data": {"images": "a", "training images": 3, "test images": 2, "classes": ["a"], "content": "x"},
    "started_from": "/run",
    "changes": [{"step": 1, "values": {"SEED": [1, 2]}, "data": ""}],
}
MISSING = object()
WRONG = ["x", "", [], [[]], [{}], {}, None, True, -1, 0.5, 3.0, 10**400, float("inf"), float("nan"), MISSING]


def fields(value, place=()):
    """Where every field of a JSON value is, except those of the config, which may hold anything."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        if key not in ("config", "layout", "ranks", "values"):  # the two of earlier versions are not read any more
            yield from fields(inner, (*place, key))


def changed(value, place, new):
    """A copy of a JSON value with another value, or none, in one place."""
    value = copy.deepcopy(value)
    *way, last = place
    inner = value
    for key in way:
        inner = inner[key]
    if new is MISSING:
        del inner[last]
    else:
        inner[last] = new
    return value


@pytest.mark.parametrize(
    ("model", "good", "free"),  # what may hold anything is only compared
    [
        (State, FULL_STATE, {("data", key) for key in FULL_STATE["data"].keys() - {"classes"}} | {("layout",)}),
        (Manifest, json.loads((OLD / storage.MANIFEST).read_text()), set()),
    ],
)
def test_a_field_of_any_other_type_is_named(model, good, free):
    anything = set()
    for place in fields(good):
        refused = []
        for new in WRONG:
            try:
                typed_json.check(changed(good, place, new), model, "file")
            except UserError as error:
                refused.append(str(error))
        assert all(re.fullmatch(f"file: .*{place[0]}.*", line) for line in refused), refused
        if not refused:
            anything.add(place)
    assert anything == free


STRANGE_RUN = dict(DEPTH=1, BATCH_SIZE=128, NUM_EPOCHS=1)
# What no check of a checkpoint can know to be wrong. With each, a run resumes, or is refused with one line.
STRANGE = {
    "far": ({"epoch": 2**53}, "resuming from .*step 2, epoch 9007199254740992"),
    "beyond its epoch": ({"images": 2**53}, "nothing is left to do"),
    "many moments": ({"moments_step": 2**53}, "resuming from"),
    "generator states of before": ({"ranks": [{"rng": {}, "data": {}}]}, "random numbers that do not depend on the"),
    "an empty config": ({"config": {}}, "was trained with other values"),
    "another optimizer": ({"optimizer": ""}, "was trained with , but this run's optimizer is AdamW"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_state_that_no_run_wrote_is_resumed_or_refused_with_one_line(strange, strange_run, tmp_path):
    path = shutil.copytree(strange_run, tmp_path / "run") / "checkpoints/step-00000002"
    forged, words = STRANGE[strange]
    forge(path, storage.STATE, json.dumps({**storage.Checkpoint(path).state, **forged}).encode())
    argv = [*training.flags(**STRANGE_RUN), "--max-steps", "3", "--output", str(tmp_path / "run")]
    result = fork_ranks.run(training.HYBRID, argv)
    assert result.codes[0] in (0, 2), str(result)
    assert len("".join(result.stderr).splitlines()) == (result.codes[0] == 2), str(result)
    assert re.search(words, str(result)), str(result)


@pytest.fixture(scope="module")
def strange_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("strange") / "run"
    training.train(output, steps=2, **STRANGE_RUN)
    return output


def test_a_checkpoint_under_another_step_s_name_is_not_valid(tmp_path):
    """It would stay the newest one for good; any other name will do."""
    path = save(tmp_path, 2)
    newest, skipped = storage.newest(path.rename(path.with_name("step-00000009")).parent)
    assert newest is None
    assert skipped == [f"{path.with_name('step-00000009')}: holds step 2; was it renamed?"]
    assert storage.Checkpoint(path.with_name("step-00000009").rename(tmp_path / "kept")).state["step"] == 2


def test_a_run_passes_over_what_is_damaged_and_goes_on(tmp_path):
    """It says why, keeps the damaged one under another name, and makes its step again."""
    values = {"checkpoint.every_steps": 4, "DEPTH": 1}
    steps = training.train(tmp_path, steps=8, **values).steps
    damaged = tmp_path / "checkpoints/step-00000008"
    os.truncate(damaged / storage.OPTIMIZER, 10)
    again = training.train(tmp_path, steps=10, **values)
    assert f"skipped: {damaged}/optimizer.safetensors: has 10 bytes" in again.said
    assert "step 4, epoch 0 of 1, 128 images of that epoch done" in again.said
    assert [record["loss"] for record in again.steps[:8]] == [record["loss"] for record in steps]
    assert (damaged.with_name("damaged-step-00000008") / storage.MODEL).exists()
    assert storage.Checkpoint(damaged).state["step"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# Beside a run that removes its old checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_a_newer_one(tmp_path, monkeypatch):
    """Not to an older one, such as the best, which stays; and nothing is said of it, since nothing is damaged."""
    for step in (1, 2):
        save(tmp_path, step)
    found, read_manifest = [], storage.Checkpoint._read_manifest

    def slow(checkpoint):
        found.append(checkpoint.path.name)
        if len(found) == 1:
            save(tmp_path, 3)
            storage.prune(tmp_path, 1, best_step=1)
        return read_manifest(checkpoint)

    monkeypatch.setattr(storage.Checkpoint, "_read_manifest", slow)
    assert newest_path(tmp_path) == (tmp_path / "step-00000003", [])
    assert found == ["step-00000002", "step-00000003"]


def test_readers_beside_a_run_that_saves_all_the_time_find_a_whole_checkpoint(tmp_path):
    """Each reads what it has found after that was removed, while hundreds of steps are saved; nothing stays open."""
    save(tmp_path, 0)

    def write():
        for step in range(1, 100_000):
            save(tmp_path, step)
            storage.prune(tmp_path, 1, None)

    writer = FORK.Process(target=write)
    writer.start()
    try:
        last = 0
        for _ in range(50):
            checkpoint, skipped = storage.newest(tmp_path)
            assert (checkpoint is not None, skipped) == (True, [])
            launchers.wait_until(lambda gone=checkpoint.path: not gone.exists(), "the writer stands still")
            step = checkpoint.state["step"]
            assert checkpoint.tensors(storage.MODEL)["a.weight"].unique().tolist() == [step]
            assert step >= last
            assert storage.EMA not in checkpoint.files
            last = step + 1
        del checkpoint
        assert not open_files(tmp_path)
    finally:
        writer.kill()
        writer.join()


@pytest.fixture
def removed_when_found(monkeypatch):
    """Checkpoints that are found are removed before they are read, as by a run that keeps one and is faster."""

    first_valid = storage._first_valid

    def found_and_removed(list_paths):
        checkpoint, skipped = first_valid(list_paths)
        if checkpoint:
            storage._remove(checkpoint.path)
        return checkpoint, skipped

    monkeypatch.setattr(storage, "_first_valid", found_and_removed)


@pytest.mark.parametrize(
    "more",
    [
        ("{run}", "--eval-only"),
        ("{other}", "--eval-only", "--set", "finetune.weights='{run}'", "--set", "finetune.head='keep'"),
        ("{other}", "--resume", "{run}"),
    ],
)
def test_a_run_reads_what_is_removed_after_it_was_found(more, removed_when_found, strange_run, tmp_path):
    run = shutil.copytree(strange_run, tmp_path / "run")
    output, *flags = (word.format(run=run, other=tmp_path / "other") for word in more)
    training.train(Path(output), 1, *flags, steps=3, **STRANGE_RUN)
    assert not list((run / storage.FOLDER).iterdir())


def test_weights_are_exported_from_what_is_removed_after_it_was_found(removed_when_found, strange_run, tmp_path):
    run = shutil.copytree(strange_run, tmp_path / "run")
    assert __main__.main(["export", str(run), str(tmp_path / "taken")]) == 0
    assert not list((run / storage.FOLDER).iterdir())
    weights, expected = (
        safetensors.torch.load_file(folder / storage.MODEL)
        for folder in (tmp_path / "taken", strange_run / "checkpoints/step-00000002")
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


# ---------------------------------------------------------------------------------------------------------------------
# Nothing that is read can run
# ---------------------------------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_does_not_run_in_a_checkpoint_nor_in_a_data_set(tmp_path):
    """Even where the manifest vouches for it, or where CIFAR-10's pickled version or a cache of images should be."""
    payload = pickle.dumps(Payload(tmp_path / "it ran"))
    for step, name in enumerate((*storage.CONTENTS, storage.MANIFEST)):
        path = save(tmp_path, step)
        if name == storage.MANIFEST:
            (path / name).write_bytes(payload)
        else:
            forge(path, name, payload)
        with pytest.raises(UserError, match=f"{name}: "):
            storage.Checkpoint(path)

    (folder := tmp_path / "cifar-10-batches-py").mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (folder / name).write_bytes(payload)
    with pytest.raises(UserError, match="corrupt"):
        cifar10.read(tmp_path, train=True)
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    with open(tmp_path / "images.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(payload)
    assert class_images.open_cache(tmp_path) is None

    assert not (tmp_path / "it ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "it ran").exists(), "and the test could have seen it"


# ---------------------------------------------------------------------------------------------------------------------
# Disks that are full, or read-only; ranks that stand still
# ---------------------------------------------------------------------------------------------------------------------

ON_DISK = {"DEPTH": 1, "checkpoint.every_steps": 5, "checkpoint.keep": 100}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_ends_the_run_if_it_is_told_to(processes, small_disk):
    """Rank 0 writes; the other, a pipeline stage, keeps the record on the same disk."""
    output, values = small_disk.path / "run", {**ON_DISK, "parallel.pipeline": processes, "DEPTH": 2}
    run = training.train(output, processes, "--on-save-error", "stop", steps=None, code=1, **values)
    (line,) = "".join(run.stderr).splitlines()
    assert re.search(
        r"step-\d+: cannot be written: .*No space left on device.*; earlier checkpoints are as they were", line
    )
    assert not list(output.glob("checkpoints/.*")), "what did not fit is gone"
    kept = storage.list_steps(output / storage.FOLDER)
    assert kept
    assert all(storage.Checkpoint(path) for path in kept)


def test_a_run_goes_on_with_a_full_disk(small_disk):
    """Checkpoints fail and training continues; when there is space again they are written, and the record is whole."""
    output = small_disk.path / "run"
    argv = training.flags(**ON_DISK, NUM_EPOCHS=3)
    ranks = fork_ranks.start(training.HYBRID, [*argv, "--output", str(output)], [{}])
    launchers.wait_until(lambda: "No space left on device" in ranks.output(0), lambda: ranks.output(0, "err"))
    small_disk.resize("64m")
    result = ranks.wait()
    assert result.codes == [0], str(result)
    assert re.search(r"step-\d+: cannot be written: .*No space left on device.*; training continues", result.stdout[0])
    assert [record["step"] for record in read_metrics(output)[0]] == list(range(1, 133))
    newest, skipped = storage.newest(output / storage.FOLDER)
    assert (newest.path.name, skipped) == ("step-00000132", [])


def test_a_run_whose_last_checkpoint_is_missing_has_failed(small_disk):
    run = training.train(small_disk.path / "run", steps=None, code=1, **ON_DISK)
    (line,) = run.stderr[0].splitlines()
    assert "the last checkpoint of the run is missing, the others are as they were" in line
    assert storage.newest(run.output / storage.FOLDER)[0]


def test_a_disk_that_cannot_be_written_is_refused_before_training(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.path)], check=True)
    line = training.refused(small_disk.path / "run", 2)
    assert line.endswith(f"--output {small_disk.path}/run: cannot be written: Read-only file system")


def test_a_rank_that_stands_still_ends_all_in_time(tmp_path):
    """SIGSTOP: the others end when their wait has lasted --timeout; the stopped one when it moves again."""
    values = {"parallel.pipeline": 2, "NUM_EPOCHS": 1000, "BATCH_SIZE": 16}
    argv = [*training.flags(**values), "--output", str(tmp_path), "--timeout", "10"]
    ranks = fork_ranks.start(training.HYBRID, argv, fork_ranks.by_torchrun(2))
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path) >= 3, lambda: ranks.output(0, "err"))
    os.kill(ranks.pids[1], signal.SIGSTOP)
    launchers.wait_until(lambda: launchers.has_ended(ranks.pids[0]), "rank 0 keeps running")
    os.kill(ranks.pids[1], signal.SIGCONT)
    result = ranks.wait()
    assert all(code not in (0, -signal.SIGKILL) for code in result.codes), str(result)


# ---------------------------------------------------------------------------------------------------------------------
# What the command line says
# ---------------------------------------------------------------------------------------------------------------------


EVERY_20 = {"DEPTH": 2, "checkpoint.every_steps": 20}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one epoch, with a checkpoint in the middle of it, and one after its evaluation."""
    return training.train(tmp_path_factory.mktemp("trained") / "run", steps=None, **EVERY_20)


EVALUATION_FILES = {"predictions.csv", "classes.csv", "confusion.csv", "confusion.png", "mistakes.png"}


@pytest.fixture(scope="module")
def answers(trained, tmp_path_factory):
    """What timm's model with the trained weights predicts for the test images: labels, logits, loss."""
    data = tmp_path_factory.mktemp("digits")
    cifar10.write_images(data)
    logits, labels = training.timms_logits(trained.output / "checkpoints/step-00000044" / storage.MODEL, data, depth=2)
    return labels.numpy(), logits, torch.nn.functional.cross_entropy(logits, labels).item()


@pytest.mark.parametrize(
    ("processes", "values"),
    [(4, {"parallel.pipeline": 2, "BATCH_SIZE": 14}), (4, {"parallel.tensor.mode": "2d", "parallel.tensor.size": 4})],
)
def test_eval_only_is_exact_on_any_world_size(processes, values, trained, answers):
    """Also where the training set has too few images for a step, and for the images of each class."""

    def files():
        every = (path for path in trained.output.rglob("*") if "evaluation" not in path.parts and path.is_file())
        return sorted((path, path.stat().st_mtime_ns) for path in every)

    before = files()
    run = training.train(trained.output, processes, "--eval-only", DEPTH=2, gradient_accumulation=500, **values)
    line = r"test accuracy (\S+)% \((\d+) of 360 images\), top-5 (\S+)%, macro recall (\S+)%, loss (\S+)"
    (said,) = re.findall(line, "".join(run.stdout))
    labels, logits, loss = answers
    confidence, found = (part.numpy() for part in logits.softmax(1).max(1))
    top5 = top_k_accuracy_score(labels, logits.numpy(), k=5)
    assert int(said[1]) == (labels == found).sum()
    assert float(said[2]) == pytest.approx(100 * top5, abs=0.01)
    assert float(said[3]) == pytest.approx(100 * balanced_accuracy_score(labels, found), abs=0.01)
    assert float(said[4]) == pytest.approx(loss, rel=1e-5)
    assert trained.evaluations[-1]["eval_top5"] == pytest.approx(top5, rel=1e-9)
    assert trained.evaluations[-1]["eval_accuracy"] == (labels == found).mean()
    assert trained.evaluations[-1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert files() == before, "the run is untouched"
    with open(trained.output / "evaluation/classes.csv", newline="") as file:
        classes = list(csv.DictReader(file))
    assert [row["class"] for row in classes] == list("0123456789")
    for digit, row in enumerate(classes):
        own = found[labels == digit]
        assert [int(row["images"]), int(row["right"])] == [len(own), (own == digit).sum()], digit
        mistaken = np.bincount(own[own != digit], minlength=10)
        assert row["mostly mistaken for"] == (str(mistaken.argmax()) if mistaken.any() else ""), digit
    with open(trained.output / "evaluation/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [f"image {number}" for number in range(360)]
    for column, expected in (("true label", labels), ("predicted label", found)):
        assert [int(row[column]) for row in rows] == expected.tolist(), column
    assert [float(row["probability"]) for row in rows] == pytest.approx(confidence.tolist(), abs=1e-4)
    assert {path.name for path in (trained.output / "evaluation").iterdir()} == EVALUATION_FILES


def test_an_evaluation_that_slurm_has_restarted_takes_the_checkpoint_that_is_given(trained, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    older = trained.output / "checkpoints/step-00000020"
    run = training.train(trained.output, 1, "--eval-only", "--resume", str(older), steps=None, DEPTH=2)
    assert f"the weights are those of {older}, step 20" in run.said


def test_a_run_that_is_done_has_nothing_left_to_do(trained):
    steps = trained.steps
    again = training.train(trained.output, steps=None, **EVERY_20)
    assert "nothing is left to do: the run has made its 44 steps" in again.said
    assert again.steps == steps


ACCEPT = ["--accept-changes"]
MISTAKES = {
    "another size": ({"HIDDEN_SIZE": 64}, ACCEPT, ["is of shape (", "but this model's is (", "finetune.weights"]),
    "more blocks": ({"DEPTH": 3}, ACCEPT, ["has no blocks.2.", "it is of another model"]),
    "fewer blocks": ({"DEPTH": 1}, ACCEPT, ["has blocks.1.", "which this model lacks"]),
    "other values": ({"DEPTH": 3, "SEED": 5}, [], ["was trained with other values (DEPTH 2 → 3, SEED 1024 → 5)"]),
    "another optimizer": ({"OPTIMIZER": "lamb"}, [], ["was trained with AdamW, but this run's optimizer is Lamb"]),
    "no such path": ({}, ["--resume", "/nowhere"], ["--resume /nowhere: no such path, and neither auto nor never"]),
    "a path that cannot be": ({}, ["--resume", "/" + "long" * 100], ["longlong: "]),
    "no checkpoint": ({}, ["--resume", "/proc"], ["--resume /proc: /proc: is no checkpoint, and there are none in it"]),
    "newer ones": ({}, ["--resume", "{output}/checkpoints/step-00000020"], ["has newer ones, up to step-00000044"]),
    "never evaluated": ({}, ["--resume", "never", "--eval-only"], ["--resume never says to take none"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_resume_with_a_mistaken_command_ends_in_one_line_and_loses_nothing(mistake, trained):
    values, more, words = MISTAKES[mistake]
    flags = (flag.format(output=trained.output) for flag in more)
    line = training.refused(trained.output, 1, *flags, **{"DEPTH": 2, **values})
    assert all(word in line for word in words), line


def test_evaluation_without_a_checkpoint_ends_in_one_line(tmp_path):
    line = training.refused(tmp_path / "run", 1, "--eval-only")
    assert f"--eval-only: no checkpoint in {tmp_path}/run/checkpoints" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("error", "code"), [(RuntimeError, 1), (KeyboardInterrupt, 130)])
def test_a_run_that_ends_before_its_first_step_leaves_no_directory(error, code, tmp_path, monkeypatch):
    def read(root, train):
        raise error

    monkeypatch.setattr(cifar10, "read", read)
    training.train(tmp_path / "run", code=code, DEPTH=1)
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_from_another_runs_checkpoint(trained, tmp_path):
    older = str(trained.output / "checkpoints/step-00000020")
    steps = training.train(tmp_path / "other", 1, "--resume", older, steps=24, DEPTH=2).steps
    assert [(r["step"], r["loss"]) for r in steps] == [(r["step"], r["loss"]) for r in trained.steps[20:24]]
