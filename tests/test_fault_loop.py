"""The loop that kills ranks: five rounds of it, and every fault that it is there to see."""

import json
import os
import signal
import tempfile
import time
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.contents import UNTRAINED
from colossal_vit.results import read_metrics

import fault_loop
import fork_ranks
import recipes


def launcher(*arguments):
    """A process that starts the ranks and waits for them, as a launcher does."""
    pid = os.fork()
    if pid == 0:
        try:
            fork_ranks.start(*arguments).wait()
        finally:
            os._exit(1)
    fork_ranks.running.add(pid)
    return fork_ranks.World([pid], Path(tempfile.mkdtemp(prefix="launcher-")))


class Interrupted(Exception):
    pass


def test_six_kills(tmp_path, monkeypatch):
    """A run with split state killed six times, once while it starts, is to the bit the run that nobody disturbs.

    The loop itself is interrupted after three of them.
    """
    monkeypatch.setattr(fault_loop, "LONGEST_DELAY", 0.3)
    for limit in ("PROGRESS_LIMIT", "END_LIMIT"):
        monkeypatch.setattr(fault_loop, limit, fork_ranks.PATIENCE)
    settings = {**fault_loop.SETTINGS, **fault_loop.SPLIT, "parallel.pipeline": 1, "BATCH_SIZE": 32, "NUM_EPOCHS": 2}
    argv = ["--config", recipes.PIPELINE_CONFIG, "--timeout", "20", *recipes.set_flags(settings)]

    def start(name, launched=False):
        return (launcher if launched else fork_ranks.start)(
            recipes.HYBRID, [*argv, "--output", str(tmp_path / name)], fork_ranks.by_torchrun(2)
        )

    said, leg = [], fault_loop.Leg(partial(start, "run"), [0, 1, fault_loop.LAUNCHER])

    def three_legs():
        yield from repeat(leg, 3)
        raise Interrupted

    def loop(legs):
        diary = fault_loop.Diary(tmp_path, {"seed": 30}, said.append)
        return fault_loop.fault_loop(legs, tmp_path / "run", 6, 30, diary.report, done=diary.done)

    with pytest.raises(Interrupted):
        loop(three_legs())
    done = loop(repeat(leg))
    result = start("undisturbed").wait()
    assert result.codes == [0, 0], str(result)
    records = fault_loop.compare(tmp_path / "run", tmp_path / "undisturbed")

    assert [this.moment for this in done] == ["any", "save", "any", "save", "start-up", "save"]
    assert all(-signal.SIGKILL in this.codes for this in done)
    assert any(this.saving for this in done)
    assert any(this.forged for this in done)
    assert {this.victim for this in done} == {0, 1, "launcher"}
    assert len(said) == 7
    assert len(read_metrics(tmp_path / "run")[0]) == records[-1]["step"] == 44
    table = "\n".join(fault_loop.make_table(done, records, {}))
    assert "| steps made in all / of the run | " in table
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 7
    with pytest.raises(AssertionError, match=r"has the run of another command: .'seed': 30"):
        fault_loop.Diary(tmp_path, {"seed": 31}, print)
    assert " / 44 |" in table


def test_a_relay_of_five_legs(tmp_path, monkeypatch):
    """Killed five times, and resumed in another layout each time: the losses of one process that nobody disturbs."""
    monkeypatch.setattr(fault_loop, "LONGEST_DELAY", 0.2)
    for limit in ("PROGRESS_LIMIT", "END_LIMIT"):
        monkeypatch.setattr(fault_loop, limit, fork_ranks.PATIENCE)
    values = {**fault_loop.RELAY, "DEPTH": 4, "NUM_EPOCHS": 1}
    small = {name: kind for name, kind in fault_loop.LAYOUTS.items() if kind[0] <= 4}
    monkeypatch.setattr(fault_loop, "LAYOUTS", small)
    # The last leg of this seed is on four ranks, so that losses differ however early the others are killed.
    legs = fault_loop.relay(tmp_path / "run", 10, values, ["--timeout", "60"])
    done = fault_loop.fault_loop(legs, tmp_path / "run", 5, 10, print)
    assert any("split state" in this.layout for this in done)
    assert len({this.layout for this in done}) > 3
    result = fork_ranks.run(
        recipes.HYBRID,
        ["--config", fault_loop.CONFIG, "--output", str(tmp_path / "alone"), *recipes.set_flags(values)],
    )
    assert result.codes == [0], str(result)
    records, worst = fault_loop.compare_curves(tmp_path / "run", tmp_path / "alone")
    assert 0 < worst < fault_loop.ANY_STEP
    assert records[-1]["step"] == 44

    whole = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    wrong = {**json.loads(whole[3]), "loss": 1.001 * json.loads(whole[3])["loss"]}
    for fault, words in (
        ([], "the steps on record are not those of the undisturbed run"),
        ([json.dumps(wrong) + "\n"], "step 4: loss is "),
    ):
        (tmp_path / "run/metrics.jsonl").write_text("".join([*whole[:3], *fault, *whole[4:]]))
        with pytest.raises(AssertionError, match=words):
            fault_loop.compare_curves(tmp_path / "run", tmp_path / "alone")


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------


