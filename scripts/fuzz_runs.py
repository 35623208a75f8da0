"""Random train commands on the same run directories: after each command, every directory must hold one valid run.

    python scripts/fuzz_runs.py SEED N [--first K] [--output DIRECTORY]

Case k of a seed is always the same: two train commands with random config values, data, number of processes,
`--output`, `--resume` and other flags, and a signal to a rank at a random step. After each command:

- each directory has one config.json, and its steps are recorded without gaps or repetitions, from 1 or from the
  checkpoint that the run was started from;
- every checkpoint is valid, its step is recorded, and its config is that of the directory, except for keys that may
  change freely and changes recorded as accepted;
- a refused command has changed nothing, and every exit code is one of those in README.md.

The ranks are forks of one process that has imported everything. With --output it writes fuzz_runs.md (how the commands
ended), fuzz_runs.json (every command), log.txt and provenance.json. Exit code 1 if a case failed.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("tests", "scripts", "vit_cifar10_hybrid"))]

from colossal_vit.benchmark import Benchmark  # noqa: E402
from colossal_vit.checkpoint import lock, restore, storage  # noqa: E402
from colossal_vit.errors import UserError  # noqa: E402
from colossal_vit.results import read_metrics  # noqa: E402

import conftest  # noqa: E402 hides GPUs, which forks could not share, before torch is imported
import fork_ranks  # noqa: E402
import launchers  # noqa: E402
import recipes  # noqa: E402

LAYOUTS = [(1, {}), (2, {"BATCH_SIZE": 32}), (2, {"parallel.pipeline": 2})]
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL]
ENDS = {0, 2, 75, 130}  # exit codes of commands that are not killed

Command = dict[str, Any]


def draw_command(draw: random.Random) -> Command:
    """A random train command; most values are defaults, so that the two of a case often match."""
    values = {"LEARNING_RATE": draw.choice([3e-3] * 5 + [1e-3]), "NUM_EPOCHS": draw.choice([1, 2])}
    values |= {"checkpoint.every_steps": draw.choice([1, 3, 100]), "checkpoint.keep": draw.choice([1, 3])}
    return {
        "values": values,
        "layout": draw.choice(LAYOUTS),
        "data": draw.choice(["digits"] * 5 + ["others"]),
        "output": draw.choice(["a", "a", "b", "link", "a/"]),
        "resume": draw.choice(["auto"] * 5 + ["never", "a", "b"]),
        "max_steps": draw.choice([None, 2, 5, 9, 30]),
        "accept": draw.random() < 0.3,
        "eval_only": draw.random() < 0.1,
        "signal": draw.choice([None] * 3 + SIGNALS),
        "at": draw.randint(1, 8),
    }


def flags_of(command: Command, folder: Path) -> list[str]:
    values = {"DEPTH": 1, "BATCH_SIZE": 64, **command["values"], **command["layout"][1]}
    flags = [*recipes.flags(**values), "--output", f"{folder}/{command['output']}"]
    if command["resume"] in ("auto", "never"):
        flags += ["--resume", command["resume"]]
    else:
        flags += ["--resume", str(folder / command["resume"])]
    flags += ["--max-steps", str(command["max_steps"])] if command["max_steps"] else []
    flags += ["--accept-changes"] if command["accept"] else []
    return flags + (["--eval-only"] if command["eval_only"] else [])


def execute(command: Command, folder: Path, data: dict[str, Path]) -> tuple[list[int], str]:
    """Run a command and send its signal; returns exit codes and the ranks' stderr."""
    ranks = command["layout"][0]
    environments = fork_ranks.by_torchrun(ranks) if ranks > 1 else [{}]
    environments = [{**environment, "DATA": str(data[command["data"]])} for environment in environments]
    output = folder / command["output"]
    before = launchers.steps_on_record(output)
    running = fork_ranks.start(recipes.HYBRID, flags_of(command, folder), environments)
    if command["signal"]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and launchers.steps_on_record(output) < before + command["at"]:
            if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in running.pids):
                break
            time.sleep(0.01)
        os.kill(running.pids[command["at"] % ranks], command["signal"])  # a zombie, if it has ended
    result = running.wait()
    return result.codes, "".join(result.stderr)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != lock.NAME)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def faults_of_directory(run: Path) -> list[str]:
    """Violated invariants of a run directory, see the module docstring."""
    if not (run / "metrics.jsonl").exists():
        return []
    if not (run / "config.json").exists():
        return ["no config.json"]
    config = json.loads((run / "config.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in read_metrics(run)[0]]
    newest, _ = storage.newest(run / storage.FOLDER)
    changes = storage.read_state(newest)["changes"] if newest else []
    accepted = {key for change in changes for key in change["values"]}
    found = []
    if steps and steps != list(range(steps[0], steps[-1] + 1)):
        found.append(f"steps on record: {steps}")
    if len(lines) != len(set(lines)):
        found.append("a record twice")
    for path in storage.list_steps(run / storage.FOLDER):
        try:
            saved = storage.verify(path)
        except UserError as error:
            found.append(str(error))
            continue
        if saved["step"] not in [*steps, steps[0] - 1 if steps else saved["step"]]:
            found.append(f"{path.name}, but {len(steps)} steps on record, up to {steps[-1:]}")
        if not saved["started_from"] and steps and steps[0] != 1:
            found.append(f"begins with step {steps[0]}")
        changed = restore.changed_values(saved["config"], config).keys() - restore.FREE_KEYS
        if changed - accepted:
            found.append(f"{path.name}: {changed} is not the run's")
    return found


def faults(command: Command, codes: list[int], errors: str, folder: Path, before: dict[str, bytes]) -> list[str]:
    found = []
    killed = command["signal"] == signal.SIGKILL
    allowed = ENDS | ({1, -signal.SIGKILL} if killed else set()) | {-(command["signal"] or 0)}  # before it trains
    if command["signal"] and not killed:
        allowed |= {1}  # of the other ranks, if the signalled one had no handler yet
    if not set(codes) <= allowed:
        found.append(f"exit codes {codes}")
    if "Traceback" in errors and not command["signal"]:
        found.append("a traceback")
    after = contents(folder)
    if set(codes) == {2} and before != after:
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        found.append(f"refused, but changed {changed}")
    for run in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        found += [f"{run.name}: {fault}" for fault in faults_of_directory(run)]
    return found


def check(seed: int, number: int, data: dict[str, Path]) -> tuple[list[Command], list[str]]:
    """Run a case.

    Returns:
        The commands, each with its arguments, processes, data, signal and exit codes; and the faults found.
    """
    draw = random.Random(f"{seed} {number}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (folder / "disk").mkdir()
    (folder / "link").symlink_to(folder / "disk")
    done = []
    try:
        for _ in range(2):
            command, before = draw_command(draw), contents(folder)
            codes, errors = execute(command, folder, data)
            name = command["signal"] and command["signal"].name
            said = shlex.join(flags_of(command, folder)[2:]).replace(f"{folder}/", "")
            done.append({"ranks": command["layout"][0], "data": command["data"], "signal": name, "arguments": said})
            done[-1] |= {"codes": codes}
            if found := faults(command, codes, errors, folder, before):
                return done, [*found, errors]
    finally:
        shutil.rmtree(folder)
    return done, []


def how_they_ended(commands: list[Command]) -> list[str]:
    """A table of exit codes by signal."""

    def end(codes: list[int]) -> str:
        return " and ".join(str(code) for code in sorted(set(codes)))

    counts = Counter((command["signal"] or "none", end(command["codes"])) for command in commands)
    rows = [f"| {sent} | {codes} | {count} |" for (sent, codes), count in sorted(counts.items())]
    return ["| signal | exit codes of the ranks | commands |", "| --- | --- | ---: |", *rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default %(default)s)")
    parser.add_argument("--output", type=Path, help="where the result goes; without, it is only printed")
    args = parser.parse_args(argv)
    benchmark = Benchmark(args.output)
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-data-"))
    data = {"digits": scratch / "digits", "others": scratch / "others"}
    conftest.small_digits(data["digits"], 27)
    conftest.small_digits(data["others"], 20)
    cases, failed = [], []
    with conftest.pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "PATIENCE", 2.0)
        for number in range(args.first, args.first + args.cases):
            done, found = check(args.seed, number, data)
            cases.append({"number": number, "commands": done, "faults": found})
            if found:
                failed.append(number)
            for line in (f"{number}:", *(f"  {command}" for command in done), *(f"  {fault}" for fault in found)):
                benchmark.print(line)
    shutil.rmtree(scratch)
    table = how_they_ended([command for case in cases for command in case["commands"]])
    table += ["", f"Seed {args.seed}: {args.cases} pairs, {len(failed)} failed{f': {failed}' if failed else ''}."]
    benchmark.finish("fuzz_runs", table, {"cases": cases})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
