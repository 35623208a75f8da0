"""Kill -9 a random rank or the launcher many times in one run: the result must be that of an undisturbed run.

    python scripts/fault_loop.py [--rounds 50] [--seed N] [--result results/fault_loop] [--scratch DIRECTORY]
    python scripts/fault_loop.py --relay --rounds 100 [--seed N] [--result results/fault_relay] [--scratch DIRECTORY]

About 20 minutes on 2 CPU cores. Two pipeline stages train a small ViT with dropout on the digits sample and save every
second step. Each round starts them with the same command, and kills one of them or their torchrun, each as often as the
others: in every fifth round while the ranks start, in every second one during a save, otherwise up to 0.7 s after a new
step. Before each round the record gets a damaged line, or the run a newer checkpoint that is forged with the right
SHA-256; before each kill another process begins to read the newest checkpoint. After each round, the other ranks must
have ended by themselves, every checkpoint must be valid, none may be lost, and what was begun to be read must be
readable. In the end the run is completed, and compared bit for bit with an undisturbed one: the final weights and
moments, and all of `metrics.jsonl` except the times.

With `--relay` each round resumes in another layout, drawn from those of check_layouts.py, on 1 to 8 ranks, with and
without optimizer state split over the data-parallel ranks; ranks are killed, no launcher. The losses and gradient norms
must then be those of an undisturbed run of one process within the limits of check_layouts.py. Ranks are forks of this
process, so that they need not import everything; that takes about 15 minutes for 100 rounds.

With `--scratch` the run is there, and the same command goes on after the rounds that it made before it was interrupted.

Prints a line per round and a table. With `--result` also writes fault_loop.md (the table), fault_loop.json (every
round), log.txt (with the output of all ranks) and provenance.json. Exit code 1 if any check fails.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.contents import VERSION
from colossal_vit.errors import UserError
from colossal_vit.files import write_text
from colossal_vit.provenance import ResultFolder

from check_layouts import ANY_STEP, CONFIG, FIRST_STEP, FOLDER, LAYOUTS, MODEL, PIPELINE, set_flags

WORLD_SIZE = 2
LAUNCHER = "launcher"
EVERY_STEPS, KEEP = 2, 3
SETTINGS: dict[str, Any] = {
    **{**MODEL, **PIPELINE, "DROP_RATE": 0.1},
    **{"checkpoint.every_steps": EVERY_STEPS, "checkpoint.keep": KEEP},
}
# Moments of AdamW, but steps so small and a run so short that rounding, which differs between layouts, stays small.
RELAY: dict[str, Any] = {
    **{**MODEL, "DEPTH": 4, "LEARNING_RATE": 1e-4, "parallel.pipeline": 1},
    **{"checkpoint.every_steps": EVERY_STEPS, "checkpoint.keep": KEEP},
}
SPLIT = {"zero.stage": 1}
ROUNDS_AN_EPOCH = 2  # an epoch is 44 steps, and a round makes 5 to 20
# Seconds that a rank waits for one that died before the rendezvous, without a launcher to end it. The wait for rank 0
# is up to twice as long, since torch tries to reach it twice.
TIMEOUT = 8.0
# Of a relay, whose up to eight ranks are slower and whose legs make few steps.
RELAY_TIMEOUT, RELAY_ROUNDS_AN_EPOCH, RELAY_DELAY = 30.0, 14, 0.1

STARTUP_EVERY, SAVE_EVERY = 5, 2  # rounds
# Seconds. A rank that is importing when another one dies finishes importing, fails to join, tries again, and ends.
PROGRESS_LIMIT, END_LIMIT, LAST_WORDS, FINISH_LIMIT = 120.0, 120.0, 10.0, 3600.0
LONGEST_DELAY = 0.7  # seconds from the first new step to the kill; of a relay, RELAY_DELAY
SAVE_LIMIT, SAVE_POLL, SAVE_DELAY = 1.0, 0.0005, 0.03  # seconds; a save takes 10 to 50 ms
# A save waits for the previous one. So when a step is recorded, the last save but one is on disk.
MOST_LOST = 2 * EVERY_STEPS

NO_RECORDS = [b"null", b"\xff", b"\0" * 9, b"[]", b'{"step": "x"}', b'{"step": -1}', b'{"step": 1e400}', b"[" * 99_999]
TIMES = {"images_per_s", "data_s", "step_s", "memory_gb"}  # metrics that may differ between two runs

# ---- The ranks -------------------------------------------------------------------------------------------------------


class Ended(Protocol):
    """The result of ranks that have ended: exit codes by rank, and as `str` their output."""

    codes: list[int]


Start = Callable[[bool], "Attempt"]  # called with whether a launcher starts the ranks


class Leg(NamedTuple):
    """How ranks are started in a round, which may be killed, and whether `_disturb` comes before; `layout` is for the
    record."""

    start: Start
    victims: Sequence[int | str]
    layout: str = ""
    disturbed: bool = True


class Attempt(Protocol):
    """Running ranks; process ids by rank, or only that of their launcher."""

    pids: list[int]

    def wait(self, timeout: float) -> Ended:
        """Wait up to `timeout` seconds for all to end; the others are then killed, with code -9."""


@dataclass
class Result:
    """The `Ended` of `Ranks`."""

    codes: list[int]
    said: str

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n{self.said}"


class Ranks:
    """An `Attempt` of plain processes, each in its own session, with the environment variables that torchrun sets.

    Args:
        command: the command line of each, after `python`.
        log: file to which their output is appended.
        launched: start them with torchrun instead.
    """

    def __init__(self, command: list[str], log: Path, launched: bool):
        self.log = log
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        place = {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        inherited = {key: value for key, value in os.environ.items() if key != "DATA"}
        environments = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD_SIZE)]
        if launched:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}", *command]
            environments = [{}]
        self.processes = []
        with open(log, "ab") as out:
            self.said_from = out.tell()
            options = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=FOLDER)
            for own in environments:
                environment = {"OMP_NUM_THREADS": "1", **inherited, **own}
                self.processes.append(subprocess.Popen([sys.executable, *command], env=environment, **options))
        self.pids = [process.pid for process in self.processes]

    def wait(self, timeout: float) -> Result:
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        said = self.log.read_bytes()[self.said_from :].decode(errors="replace")
        return Result([process.returncode for process in self.processes], said)


@contextmanager
def _started(start: Start, launched: bool = False) -> Iterator[Attempt]:
    """Start ranks, and kill them if the block raises; their output is added to an `AssertionError`."""
    attempt = start(launched)
    try:
        yield attempt
    except AssertionError as error:
        raise AssertionError(f"{error}: {attempt.wait(LAST_WORDS)}") from None
    except BaseException:
        attempt.wait(0.0)
        raise


# ---- Progress of the ranks -------------------------------------------------------------------------------------------


class _Record:
    """The steps that an attempt records; created before it starts.

    A resumed run replaces `metrics.jsonl` before its first step, so an earlier attempt's file has another inode.
    """

    def __init__(self, output: Path):
        self.path = output / "metrics.jsonl"
        self.earlier = self.path.stat().st_ino if self.path.exists() else None

    def last_step(self) -> int:
        """The last recorded step, or 0."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_ino == self.earlier:
                    return 0
                file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            try:
                return json.loads(line)["step"]
            except (ValueError, TypeError):  # an incomplete line
                continue
        return 0


