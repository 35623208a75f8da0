"""A run that was stopped resumes as if it had not been: to the bit on one layout, within the contract on another."""

import functools
import itertools
import json
import os
import random
import re
import signal
import time
from hashlib import sha256

import pytest
import safetensors.torch
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.checkpoint.tensors import parameter_slots
from colossal_vit.data.batches import Loader
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.schedules import CosineAnnealingWarmupLR
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.launch import exits
from colossal_vit.launch.flags import parse
from colossal_vit.launch.signals import StopRequests
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.parallel.layout import Layout
from colossal_vit.results import read_metrics
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.utils import is_using_pp

import fork_ranks
import launchers
import layouts
import training
import vit
from conftest import random_start
from layouts import LAYOUTS, MODEL

# ---------------------------------------------------------------------------------------------------------------------
# The same layout: to the bit
# ---------------------------------------------------------------------------------------------------------------------

HYBRID = {**MODEL, **training.RANDOM, "DEPTH": 2, "BATCH_SIZE": 128, "NUM_EPOCHS": 2, "WARMUP_EPOCHS": 1}
PLAIN = dict(IMG_SIZE=16, PATCH_SIZE=4, HIDDEN_SIZE=32, DEPTH=1, NUM_HEADS=4, NUM_EPOCHS=2, WARMUP_EPOCHS=1)
PLAIN |= dict(layouts.RANDOM, NUM_CLASSES=10, BATCH_SIZE=64)
NAIVE = {"fp16.mode": "NAIVE", "IMG_SIZE": 16}  # half precision is slow on a CPU
FP16 = {"fp16.dtype": "fp16", "fp16.growth_interval": 3}  # the loss scale changes all the time

HYBRID_RUN = (training.HYBRID, HYBRID)
DALI_RUN = (training.IMAGENET, PLAIN | training.MIX | dict(gradient_accumulation=4, BATCH_SIZE=16))
CALTECH_RUN = (training.CALTECH101, PLAIN | dict(CACHE_SIZE=18))
RUNS = {  # script and its values; processes; what else
    "hybrid, 1 process": (HYBRID_RUN, 1, {"parallel.pipeline": 1}),
    "hybrid, PP 2, fp16 with loss scaling": (HYBRID_RUN, 2, {**NAIVE, **FP16, "fp16.initial_scale": 2.0**22}),
    "hybrid, 1D 2, bf16": (HYBRID_RUN, 2, {**LAYOUTS["1D 2"][1], **NAIVE, "parallel.pipeline": 1}),
    "hybrid, PP 2 interleaved, recomputed": (HYBRID_RUN, 2, {"model.num_chunks": 2, "DEPTH": 4, "CHECKPOINT": True}),
    "hybrid, DP 2 × PP 2, SGD": (HYBRID_RUN, 4, {"OPTIMIZER": "sgd", "LEARNING_RATE": 0.1}),
    "hybrid, DP 2 × PP 2, split state, average, fp16 with loss scaling": (
        HYBRID_RUN,
        4,
        {**NAIVE, **FP16, "fp16.initial_scale": 2.0**22, "OPTIMIZER": "lamb", "zero.stage": 1, "ema.decay": 0.9},
    ),
    "hybrid, DP 2 × PP 2, split weights, average, LAMB, fp16 with loss scaling": (
        HYBRID_RUN,
        4,
        {**NAIVE, **FP16, "fp16.initial_scale": 2.0**22, "OPTIMIZER": "lamb", "zero.stage": 3, "ema.decay": 0.9},
    ),
    "hybrid, 2D 4, LAMB": (
        HYBRID_RUN,
        4,
        {**LAYOUTS["2D 4"][1], "parallel.pipeline": 1, "OPTIMIZER": "lamb", "DEPTH": 1, "BATCH_SIZE": 256},
    ),
    "hybrid, DP 2 × 1D 2, split state, Muon, fp16 with loss scaling": (
        HYBRID_RUN,
        4,
        {
            **NAIVE,
            **FP16,
            **layouts.tensor("1d", 2),
            **{"fp16.initial_scale": 2.0**22, "OPTIMIZER": "muon", "zero.stage": 1},
            **{"parallel.pipeline": 1, "DEPTH": 1},
        },
    ),
    "hybrid, DP 4, static graph": (
        HYBRID_RUN,
        4,
        {"parallel.pipeline": 1, "torch_ddp.static_graph": True, "DEPTH": 1, "BATCH_SIZE": 32},
    ),
    "imagenet, 1 process": (DALI_RUN, 1, {}),
    "imagenet, 2 processes, bf16": (DALI_RUN, 2, {"fp16.mode": "TORCH"}),
    "caltech101, 1 process, fp16 with loss scaling": (
        CALTECH_RUN,
        1,
        {**FP16, "fp16.mode": "TORCH", "fp16.init_scale": 2.0**22},
    ),
    "caltech101, 4 processes, bf16": (CALTECH_RUN, 4, {**NAIVE, "BATCH_SIZE": 16}),
}


