"""Kill -9 of a random rank or of the launcher, many times in one run: it must end as one that nothing happened to.

    python scripts/fault_loop.py [--rounds 50] [--seed N] [--result results/fault_loop]

About 20 minutes on 2 CPU cores. Two pipeline stages train a small ViT with dropout on the digits sample and save every
second step. In each round they are started with the same command and one of them is killed, or the torchrun that has
started them, each as often as the others: up to 0.7 s after the run has made a step that no checkpoint has; in every
second round in the middle of a save; in every fifth one while the ranks start. After each round the other ranks must
have ended by themselves, every checkpoint must be valid, and none be lost. Then the run is left alone to its end, and
compared with one that nobody disturbed: all that `metrics.jsonl` says but for the times, and the final weights and
moments, to the bit.

Prints a line a round and a table. With `--result` also writes fault_loop.md (the table), fault_loop.json (every round),
log.txt (with all that the ranks said) and provenance.json. Exit code 1 when something is not as it must be.
"""

import argparse
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
from colossal_vit.benchmark import Benchmark
from colossal_vit.checkpoint import storage
from colossal_vit.errors import UserError

from check_layouts import CONFIG, FOLDER, MODEL, PIPELINE, set_flags

WORLD_SIZE = 2
LAUNCHER = "launcher"
EVERY_STEPS, KEEP = 2, 3
SETTINGS: dict[str, Any] = {
    **{**MODEL, **PIPELINE, "DROP_RATE": 0.1},
    **{"checkpoint.every_steps": EVERY_STEPS, "checkpoint.keep": KEEP},
}
ROUNDS_AN_EPOCH = 2  # an epoch is 44 steps, and a round makes 5 to 20
# Seconds that a rank waits for one that died before they met; there is no launcher to end it. Rank 0 is waited for up
# to twice as long, since torch tries to reach it twice.
TIMEOUT = 8.0

STARTUP_EVERY, SAVE_EVERY = 5, 2  # rounds
# Seconds. A rank that was importing when another one died imports on, joins in vain, tries again, and ends.
PROGRESS_LIMIT, END_LIMIT, LAST_WORDS, FINISH_LIMIT = 120.0, 120.0, 10.0, 3600.0
LONGEST_DELAY = 0.7  # seconds from the first new step to the kill
SAVE_LIMIT, SAVE_POLL, SAVE_DELAY = 1.0, 0.0005, 0.03  # seconds; a save takes 10 to 50 ms
# A save waits for the one before. So when a step is on record, the last save but one is on the disk.
MOST_LOST = 2 * EVERY_STEPS

TIMES = {"images_per_s", "data_s", "step_s", "memory_gb"}  # what may differ between two runs

# ---- The ranks -------------------------------------------------------------------------------------------------------


class Ended(Protocol):
    """Ranks that have ended: exit codes by rank, and as text what they said."""

    codes: list[int]


Start = Callable[[bool], "Attempt"]  # called with whether a launcher starts the ranks


class Attempt(Protocol):
    """Ranks that were started; process ids by rank, or that of their launcher alone."""

    pids: list[int]

    def wait(self, timeout: float) -> Ended:
        """Wait for all to end; those that have not by then are killed, and have code -9."""


@dataclass
class Result:
    """The `Ended` of `Ranks`."""

    codes: list[int]
    said: str

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n{self.said}"


class Ranks:
    """The `Attempt` of plain processes, each in a session of its own, with the environment that torchrun gives.

    Args:
        command: what follows `python`, for each.
        log: what they say is appended to this file.
        launched: start them by torchrun instead.
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
    """Ranks that do not outlive an error of ours; an `AssertionError` then says what they said."""
    attempt = start(launched)
    try:
        yield attempt
    except AssertionError as error:
        raise AssertionError(f"{error}: {attempt.wait(LAST_WORDS)}") from None
    except BaseException:
        attempt.wait(0.0)
        raise


# ---- What they have done so far --------------------------------------------------------------------------------------


class _Record:
    """The steps that an attempt, which is yet to start, puts on record.

    A run that resumes replaces `metrics.jsonl` before its first step, so that what an earlier attempt has left there
    is known by the inode.
    """

    def __init__(self, output: Path):
        self.path = output / "metrics.jsonl"
        self.earlier = self.path.stat().st_ino if self.path.exists() else None

    def last_step(self) -> int:
        """The last step on record; 0 before there is one."""
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
            except (ValueError, TypeError):  # the part of a line
                continue
        return 0


def _hidden(folder: Path) -> set[str]:
    """The names under which checkpoints are being written, or were when a rank was killed."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    return {name for name in names if name.startswith(".step-") and not name.endswith("-removed")}


