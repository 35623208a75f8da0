"""Random train commands on the same run directories: after each command, every directory must hold one valid run.

    python scripts/fuzz_runs.py SEED N [--first K] [--output DIRECTORY]

Case k of a seed is always the same: two train commands with random config values, data, number of processes, working
directory, `--output`, `--resume` and other flags, a signal to a rank at a random step, a full disk under stdout, and
checkpoints that cannot be written. Beside some a checkpoint is evaluated, listed, verified or exported. Before some
second commands the run is damaged or forged. After each command:

- each directory has one config.json, and its steps are recorded without gaps or repetitions, from 1 or from the
  checkpoint that the run was started from;
- every checkpoint is valid, its step is recorded, and its config is that of the directory, except for keys that may
  change freely and changes recorded as accepted;
- two folders that are no runs, a project and a model, have all that they had;
- in every 20th case the data are Caltech101, and the first command is killed while it decodes the images: the second
  one leaves nothing of that;
- a refused command has changed nothing, every exit code is one of those in README.md, and nothing had a traceback.

The ranks are forks of one process that has imported everything. With --output it writes fuzz_runs.md (how the commands
ended), fuzz_runs.json (every command), log.txt and provenance.json after each case, and goes on after the cases that
are there already. Exit code 1 if a case failed.
"""

import argparse
import errno
import functools
import itertools
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / name) for name in ("tests", "scripts", "vit_cifar10_hybrid", "vit_caltech101_amp")),
]

from colossal_vit.checkpoint import __main__ as checkpoint_command  # noqa: E402
from colossal_vit.checkpoint import checkpointer, lock, storage  # noqa: E402
from colossal_vit.data.digits import write_caltech101  # noqa: E402
from colossal_vit.errors import UserError  # noqa: E402
from colossal_vit.files import SCRATCH  # noqa: E402
from colossal_vit.provenance import ResultFolder  # noqa: E402
from colossal_vit.results import read_metrics  # noqa: E402

import conftest  # noqa: E402 hides GPUs, which forks could not share, before torch is imported
import fork_ranks  # noqa: E402
import launchers  # noqa: E402
import recipes  # noqa: E402

LAYOUTS = [(1, {}), (2, {"BATCH_SIZE": 32}), (2, {"parallel.pipeline": 2})]
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL]
ENDS = {0, 2, 75, 130}  # exit codes of commands that are not killed
# Working directory and --output of a command, below the case's folder.
USUAL = [("", "a"), ("", "b"), ("", "link"), ("", "a/")]
STRANGE = [("a", "."), ("a/checkpoints", ".."), ("", "a/checkpoints/.."), ("", "b/../a"), ("", "model")]
STRANGE += [("", "project")] * 2
DECODING_EVERY = 20  # cases, see `check_decoding`
# What is in two of the folders, and is no run's.
FOREIGN = {
    "project/src/train.py": "print()",
    "project/checkpoints/mine.pt": "weights",
    "project/notes.txt": "notes",
    "model/config.json": '{"model_type": "vit"}',
    "model/model.safetensors": "weights",
}

Command = dict[str, Any]


def draw_command(draw: random.Random) -> Command:
    """A random train command; most values are defaults, so that the two of a case often match."""
    values = {"LEARNING_RATE": draw.choice([3e-3] * 5 + [1e-3]), "NUM_EPOCHS": draw.choice([1, 2])}
    values |= {"checkpoint.every_steps": draw.choice([1, 3, 100]), "checkpoint.keep": draw.choice([1, 3])}
    return {
        "values": values,
        "layout": draw.choice(LAYOUTS),
        "data": draw.choice(["digits"] * 5 + ["others"]),
        "place": draw.choice(USUAL * 3 + STRANGE),
        "relative": draw.random() < 0.3,
        "resume": draw.choice(["auto"] * 7 + ["never"] * 2 + ["a", "b"]),
        "max_steps": draw.choice([None, 2, 5, 9, 30]),
        "accept": draw.random() < 0.3,
        "eval_only": draw.random() < 0.1,
        "signal": draw.choice([None] * 3 + SIGNALS),
        "at": draw.randint(1, 8),
        "beside": draw.choice([None] * 5 + ["eval", "ls", "verify", "export"]),
        "stdout": draw.choice(["read"] * 5 + ["full"]),
        "saves": draw.choice(["written"] * 7 + list(SAVE_ERRORS)),
        "damage": draw.choice([None] * 9 + list(DAMAGES)),  # of the run, before the command
    }


# ---- A command -------------------------------------------------------------------------------------------------------


def run_of(command: Command, folder: Path) -> Path:
    """The run directory of a command."""
    return Path(os.path.realpath(folder.joinpath(*command["place"])))