def options(values):
    """What `training.train` takes, for values with an AMP mode or without; from the config file's own values on."""
    values = {"checkpoint.keep": 2, **values}
    amp = values.pop("fp16.mode", None)
    return dict(values, amp=amp, small=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, small_sample):
    """The whole run of each of `RUNS`, trained once for all tests that stop it somewhere, and `train` with its values.

    A test gets both by the run's name.
    """

    @functools.cache
    def trained(name):
        (script, values), processes, more = RUNS[name]
        train = functools.partial(training.train, world_size=processes, script=script, **options({**values, **more}))
        return train(tmp_path_factory.mktemp("whole"), steps=None), train

    def run(name, patch):
        if RUNS[name][0][0] == training.HYBRID:
            patch.setenv("DATA", str(small_sample))  # as `few_test_images` does
        return trained(name)

    return run


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_runs_record_the_same_bits(name, uninterrupted, tmp_path, monkeypatch):
    """Stopped at the start, at random steps of the warm-up and after it, at the end of an epoch; and never."""
    whole, train = uninterrupted(name, monkeypatch)
    expected, parts = whole.records, tmp_path / "parts"
    per_epoch, total = (line["step"] for line in expected if "eval_loss" in line)
    draw = random.Random(name)
    stops = [draw.choice([1, draw.randrange(2, per_epoch)]), per_epoch, draw.randrange(per_epoch + 1, total)]
    for stop in stops:
        assert train(parts, steps=stop).steps[-1]["step"] == stop
    resumed = train(parts, steps=None)
    assert f"resuming from {parts}/checkpoints/step-{stops[-1]:08d}: step {stops[-1]}" in resumed.said
    assert resumed.records == expected
    assert storage.list_steps(parts / "checkpoints")[0].name == f"step-{total:08d}"
    if "loss scaling" in name:
        assert len({line["loss_scale"] for line in expected if "loss" in line}) > 2, (
            "else the scaler's state is nothing"
        )
    last = [
        safetensors.torch.load_file(run / f"checkpoints/step-{total:08d}/model.safetensors")
        for run in (whole.output, parts)
    ]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])


