"""Kill -9 a random rank or the launcher many times in one run: the result must be that of an undisturbed run.

    python -m pytest tests/stress/test_kills.py -k relay --cases 100 --seed 7 --result results/fault_relay

Each round starts the ranks of a small ViT that saves every second step, and kills one of them or their launcher: in
every fifth round while the ranks start, in every second one during a save, otherwise soon after a new step. Before each
round the record gets a damaged line, or the run a newer checkpoint that is forged with the right SHA-256; before each
kill this process begins to read the newest checkpoint. After each round, the other ranks must have ended by themselves,
every checkpoint must be valid, none may be lost, and what was begun to be read must be readable. In the end the run is
completed, and compared with an undisturbed one: where all rounds have one layout, to the bit; where each has another
one, within the limits of `layouts`. The seed decides on victims, moments and layouts; how far a round comes, the clock.
"""

import json
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import faults
import psutil
import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.errors import UserError
from colossal_vit.results import METRICS

import fork_ranks
import training
from fork_ranks import PATIENCE
from layouts import ANY_STEP, FIRST_STEP, LAYOUTS

LAUNCHER = "launcher"
EVERY_STEPS = 2
SAVES = {"checkpoint.every_steps": EVERY_STEPS, "checkpoint.keep": 3}
LEARNED = (storage.MODEL, storage.OPTIMIZER, storage.EMA)
SPLIT = {"zero.stage": 1}
ALL_ON = {**training.RANDOM, "augment.policy": "rand", "augment.erase": 0.3, "ema.decay": 0.9}
STARTUP_EVERY, SAVE_EVERY = 5, 2  # rounds
STEP_DELAY = 0.15  # most seconds from a round's first step to its kill
SAVE_LIMIT, SAVE_POLL, SAVE_DELAY = 1.0, 0.0005, 0.03  # seconds; a save takes 10 to 50 ms
# A save waits for the previous one. So when a step is recorded, the last save but one is on disk.
MOST_LOST = 2 * EVERY_STEPS


class Leg(NamedTuple):
    """How ranks are started in a round: `start` is told whether by a launcher; and which of them may be killed."""

    start: Callable[[bool], fork_ranks.World]
    victims: Sequence[int | str]
    layout: str = ""


@contextmanager
def started(leg: Leg, launched: bool = False) -> Iterator[fork_ranks.World]:
    """Start ranks; what they said is added to an `AssertionError`."""
    world = leg.start(launched)
    try:
        yield world
    except AssertionError as error:
        raise AssertionError(f"{error}: {world.wait(10)}") from None


# ---- Progress of the ranks -------------------------------------------------------------------------------------------


class Record:
    """The steps that a round records; created before it starts.

    A resumed run replaces `metrics.jsonl` before its first step, so an earlier round's file has another inode.
    """

    def __init__(self, output: Path):
        self.path = output / METRICS
        self.earlier = self.path.stat().st_ino if self.path.exists() else None

    def last_step(self) -> int:
        """The last recorded step, or 0."""
        if not self.path.exists() or self.path.stat().st_ino == self.earlier:
            return 0
        return training.last_step(self.path.parent)


def being_written(folder: Path) -> set[str]:
    """Names of temporary folders of checkpoints, being written or left over from a killed rank."""
    names = os.listdir(folder) if folder.exists() else []
    return {name for name in names if name.startswith(".step-") and not name.endswith("-removed")}