def flags_of(command: Command, folder: Path) -> list[str]:
    values = {"DEPTH": 2, "BATCH_SIZE": 64, **command["values"], **command["layout"][1]}
    cwd, output = command["place"]
    absolute = not (command["relative"] or cwd)
    flags = [*recipes.flags(**values), "--output", f"{folder}/{output}" if absolute else output]
    if command["resume"] in ("auto", "never"):
        flags += ["--resume", command["resume"]]
    else:
        path = folder / command["resume"]
        flags += ["--resume", str(path if absolute else os.path.relpath(path, folder / cwd))]
    flags += ["--max-steps", str(command["max_steps"])] if command["max_steps"] else []
    flags += ["--accept-changes"] if command["accept"] else []
    return flags + (["--eval-only"] if command["eval_only"] else [])


SAVE_ERRORS = {"no space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no memory": MemoryError()}


def prepare_rank(command: Command, rank: int) -> None:
    """Called in each new rank: put a full disk under its stdout, and let every second save fail."""
    become, write, saves = fork_ranks._become, storage.write, itertools.count()
    if command["stdout"] == "full":
        fork_ranks._become = lambda script, argv, env, cwd, out, err: become(script, argv, env, cwd, "/dev/full", err)
    if command["saves"] in SAVE_ERRORS:

        def failing(*args: Any) -> None:
            if next(saves) % 2:
                raise SAVE_ERRORS[command["saves"]]
            write(*args)

        storage.write = failing


def look(command: Command, folder: Path, environment: dict[str, str], known: set[str]) -> list[str]:
    """What was wrong with a command that reads a run while it trains; `known` are names of damaged checkpoints."""
    run, verb = run_of(command, folder), command["beside"]
    if verb == "eval":
        argv = flags_of({**command, "layout": LAYOUTS[0], "eval_only": True, "resume": "auto"}, folder)
        result = fork_ranks.start(recipes.HYBRID, argv, [environment], cwd=folder / command["place"][0]).wait()
        good, said = result.codes in ([0], [2]), str(result)
        good &= result.codes == [0] or "--eval-only: no checkpoint in" in said or "was trained" in said
    else:
        more = [str(folder / "exported")] if verb == "export" else []
        with tempfile.TemporaryFile() as file:
            if (pid := os.fork()) == 0:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
                fork_ranks.end_as(lambda: sys.exit(checkpoint_command.main([verb, str(run), *more])))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            file.seek(0)
            said = file.read().decode()
        nothing = "is no checkpoint, and there are none in it" in said or "no such file or directory" in said
        damaged = any(name in said for name in known)
        good = code == 0 or (code == 2 and (nothing or damaged)) or (code == 1 and damaged)
        shutil.rmtree(folder / "exported", ignore_errors=True)
    return [] if good and "Traceback" not in said else [f"beside it, {verb}: {said}"]


def execute(command: Command, folder: Path, data: dict[str, Path], known: set[str]) -> tuple[list[int], str, list[str]]:
    """Run a command and send its signal; returns exit codes, the ranks' stderr, and what was wrong beside it."""
    ranks = command["layout"][0]
    environments = fork_ranks.by_torchrun(ranks) if ranks > 1 else [{}]
    environments = [{**environment, "DATA": str(data[command["data"]])} for environment in environments]
    output, cwd = run_of(command, folder), folder / command["place"][0]
    cwd.mkdir(parents=True, exist_ok=True)
    before, found = launchers.steps_on_record(output), []
    enter = functools.partial(prepare_rank, command)
    running = fork_ranks.start(recipes.HYBRID, flags_of(command, folder), environments, cwd=cwd, enter=enter)
    if command["signal"] or command["beside"]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and launchers.steps_on_record(output) < before + command["at"]:
            if all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in running.pids):
                break
            time.sleep(0.01)
    if command["beside"]:
        found = look(command, folder, {"DATA": environments[0]["DATA"]}, known)
    if command["signal"]:
        os.kill(running.pids[command["at"] % ranks], command["signal"])  # a zombie, if it has ended
    result = running.wait()
    return result.codes, "".join(result.stderr), found


# ---- Damage ----------------------------------------------------------------------------------------------------------


def damage_metrics(run: Path, draw: random.Random) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    strange = draw.choice([b"null", b"\xff", b"\0" * 9, b"[]", b'{"step": "x"}', b'{"step": 1e400}', b"[" * 99_999])
    lines.insert(draw.randrange(len(lines) + 1), strange + b"\n")
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


def tear_metrics(run: Path, draw: random.Random) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1, "epo')


def replace_config(run: Path, draw: random.Random) -> None:
    (run / "config.json").write_text("{}")


def remove_newest(run: Path, draw: random.Random) -> None:
    shutil.rmtree(storage.list_steps(run / storage.FOLDER)[0])