def _hidden(folder: Path) -> set[str]:
    """Names of temporary folders of checkpoints, being written or left over from a killed rank."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    return {name for name in names if name.startswith(".step-") and not name.endswith("-removed")}


def _wait_for_step(attempt: Attempt, record: _Record, step: int) -> None:
    """Wait until a step after `step` is recorded; fails if a rank ends before, or after PROGRESS_LIMIT seconds."""
    deadline = time.monotonic() + PROGRESS_LIMIT
    while record.last_step() <= step:
        ended = [pid for pid in attempt.pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        assert not ended, f"a rank ended before step {step + 1} was made"
        assert time.monotonic() < deadline, f"{PROGRESS_LIMIT:g} s went by before step {step + 1} was made"
        time.sleep(0.01)


def _wait_for_save(folder: Path, earlier: set[str], delay: float) -> None:
    """Wait until a checkpoint has been written to for about `delay` seconds, but no longer than SAVE_LIMIT seconds."""
    deadline = time.monotonic() + SAVE_LIMIT
    while time.monotonic() < deadline:
        if _hidden(folder) - earlier:
            time.sleep(delay)
            if _hidden(folder) - earlier:
                return
            delay /= 2  # the write was faster
        time.sleep(SAVE_POLL)


def _check_checkpoints(folder: Path, newest: int, forged: Container[str] = ()) -> tuple[int, int]:
    """Check every checkpoint of a run whose ranks have all ended.

    Args:
        folder: with the checkpoints.
        newest: step of the newest one before this round.
        forged: names of those that `_disturb` has added.

    Returns:
        Number of checkpoints, and the step of the newest, or 0.

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
    return len(found), last