@pytest.mark.parametrize(
    "name",
    [
        "hybrid, 1 process",
        "hybrid, DP 2 × PP 2, SGD",
        "hybrid, DP 2 × PP 2, split state, average, fp16 with loss scaling",
        "imagenet, 2 processes, bf16",
    ],
)
def test_results_that_are_read_a_step_late_as_on_a_gpu_change_nothing(name, tmp_path, monkeypatch, request):
    """The same records and checkpoints, one of them in the middle of an epoch."""
    (script, values), processes, more = RUNS[name]
    if script == training.HYBRID:
        request.getfixturevalue("few_test_images")
    values = options({**values, **more, "checkpoint.every_steps": 3, "WARMUP_EPOCHS": 0, "NUM_EPOCHS": 1})
    values["checkpoint.keep"] = 99
    found = {}
    for late in (False, True):
        monkeypatch.setattr(Engine, "reads_late", late)
        run = training.train(tmp_path / f"late_{late}", processes, script=script, steps=None, **values)
        saved = {path: sha256(path.read_bytes()).digest() for path in sorted(run.output.rglob("*.safetensors"))}
        states = [json.loads(path.read_text())["scaler"] for path in sorted(run.output.rglob("state.json"))]
        found[late] = run.records, list(saved.values()), states
        assert all(step["step_s"] > 0 for step in run.steps)
    assert len(states) > 1
    assert found[True] == found[False]


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("hybrid, 1 process", 0),
        ("hybrid, 1 process", 1),
        ("hybrid, DP 2 × PP 2, SGD", 0),
        ("hybrid, DP 2 × PP 2, split state, average, fp16 with loss scaling", 1),
        ("imagenet, 2 processes, bf16", 0),
    ],
)
def test_a_run_that_is_stopped_before_or_in_an_epochs_evaluation_goes_on_to_the_bit(
    name, batches, uninterrupted, tmp_path, monkeypatch
):
    """All steps of the first epoch are made then, and so many batches of its evaluation, first of the average."""
    whole, train = uninterrupted(name, monkeypatch)
    expected = whole.records
    per_epoch = next(line["step"] for line in expected if "eval_loss" in line)
    with monkeypatch.context() as patch:
        calls, original = itertools.count(1), StopRequests.answer

        def answer(requests):
            _, save = original(requests)
            return signal.SIGTERM if next(calls) == per_epoch + batches else 0, save

        patch.setattr(StopRequests, "answer", answer)
        stopped = train(tmp_path / "parts", steps=None, code=75)
    assert f"stopped by SIGTERM after step {per_epoch}, " in str(stopped)  # one rank prints it, not always the first
    assert train(tmp_path / "parts", steps=None).records == expected


def test_a_run_that_is_stopped_in_its_last_evaluation_and_resumed_knows_its_best_checkpoint(tmp_path, monkeypatch):
    """The one of that step, which was written before the evaluation."""
    with monkeypatch.context() as patch:
        calls, original = itertools.count(1), StopRequests.answer

        def answer(requests):
            _, save = original(requests)
            return signal.SIGTERM if next(calls) == 45 else 0, save

        patch.setattr(StopRequests, "answer", answer)
        training.train(tmp_path, steps=None, code=75, DEPTH=1, NUM_EPOCHS=1)
    accuracy = training.train(tmp_path, steps=None, DEPTH=1, NUM_EPOCHS=1).evaluations[-1]["eval_accuracy"]
    newest, faults = storage.newest(tmp_path / storage.FOLDER)
    assert newest.state["best"] == {"accuracy": accuracy, "step": newest.state["step"]}
    assert not faults
    assert not list((tmp_path / storage.FOLDER).glob(".*"))


# ---------------------------------------------------------------------------------------------------------------------
# Another layout: the same weights and moments, and losses within the contract
# ---------------------------------------------------------------------------------------------------------------------

PAIRED = {name: LAYOUTS[name] for name in ("DP 2", "PP 2", "1D 2", "1D 4", "2D 4", "2.5D 8", "3D 8", "PP 2 × 1D 2")}
LEARNED = {**training.RANDOM, "DEPTH": 2}
MODES = {name: (size, {**LEARNED, **values}, None) for name, (size, values) in PAIRED.items()}
MODES["DP 2, NAIVE"] = (2, {**LEARNED, "BATCH_SIZE": 16}, "NAIVE")
MODES["DP 4, split state"] = (4, {**LEARNED, "BATCH_SIZE": 8, "zero.stage": 1}, None)
MODES["DP 4, split weights"] = (4, {**LEARNED, "BATCH_SIZE": 8, "zero.stage": 3}, None)
MODES["DP 2 × 1D 2, split weights, NAIVE"] = (
    4,
    {**LEARNED, **LAYOUTS["1D 2"][1], "BATCH_SIZE": 16, "zero.stage": 3},
    "NAIVE",
)
MODES["DP 2 × PP 2, split state, NAIVE"] = (4, {**LEARNED, **LAYOUTS["DP 2 × PP 2"][1], "zero.stage": 1}, "NAIVE")