def wait_for_step(world: fork_ranks.World, record: Record, step: int) -> None:
    """Wait until a step after `step` is recorded; fails if a rank ends before."""
    deadline = time.monotonic() + PATIENCE
    while record.last_step() <= step:
        ended = [pid for pid in world.pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        assert not ended, f"a rank ended before step {step + 1} was made"
        assert time.monotonic() < deadline, f"{PATIENCE} s went by before step {step + 1} was made"
        time.sleep(0.01)


def wait_for_save(folder: Path, earlier: set[str], delay: float) -> None:
    """Wait until a checkpoint has been written to for about `delay` seconds, but no longer than SAVE_LIMIT seconds."""
    deadline = time.monotonic() + SAVE_LIMIT
    while time.monotonic() < deadline:
        if being_written(folder) - earlier:
            time.sleep(delay)
            if being_written(folder) - earlier:
                return
            delay /= 2  # the write was faster
        time.sleep(SAVE_POLL)


# ---- Before and after a round ----------------------------------------------------------------------------------------


def forge_a_checkpoint(output: Path, newest: int, draw: random.Random) -> str:
    """Add a newer checkpoint whose state is wrong and whose SHA-256 is right; returns its name."""
    last = output / storage.FOLDER / f"step-{newest:08d}"
    forged = last.with_name(f"step-{newest + 1:08d}")
    shutil.rmtree(forged, ignore_errors=True)
    shutil.copytree(last, forged)
    faults.forge(forged, draw, step=newest + 1)
    return forged.name


def check_checkpoints(folder: Path, newest: int, forged: Container[str] = ()) -> int:
    """Check every checkpoint of a run whose ranks have all ended, except those that were forged.

    Returns:
        The step of the newest, or 0.

    Raises:
        AssertionError: if one is not valid, or none is of step `newest` or later.
    """
    found = {}
    for path in folder.glob("step-*"):
        try:
            found[storage.Checkpoint(path).state["step"]] = path.name
        except UserError as error:
            if path.name not in forged:
                raise AssertionError(f"a checkpoint is not whole: {error}") from None
    assert all(name == f"step-{step:08d}" for step, name in found.items()), f"steps under other names: {found}"
    set_aside = [path.name for path in folder.glob("damaged-*") if path.stem.removeprefix("damaged-") not in forged]
    assert not set_aside, f"checkpoints did not hold when the run was started: {', '.join(set_aside)}"
    last = max(found, default=0)
    assert last >= newest, f"a checkpoint is lost: the newest was that of step {newest} and is that of step {last} now"
    return last


def read_beside(checkpoint: storage.Checkpoint | None) -> None:
    """Read a checkpoint that was found before a kill, although the run may have removed it meanwhile."""
    if checkpoint is None:
        return
    for name, expected in json.loads(checkpoint.files[storage.MANIFEST].read_text())["files"].items():
        assert storage._fingerprint(checkpoint.files[name]) == expected, f"beside the run: {name} of {checkpoint.path}"
    checkpoint.tensors(storage.MODEL)


# ---- The rounds ------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """One start of the ranks and one kill.

    Attributes:
        victim: the killed rank, or "launcher".
        moment: the intended time of the kill: "start-up", "save" or "any".
        saving: whether a checkpoint was being written just before the kill.
        begun, reached, newest: the step that the round resumed from, the last step it recorded (at least `begun`),
            and the step of the newest checkpoint afterwards.
        layout: of the leg.
        forged: name of the checkpoint that was added before, or "".
    """

    victim: int | str
    moment: str
    saving: bool
    begun: int
    reached: int
    newest: int
    layout: str
    forged: str


def moment_of(number: int) -> str:
    """When a rank is killed in round `number`."""
    if number % STARTUP_EVERY == 0:
        return "start-up"
    return "save" if number % SAVE_EVERY == 0 else "any"


def kill(pid: int) -> list[psutil.Process]:
    """Kill a process, and return its children and their children."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts no more children
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    return children


def one_round(leg: Leg, output: Path, done: list[Round], delays: dict[str, float], seed: int, disturbed: bool) -> Round:
    """Start the ranks, kill one or their launcher, and check the checkpoints; `delays` has upper limits by moment."""
    number, begun = len(done) + 1, done[-1].newest if done else 0
    draw, moment, added = random.Random(f"{seed} {number}"), moment_of(number), ""
    delay, victim = draw.random() * delays[moment], leg.victims[(number + seed) % len(leg.victims)]
    if disturbed and begun and number % 2:
        added = forge_a_checkpoint(output, begun, draw)
    elif disturbed and (output / METRICS).exists():
        faults.add_a_strange_record(output, draw)
    folder, record = output / storage.FOLDER, Record(output)
    earlier, index = being_written(folder), 0 if victim == LAUNCHER else victim
    started_at = time.monotonic()
    with started(leg, victim == LAUNCHER) as world:
        if moment != "start-up":
            wait_for_step(world, record, begun + (MOST_LOST if number % 3 else 0))  # most rounds get on
            if victim != LAUNCHER:  # which takes longer
                delays["start-up"] = min(delays["start-up"], time.monotonic() - started_at)
        reading, _ = storage.newest(folder)
        if moment == "save":
            wait_for_save(folder, earlier, delay)
        else:
            time.sleep(delay)
        saving = bool(being_written(folder) - earlier)
        _, alive = psutil.wait_procs(kill(world.pids[index]), PATIENCE)
        for process in alive:
            process.kill()
        ended = world.wait(PATIENCE)
    assert ended.codes[index] == -signal.SIGKILL, f"{victim} had ended before it was killed: {ended}"
    others = [code for rank, code in enumerate(ended.codes) if rank != index]
    outlived = alive or -signal.SIGKILL in others
    assert not outlived, f"not all ended within {PATIENCE} s of {victim}: {ended}"
    assert all(others), f"exit code 0 after {victim} was killed: {ended}"
    read_beside(reading)
    newest = check_checkpoints(folder, begun, {added, *(this.forged for this in done)})
    reached = max(record.last_step(), begun)
    assert reached <= newest + MOST_LOST, f"step {reached} is on record, but the newest checkpoint is of step {newest}"
    return Round(victim, moment, saving, begun, reached, newest, leg.layout, added)


def kill_again_and_again(
    legs: Iterator[Leg],
    output: Path,
    rounds: int,
    seed: int,
    disturbed: bool = True,
    report: Callable[[str], None] = print,
) -> list[Round]:
    """Start a run and kill a rank or its launcher, `rounds` times; then let the run complete.

    Args:
        legs: how to start the ranks in each round, and to complete the run.
        output: their run directory.
        rounds: number of kills.
        seed: of the random victims and times.
        disturbed: whether records and checkpoints are damaged and forged between the rounds.
        report: called with a line on each round.

    Raises:
        AssertionError: if a checkpoint is lost or not valid, a rank outlives a killed one, or the run does not resume
            or complete.
    """
    done, delays = [], {"any": STEP_DELAY, "save": SAVE_DELAY, "start-up": PATIENCE}  # the last one is measured
    for number in range(1, rounds + 1):
        try:
            done.append(one_round(next(legs), output, done, delays, seed, disturbed))
        except AssertionError as error:
            raise AssertionError(f"round {number} ({moment_of(number)}), seed {seed}: {error}") from None
        report(f"round {number}, seed {seed}: {done[-1]}")
    with started(next(legs)) as world:
        ended = world.wait(6 * PATIENCE)
    assert not any(ended.codes), f"left alone after {rounds} rounds, the run failed: {ended}"
    check_checkpoints(output / storage.FOLDER, done[-1].newest, {this.forged for this in done})
    return done


# ---- What it must come to --------------------------------------------------------------------------------------------


def check_same_bits(output: Path, undisturbed: Path) -> None:
    """Compare the records, without the times, and the final weights and moments of two completed runs."""
    records, expected = training.records(output), training.records(undisturbed)
    for here, there in zip(records, expected, strict=False):
        assert here == there, f"{here} is on record, but {there} in the undisturbed run"
    assert len(records) == len(expected), f"{len(records)} records, but {len(expected)} in the undisturbed run"
    last, wanted = (storage.newest(directory / storage.FOLDER)[0].path for directory in (output, undisturbed))
    assert last.name == wanted.name, f"the last checkpoint is {last.name}, and {wanted.name} undisturbed"
    for name in LEARNED:
        same = (last / name).read_bytes() == (wanted / name).read_bytes()
        assert same, f"{name} of {last.name} is not that of the undisturbed run"


def check_same_curves(output: Path, undisturbed: Path) -> float:
    """Compare the losses and gradient norms of two completed runs in fp32; returns the largest relative difference."""
    records, expected = training.records(output), training.records(undisturbed)
    steps = [[(line["step"], "eval_loss" in line) for line in lines] for lines in (records, expected)]
    assert steps[0] == steps[1], "the steps on record are not those of the undisturbed run"
    worst = 0.0
    for here, there in zip(records, expected, strict=True):
        for key in here.keys() & {"loss", "grad_norm", "eval_loss", "ema_loss"}:
            error = abs(here[key] - there[key]) / abs(there[key])
            limit = FIRST_STEP if here["step"] == 1 else ANY_STEP
            assert error <= limit, f"step {here['step']}: {key} is {here[key]}, but {there[key]} undisturbed"
            worst = max(worst, error)
    return worst


def start(argv: list[str], world_size: int, launched: bool) -> fork_ranks.World:
    """Start ranks, or a process that starts them and waits for them, as a launcher does."""
    environments = fork_ranks.by_torchrun(world_size) if world_size > 1 else [{}]
    if not launched:
        return fork_ranks.start(training.HYBRID, argv, environments)
    if (pid := os.fork()) == 0:
        try:
            fork_ranks.start(training.HYBRID, argv, environments).wait()
        finally:
            os._exit(1)
    fork_ranks.running.add(pid)
    return fork_ranks.World([pid], Path(tempfile.mkdtemp(prefix="launcher-")))


def test_run_killed_many_times_in_one_layout_comes_to_the_same_bits(pytestconfig, tmp_path, report):
    rounds, seed = pytestconfig.option.cases or 6, pytestconfig.option.seed
    values = {**SAVES, **SPLIT, **ALL_ON, "NUM_EPOCHS": math.ceil(rounds / 2)}
    argv = [*training.flags(**values), "--timeout", "20", "--output", str(tmp_path / "run")]
    leg = Leg(partial(start, argv, 2), [0, 1, LAUNCHER])
    done = kill_again_and_again(repeat(leg), tmp_path / "run", rounds, seed, report=report)
    undisturbed = training.train(tmp_path / "undisturbed", 2, steps=None, **values)
    check_same_bits(tmp_path / "run", undisturbed.output)
    report(f"{rounds} kills, {len(undisturbed.steps)} steps: to the bit those of an undisturbed run")
    assert [this.moment for this in done[:6]] == ["any", "save", "any", "save", "start-up", "save"]
    assert any(this.saving for this in done)
    assert any(this.forged for this in done)
    assert {this.victim for this in done} == {0, 1, LAUNCHER}


def relay(output: Path, seed: int, values: dict) -> Iterator[Leg]:
    """Legs in random layouts, none like the one before, with and without state split over data-parallel ranks."""
    kinds = {"1 process": (1, {}), **LAYOUTS}
    kinds |= {f"{name}, split state": (size, {**own, **SPLIT}) for name, (size, own) in LAYOUTS.items() if "DP" in name}
    draw, previous = random.Random(seed), None
    while True:
        name = previous = draw.choice([name for name in kinds if name != previous])
        size, own = kinds[name]
        argv = [*training.flags(**{**values, **own}), "--timeout", "60", "--output", str(output)]
        yield Leg(partial(start, argv, size), range(size), name)


def test_relay_of_layouts_killed_many_times_comes_to_the_losses_of_one_process(pytestconfig, tmp_path, report):
    """Of AdamW, but with steps so small that rounding, which differs between layouts, stays small."""
    rounds, seed = pytestconfig.option.cases or 5, pytestconfig.option.seed
    values = {**SAVES, **ALL_ON, "LEARNING_RATE": 1e-4, "NUM_EPOCHS": math.ceil(rounds / 10)}  # 44 steps each
    legs = relay(tmp_path / "run", seed, values)
    done = kill_again_and_again(legs, tmp_path / "run", rounds, seed, report=report)
    undisturbed = training.train(tmp_path / "alone", steps=None, **values)
    worst, kinds = check_same_curves(tmp_path / "run", undisturbed.output), {this.layout for this in done}
    report(f"{rounds} kills, {len(undisturbed.steps)} steps in {len(kinds)} layouts: {worst:.1e} from one process")
    assert 0 < worst < ANY_STEP
    assert len(kinds) > 2

    whole = (tmp_path / "run" / METRICS).read_text().splitlines(keepends=True)
    wrong = {**json.loads(whole[3]), "loss": 1.001 * json.loads(whole[3])["loss"]}
    for fault, words in (
        ([], "the steps on record are not those of the undisturbed run"),
        ([json.dumps(wrong) + "\n"], "step 4: loss is "),
    ):
        (tmp_path / "run" / METRICS).write_text("".join([*whole[:3], *fault, *whole[4:]]))
        with pytest.raises(AssertionError, match=words):
            check_same_curves(tmp_path / "run", undisturbed.output)


# ---- Faults that the rounds and comparisons are there to find --------------------------------------------------------


def save(folder, step):
    path = folder / f"step-{step:08d}"
    weights = {"weight": torch.full((2,), float(step))}
    storage.write(path, dict.fromkeys(LEARNED, weights), {**training.UNTRAINED, "step": step})
    return path


def pretend(output, fault=None, step_s=0.0):
    """What a run of 60 steps leaves, without training; `fault` is what is wrong with it once it resumes."""
    folder, metrics = output / storage.FOLDER, output / METRICS
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
            (save(folder, step) / storage.MANIFEST).unlink()
        elif fault not in ("lost", "behind"):
            save(folder, step)
        time.sleep(step_s)


class Pretended:
    """A `World` of two ranks, only the first of which does something; the survivor ends as `fault` has it."""

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
        return fork_ranks.Result(codes, ["what they said"], [])


@pytest.mark.parametrize(
    ("fault", "words"),
    {
        "half-written": r"a checkpoint is not whole: .*step-\d+/manifest.json: No such file or directory",
        "lost": r"a checkpoint is lost: the newest was that of step \d+ and is that of step \d+ now",
        "damaged": r"checkpoints did not hold when the run was started: damaged-step-\d+",
        "behind": r"step \d+ is on record, but the newest checkpoint is of step \d+",
        "ends": r"a rank ended before step \d+ was made\n.*: exit codes \[0, 0\]\nwhat they said",
        "content": r"exit code 0 after (\d|launcher) was killed: exit codes ",
        "outlives": r"not all ended within \d+ s of (\d|launcher): exit codes ",
    }.items(),
)
def test_a_round_with_a_fault_is_found(fault, words, tmp_path, monkeypatch):
    monkeypatch.setattr("test_kills.SAVE_LIMIT", 0.2)
    legs = repeat(Leg(partial(Pretended, tmp_path / "run", fault), [0, 1, LAUNCHER]))
    with pytest.raises(AssertionError, match=r"^round \d \(\w+\), seed 0: " + words):
        kill_again_and_again(legs, tmp_path / "run", 4, 0, disturbed=False)


def test_two_runs_that_differ_in_one_bit_are_found(tmp_path):
    """In a record, in the number of records, in the weights, in the last checkpoint; but not in times."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    for output in (run, undisturbed):
        pretend(output)
    check_same_bits(run, undisturbed)
    whole = (run / METRICS).read_text()
    (run / METRICS).write_text(whole.replace(str(1 / 7), str(1 / 7 + 2**-55)))
    with pytest.raises(AssertionError, match=r"'loss': 0\.14\d+} is on record, but {'step': 7, 'loss': 0\.14\d+} in"):
        check_same_bits(run, undisturbed)
    (run / METRICS).write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match="59 records, but 60"):
        check_same_bits(run, undisturbed)
    (run / METRICS).write_text(whole)
    newest = storage.newest(run / storage.FOLDER)[0]
    last, weights = newest.path, {"weight": torch.tensor([60.0, 60.000004])}
    storage._remove(last)
    storage.write(last, dict.fromkeys(LEARNED, weights), newest.state)
    with pytest.raises(AssertionError, match=r"model.safetensors of step-00000060 is not that of the undisturbed run"):
        check_same_bits(run, undisturbed)
    storage._remove(last)
    with pytest.raises(AssertionError, match="the last checkpoint is step-00000059, and step-00000060 undisturbed"):
        check_same_bits(run, undisturbed)