def _disturb(output: Path, newest: int, draw: random.Random) -> str:
    """Damage what a run must get over: add a line to its record that is none, or a newer checkpoint that is forged.

    Returns:
        The name of that checkpoint, or "".
    """
    metrics, last = output / "metrics.jsonl", output / storage.FOLDER / f"step-{newest:08d}"
    if not newest or draw.random() < 0.5:
        if metrics.exists():
            lines = metrics.read_bytes().splitlines(keepends=True)
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(NO_RECORDS) + b"\n")
            metrics.write_bytes(b"".join(lines))
        return ""
    forged = last.with_name(f"step-{newest + 1:08d}")
    shutil.rmtree(forged, ignore_errors=True)
    shutil.copytree(last, forged)
    wrong = {draw.choice(["epoch", "images", "moments_step", "ranks", "config", "best"]): draw.choice(["x", -1, [1]])}
    (forged / storage.STATE).write_text(
        storage._to_text({**storage.Checkpoint(last).state, "step": newest + 1, **wrong})
    )
    files = {name: storage._fingerprint(forged / name) for name in storage.CONTENTS}
    (forged / storage.MANIFEST).write_text(storage._to_text({"version": VERSION, "files": files}))
    return forged.name


def _read_beside(checkpoint: storage.Checkpoint | None) -> bool:
    """Read a checkpoint that was found before a kill; returns whether the run has removed it meanwhile.

    Raises:
        AssertionError: if it cannot be read, or is not what it was.
    """
    if checkpoint is None:
        return False
    for name, expected in json.loads(checkpoint.files[storage.MANIFEST].read_text())["files"].items():
        assert storage._fingerprint(checkpoint.files[name]) == expected, f"beside the run: {name} of {checkpoint.path}"
    checkpoint.tensors(storage.MODEL)
    return not checkpoint.path.exists()


# ---- The loop --------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """One start of the ranks and one kill.

    Attributes:
        victim: the killed rank, or "launcher".
        moment: the intended time of the kill: "start-up", "save" or "any".
        saving: whether a checkpoint was being written just before the kill.
        half_written: whether a half-written one was left, in its temporary folder.
        end_s: seconds from the kill until all other ranks had ended.
        codes: exit codes by rank, or that of the launcher.
        begun, reached, newest: the step that the attempt resumed from, the last step it recorded (at least `begun`),
            and the step of the newest checkpoint afterwards.
        verified: number of checkpoints afterwards.
        layout: of a relay's leg.
        forged: name of the checkpoint that was added before, or "".
        removed: whether the run had removed the checkpoint that was read beside it.
    """

    victim: int | str
    moment: str
    saving: bool
    half_written: bool
    end_s: float
    codes: list[int]
    begun: int
    reached: int
    newest: int
    verified: int
    layout: str
    forged: str
    removed: bool


def _name(victim: int | str) -> str:
    return victim if victim == LAUNCHER else f"rank {victim}"


def _moment(number: int) -> str:
    """When a rank is killed in round `number`."""
    if number % STARTUP_EVERY == 0:
        return "start-up"
    return "save" if number % SAVE_EVERY == 0 else "any"


def _kill(pid: int) -> list[psutil.Process]:
    """Kill a process, and return its children and their children."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts no more children
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    return children