class Fixed(Loader):
    """Three global batches of 32 random images, of which this rank takes its part."""

    def __init__(self, config, num_ranks, rank):
        self.start = 0
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(3, 32, 3, config.IMG_SIZE, config.IMG_SIZE, generator=generator)
        labels = torch.randint(10, (3, 32), generator=generator)
        self.batches = [
            (i.chunk(num_ranks)[rank], lab.chunk(num_ranks)[rank]) for i, lab in zip(images, labels, strict=True)
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[self.start :])

    def seek(self, epoch, start):
        self.start = start


def build():
    """The trainer and loader of a small run in the layout that is launched, on random weights."""
    config, layout = gpc.config, launched_layout()
    model = vit.build_vit(config, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=10)
    loader = Fixed(config, layout.data, gpc.get_local_rank(ParallelMode.DATA))
    engine, loader, *_ = initialize(model, optimizer, col_nn.CrossEntropyLoss(), loader, None, scheduler)
    return Trainer(engine, scheduler, RankLogger(1)), loader


def launched_layout():
    return Layout.of(gpc.config, gpc.get_world_size(ParallelMode.GLOBAL))


def load(trainer, loader, output, resume="auto"):
    """Begin a run in `output`, from a checkpoint if one is given; returns its checkpointer."""
    args = parse(["--accept-changes", "--on-save-error", "stop", "--resume", str(resume)])
    run = Run(args, gpc.config, launched_layout(), output, torch.device("cpu"), trainer.logger)
    checkpointer = Checkpointer(run)
    checkpointer.prepare()
    checkpointer.load(trainer, loader)
    return checkpointer


def forget(trainer, loader):
    """Leave nothing in the engine, the schedule and the loader that a checkpoint could fail to replace unnoticed."""
    with torch.no_grad():
        for slot in parameter_slots(trainer.engine):
            slot.working.fill_(torch.nan)
            slot.master.fill_(torch.nan)
    for state in trainer.engine.optimizer.optim.state.values():
        for tensor in filter(torch.is_tensor, state.values()):
            tensor.fill_(torch.nan)
    trainer.engine.num_steps = 0
    trainer.lr_scheduler.step()
    loader.start = 0


def save(checkpointer):
    """Save a checkpoint after two of the three steps; returns its path."""
    path = checkpointer.save(0, 2)
    assert checkpointer.finish() is None
    return path


def step(engine, batches, scheduler, forward_only=False):
    """A training step, or what there is of it to its loss: the loss, or None where this rank does not see it."""
    engine.train()
    engine.zero_grad()
    _, _, loss = engine.execute_schedule(batches, forward_only=forward_only, return_loss=True)
    if not forward_only:
        engine.step()
        scheduler.step()
    return None if loss is None or (is_using_pp() and not gpc.is_last_rank(ParallelMode.PIPELINE)) else float(loss)


def mean(losses):
    """Over data-parallel ranks; tensor-parallel ones see the same."""
    seen = [loss for loss in losses if loss is not None]
    return sum(seen) / len(seen)


def save_after_two_steps(output):
    """Save a checkpoint after two of the three steps; returns its path, and the loss of the third."""
    trainer, loader = build()
    checkpointer = load(trainer, loader, output)
    batches = iter(loader)
    for _ in range(2):
        step(trainer.engine, batches, trainer.lr_scheduler)
    return save(checkpointer), step(trainer.engine, batches, trainer.lr_scheduler)