def save(folder, step):
    path = folder / f"step-{step:08d}"
    weights = {"weight": torch.full((2,), float(step))}
    storage.write(path, {storage.MODEL: weights, storage.OPTIMIZER: weights}, {**UNTRAINED, "step": step})
    return path


def pretend(output, fault=None, step_s=0.0):
    """What a run of 60 steps leaves, without training; `fault` is what is wrong with it once it resumes."""
    folder, metrics = output / storage.FOLDER, output / "metrics.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    saved = storage.list_steps(folder)
    step = storage.step_of(saved[0]) if saved else 0
    if not saved:
        fault = None
    if fault == "damaged":
        save(folder, step + 1).rename(folder / f"damaged-step-{step + 1:08d}")
    if fault == "lost":
        storage._remove(saved[0])
    if fault == "ends":
        return
    lines = metrics.read_text().splitlines(keepends=True)[:step] if metrics.exists() else []
    (output / "scratch").write_text("".join(lines))
    (output / "scratch").replace(metrics)
    while step < 60:
        step += 1
        with open(metrics, "a") as file:
            file.write(json.dumps({"step": step, "loss": 1 / step, "step_s": time.monotonic()}) + "\n")
        if fault == "half-written":
            path = save(folder, step)
            (path / storage.MANIFEST).unlink()
        elif fault not in ("lost", "behind"):
            save(folder, step)
        time.sleep(step_s)


class Pretended:
    """An `Attempt` of two ranks, only the first of which does something; the survivor ends as `fault` has it."""

    def __init__(self, output, fault, launched):
        self.fault, self.pids = fault, []
        for work in (lambda: pretend(output, fault, 0.02), signal.pause):
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                finally:
                    os._exit(0)
            self.pids.append(pid)

    def wait(self, timeout):
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (rank := next((r for r, pid in enumerate(self.pids) if os.waitid(os.P_PID, pid, look)), None)) is None:
            time.sleep(0.01)
        os.kill(self.pids[1 - rank], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        codes[1 - rank] = {"content": 0, "outlives": -9}.get(self.fault, codes[rank] and 1)
        return fault_loop.Result(codes, "what they said")


@pytest.mark.parametrize(
    ("fault", "words"),
    {
        "half-written": r"a checkpoint is not whole: .*step-\d+/manifest.json: No such file or directory",
        "lost": r"a checkpoint is lost: the newest was that of step \d+ and is that of step \d+ now",
        "damaged": r"checkpoints did not hold when the run was started: damaged-step-\d+",
        "behind": r"step \d+ is on record, but the newest checkpoint is of step \d+",
        "ends": r"a rank ended before step \d+ was made: exit codes \[0, 0\]\nwhat they said",
        "content": r"exit code 0 after (rank \d|launcher) was killed: exit codes ",
        "outlives": r"not all ended within 120 s of (rank \d|launcher): exit codes ",
    }.items(),
)
def test_the_loop_sees_it(fault, words, tmp_path, monkeypatch):
    for name in ("LONGEST_DELAY", "SAVE_LIMIT"):
        monkeypatch.setattr(fault_loop, name, 0.2)
    start = partial(Pretended, tmp_path / "run", fault)
    legs = repeat(fault_loop.Leg(start, [0, 1, fault_loop.LAUNCHER], disturbed=False))
    with pytest.raises(AssertionError, match=r"^round \d \(\w+\), seed 0: " + words):
        fault_loop.fault_loop(legs, tmp_path / "run", 4, 0, print)


def test_the_comparison_sees_it(tmp_path):
    """Two runs that differ in times; then in a record, in the number of records, in the weights."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    for output in (run, undisturbed):
        pretend(output)
    assert fault_loop.compare(run, undisturbed) == [{"step": step, "loss": 1 / step} for step in range(1, 61)]

    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole.replace(str(1 / 7), str(1 / 7 + 2**-55)))
    with pytest.raises(AssertionError, match=r"'loss': 0\.14\d+} is on record, but {'step': 7, 'loss': 0\.14\d+} in"):
        fault_loop.compare(run, undisturbed)
    (run / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match="59 records, but 60"):
        fault_loop.compare(run, undisturbed)
    (run / "metrics.jsonl").write_text(whole)
    newest = storage.newest(run / storage.FOLDER)[0]
    last, weights = newest.path, {"weight": torch.tensor([60.0, 60.000004])}
    storage._remove(last)
    storage.write(last, {storage.MODEL: weights, storage.OPTIMIZER: weights}, newest.state)
    with pytest.raises(AssertionError, match=r"model.safetensors of step-00000060 is not that of the undisturbed run"):
        fault_loop.compare(run, undisturbed)
    storage._remove(last)
    with pytest.raises(AssertionError, match="the last checkpoint is step-00000059, and step-00000060 undisturbed"):
        fault_loop.compare(run, undisturbed)
