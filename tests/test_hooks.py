"""What a run leaves behind: metrics.jsonl, TensorBoard events, curves, the resolved config."""

import csv
import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import colossalai.legacy as colossalai
import numpy as np
import psutil
import pytest
import torch
from colossal_vit import main, results
from colossal_vit.checkpoint import lock, storage
from colossal_vit.data.batches import IGNORED, SampledLoader
from colossal_vit.engine import engine
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.errors import TrainingError
from colossal_vit.hooks import profile, progress, wandb_run
from colossal_vit.hooks.confusion import ConfusionHook
from colossal_vit.hooks.debug_nan import DebugNanHook
from colossal_vit.hooks.progress import ProgressHook, time_left
from colossal_vit.hooks.recorder import Recorder
from colossal_vit.launch import exits, signals, watchdog
from colossal_vit.results import CURVES, METRICS, draw
from matplotlib.figure import Figure
from sklearn.metrics import confusion_matrix, recall_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fork_ranks
import launchers
import training
import vit
import waits
from layouts import LAYOUTS

STEP_KEYS = ["step", "epoch", "loss", "lr", "grad_norm", "images_per_s", "data_s", "step_s", "memory_gb"]
EVAL_KEYS = ["step", "epoch", "eval_loss", "eval_accuracy", "eval_top5", "eval_images"]
EVALUATION_S = 1e6  # by a clock that jumps


@pytest.fixture(scope="module")
def run(tmp_path_factory, curves):
    """Two epochs of 22 steps on 2 data-parallel ranks with accumulation 2, one of them warm-up."""
    evaluate, clock, jump = Trainer.evaluate, time.perf_counter, 0.0

    def long_evaluation(self, *args, **options):
        nonlocal jump
        evaluate(self, *args, **options)
        jump += EVALUATION_S

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock() + jump)
        patch.setattr(Trainer, "evaluate", long_evaluation)
        values = {"BATCH_SIZE": 16, "gradient_accumulation": 2, "NUM_EPOCHS": 2, "WARMUP_EPOCHS": 1, "LAYER_DECAY": 0.5}
        return training.train(tmp_path_factory.mktemp("run") / "two-epochs", 2, "--profile", steps=None, **values)