def load_each(paths, folder):
    """Resume from each; returns for each what is not the same when it is saved again, the next loss and the rate.

    All in one engine, which `forget`s in between, and makes a whole training step after the last one.
    """
    trainer, loader = build()
    answers = {}
    for name, path in paths.items():
        forget(trainer, loader)
        checkpointer = load(trainer, loader, folder / name, path)
        rate = trainer.lr_scheduler.get_last_lr()
        again = save(checkpointer)
        wrong = differences(path, again) if gpc.get_global_rank() == 0 else None
        is_last = len(answers) == len(paths) - 1
        loss = step(trainer.engine, iter(loader), trainer.lr_scheduler, forward_only=not is_last)
        answers[name] = wrong, loss, rate
    return answers


def differences(path, again):
    """The names of tensors and numbers in which two checkpoints differ."""
    one, other = storage.Checkpoint(path), storage.Checkpoint(again)
    wrong = [key for key in ("step", "images", "moments_step") if not one.state[key] == other.state[key] > 0]
    for file in (storage.MODEL, storage.OPTIMIZER):
        there, here = one.tensors(file), other.tensors(file)
        wrong += [key for key in there.keys() | here.keys() if not torch.equal(there[key], here[key])]
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of every layout, and the loss of the step after it."""
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as patch:
        random_start(patch)
        losses = {}
        for name, (processes, values, amp) in MODES.items():
            function = functools.partial(save_after_two_steps, folder / name)
            paths, own = zip(*training.call(function, processes, amp, **values), strict=True)
            losses[name] = paths[0], mean(own)
    return losses


def test_every_layout_writes_the_same_tensors(saved):
    """So which layout wrote a checkpoint makes no difference to the one that reads it."""
    checkpoints = {name: storage.Checkpoint(path) for name, (path, _) in saved.items()}
    for file in (storage.MODEL, storage.OPTIMIZER):
        expected = checkpoints["DP 2"].tensors(file)
        for name, checkpoint in checkpoints.items():
            found = checkpoint.tensors(file)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert (found[key].shape, found[key].dtype) == (tensor.shape, tensor.dtype), f"{name}: {key}"
                if file == storage.OPTIMIZER and "NAIVE" not in name:  # a weight may follow the sign of a tiny gradient
                    assert (found[key] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), f"{name}: {key}"


def writers(reader):
    """Its own layout and three others, at distances that differ, so that each layout is read by four."""
    names = list(MODES)
    return [names[(names.index(reader) + distance) % len(names)] for distance in (0, 1, 3, 7)]


@pytest.mark.parametrize("reader", MODES)
def test_every_layout_reads_others(reader, saved, tmp_path):
    processes, values, amp = MODES[reader]
    paths = {name: saved[name][0] for name in writers(reader)}
    answers = training.call(functools.partial(load_each, paths, tmp_path), processes, amp, **values)
    for writer in paths:
        expected = saved[writer][1]
        wrong, _, rate = answers[0][writer]
        assert wrong == [], f"written by {writer}: not the same after reading: {wrong}"
        loss = mean([answer[writer][1] for answer in answers])
        half = amp or MODES[writer][2]
        assert loss == pytest.approx(expected, rel=2e-2 if half else 1e-4), writer
        assert rate == answers[0][reader][2]
    assert len({loss for _, loss in saved.values()}) > 1, "not all of one layout"


def test_checkpoint_moments_are_not_zero(saved):
    """What the test above must see: without moments the next losses would be other ones, weights being the same."""
    path, _ = saved["DP 2"]
    optimizer = safetensors.torch.load_file(path / storage.OPTIMIZER)
    assert all(tensor.abs().max() > 0 for tensor in optimizer.values())
    assert {key.split(".", 1)[0] for key in optimizer} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("PP 2", "1D 4"), ("DP 2", "2D 4")],
)
def test_a_run_goes_on_in_another_layout(first, second, few_test_images, tmp_path, random_weights):
    """Ten steps in one layout, ten in another, through the command line: the curve is that of one process."""
    expected = training.train(tmp_path / "one", **LEARNED).steps
    training.train(tmp_path / "two", LAYOUTS[first][0], steps=10, **LEARNED, **LAYOUTS[first][1])
    steps = training.train(tmp_path / "two", LAYOUTS[second][0], **LEARNED, **LAYOUTS[second][1]).steps
    assert [r["step"] for r in steps] == list(range(1, 21))
    for here, there in zip(steps, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=1e-4), (here["step"], key)
        assert here["lr"] == there["lr"]


def test_the_place_in_the_epoch_counts_in_images(few_test_images, tmp_path, random_weights):
    """Accumulation and data parallel size changed in the middle of an epoch, the global batch not: the same curve."""
    common = dict(LEARNED, NUM_EPOCHS=2)
    expected = training.train(tmp_path / "one", steps=30, BATCH_SIZE=64, **common).steps
    training.train(tmp_path / "two", 2, steps=14, BATCH_SIZE=16, gradient_accumulation=2, **common)
    steps = training.train(tmp_path / "two", 4, steps=30, BATCH_SIZE=16, **common).steps
    assert {r["epoch"] for r in steps[14:]} == {0, 1}, "resumed in the middle of an epoch"
    for here, there in zip(steps, expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3 if here["step"] > 20 else 1e-4), here["step"]
        assert (here["lr"], here["epoch"]) == (there["lr"], there["epoch"])


def test_a_run_that_is_told_to_stop_goes_on_to_the_bit(few_test_images, tmp_path):
    """A signal to one rank, or Ctrl-C to all, twice at once since torchrun passes it on; wherever it finds the run."""
    settings = options({**HYBRID, "BATCH_SIZE": 16, "NUM_EPOCHS": 4})
    whole = training.train(tmp_path / "whole", 2, steps=None, **settings)
    output, steps = tmp_path / "parts", 0
    argv = [*training.flags(**settings), "--output", str(output)]
    for victims, number, code in (
        ([1], signal.SIGUSR1, 75),
        ([0], signal.SIGTERM, 75),
        ([0, 1, 0, 1], signal.SIGINT, 130),
    ):
        ranks = fork_ranks.start(training.HYBRID, argv, fork_ranks.by_torchrun(2))
        launchers.wait_until(lambda steps=steps: launchers.steps_on_record(output) >= steps + 3, ranks.output(0, "err"))
        for victim in victims:
            os.kill(ranks.pids[victim], number)
        result = ranks.wait()
        assert result.codes == [code, code], str(result)
        assert f"stopped by {number.name} after step" in "".join(result.stderr)
        steps = read_metrics(output)[0][-1]["step"]
        assert storage.step_of(storage.newest(output / storage.FOLDER)[0].path) == steps
    assert steps < whole.steps[-1]["step"], "stopped before its end"
    assert training.train(output, 2, steps=None, **settings).records == whole.records


SMALL = {"DEPTH": 1, "NUM_EPOCHS": 1}


def start_with_slow_writes(output, seconds, *more, world_size=1, **values):
    """Ranks whose checkpoints take so long to write; `output.mark` exists from the first write on."""

    def enter(rank):
        write = storage.write

        def slowly(*args):
            output.with_suffix(".mark").touch()
            time.sleep(seconds)
            write(*args)

        storage.write = slowly

    argv = [*training.flags(**values), "--output", str(output), *more]
    environments = fork_ranks.by_torchrun(world_size) if world_size > 1 else [{}]
    return fork_ranks.start(training.HYBRID, argv, environments, enter=enter)


def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(few_test_images, tmp_path):
    rank = start_with_slow_writes(tmp_path / "run", 4, **SMALL)
    launchers.wait_until((tmp_path / "run.mark").exists, lambda: rank.output(0, "err"))
    time.sleep(1)
    os.kill(rank.pids[0], signal.SIGTERM)
    result = rank.wait()
    assert result.codes == [0], str(result)
    assert storage.newest(tmp_path / "run" / storage.FOLDER)[0].path.name == "step-00000044"


def test_a_run_that_fails_while_a_checkpoint_is_written_keeps_it(few_test_images, tmp_path):
    """The norm of step 2 is not finite."""
    values = {**SMALL, "checkpoint.every_steps": 1, "LEARNING_RATE": 1e30, "WARMUP_EPOCHS": 0}
    result = start_with_slow_writes(tmp_path / "run", 3, **values).wait()
    assert result.codes == [1], str(result)
    assert "not finite" in result.stderr[0]
    newest, _ = storage.newest(tmp_path / "run" / storage.FOLDER)
    assert newest.path.name == "step-00000001"


def test_on_a_gpu_nothing_is_saved_of_a_step_whose_gradient_is_not_finite(few_test_images, tmp_path, read_late):
    """Though the host reads its norm later. All ranks end, before any waits for another in saving."""
    values = {"parallel.pipeline": 2, "checkpoint.every_steps": 1, "LEARNING_RATE": 1e30, "clip_grad_norm": 0}
    run = training.train(tmp_path / "run", 2, code=1, **values)
    (line,) = "".join(run.stderr).splitlines()
    assert f"step {len(run.steps) + 1}: the gradient is not finite" in line
    newest, _ = storage.newest(tmp_path / "run" / storage.FOLDER)
    assert newest.path.name == f"step-{len(run.steps):08d}"


def meet_a_bug():
    raise RuntimeError("a bug")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "codes", "said"),
    [
        (meet_a_bug, [1], "RuntimeError: a bug"),
        (meet_a_bug, [1, 1], "RuntimeError: a bug"),
        (die, [1, -signal.SIGKILL], r"^rank 1 \(.*\) died; the other ranks end too\n$"),
    ],
)
def test_a_rank_that_fails_while_a_checkpoint_is_written_does_not_lose_it(
    fail, codes, said, few_test_images, tmp_path, monkeypatch
):
    """The last rank, in step 3; the checkpoint of step 2 takes longer than the wait for a dead rank's name."""
    original = MetricsHook.after_train_iter

    def fails(hook, trainer, *args):
        original(hook, trainer, *args)
        if trainer.engine.num_steps == 3 and gpc.get_global_rank() == len(codes) - 1:
            fail()

    monkeypatch.setattr(MetricsHook, "after_train_iter", fails)
    monkeypatch.setattr(exits, "WATCHDOG_GRACE", 1.0)
    values = {**SMALL, "checkpoint.every_steps": 2, "BATCH_SIZE": 16}
    result = start_with_slow_writes(tmp_path / "run", 3, *fork_ranks.FOREVER, world_size=len(codes), **values).wait()
    assert result.codes == codes, str(result)
    assert re.search(said, "".join(result.stderr)), str(result)
    newest, _ = storage.newest(tmp_path / "run" / storage.FOLDER)
    assert newest.path.name == "step-00000002"


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_run_that_began_with_a_checkpoint_resumes_without_it(count, few_test_images, tmp_path):
    """The first one was one of its own, and is removed by the later ones."""
    values = {**SMALL, "checkpoint.every_steps": 1, "checkpoint.keep": 1}
    training.train(tmp_path, steps=2, **values)
    given = str(tmp_path / "checkpoints/step-00000002")
    training.train(tmp_path, 1, "--resume", given, steps=4, **values)
    assert not os.path.exists(given)
    argv = [*training.flags(**values), "--output", str(tmp_path), "--max-steps", "5", "--resume", given]
    result = fork_ranks.start(training.HYBRID, argv, [{"TORCHELASTIC_RESTART_COUNT": count}]).wait()
    assert result.codes == [0], str(result)
    assert storage.newest(tmp_path / storage.FOLDER)[0].path.name == "step-00000005"


def test_max_steps_counts_steps_made_with_another_global_batch(few_test_images, tmp_path):
    values = {"DEPTH": 1, "NUM_EPOCHS": 4}
    training.train(tmp_path, steps=20, **values)
    run = training.train(tmp_path, 1, "--accept-changes", steps=30, BATCH_SIZE=64, **values)
    assert run.steps[-1]["step"] == 30
    assert storage.newest(tmp_path / storage.FOLDER)[0].path.name == "step-00000030"