def _round(leg: Leg, output: Path, number: int, done: list[Round], delays: dict[str, float], seed: int) -> Round:
    """Start the ranks, kill one or their launcher, and check the checkpoints; `delays` has upper limits by moment."""
    draw, begun, moment = random.Random(f"{seed} {number}"), done[-1].newest if done else 0, _moment(number)
    delay, victim = draw.random() * delays[moment], draw.choice(leg.victims)
    added = _disturb(output, begun, draw) if leg.disturbed else ""
    forged = {added, *(this.forged for this in done)}
    folder, record = output / storage.FOLDER, _Record(output)
    earlier = _hidden(folder)
    index = 0 if victim == LAUNCHER else victim
    name = _name(victim)
    started = time.monotonic()
    with _started(leg.start, victim == LAUNCHER) as attempt:
        if moment != "start-up":
            _wait_for_step(attempt, record, begun)
            if victim != LAUNCHER:  # which takes longer
                delays["start-up"] = min(delays["start-up"], time.monotonic() - started)
        reading, _ = storage.newest(folder)
        if moment == "save":
            _wait_for_save(folder, earlier, delay)
        else:
            time.sleep(delay)
        saving = bool(_hidden(folder) - earlier)
        killed = time.monotonic()
        orphans = _kill(attempt.pids[index])
        _, alive = psutil.wait_procs(orphans, END_LIMIT)
        for process in alive:
            process.kill()
        ended = attempt.wait(END_LIMIT)
    end_s = time.monotonic() - killed
    assert ended.codes[index] == -signal.SIGKILL, f"{name} had ended before it was killed: {ended}"
    others = [code for rank, code in enumerate(ended.codes) if rank != index]
    outlived = alive or -signal.SIGKILL in others
    assert not outlived, f"not all ended within {END_LIMIT:g} s of {name}: {ended}"
    assert all(others), f"exit code 0 after {name} was killed: {ended}"
    half_written = bool(_hidden(folder) - earlier)
    removed = _read_beside(reading)
    verified, newest = _check_checkpoints(folder, begun, forged)
    reached = max(record.last_step(), begun)
    assert reached <= newest + MOST_LOST, f"step {reached} is on record, but the newest checkpoint is of step {newest}"
    steps = (begun, reached, newest)
    return Round(victim, moment, saving, half_written, end_s, ended.codes, *steps, verified, leg.layout, added, removed)


def fault_loop(
    legs: Iterator[Leg],
    output: Path,
    rounds: int,
    seed: int,
    report: Callable[[str, list[Round]], None],
    longest_delay: float | None = None,
    done: Sequence[Round] = (),
) -> list[Round]:
    """Start a run and kill a rank or its launcher, repeatedly; then let the run complete.

    Args:
        legs: how to start the ranks in each round, and to complete the run.
        output: their run directory.
        rounds: number of kills.
        seed: of the random victims and times.
        report: called with a line for each round, and the rounds so far.
        longest_delay: seconds from the first new step to the kill; None means LONGEST_DELAY.
        done: the rounds that were made already.

    Raises:
        AssertionError: if a checkpoint is lost or not valid, a rank outlives a killed one, or the run does not resume
            or complete.
    """
    done = list(done)
    delays = {
        "any": longest_delay or LONGEST_DELAY,
        "save": SAVE_DELAY,
        "start-up": PROGRESS_LIMIT,
    }  # the last one is measured
    for number in range(len(done) + 1, rounds + 1):
        try:
            this = _round(next(legs), output, number, done, delays, seed)
        except AssertionError as error:
            raise AssertionError(f"round {number} ({_moment(number)}), seed {seed}: {error}") from None
        done.append(this)
        during = ", in a save" * this.saving + ", left half-written" * this.half_written
        where = f" ({this.layout})" if this.layout else ""
        report(
            f"round {number}{where}: {_name(this.victim)} killed ({this.moment}{during}) "
            f"after steps {this.begun} to {this.reached}; "
            f"the others ended after {this.end_s:.2f} s; {this.verified} checkpoints hold, the newest of step "
            f"{this.newest}",
            done,
        )
    with _started(next(legs).start) as attempt:
        ended = attempt.wait(FINISH_LIMIT)
    assert not any(ended.codes), f"left alone after {rounds} rounds, the run failed: {ended}"
    _check_checkpoints(output / storage.FOLDER, done[-1].newest, {this.forged for this in done})
    report("left alone, the run has come to its end", done)
    return done