def test_metrics_have_one_record_per_step_and_evaluation(run):
    records = [json.loads(line) for line in (run.output / METRICS).read_text().splitlines()]
    steps, evaluations = run.steps, run.evaluations
    assert records == steps[:22] + evaluations[:1] + steps[22:] + evaluations[1:]
    assert [list(record) for record in records] == ([STEP_KEYS] * 22 + [EVAL_KEYS]) * 2
    assert [(record["step"], record["epoch"]) for record in steps] == [(k + 1, k // 22) for k in range(44)]
    assert [(record["step"], record["epoch"]) for record in evaluations] == [(22, 0), (44, 1)]
    assert all(record["eval_images"] == 360 for record in evaluations)
    for record in steps:
        assert record["images_per_s"] == pytest.approx(64 / record["step_s"])
        assert 0 <= record["data_s"] < record["step_s"] < EVALUATION_S, "evaluation is not part of a step"
        assert 0.05 < record["memory_gb"] < 24


def test_metrics_have_the_rate_a_step_was_made_with(run):
    """The head's, which is LEARNING_RATE at the end of the warm-up epoch, and then falls by half a cosine."""
    rates = [record["lr"] for record in run.steps]
    assert rates[:22] == pytest.approx([3e-3 * (k + 1) / 22 for k in range(22)])
    assert rates[22:] == pytest.approx([3e-3 * (1 + math.cos(math.pi * k / 22)) / 2 for k in range(22)])


def assert_tensorboard_has_the_numbers(run):
    events = EventAccumulator(str(run.output))
    events.Reload()
    for records in (run.steps, run.evaluations):
        for key in records[0].keys() - {"step", "epoch", "eval_images"}:
            group, name = key.split("_", 1) if key in EVAL_KEYS else ("train", key)
            scalars = events.Scalars(f"{group}/{name}")
            assert [scalar.step for scalar in scalars] == [record["step"] for record in records], key
            assert [scalar.value for scalar in scalars] == pytest.approx([record[key] for record in records], rel=1e-6)


def test_tensorboard_has_the_numbers_of_metrics(run):
    assert_tensorboard_has_the_numbers(run)


def test_tensorboard_has_the_numbers_of_metrics_that_a_resumed_run_leaves(tmp_path, few_test_images):
    """Without the evaluation of a step in mid-epoch, which the one at the end of the epoch replaces.

    The runs stop there twice, then after an epoch; the last one makes steps again, since a checkpoint is lost.
    """
    values = {"DEPTH": 1, "NUM_EPOCHS": 2, "BATCH_SIZE": 128, "checkpoint.every_steps": 4}
    for steps in (3, 6, 11, None):
        if steps is None:
            shutil.rmtree(tmp_path / "checkpoints/step-00000011")
        run = training.train(tmp_path, steps=steps, **values)
        assert_tensorboard_has_the_numbers(run)
    assert [record["step"] for record in run.evaluations] == [11, 22]


def test_run_directory_has_curves_and_config(run, tmp_path):
    """Curves of a run that ended before its first evaluation are drawn as well, and are other ones."""
    unfinished = tmp_path / run.output.name  # which is in the title
    unfinished.mkdir()
    steps = [line for line in (run.output / METRICS).read_text().splitlines(True) if "eval_loss" not in line]
    (unfinished / METRICS).write_text("".join(steps))
    draw(unfinished)
    for name in CURVES:
        pictures = [(folder / name).read_bytes() for folder in (run.output, unfinished)]
        assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures)
        assert pictures[0] != pictures[1]
    config = json.loads((run.output / "config.json").read_text())
    assert config["gradient_accumulation"] == 2
    assert config["LABEL_SMOOTHING"] == 0.1
    assert config["fp16"] is None


def test_curves_drawn_within_a_run_have_its_name(run, monkeypatch):
    draw(run.output)
    pictures = {name: (run.output / name).read_bytes() for name in CURVES}
    monkeypatch.chdir(run.output)
    draw(Path("."))
    assert {name: Path(name).read_bytes() for name in CURVES} == pictures


def test_curves_of_what_is_no_run_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results", str(tmp_path)])
    assert results.main() == 2
    assert capsys.readouterr().err == f"results: error: {tmp_path}/{METRICS}: No such file or directory\n"


def test_profile_says_where_the_time_goes(run):
    """Mean of the steps after the traced one, without the evaluation between two epochs; parts sum up to the step."""
    step, count, said = re.search(r"a step takes (\S+) ms, the mean of (\d+): (.*)", run.said).groups()
    times = {name: float(ms) for name, ms in re.findall(r"(\w+) (-?[\d.]+) ms", said)}
    assert list(times) == ["data", "forward", "backward", "update", "other"]
    assert sum(times.values()) == pytest.approx(float(step), abs=0.5)
    assert min(times[name] for name in ("forward", "backward", "update")) > 0
    assert times["other"] >= 0
    steps = run.steps
    assert int(count) == len(steps) - 3
    assert float(step) == pytest.approx(1e3 * sum(record["step_s"] for record in steps[3:]) / int(count), rel=0.1)
    for rank in range(2):
        trace = json.loads((run.output / f"profile-rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        assert [names.count(part) for part in ("data", "forward", "backward", "update")] == [2, 2, 2, 1]


# In microseconds. 0 to 10 are busy by two streams, 15 to 40 by a long kernel beside and after short ones, 41 to 42.
KERNELS = [(41, 42), (0, 4), (3, 10), (15, 40), (16, 20), (30, 31)]
OTHERS = [("gpu_memcpy", 11, 14), ("gpu_user_annotation", 0, 90), ("cpu_op", 10, 50), ("cuda_runtime", 42, 60)]


def trace_of(events):
    return [dict(ph="M", name="process_name"), *(dict(cat=cat, ts=a, dur=b - a) for cat, a, b in events)]


@pytest.mark.parametrize(
    ("events", "idle", "span"),
    [
        ([*(("kernel", a, b) for a, b in KERNELS), *OTHERS], 5 + 1, 42),
        (OTHERS, 0, 0),
    ],
)
def test_idle_time_of_a_trace_is_where_no_stream_runs_a_kernel(events, idle, span):
    assert profile.idle_time(trace_of(events)) == (idle, span)


def test_profile_on_a_gpu_reports_the_idle_time_of_a_step_without_waits_of_its_own(tmp_path, monkeypatch):
    """Its trace is a made one."""
    events, said = trace_of(("kernel", 1000 * a, 1000 * b) for a, b in KERNELS), []
    waits = SimpleNamespace(num=0)
    accelerator = SimpleNamespace(get_current_device=lambda: torch.device("cuda"))
    accelerator.synchronize = lambda: setattr(waits, "num", waits.num + 1)
    monkeypatch.setattr(profile, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(profile, "gpc", SimpleNamespace(get_global_rank=lambda: 0))
    hook = profile.ProfileHook(tmp_path, None, SimpleNamespace(info=said.append))
    hook.engine = SimpleNamespace(model=SimpleNamespace(training=True))
    hook.profiler = SimpleNamespace(stop=lambda: None)
    counts = []
    for made in range(hook.COUNTED + 2):
        hook.made = made
        with hook._timed("forward"):
            pass
        counts.append(waits.num)
    assert counts == [0, 0, 0, 1, 2]
    trace = json.dumps({"traceEvents": events})
    profiler = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(trace))
    hook._export(profiler)
    hook.num_timed, hook.step_s = 2, 0.1
    hook.after_train(None)
    assert said[0] == "in the traced step the device runs no kernel for 6.0 of 42.0 ms"


def test_profile_of_a_resumed_run_is_of_its_own_steps(tmp_path):
    training.train(tmp_path, steps=4, DEPTH=1)
    assert "the mean of 2: " in training.train(tmp_path, 1, "--profile", steps=9, DEPTH=1).said
    assert (tmp_path / "profile-rank0.json").exists()


def test_profile_of_too_few_steps_says_so(tmp_path):
    assert "--profile times steps after the first 3" in training.train(tmp_path, 1, "--profile", steps=3, DEPTH=1).said


def test_loss_scaled_runs_record_scale_and_skips(tmp_path):
    """An initial scale that overflows fp16: the first steps are skipped, and the record says so."""
    values = {"fp16.dtype": "fp16", "fp16.initial_scale": 2.0**24, "fp16.hysteresis": 1}
    steps = training.train(tmp_path, steps=12, amp="NAIVE", **values).steps
    skipped = [record["skipped"] for record in steps]
    assert skipped[0]
    assert not skipped[-1]
    scale = 2.0**24
    for record in steps:
        scale = scale / 2 if record["skipped"] else scale
        assert record["loss_scale"] == scale
        assert 2 < record["loss"] < 3, "the recorded loss is not scaled"


# ---- Progress in a log ----


def test_log_without_a_terminal_has_a_line_at_once_every_log_every_seconds_and_after_an_epoch(monkeypatch):
    """By a clock on which a step takes 700 s, the first one 5000 s, and the evaluation between two epochs 3000 s.

    The last step of the second epoch has its line already when that ends.
    """
    clock, said = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def function():
        config, args = SimpleNamespace(NUM_EPOCHS=3, LOG_EVERY=1400), SimpleNamespace(max_steps=None)
        log = SimpleNamespace(info=lambda text, ranks: said.append(text))
        engine = SimpleNamespace(accumulation=2, num_steps=0)
        trainer = SimpleNamespace(engine=engine, num_epochs=3, states={})
        hook = ProgressHook(SimpleNamespace(config=config, args=args, log=log), range(800))
        hook.before_train(trainer)
        for epoch, steps in ((0, 4), (1, 1)):
            trainer.states["records"] = []
            for _ in range(steps):
                engine.num_steps += 1
                clock[0] += 700 if engine.num_steps > 1 else 5000
                record = dict(step=engine.num_steps, epoch=epoch, loss=2 + epoch / 8, images_per_s=1234.56)
                trainer.states["records"].append(record)
                hook.after_train_iter(trainer, None, None, None)
            hook.after_train_epoch(trainer)
            clock[0] += 3000
        return said

    first, second = "loss 2.0000, 1235 images/s", "loss 2.1250, 1235 images/s"
    assert fork_ranks.call(function) == [
        [
            f"epoch 0 of 3: step 1 of 1,200, {first}",
            f"epoch 0 of 3: step 3 of 1,200, {first}, {1197 * 700 / 3600:.1f} h left",
            f"epoch 0 of 3: step 4 of 1,200, {first}, {1196 * 700 / 3600:.1f} h left",
            f"epoch 1 of 3: step 5 of 1,200, {second}, {1195 * (4 * 700 + 3000) / 4 / 3600:.1f} h left",
        ]
    ]


def test_log_of_an_evaluation_without_a_terminal_has_a_line_every_log_every_seconds(monkeypatch):
    """By a clock on which a batch takes 700 s: two evaluations of five batches each."""
    clock, said = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def function():
        log = SimpleNamespace(info=lambda text, ranks: said.append(text))
        run = SimpleNamespace(config=SimpleNamespace(LOG_EVERY=1400), log=log)
        trainer, hook = SimpleNamespace(test_dataloader=range(5)), ProgressHook(run, range(800))
        for _ in range(2):
            hook.before_test(trainer)
            for _ in range(5):
                clock[0] += 700
                hook.after_test_iter(trainer, None, None, None)
            hook.after_test(trainer)
        return said

    assert fork_ranks.call(function) == [["evaluation: batch 2 of 5", "evaluation: batch 4 of 5"] * 2]


def test_time_left_is_in_the_largest_unit_that_fits():
    assert [time_left(s) for s in (0.4, 59, 61, 3599, 3600, 400_000)] == [
        *("0 s left", "59 s left", "1 min left", "60 min left", "1.0 h left", "111.1 h left")
    ]


def test_log_of_a_run_says_how_far_it_is(run):
    """Of a training that lasts seconds: the first step of all, and the last one of each epoch."""
    lines = re.findall(r"\d\d:\d\d:\d\d (epoch \d.*)", run.said)
    speed = r"loss \d\.\d{4}, \d+ images/s"
    expected = [f"epoch 0 of 2: step 1 of 44, {speed}", rf"epoch 0 of 2: step 22 of 44, {speed}, \d+ (s|min) left"]
    expected += ["epoch 0 of 2: test accuracy .*", f"epoch 1 of 2: step 44 of 44, {speed}", "epoch 1 of 2: test .*"]
    expected = [re.compile(pattern) for pattern in expected]
    assert all(any(pattern.fullmatch(line) for pattern in expected) or ": step " in line for line in lines), lines
    assert all(any(pattern.fullmatch(line) for line in lines) for pattern in expected), lines


# ---- Hooks of users ----


def test_tutorials_hooks_are_called_once_per_optimizer_step(tmp_path):
    """A hook as the tutorials write it, and Colossal-AI's own, which share values in `trainer.states`."""

    class CountingHook(colossalai.trainer.hooks.BaseHook):
        def __init__(self, priority=10):
            super().__init__(priority)
            self.events = []

        def before_train(self, trainer):
            self.events.append("train")

        def before_train_epoch(self, trainer):
            self.events.append(f"epoch {trainer.cur_epoch} of {trainer.steps_per_epoch} steps")

        def before_train_iter(self, trainer):
            self.events.append(f"step {trainer.cur_step}")

        def after_train_iter(self, trainer, output, label, loss):
            assert loss == trainer.engine.criterion(output, label)
            self.events.append(trainer.states["metrics"]["train"]["Loss"].last_step_loss.item() == loss)

        def after_test(self, trainer):
            self.events.append(trainer.states["metrics"]["test"]["Accuracy"].get_accumulated_value())

        def after_train(self, trainer):
            self.events.append("done")

    def function():
        images, labels = torch.eye(16), torch.arange(16)
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=2)
        model = torch.nn.Linear(16, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
        parts = initialize(model, optimizer, torch.nn.CrossEntropyLoss(), batches, batches)
        counting, upstream = CountingHook(), colossalai.trainer.hooks
        accuracy = upstream.AccuracyHook(lambda output, label: (output.argmax(1) == label).sum())
        trained, train, test, _ = parts
        trainer = Trainer(trained)
        trainer.fit(train, epochs=2, max_steps=3, test_dataloader=test, hooks=[counting, upstream.LossHook(), accuracy])
        return counting.events

    (events,) = fork_ranks.call(function, gradient_accumulation=4)
    first = ["epoch 0 of 2 steps", "step 0", True, "step 1", True, 1.0]
    assert events == ["train", *first, "epoch 1 of 2 steps", "step 2", True, 1.0, "done"]


# ---- Weights & Biases ----


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """wandb without the settings and the login of whoever runs the tests, and offline."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "none" / name))
    monkeypatch.setenv("WANDB_MODE", "offline")


def inspect(folder, *flags):
    """What wandb's own reader prints for the run in a folder."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_wandb_resumed_has_the_same_records_in_one_run(tmp_path, offline):
    """The rank of the second pipeline stage writes them."""
    parts, ids = [], set()
    for steps, expected_steps in ((3, [1, 2, 3, 3]), (5, [4, 5, 5])):
        run = training.train(tmp_path / "run", 2, "--wandb", steps=steps, DEPTH=2, **{"parallel.pipeline": 2})
        (folder,) = {path for path in (run.output / "wandb").glob("offline-run-*") if path not in parts}
        parts.append(folder)
        lines = [json.loads(line) for line in inspect(folder).splitlines()]
        items = [line["history"]["item"] for line in lines if line["type"] == "history"]
        written = [json.loads(line) for line in (run.output / METRICS).read_text().splitlines()]
        expected = written[-len(items) :]
        assert [{key: value for key, value in item.items() if key[0] != "_"} for item in items] == expected
        (metric,) = [line["metric"] for line in lines if line["type"] == "metric"]
        assert (metric["glob_name"], metric["step_metric"]) == ("*", "step")
        summary = json.loads(inspect(folder, "--summary"))
        config = json.loads((run.output / "config.json").read_text())
        assert summary["config"] == {key: value for key, value in config.items() if value != {}}  # which wandb drops
        assert (summary["project"], summary["name"], summary["exit_code"]) == ("vit_cifar10_hybrid", "run", 0)
        ids.add(summary["run_id"])
        assert [item["step"] for item in items] == expected_steps
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("content", "known"),
    [(b"1a2b3c4d\n", "1a2b3c4d"), (b"my-run_2", "my-run_2"), (b"", None), (b"\xff\n", None), (b"a/b", None)],
)
def test_wandb_id_that_is_damaged_is_not_read(content, known, tmp_path):
    (tmp_path / "id.txt").write_bytes(content)
    assert wandb_run._read_id(tmp_path / "id.txt") == known
    assert wandb_run._read_id(tmp_path / "none") is None


def test_wandb_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = training.refused(tmp_path / "run", 1, "--wandb")
    assert line.endswith(": error: --wandb needs the package wandb: pip install wandb")
    assert not (tmp_path / "run").exists()


def test_wandb_without_login_is_refused_in_one_line(tmp_path, offline, monkeypatch):
    """All ranks end, and the run directory counts as new."""
    monkeypatch.delenv("WANDB_MODE")
    run = training.train(tmp_path / "run", 2, "--wandb", steps=1, DEPTH=2, code=2)
    (line,) = "".join(run.stderr).splitlines()
    assert re.search(r"error: --wandb: No API key configured.* \(WANDB_MODE=offline needs no login\)$", line)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_wandb_server_that_does_not_answer_is_replaced_by_an_offline_run(tmp_path, offline, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://localhost:{fork_ranks.free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setattr(wandb_run, "INIT_TIMEOUT", 1.0)
    run = training.train(tmp_path / "run", 1, "--wandb", steps=2, DEPTH=1)
    assert "; this run is recorded offline" in run.said
    (folder,) = (tmp_path / "run/wandb").glob("offline-run-*")
    assert json.loads(inspect(folder, "--summary"))["summary"]["step"] == 2


def test_wandb_that_dies_does_not_stop_training(tmp_path, offline, monkeypatch):
    original = wandb_run.WandbRun.write

    def write(self, record):
        if record["step"] == 2:
            for child in psutil.Process().children():
                child.kill()
                child.wait()
        original(self, record)

    monkeypatch.setattr(wandb_run.WandbRun, "write", write)
    run = training.train(tmp_path / "run", 1, "--wandb", steps=4, DEPTH=1)
    assert "Weights & Biases: the records end here: " in run.said
    assert [record["step"] for record in run.steps] == [1, 2, 3, 4]


# ---- Waits for the device ----


FP16 = {"fp16.dtype": "fp16"}  # in which the loss has a scale; on a CPU the modes are in bf16 otherwise
LAMB = {"OPTIMIZER": "lamb"}
TINY = {"IMG_SIZE": 16, "DEPTH": 1, "gradient_accumulation": 2}


@pytest.mark.parametrize(
    ("script", "layout", "amp", "values"),
    [
        (training.HYBRID, "DP 2", None, TINY),
        (training.HYBRID, "DP 2", "TORCH", TINY),
        (training.HYBRID, "DP 2", "NAIVE", {**TINY, **FP16}),
        (training.HYBRID, "2D 4", "NAIVE", {**TINY, **LAMB}),
        (training.HYBRID, "2D 4", "TORCH", {**TINY, **LAMB, **FP16}),
        (training.HYBRID, "PP 2", None, {**TINY, "DEPTH": 4}),
        (training.HYBRID, "PP 2", "NAIVE", {**TINY, **FP16, "DEPTH": 4}),
        (training.HYBRID, "PP 2 interleaved × 2", "NAIVE", {**TINY, "DEPTH": 4}),
        (training.CALTECH101, None, "TORCH", {"SYNTHETIC": True}),
        (training.IMAGENET, None, "NAIVE", {"SYNTHETIC": True}),
    ],
)
def test_host_reads_one_result_in_a_step_and_waits_for_nothing_else(
    script, layout, amp, values, tmp_path, few_test_images, monkeypatch
):
    """With clipping, accumulation and all that is recorded, also where a step has several micro-batches."""
    waits.print_waits(monkeypatch)
    world_size, own = LAYOUTS[layout] if layout else (1, {})
    run = training.train(tmp_path, world_size, "--profile", steps=4, script=script, amp=amp, **{**own, **values})
    assert waits.ONE in run.said
    (forward,) = re.findall(r"a step takes .* forward ([\d.]+) ms", run.said)
    assert float(forward) > 0, "pipelines, too, say when a forward pass begins"


def test_wait_counter_counts_other_waits():
    """Also where they cost nothing, on the CPU."""
    count = torch.tensor(3.0)
    with waits.WaitCounter([count]) as counter:
        values = torch.arange(4.0)
        assert engine.Scalars([values.sum(), values.max()]).read() == [6.0, 3.0]
        assert count.item() == 3.0
        assert values.sum() == 6.0
        assert float(values[1]) == 1.0
        assert len(values[values > 1]) == 2
        assert engine.Scalars([values[0]]).read() == [0.0]
    assert (counter.reads, counter.others) == (2, {"_local_scalar_dense": 2, "index": 1})


# ---- --debug-nan ----


@pytest.mark.parametrize("amp", [None, "NAIVE"])
def test_debug_nan_names_the_module_with_infinite_output(tmp_path, monkeypatch, amp):
    """A weight of the second pipeline stage that is not finite: one line, from the rank that has it; all end."""
    original = vit.full_vit

    def full_vit(config):
        model = original(config)
        model.blocks[-2].mlp.fc2.bias.data[5] = torch.inf
        return model

    monkeypatch.setattr(vit, "full_vit", full_vit)
    run = training.train(tmp_path, 2, "--debug-nan", amp=amp, code=1, **{"parallel.pipeline": 2})
    (line,) = "".join(run.stderr).splitlines()
    assert re.search(r"step 1, rank 1: the output of blocks\.2\.mlp\.fc2\S* \(\w+\) is not finite: 272 of 8704", line)


def test_debug_nan_says_that_it_was_in_an_evaluation(tmp_path):
    """The only step leaves weights whose squares overflow: in the evaluation after it, and in one of its checkpoint."""
    values = dict(DEPTH=1, LEARNING_RATE=1e30)
    training.train(tmp_path / "run", steps=1, **values)
    for name, *flags in (("new", "--max-steps", "1"), ("run", "--eval-only")):
        run = training.train(tmp_path / name, 1, "--debug-nan", *flags, steps=None, code=1, **values)
        assert "evaluation after step 1, rank 0: the output of blocks.0.norm1 (LayerNorm) is not" in run.stderr[0]


def test_debug_nan_names_the_module_whose_gradient_overflows():
    """The square root of zero is finite, and its slope is not."""

    class Root(torch.nn.Module):
        def forward(self, x):
            return x.sqrt()

    def function():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), Root(), torch.nn.Identity())
        torch.nn.init.zeros_(model[0].weight)
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        DebugNanHook().after_hook_is_attached(SimpleNamespace(engine=engine))
        loss = engine(torch.ones(1, 2)).sum()
        with pytest.raises(TrainingError) as caught:
            engine.backward(loss)
        return str(caught.value)

    (said,) = fork_ranks.call(function)
    assert said.startswith("step 1, rank 0: the gradient at the output of 0 (Linear) is not finite: 2 of 2 values")


# ---- Signals ----


def test_end_of_a_terminal_is_heard_once_and_with_nohup_not_at_all(monkeypatch):
    """The shell ends too, after which `parent` sends SIGTERM."""
    monkeypatch.setattr(signals, "SAME_SIGNAL", 0.0)

    def heard(usual):
        signal.signal(signal.SIGHUP, usual)
        requests = signals.StopRequests()
        requests.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        if usual == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
        return requests.answer()[0]

    assert fork_ranks.call(lambda: heard(signal.SIG_DFL)) == [signal.SIGHUP]
    assert fork_ranks.call(lambda: heard(signal.SIG_IGN)) == [0]


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_that_comes_twice_at_once_stops_a_run_once(number, monkeypatch):
    """As Ctrl-C does, from the terminal and from torchrun; later ones have their usual effects."""
    clock, effects = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])

    def function():
        signal.signal(number, lambda *_: effects.append(clock[0]))
        requests = signals.StopRequests()
        requests.listen()
        for clock[0] in (100.0, 100.1, 101.9, 102.1, 103.0):
            os.kill(os.getpid(), number)
        return requests.answer()[0], effects

    assert fork_ranks.call(function) == [(number, [102.1, 103.0])]