def flip_a_byte(run: Path, draw: random.Random) -> None:
    file = storage.list_steps(run / storage.FOLDER)[0] / draw.choice([*storage.CONTENTS, storage.MANIFEST])
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 255
    file.write_bytes(content)


def forge_a_field(run: Path, draw: random.Random) -> None:
    """With the right SHA-256."""
    path = storage.list_steps(run / storage.FOLDER)[0]
    state = json.loads((path / storage.STATE).read_text())
    key = draw.choice(["step", "epoch", "images", "global_batch", "moments_step", "best", "layout", "ranks", "config"])
    (path / storage.STATE).write_text(storage._to_text({**state, key: draw.choice(["x", -1, [1], float("nan")])}))
    manifest = json.loads((path / storage.MANIFEST).read_text())
    manifest["files"][storage.STATE] = storage._fingerprint(path / storage.STATE)
    (path / storage.MANIFEST).write_text(storage._to_text(manifest))


DAMAGES = {
    act.__name__: act
    for act in (damage_metrics, tear_metrics, replace_config, remove_newest, flip_a_byte, forge_a_field)
}


def damage(command: Command, folder: Path, draw: random.Random) -> set[str]:
    """Damage the run that a command will find, if there is one; returns the names of damaged checkpoints."""
    run = run_of(command, folder)
    if not command["damage"] or not (run / "metrics.jsonl").exists() or not storage.list_steps(run / storage.FOLDER):
        return set()
    newest = storage.list_steps(run / storage.FOLDER)[0].name
    DAMAGES[command["damage"]](run, draw)
    return {newest} if command["damage"] in ("flip_a_byte", "forge_a_field") else set()


# ---- What must hold --------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != lock.NAME)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def faults_of_directory(run: Path, known: Iterable[str] = ()) -> list[str]:
    """Violated invariants of a run directory, see the module docstring; `known` are names of damaged checkpoints."""
    if not (run / "metrics.jsonl").exists():
        return []
    if not (run / "config.json").exists():
        return ["no config.json"]
    config = json.loads((run / "config.json").read_text())
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    steps = [record["step"] for record in read_metrics(run)[0]]
    newest, _ = storage.newest(run / storage.FOLDER)
    changes = newest.state["changes"] if newest else []
    accepted = {key for change in changes for key in change["values"]}
    found = []
    if steps and steps != list(range(steps[0], steps[-1] + 1)):
        found.append(f"steps on record: {steps}")
    if len(lines) != len(set(lines)):
        found.append("a record twice")
    for path in storage.list_steps(run / storage.FOLDER):
        try:
            saved = storage.Checkpoint(path).state
        except UserError as error:
            found += [str(error)] if path.name not in known else []
            continue
        if saved["step"] not in [*steps, steps[0] - 1 if steps else saved["step"]]:
            found.append(f"{path.name}, but {len(steps)} steps on record, up to {steps[-1:]}")
        if not saved["started_from"] and steps and steps[0] != 1:
            found.append(f"begins with step {steps[0]}")
        changed = checkpointer.changed_values(saved["config"], config).keys() - checkpointer.FREE_KEYS
        if config and changed - accepted:  # without, `replace_config` was there
            found.append(f"{path.name}: {changed} is not the run's")
    return found


def faults(
    command: Command, codes: list[int], errors: str, folder: Path, before: dict[str, bytes], known: set[str]
) -> list[str]:
    found = []
    killed = command["signal"] == signal.SIGKILL
    allowed = ENDS | ({1, -signal.SIGKILL} if killed else set()) | {-(command["signal"] or 0)}  # before it trains
    if (command["signal"] and not killed) or command["saves"] in SAVE_ERRORS:
        allowed |= {1}  # of the other ranks, if the signalled one had no handler yet; or without its last checkpoint
    if not set(codes) <= allowed:
        found.append(f"exit codes {codes}")
    if "Traceback" in errors and not command["signal"]:
        found.append("a traceback")
    after = contents(folder)
    if set(codes) == {2} and before != after:
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        found.append(f"refused, but changed {changed}")
    if changed := [name for name, content in FOREIGN.items() if after.get(name) != content.encode()]:
        found.append(f"not as they were: {changed}")
    for run in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        found += [f"{run.name}: {fault}" for fault in faults_of_directory(run, known)]
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
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    done, known, place = [], set(), None
    try:
        for _ in range(2):
            command = draw_command(draw)
            if place and draw.random() < 0.5:  # else most pairs are of two directories
                command["place"] = place
            place = command["place"]
            known |= damage(command, folder, draw)
            before = contents(folder)
            codes, errors, found = execute(command, folder, data, known)
            name = command["signal"] and command["signal"].name
            said = shlex.join(flags_of(command, folder)[2:]).replace(f"{folder}/", "")
            done.append({"ranks": command["layout"][0], "data": command["data"], "signal": name, "arguments": said})
            done[-1] |= {key: command[key] for key in ("place", "beside", "stdout", "saves", "damage", "at")}
            done[-1] |= {"codes": codes}
            if found := found + faults(command, codes, errors, folder, before, known):
                return done, [*found, errors]
    finally:
        shutil.rmtree(folder)
    return done, []