def _wait_for_step(attempt: Attempt, record: _Record, step: int) -> None:
    """Wait until a step after `step` is on record, in vain if a rank ends before."""
    deadline = time.monotonic() + PROGRESS_LIMIT
    while record.last_step() <= step:
        ended = [pid for pid in attempt.pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        assert not ended, f"a rank ended before step {step + 1} was made"
        assert time.monotonic() < deadline, f"{PROGRESS_LIMIT:g} s went by before step {step + 1} was made"
        time.sleep(0.01)


def _wait_for_save(folder: Path, earlier: set[str], delay: float) -> None:
    """Wait until a checkpoint is being written, and has been for about `delay` seconds; or for SAVE_LIMIT seconds."""
    deadline = time.monotonic() + SAVE_LIMIT
    while time.monotonic() < deadline:
        if _hidden(folder) - earlier:
            time.sleep(delay)
            if _hidden(folder) - earlier:
                return
            delay /= 2  # it was written faster than that
        time.sleep(SAVE_POLL)


def _check_checkpoints(folder: Path, newest: int) -> tuple[int, int]:
    """Check every checkpoint of a run whose ranks have all ended.

    Args:
        folder: with the checkpoints.
        newest: step of the newest one before.

    Returns:
        How many there are, and the step of the newest, 0 without one.

    Raises:
        AssertionError: if one is not whole, or the newest is gone.
    """
    found = {}
    for path in folder.glob("step-*"):
        try:
            found[storage.verify(path)["step"]] = path.name
        except UserError as error:
            raise AssertionError(f"a checkpoint is not whole: {error}") from None
    assert all(name == f"step-{step:08d}" for step, name in found.items()), f"steps under other names: {found}"
    set_aside = [path.name for path in folder.glob("damaged-*")]
    assert not set_aside, f"checkpoints did not hold when the run was started: {', '.join(set_aside)}"
    last = max(found, default=0)
    assert last >= newest, f"a checkpoint is lost: the newest was that of step {newest} and is that of step {last} now"
    return len(found), last


# ---- The loop --------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """A start and a kill.

    Attributes:
        victim: the rank, or "launcher".
        moment: what the kill was meant for: "start-up", "save" or "any".
        saving: whether a checkpoint was being written just before the kill.
        half_written: whether one was left half-written, under its hidden name.
        end_s: seconds from the kill until all other ranks had ended.
        codes: exit codes by rank, or that of the launcher.
        begun, reached, newest: step that the attempt went on from, the last one it has put on record (not before
            `begun`), and the one of the newest checkpoint after it.
        verified: number of checkpoints after it.
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


def _name(victim: int | str) -> str:
    return victim if victim == LAUNCHER else f"rank {victim}"


def _kill(pid: int) -> list[psutil.Process]:
    """Kill a process, and return those that it had started."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts no more
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    return children


def _round(start: Start, output: Path, moment: str, begun: int, delays: dict, draw: random.Random) -> Round:
    """Start the ranks, kill one or their launcher, and look at what is left; `delays` are the longest ones."""
    folder, record = output / storage.FOLDER, _Record(output)
    earlier, fraction = _hidden(folder), draw.random()
    delay = fraction * delays[moment]
    victim = draw.choice([*range(WORLD_SIZE), LAUNCHER])
    index = 0 if victim == LAUNCHER else victim
    name = _name(victim)
    started = time.monotonic()
    with _started(start, victim == LAUNCHER) as attempt:
        if moment != "start-up":
            _wait_for_step(attempt, record, begun)
            if victim != LAUNCHER:  # which takes longer
                delays["start-up"] = min(delays["start-up"], time.monotonic() - started)
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
    verified, newest = _check_checkpoints(folder, begun)
    reached = max(record.last_step(), begun)
    assert reached <= newest + MOST_LOST, f"step {reached} is on record, but the newest checkpoint is of step {newest}"
    return Round(victim, moment, saving, half_written, end_s, ended.codes, begun, reached, newest, verified)


def fault_loop(start: Start, output: Path, rounds: int, seed: int, say: Callable[[str], None]) -> list[Round]:
    """Start a run and kill a rank of it or its launcher, again and again; then let it come to its end.

    Args:
        start: starts the ranks, always with the same command.
        output: their run directory.
        rounds: how often one is killed.
        seed: of which one, and when.
        say: called with a line for each round.

    Raises:
        AssertionError: if a checkpoint is lost, or is not whole under its final name; if a rank outlives another one;
            if the run does not resume or come to its end.
    """
    draw, done, newest = random.Random(seed), [], 0
    delays = {"any": LONGEST_DELAY, "save": SAVE_DELAY, "start-up": PROGRESS_LIMIT}  # the last one is measured
    for number in range(1, rounds + 1):
        moment = "save" if number % SAVE_EVERY == 0 else "any"
        if number % STARTUP_EVERY == 0:
            moment = "start-up"
        try:
            this = _round(start, output, moment, newest, delays, draw)
        except AssertionError as error:
            raise AssertionError(f"round {number} ({moment}), seed {seed}: {error}") from None
        newest = this.newest
        done.append(this)
        during = ", in a save" * this.saving + ", left half-written" * this.half_written
        say(
            f"round {number}: {_name(this.victim)} killed ({moment}{during}) "
            f"after steps {this.begun} to {this.reached}; "
            f"the others ended after {this.end_s:.2f} s; {this.verified} checkpoints hold, the newest of step {newest}"
        )
    with _started(start) as attempt:
        ended = attempt.wait(FINISH_LIMIT)
    assert not any(ended.codes), f"left alone after {rounds} rounds, the run failed: {ended}"
    _check_checkpoints(output / storage.FOLDER, newest)
    say("left alone, the run has come to its end")
    return done


def compare(output: Path, undisturbed: Path) -> list[dict]:
    """Compare two runs that have ended; returns what both have on record, without the times.

    Raises:
        AssertionError: if anything else on record is different, or the final weights or moments are.
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
    names = [path and path.name for path in (last, wanted)]
    assert names[0] == names[1] is not None, f"the last checkpoint is {names[0]}, and {names[1]} undisturbed"
    for name in (storage.MODEL, storage.OPTIMIZER):
        same = (last / name).read_bytes() == (wanted / name).read_bytes()
        assert same, f"{name} of {last.name} is not that of the undisturbed run"
    return records


def make_table(done: list[Round], records: list[dict]) -> list[str]:
    """What happened, as a table in Markdown; `records` are those of the run in the end."""
    steps = records[-1]["step"]
    made = sum(this.reached - this.begun for this in done) + steps - done[-1].newest
    rows = {
        "rounds": len(done),
        "killed": ", ".join(
            f"{sum(this.victim == victim for this in done)} × {_name(victim)}"
            for victim in (*range(WORLD_SIZE), LAUNCHER)
        ),
        "killed during start-up": sum(this.moment == "start-up" for this in done),
        "killed while a checkpoint was being written": sum(this.saving for this in done),
        "… which was left half-written, under a hidden name": sum(this.half_written for this in done),
        "steps made in all / of the run": f"{made} / {steps}",
        "most steps lost by a kill": max(this.reached - this.newest for this in done),
        "checkpoints verified / not whole / lost": f"{sum(this.verified for this in done)} / 0 / 0",
        "longest time until the other ranks had ended": f"{max(this.end_s for this in done):.1f} s",
        "records as in the undisturbed run": f"all {len(records)}, to the bit",
        "final weights and moments as in the undisturbed run": "to the bit",
    }
    return ["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="how often one is killed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default %(default)s)")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    benchmark = Benchmark(args.result)

    scratch = Path(tempfile.mkdtemp(prefix="fault-loop-"))
    log = scratch / "log.txt"
    settings = {**SETTINGS, "NUM_EPOCHS": math.ceil(args.rounds / ROUNDS_AN_EPOCH)}
    command = ["train_hybrid.py", "--config", CONFIG, "--timeout", str(TIMEOUT), *set_flags(settings)]

    def start(name: str, launched: bool = False) -> Ranks:
        return Ranks([*command, "--output", str(scratch / name)], log, launched)

    def say(line: str) -> None:
        benchmark.say(line)
        with open(log, "a") as file:
            file.write(f"fault_loop.py: {line}\n")

    try:
        done = fault_loop(partial(start, "run"), scratch / "run", args.rounds, args.seed, say)
        with _started(partial(start, "undisturbed")) as attempt:
            ended = attempt.wait(FINISH_LIMIT)
        assert not any(ended.codes), f"the undisturbed run failed: {ended}"
        records = compare(scratch / "run", scratch / "undisturbed")
    except AssertionError as error:
        print(f"fault_loop.py: error: {error}\nThe run is left in {scratch}", file=sys.stderr)
        return 1
    benchmark.log = log.read_text()
    details = {"settings": settings, "seed": args.seed, "rounds": [asdict(this) for this in done]}
    benchmark.finish("fault_loop", make_table(done, records), details)
    shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