@pytest.mark.parametrize(
    ("code", "all_leave", "told"), [(0, False, b"bye\n"), (2, False, b"end 2\n"), (75, True, b"bye\n")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_ends_the_others_only_if_they_do_not_leave_too(rank, code, all_leave, told, monkeypatch):
    """Rank 0 has the store, and so waits for them if all end."""
    monkeypatch.setattr(watchdog, "END_TIMEOUT", fork_ranks.PATIENCE)
    own = watchdog.Watchdog(rank, 1, "localhost", end=None)
    here, there = socket.socketpair()
    own.connections, waits, left, found = [here], rank == 0 and code > 0, threading.Event(), []

    def upload():
        found.append(there.recv(64))
        found.append(left.wait(0.5 if waits else fork_ranks.PATIENCE))
        there.close()

    other = threading.Thread(target=upload)
    other.start()
    own.leave(code, all_leave)
    left.set()
    other.join()
    here.close()
    assert own.leaving.is_set()
    assert found == [told, not waits]


def test_another_signal_does_not_interrupt_the_last_upload_of_a_run_that_stops(tmp_path, monkeypatch):
    """As torchrun sends one to all once a rank has ended."""
    uploading, told, done = (tmp_path / name for name in ("uploading", "told", "done"))

    class Exits(exits.Exits):
        def __init__(self):
            super().__init__()
            self.add(self.upload)

        def upload(self, ending):
            uploading.touch()
            launchers.wait_until(told.exists, "no signal")
            done.touch()

    monkeypatch.setattr(signals, "SAME_SIGNAL", 0.0)
    monkeypatch.setattr(main, "Exits", Exits)
    argv = [*training.flags(DEPTH=1, NUM_EPOCHS=1000), "--output", str(tmp_path / "run")]
    rank = fork_ranks.start(training.HYBRID, argv, [{}])
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 1, lambda: rank.output(0, "err"))
    os.kill(rank.pids[0], signal.SIGUSR1)
    launchers.wait_until(uploading.exists, lambda: rank.output(0, "err"))
    os.kill(rank.pids[0], signal.SIGTERM)
    told.touch()
    result = rank.wait()
    assert result.codes == [75], str(result)
    assert done.exists()


# ---- The thread that writes checkpoints ----

EVERY_2 = {"DEPTH": 1, "checkpoint.every_steps": 2}


@pytest.mark.parametrize("world_size", [1, 2])
def test_error_in_the_thread_that_writes_ends_the_run_with_its_traceback(world_size, tmp_path, monkeypatch):
    """One that is no disk's, and so nobody's but ours; the first checkpoint is written, the second is not."""
    write = storage.write

    def wrong(path, *args):
        return write(path, *args) if path.name == "step-00000002" else write(path, {storage.MODEL: None}, None)

    monkeypatch.setattr(storage, "write", wrong)
    values = {**EVERY_2, "BATCH_SIZE": 128 // world_size}
    run = training.train(tmp_path, world_size, *fork_ranks.FOREVER, steps=None, code=1, **values)
    assert "Traceback" in run.said
    assert "TypeError: 'NoneType' object is not iterable" in run.said
    assert storage.newest(tmp_path / "checkpoints")[0].path.name == "step-00000002"


def test_checkpoint_without_memory_is_like_one_without_disk(tmp_path, monkeypatch):
    write = storage.write

    def small(path, *args):
        if path.name == "step-00000002":
            raise MemoryError
        write(path, *args)

    monkeypatch.setattr(storage, "write", small)
    said = training.train(tmp_path, steps=4, **EVERY_2).said
    assert "step-00000002: cannot be written: out of memory; training continues" in said
    assert storage.newest(tmp_path / "checkpoints")[0].path.name == "step-00000004"
    said = training.train(tmp_path, 1, "--resume", "never", steps=2, code=1, **EVERY_2).said
    assert "out of memory; the last checkpoint of the run is missing" in said
    assert (tmp_path / lock.NAME).exists(), "a run that has begun keeps its lock file"


def test_save_that_finds_the_last_one_failed_ends_the_run_if_it_is_told_to(tmp_path, monkeypatch):
    def full(*args):
        time.sleep(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write", full)
    run = training.train(tmp_path, 1, "--on-save-error", "stop", steps=20, code=1, **EVERY_2)
    assert "step-00000002: cannot be written: No space left on device; earlier checkpoints are as they were" in run.said


def test_old_checkpoint_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    def busy(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(storage, "_remove", busy)
    said = training.train(tmp_path, steps=4, **EVERY_2, **{"checkpoint.keep": 1}).said
    assert f"{tmp_path}/checkpoints/step-00000002: cannot be removed: Device or resource busy" in said
    assert len(storage.list_steps(tmp_path / "checkpoints")) == 2, "the new one is there"


def test_a_full_disk_is_told_once_and_records_are_kept(tmp_path, capfd):
    said = []
    recorder = Recorder(tmp_path, SimpleNamespace(info=lambda text, ranks: said.append(text)), None, curves=False)
    recorder.open(0, 0)
    whole, full = recorder.file, os.open("/dev/full", os.O_WRONLY)
    for file, steps in ((full, (1, 2)), (whole, (3,)), (full, (4, 5))):
        recorder.file = file
        for step in steps:
            recorder.write({"step": step})
    assert said == [f"{tmp_path}: metrics.jsonl has to wait: No space left on device"] * 2
    recorder.file = whole
    (events,) = (thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard."))
    for thread in (events, threading.current_thread()):  # as if it died of this
        threading.excepthook(threading.ExceptHookArgs((OSError, OSError("no space"), None, thread)))
    assert capfd.readouterr().err.count("OSError: no space") == 1
    recorder.close()
    os.close(full)
    assert [line["step"] for line in training.lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_record_that_cannot_be_synced_does_not_end_the_run(tmp_path, monkeypatch):
    """As on a full disk that says so late."""

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(storage, "sync", lambda path: None)
    run = training.train(tmp_path, steps=2, DEPTH=1)
    assert [record["step"] for record in run.steps] == [1, 2]
    assert run.evaluations
    assert "cannot be written" not in run.said


# ---- Predictions of an evaluation ----

CLASSES = ["ant", "bee", "cat", "dog"]
LABELS = [0, 0, 0, 1, 1, 2, 2]
# What a model has found, and how sure it was. Right: 1 of 3 ants, all bees, 1 of 2 cats; nobody has seen a dog.
FOUND = [1, 0, 1, 1, 1, 0, 3]
SURE = [0.6, 0.9, 0.85, 0.99, 0.5, 0.75, 0.95]


def test_accuracy_by_class_and_pictures_of_mistakes(tmp_path, monkeypatch):
    """Each class has another number of images, another accuracy and precision, and is taken for another one."""
    figures = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.__setitem__(path.name, figure))
    pixels = torch.randint(256, (7, 3, 2, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([10.0, 100.0, 200.0]).view(3, 1, 1), torch.tensor([80.0, 40.0, 20.0]).view(3, 1, 1)
    logits = torch.full((8, 4), 0.0)
    for row, (found, sure) in enumerate(zip(FOUND, SURE, strict=True)):
        logits[row] = math.log((1 - sure) / 3)
        logits[row, found] = math.log(sure)
    labels = torch.tensor([*LABELS, IGNORED])

    def function():
        loader = SampledLoader.__new__(SampledLoader)
        loader.__dict__.update(mean=mean, std=std, pick=lambda rows: ((pixels[rows] - mean) / std, labels[rows]))
        log = SimpleNamespace(info=lambda *_: None)
        hook = ConfusionHook(SimpleNamespace(output=tmp_path, data={"classes": CLASSES}, log=log))
        engine = SimpleNamespace(schedule=object())
        trainer = SimpleNamespace(engine=engine, evaluating_ema=False, test_dataloader=loader)
        hook.before_test(trainer)
        for part in (slice(4), slice(4, 8)):  # the last place is left over
            hook.after_test_iter(trainer, logits[part], labels[part], None)
        hook.after_test(trainer)
        confusion = figures["confusion.png"].axes[0]
        mistakes = [axes for axes in figures["mistakes.png"].axes if axes.images]
        return (
            (confusion.get_xlabel(), confusion.get_ylabel(), confusion.images[0].get_array().tolist()),
            [[label.get_text() for label in axis.get_ticklabels()] for axis in (confusion.xaxis, confusion.yaxis)],
            [(axes.get_title("left"), axes.images[0].get_array().tolist()) for axes in mistakes],
            {text.get_position(): text.get_text() for text in confusion.texts},
        )

    ((confusion, names, mistakes, cells),) = fork_ranks.call(function)
    with open(tmp_path / "evaluation/classes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    taken = confusion_matrix(LABELS, FOUND, labels=range(4))
    recall = recall_score(LABELS, FOUND, labels=range(3), average=None)
    assert [row["class"] for row in rows] == CLASSES
    assert [int(row["images"]) for row in rows] == taken.sum(1).tolist()
    assert [int(row["right"]) for row in rows] == taken.diagonal().tolist()
    assert [float(row["accuracy"]) for row in rows[:3]] == pytest.approx(list(recall), abs=1e-4)
    assert [row["mostly mistaken for"] for row in rows] == ["bee", "", "ant", ""]
    assert rows[3]["accuracy"] == ""
    assert confusion[:2] == ("predicted label", "true label")
    assert np.array(confusion[2]) == pytest.approx(taken / taken.sum(1, keepdims=True).clip(1))
    assert names == [CLASSES, CLASSES]
    assert cells == {(x, y): str(taken[y, x]) for x in range(4) for y in range(4)}
    with open(tmp_path / "evaluation/confusion.csv", newline="") as file:
        header, *counts = csv.reader(file)
    assert header == ["true label / predicted label", *CLASSES]
    assert counts == [[name, *map(str, row)] for name, row in zip(CLASSES, taken, strict=True)]
    with open(tmp_path / "evaluation/predictions.csv", newline="") as file:
        found = list(csv.reader(file))[1:]
    named = zip(LABELS, FOUND, SURE, strict=True)
    expected = [[f"image {row}", CLASSES[a], CLASSES[b], f"{sure:.6f}"] for row, (a, b, sure) in enumerate(named)]
    assert found == expected
    expected = [(6, "dog 95%, is cat"), (2, "bee 85%, is ant"), (5, "ant 75%, is cat"), (0, "bee 60%, is ant")]
    assert [title for title, _ in mistakes] == [f"image {row}\n{said}" for row, said in expected]
    for (row, _), (_, picture) in zip(expected, mistakes, strict=True):
        torch.testing.assert_close(torch.tensor(picture), pixels[row].permute(1, 2, 0) / 255)