def check_decoding(seed: int, number: int, root: Path) -> tuple[list[Command], list[str]]:
    """A case of another kind: Caltech101 killed while it decodes its images; the next run leaves nothing of that.

    Args:
        root: a data folder with the images, without a cache.
    """
    draw, folder = random.Random(f"{seed} {number}"), root / "caltech101"
    values = {key: value for key, value in recipes.MODEL.items() if key not in ("CHECKPOINT", "NUM_MICRO_BATCHES")}
    values |= dict(DEPTH=1, BATCH_SIZE=64, IMG_SIZE=16, CACHE_SIZE=64, PATCH_SIZE=8, NUM_EPOCHS=1, DATA=str(root))
    output = Path(tempfile.mkdtemp(prefix="fuzz-"))
    argv = ["--config", "config/config_fp32.py", *recipes.set_flags(values), "--output", str(output)]
    done, found = [], []
    try:
        for killed in (True, False):
            running = fork_ranks.start("vit_caltech101_amp/train.py", [*argv, "--max-steps", "1"], [{}])
            look = (os.P_PID, running.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            while killed and not any(folder.glob(f"{SCRATCH}*")) and not os.waitid(*look):
                time.sleep(0.001)
            if killed:
                time.sleep(draw.random() * 0.3)
                os.kill(running.pids[0], signal.SIGKILL)
            result = running.wait()
            at = "SIGKILL" if killed else None
            done.append({"signal": at, "arguments": "decoding Caltech101", "codes": result.codes})
            found += [str(result)] if "Traceback" in result.stderr[0] or result.codes[0] not in {0, -9 * killed} else []
        left = sorted(path.name for path in folder.iterdir())
        if len(left) != 2 or any(name.startswith(".") for name in left):
            found.append(f"left behind: {left}")
    finally:
        shutil.rmtree(output)
        for path in [*folder.glob("decoded-*"), *folder.glob(f"{SCRATCH}*")]:
            shutil.rmtree(path)
    return done, found


def how_they_ended(commands: list[Command]) -> list[str]:
    """A table of exit codes by signal."""

    def end(codes: list[int]) -> str:
        return " and ".join(str(code) for code in sorted(set(codes)))

    counts = Counter((command["signal"] or "none", end(command["codes"])) for command in commands)
    rows = [f"| {sent} | {codes} | {count} |" for (sent, codes), count in sorted(counts.items())]
    return ["| signal | exit codes of the ranks | commands |", "| --- | --- | ---: |", *rows]


def summary(seed: int, cases: list[dict[str, Any]]) -> list[str]:
    """How the commands ended, and which cases failed, as Markdown."""
    failed = [case["number"] for case in cases if case["faults"]]
    table = how_they_ended([command for case in cases for command in case["commands"]])
    return [*table, "", f"Seed {seed}: {len(cases)} pairs, {len(failed)} failed{f': {failed}' if failed else ''}."]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default %(default)s)")
    parser.add_argument("--output", type=Path, help="where the result goes; without, it is only printed")
    args = parser.parse_args(argv)
    result = ResultFolder(args.output)
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-data-"))
    data = {"digits": scratch / "digits", "others": scratch / "others"}
    conftest.small_digits(data["digits"], 27)
    conftest.small_digits(data["others"], 20)
    write_caltech101(caltech101 := scratch / "caltech101")
    earlier = args.output / "fuzz_runs.json" if args.output else None
    details = {"seed": args.seed, "cases": []}
    if earlier and earlier.exists() and (there := json.loads(earlier.read_text())).get("seed") == args.seed:
        details, result.log = there, (args.output / "log.txt").read_text()
    cases, done_already = details["cases"], {case["number"] for case in details["cases"]}
    with conftest.pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "PATIENCE", 2.0)
        for number in range(args.first, args.first + args.cases):
            if number in done_already:
                continue
            if number % DECODING_EVERY == DECODING_EVERY - 1:
                done, found = check_decoding(args.seed, number, caltech101)
            else:
                done, found = check(args.seed, number, data)
            cases.append({"number": number, "commands": done, "faults": found})
            for line in (f"{number}:", *(f"  {command}" for command in done), *(f"  {fault}" for fault in found)):
                result.print(line)
            result.write("fuzz_runs", summary(args.seed, cases), details)
    shutil.rmtree(scratch)
    result.finish("fuzz_runs", summary(args.seed, cases), details)
    return int(any(case["faults"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