def compare(output: Path, undisturbed: Path) -> list[dict]:
    """Compare two completed runs; returns their common records, without the times.

    Raises:
        AssertionError: if their records, final weights or moments differ in any bit.
    """
    records, expected = (
        [
            {key: value for key, value in json.loads(line).items() if key not in TIMES}
            for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        for directory in (output, undisturbed)
    )
    for here, there in zip(records, expected, strict=False):
        assert here == there, f"{here} is on record, but {there} in the undisturbed run"
    assert len(records) == len(expected), f"{len(records)} records, but {len(expected)} in the undisturbed run"
    last, wanted = (storage.newest(directory / storage.FOLDER)[0] for directory in (output, undisturbed))
    names = [found and found.path.name for found in (last, wanted)]
    assert names[0] == names[1] is not None, f"the last checkpoint is {names[0]}, and {names[1]} undisturbed"
    for name in (storage.MODEL, storage.OPTIMIZER):
        same = (last.path / name).read_bytes() == (wanted.path / name).read_bytes()
        assert same, f"{name} of {last.path.name} is not that of the undisturbed run"
    return records


def compare_curves(output: Path, undisturbed: Path) -> tuple[list[dict], float]:
    """Compare the losses and gradient norms of two completed runs in fp32, whose layouts may differ.

    Returns:
        The records of the first run, and the largest relative difference.

    Raises:
        AssertionError: if steps or evaluations are missing, or a difference exceeds the limits of check_layouts.py.
    """
    records, expected = (
        [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for directory in (output, undisturbed)
    )
    steps = [[(line["step"], "eval_loss" in line) for line in lines] for lines in (records, expected)]
    assert steps[0] == steps[1], "the steps on record are not those of the undisturbed run"
    worst = 0.0
    for here, there in zip(records, expected, strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in here:
                error = abs(here[key] - there[key]) / abs(there[key])
                limit = FIRST_STEP if here["step"] == 1 else ANY_STEP
                assert error <= limit, f"step {here['step']}: {key} is {here[key]}, but {there[key]} undisturbed"
                worst = max(worst, error)
    return records, worst


class Outcome(NamedTuple):
    """What a run with kills came to: its config values, rounds, records, and rows about its comparison."""

    settings: dict[str, Any]
    done: list[Round]
    records: list[dict]
    verdict: dict[str, str]


def make_table(done: list[Round], records: list[dict], verdict: dict[str, str]) -> list[str]:
    """A summary as a Markdown table; `records` are those of the completed run, `verdict` its comparison."""
    steps = records[-1]["step"]
    victims = sorted({this.victim for this in done}, key=str)
    made = sum(this.reached - this.begun for this in done) + steps - done[-1].newest
    rows = {
        "rounds": len(done),
        "killed": ", ".join(f"{sum(this.victim == victim for this in done)} × {_name(victim)}" for victim in victims),
        "killed during start-up": sum(this.moment == "start-up" for this in done),
        "killed while a checkpoint was being written": sum(this.saving for this in done),
        "… which was left half-written, under a hidden name": sum(this.half_written for this in done),
        "steps made in all / of the run": f"{made} / {steps}",
        "most steps lost by a kill": max(this.reached - this.newest for this in done),
        "checkpoints verified / not whole / lost": f"{sum(this.verified for this in done)} / 0 / 0",
        "checkpoints forged between rounds, and passed over": sum(bool(this.forged) for this in done),
        "checkpoints read after the run had removed them": sum(this.removed for this in done),
        "longest time until the other ranks had ended": f"{max(this.end_s for this in done):.1f} s",
        **verdict,
    }
    return ["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows.items())]


# ---- The relay -------------------------------------------------------------------------------------------------------


def relay(output: Path, seed: int, values: dict[str, Any], flags: Sequence[str]) -> Iterator[Leg]:
    """Legs in random layouts, none like the one before, on forks of this process.

    Args:
        output: the run directory.
        seed: of the layouts.
        values: config values that all legs share.
        flags: more of the command line.
    """
    import fork_ranks

    kinds = {"1 process": (1, {}), **LAYOUTS}
    kinds |= {f"{name}, split state": (size, {**own, **SPLIT}) for name, (size, own) in LAYOUTS.items() if "DP" in name}
    draw, previous = random.Random(seed), None
    while True:
        name = draw.choice([name for name in kinds if name != previous])
        size, own = kinds[name]
        command = ["--config", CONFIG, "--output", str(output), *flags, *set_flags({**values, **own})]
        environments = [{}] if size == 1 else fork_ranks.by_torchrun(size)
        start = partial(fork_ranks.start, "vit_cifar10_hybrid/train_hybrid.py", command, environments)
        yield Leg(lambda launched, start=start: start(), range(size), name)
        previous = name


def run_relay(args: argparse.Namespace, scratch: Path, diary: "Diary") -> Outcome:
    """The run of `--relay`, and an undisturbed one of one process."""
    sys.path.append(str(FOLDER.parent / "tests"))
    import conftest  # noqa: F401 prepares this process for forks
    import fork_ranks

    values = {**RELAY, "NUM_EPOCHS": math.ceil(args.rounds / RELAY_ROUNDS_AN_EPOCH)}
    legs = relay(scratch / "run", args.seed, values, ["--timeout", str(RELAY_TIMEOUT)])
    legs = itertools.islice(legs, len(diary.done), None)
    done = fault_loop(legs, scratch / "run", args.rounds, args.seed, diary.report, RELAY_DELAY, diary.done)
    command = ["--config", CONFIG, "--output", str(scratch / "undisturbed"), *set_flags(values)]
    ended = fork_ranks.run("vit_cifar10_hybrid/train_hybrid.py", command)
    assert not any(ended.codes), f"the undisturbed run failed: {ended}"
    records, worst = compare_curves(scratch / "run", scratch / "undisturbed")
    layouts = {this.layout for this in done}
    verdict = {
        "layouts": f"{len(layouts)}, {sum('split' in name for name in layouts)} of them with split state",
        "largest difference of a loss or gradient norm from one undisturbed process": f"{worst:.1e}",
        "final loss": f"{next(line['loss'] for line in reversed(records) if 'loss' in line):.3f}",
    }
    return Outcome(values, done, records, verdict)


# ---- From the command line -------------------------------------------------------------------------------------------


class Diary:
    """Log and rounds of a run, in files with which the same command goes on after it was interrupted.

    Args:
        folder: where they are.
        settings: of the command.
        print_line: called with each line of the log.

    Raises:
        AssertionError: if those in the folder are of another command.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], print_line: Callable[[str], None]):
        self.log, self.rounds = folder / "log.txt", folder / "rounds.json"
        self.settings, self.print_line = settings, print_line
        there = json.loads(self.rounds.read_text()) if self.rounds.exists() else {"settings": settings, "done": []}
        assert there["settings"] == settings, f"{folder} has the run of another command: {there['settings']}"
        self.done = [Round(**this) for this in there["done"]]

    def report(self, line: str, done: list[Round]) -> None:
        """Log a line, and keep the rounds so far."""
        self.print_line(line)
        with open(self.log, "a") as file:
            file.write(f"fault_loop.py: {line}\n")
        write_text(self.rounds, json.dumps({"settings": self.settings, "done": [asdict(this) for this in done]}))


def run_launched(args: argparse.Namespace, scratch: Path, diary: Diary) -> Outcome:
    """The run whose ranks or launcher are killed, and an undisturbed one."""
    settings = {**SETTINGS, "NUM_EPOCHS": math.ceil(args.rounds / ROUNDS_AN_EPOCH)}
    command = ["train_hybrid.py", "--config", CONFIG, "--timeout", str(TIMEOUT), *set_flags(settings)]

    def start(name: str, launched: bool = False) -> Ranks:  # with a relative path, as somebody would type it
        return Ranks([*command, "--output", os.path.relpath(scratch / name, FOLDER)], diary.log, launched)

    legs = repeat(Leg(partial(start, "run"), [*range(WORLD_SIZE), LAUNCHER]))
    done = fault_loop(legs, scratch / "run", args.rounds, args.seed, diary.report, done=diary.done)
    with _started(partial(start, "undisturbed")) as attempt:
        ended = attempt.wait(FINISH_LIMIT)
    assert not any(ended.codes), f"the undisturbed run failed: {ended}"
    records = compare(scratch / "run", scratch / "undisturbed")
    verdict = {
        "records as in the undisturbed run": f"all {len(records)}, to the bit",
        "final weights and moments as in the undisturbed run": "to the bit",
    }
    return Outcome(settings, done, records, verdict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="how often one is killed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default %(default)s)")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    parser.add_argument("--relay", action="store_true", help="each round in another layout")
    parser.add_argument("--scratch", type=Path, help="folder of the run, with which the same command goes on")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    result = ResultFolder(args.result)
    scratch = (args.scratch or Path(tempfile.mkdtemp(prefix="fault-loop-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        settings = {"rounds": args.rounds, "seed": args.seed, "relay": args.relay}
        diary = Diary(scratch, settings, result.print)
        outcome = (run_relay if args.relay else run_launched)(args, scratch, diary)
        result.log = diary.log.read_text()
    except AssertionError as error:
        print(f"fault_loop.py: error: {error}\nThe run is left in {scratch}", file=sys.stderr)
        return 1
    table = make_table(outcome.done, outcome.records, outcome.verdict)
    rounds = [asdict(this) for this in outcome.done]
    result.finish("fault_loop", table, {"settings": outcome.settings, "seed": args.seed, "rounds": rounds})
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
