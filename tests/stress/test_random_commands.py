"""Random train commands on the same run directories: after each command, every directory must hold one valid run.

    python -m pytest tests/stress/test_random_commands.py --cases 500 --seed 2026

A seed's case is always the same: two train commands with random config values, data, number of processes, working
directory, `--output`, `--resume` and other flags, a signal to a rank at a random step, a full disk under stdout, and
checkpoints that cannot be written. Beside some a checkpoint is evaluated, listed, verified or exported. Before some
second commands the run is damaged or forged. After each command:

- each directory has one config.json, and its steps are recorded without gaps or repetitions, from 1 or from the
  checkpoint that the run was started from;
- every checkpoint is valid, its step is recorded, and its config is that of the directory, except for keys that may
  change freely and changes recorded as accepted;
- two folders that are no runs, a project and a model, have all that they had;
- a refused command has changed nothing, exit codes are those of docs/launching.md, and nothing had a traceback.

Other cases are runs whose saves fail at random, of which the newest and the best that are written stay; own images that
are edited or renamed between two commands, of which the second is refused, or trains on no image of the test set and
gives each its class's label; and Caltech101 whose first command is killed while it decodes the images: the second one
leaves nothing of that.
"""

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
from collections.abc import Container
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.checkpoint import __main__ as checkpoint_command
from colossal_vit.checkpoint import checkpointer, lock, run_directory, storage
from colossal_vit.engine.engine import Engine
from colossal_vit.errors import UserError
from colossal_vit.files import SCRATCH
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.results import METRICS, read_metrics
from colossalai.legacy.core import global_context as gpc
from PIL import Image

import caltech101
import conftest
import fork_ranks
import launchers
import schemas
import training

LAYOUTS = [(1, {}), (2, {"BATCH_SIZE": 32}), (2, {"parallel.pipeline": 2})]
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL]
ENDS = {0, 2, 75, 130}  # exit codes of commands that are not killed
# Working directory and --output of a command, below the case's folder.
USUAL = [("", "a"), ("", "b"), ("", "link"), ("", "a/")]
STRANGE = [("a", "."), ("a/checkpoints", ".."), ("", "a/checkpoints/.."), ("", "b/../a"), ("", "model")]
STRANGE += [("", "project")] * 2
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
        "damage": draw.choice([None] * 9 + DAMAGES),  # done to the run before the command
    }


# ---- A command -------------------------------------------------------------------------------------------------------


def run_of(command: Command, folder: Path) -> Path:
    """The run directory of a command."""
    return run_directory.latest(Path(os.path.realpath(folder.joinpath(*command["place"]))))


def flags_of(command: Command, folder: Path) -> list[str]:
    values = {"DEPTH": 2, "BATCH_SIZE": 64, **command["values"], **command["layout"][1]}
    cwd, output = command["place"]
    absolute = not (command["relative"] or cwd)
    resume = command["resume"]
    if resume not in ("auto", "never"):
        resume = str(folder / resume) if absolute else os.path.relpath(folder / resume, folder / cwd)
    flags = [*training.flags(**values), "--output", f"{folder}/{output}" if absolute else output, "--resume", resume]
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


def look(command: Command, folder: Path, environment: dict[str, str], known: set[str]) -> None:
    """Read a run while it trains; `known` are names of damaged checkpoints.

    Raises:
        AssertionError: if that fails for another reason than those.
    """
    run, verb = run_of(command, folder), command["beside"]
    if verb == "eval":
        argv = flags_of({**command, "layout": LAYOUTS[0], "eval_only": True, "resume": "auto"}, folder)
        result = fork_ranks.start(training.HYBRID, argv, [environment], cwd=folder / command["place"][0]).wait()
        (code,), said = result.codes, str(result)
        good = code == 0 or (code == 2 and ("--eval-only: no checkpoint in" in said or "was trained" in said))
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
    assert good, f"beside it, {verb}: {said}"
    assert "Traceback" not in said, f"beside it, {verb}: {said}"


def has_ended(pid: int) -> bool:
    return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def execute(command: Command, folder: Path, data: dict[str, Path], known: set[str]) -> fork_ranks.Result:
    """Run a command, read its run beside it, and send its signal."""
    ranks = command["layout"][0]
    environments = fork_ranks.by_torchrun(ranks) if ranks > 1 else [{}]
    environments = [{**environment, "DATA": str(data[command["data"]])} for environment in environments]
    cwd = folder / command["place"][0]
    cwd.mkdir(parents=True, exist_ok=True)
    before, enter = launchers.steps_on_record(run_of(command, folder)), functools.partial(prepare_rank, command)
    world = fork_ranks.start(training.HYBRID, flags_of(command, folder), environments, cwd=cwd, enter=enter)
    deadline = time.monotonic() + (5 if command["signal"] or command["beside"] else 0)
    while time.monotonic() < deadline and launchers.steps_on_record(run_of(command, folder)) < before + command["at"]:
        if all(map(has_ended, world.pids)):
            break
        time.sleep(0.01)
    if command["beside"]:
        look(command, folder, {"DATA": environments[0]["DATA"]}, known)
    if command["signal"]:
        os.kill(world.pids[command["at"] % ranks], command["signal"])  # a zombie, if it has ended
    return world.wait()


# ---- Damage ----------------------------------------------------------------------------------------------------------


def damage(command: Command, folder: Path, draw: random.Random) -> set[str]:
    """Damage the run that a command will find, if there is one; returns the names of damaged checkpoints."""
    run = run_of(command, folder)
    if not command["damage"] or not (run / METRICS).exists() or not storage.list_steps(run / storage.FOLDER):
        return set()
    newest = storage.list_steps(run / storage.FOLDER)[0]
    match command["damage"]:
        case "a strange record":
            faults.add_a_strange_record(run, draw)
        case "a torn record":
            with open(run / METRICS, "ab") as file:
                file.write(b'{"step": 1, "epo')
        case "another config":
            (run / "config.json").write_text("{}")
        case "no newest checkpoint":
            shutil.rmtree(newest)
        case "a flipped byte":
            file = newest / draw.choice([*storage.CONTENTS, storage.MANIFEST])
            content = bytearray(file.read_bytes())
            content[draw.randrange(len(content))] ^= 255
            file.write_bytes(content)
            return {newest.name}
        case "a forged field":
            faults.forge(newest, draw, [*faults.FIELDS, "step", "global_batch", "layout"])
            return {newest.name}
    return set()


DAMAGES = ["a strange record", "a torn record", "another config", "no newest checkpoint"]
DAMAGES += ["a flipped byte", "a forged field"]


# ---- What must hold --------------------------------------------------------------------------------------------------


def check_run(run: Path, known: Container[str] = ()) -> None:
    """Check what must hold of a run directory, see above; `known` are names of damaged checkpoints."""
    if not (run / METRICS).exists():
        return
    assert (run / "config.json").exists(), f"{run} has no config.json"
    config = json.loads((run / "config.json").read_text())
    lines = (run / METRICS).read_bytes().splitlines()
    steps = [record["step"] for record in read_metrics(run)[0]]
    assert not steps or steps == list(range(steps[0], steps[-1] + 1)), f"steps on record: {steps}"
    assert len(lines) == len(set(lines)), "a record twice"
    newest, _ = storage.newest(run / storage.FOLDER)
    changes = newest.state["changes"] if newest else []
    accepted = {key for change in changes for key in change["values"]}
    for path in storage.list_steps(run / storage.FOLDER):
        try:
            saved = storage.Checkpoint(path).state
        except UserError as error:
            if path.name not in known:
                raise AssertionError(f"damaged: {error}") from None
            continue
        on_record = saved["step"] in [*steps, steps[0] - 1 if steps else saved["step"]]
        assert on_record, f"{path.name}, but {len(steps)} steps on record, up to {steps[-1:]}"
        assert saved["started_from"] or not steps or steps[0] == 1, f"begins with step {steps[0]}"
        schema = schemas.schema(schemas.HYBRID)
        changed = checkpointer.changed_values(saved["config"], config, schema)
        changed = {key for key in changed if configs.affects_training(key, *changed[key], schema)} - accepted
        assert not config or not changed, f"{path.name}: {changed} is not the run's"  # {} is "another config"


def check_command(command: Command, result: fork_ranks.Result, folder: Path, before: dict[str, bytes]) -> None:
    """Check how a command has ended, and what of the files, which were `before`, must be as they were."""
    codes, killed = set(result.codes), command["signal"] == signal.SIGKILL
    allowed = ENDS | ({1, -signal.SIGKILL} if killed else set()) | {-(command["signal"] or 0)}  # before it trains
    if (command["signal"] and not killed) or command["saves"] in SAVE_ERRORS:
        allowed |= {1}  # the other ranks', if the signalled one had no handler yet; or without its last checkpoint
    assert codes <= allowed, str(result)
    assert command["signal"] or "Traceback" not in "".join(result.stderr), str(result)
    after = training.contents(folder)
    if codes == {2}:
        changed = {name for name, _ in before.items() ^ after.items()}
        if command["beside"] == "eval":  # which wrote its own results
            evaluation = run_of(command, folder).relative_to(folder) / "evaluation"
            changed = {name for name in changed if Path(name).parent != evaluation}
        assert sorted(changed) == [], "refused, and yet there are changes"
    assert {name: after.get(name) for name in FOREIGN} == {name: text.encode() for name, text in FOREIGN.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("data") / name for name in ("digits", "others")}
    conftest.small_digits(folders["digits"], 27)
    conftest.small_digits(folders["others"], 20)
    return folders


@pytest.mark.cases(12)
def test_two_random_commands_one_after_the_other_leave_valid_runs(seed, data, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 2.0)
    draw, known, place = random.Random(seed), set(), None
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for name, content in FOREIGN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for _ in range(2):
        command = draw_command(draw)
        if place and draw.random() < 0.5:  # else most pairs are of two directories
            command["place"] = place
        place = command["place"]
        known |= damage(command, tmp_path, draw)
        print({**command, "flags": shlex.join(flags_of(command, tmp_path)[2:])})
        before = training.contents(tmp_path)
        result = execute(command, tmp_path, data, known)
        check_command(command, result, tmp_path, before)
        for run in sorted(path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()):
            check_run(run, known)


@pytest.mark.cases(1)
def test_a_command_killed_while_it_decodes_images_leaves_nothing_that_the_next_one_does_not_remove(seed, tmp_path):
    draw, folder = random.Random(seed), tmp_path / "data" / "caltech101"
    caltech101.write_sample(tmp_path / "data")
    flags = training.flags(script=training.CALTECH101, CACHE_SIZE=64, DATA=str(tmp_path / "data"))
    argv = [*flags, "--output", str(tmp_path / "run"), "--max-steps", "1"]
    world = fork_ranks.start(training.CALTECH101, argv, [{}])
    while not any(folder.glob(f"{SCRATCH}*")) and not has_ended(world.pids[0]):
        time.sleep(0.001)
    time.sleep(draw.random() * 0.3)
    os.kill(world.pids[0], signal.SIGKILL)
    killed, result = world.wait(), fork_ranks.run(training.CALTECH101, argv)
    assert killed.codes[0] in (0, -signal.SIGKILL), str(killed)
    assert result.codes == [0], str(result)
    assert "Traceback" not in killed.stderr[0] + result.stderr[0]
    left = sorted(path.name for path in folder.iterdir())
    names = ["101_ObjectCategories", "checked.json", "contents.json", "decoded"]
    assert [name.split("-")[0] for name in left] == names


# ---- The best checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
def test_of_the_checkpoints_that_are_written_the_newest_and_the_best_stay(seed, few_test_images, tmp_path, monkeypatch):
    """Random accuracies, writes that fail, `keep`, moments to save at and to stop at; the rule is applied by hand."""
    draw, epochs = random.Random(seed), 6  # of two steps each
    accuracies = [draw.choice([0.1, 0.2, 0.3, 0.4, 0.5]) for _ in range(epochs)]
    failing = {step: draw.choice(list(SAVE_ERRORS.values())) for step in range(1, 2 * epochs) if draw.random() < 0.3}
    keep, every_steps = draw.randint(1, 3), draw.choice([1, 2, 3, 100])
    values = {"DEPTH": 1, "BATCH_SIZE": 512, "NUM_EPOCHS": epochs, **draw.choice([{}, {"ema.decay": 0.9}])}
    values |= {"checkpoint.keep": keep, "checkpoint.every_steps": every_steps}
    stops = [*sorted(draw.sample(range(1, 2 * epochs), draw.randint(0, 2))), 2 * epochs]
    print(dict(accuracies=accuracies, failing=sorted(failing), keep=keep, every_steps=every_steps, stops=stops))
    written, after_test, write = tmp_path / "written", MetricsHook.after_test, storage.write

    def say(hook, trainer):
        after_test(hook, trainer)
        hook.accuracy = 1 - draw.random() if trainer.evaluating_ema else accuracies[trainer.cur_epoch]

    def note_or_fail(path, tensors, state):
        if state["step"] in failing:
            raise failing[state["step"]]
        write(path, tensors, state)
        with open(written, "a") as file:
            file.write(f"{state['step']} {state['epoch'] if state['images'] == 0 else 0}\n")

    monkeypatch.setattr(MetricsHook, "after_test", say)
    monkeypatch.setattr(storage, "write", note_or_fail)
    for stop in stops:
        argv = [*training.flags(**values), "--output", str(tmp_path / "run"), "--max-steps", str(stop)]
        result = fork_ranks.run(training.HYBRID, argv)
        assert result.codes == [int(stop in failing)], str(result)
    there = {}  # steps, each with its accuracy; -1 if it was in an epoch
    for line in written.read_text().splitlines():
        step, epoch = map(int, line.split())
        there[step] = accuracies[epoch - 1] if epoch else -1.0
        best = max(sorted(there), key=there.get)
        stay = {*sorted(there)[-keep:], *([best] if there[best] >= 0 else [])}
        there = {step: there[step] for step in stay}
    folder = tmp_path / "run" / storage.FOLDER
    assert {storage.step_of(path) for path in storage.list_steps(folder)} == set(there)
    expected = {"accuracy": there[best], "step": best} if there[best] >= 0 else None
    assert storage.newest(folder)[0].state["best"] == expected


# ---- Own images between two commands ---------------------------------------------------------------------------------


def paint(path: Path, grey: int) -> None:
    """Write an image of one grey level, in a file whose size does not depend on it."""
    Image.new("RGB", (16, 16), (grey, grey, grey)).save(path)


def change_own_images(root: Path, draw: random.Random, unused: list[int]) -> str:
    """Do to class folders what leaves names or sizes and, by chance, times as they were."""
    files, kind = sorted(root.rglob("*.bmp")), draw.choice(["nothing", "edit", "swap", "move", "rename", "exchange"])
    times = {path: path.stat().st_mtime_ns for path in files}
    if kind == "edit":
        for path in draw.sample(files, draw.randint(1, len(files) // 2)):
            paint(path, unused.pop())
    elif kind in ("swap", "move"):  # the names of two files; or what two folders have below one name
        one, other = draw.sample(files, 2) if kind == "swap" else draw.choice(list(zip(files, files[8:], strict=False)))
        between = root / "between"
        one.rename(between), other.rename(one), between.rename(other)
    elif kind == "rename":
        draw.choice(files).rename(draw.choice(files).with_name("new.bmp"))
    elif kind == "exchange":
        (root / "a").rename(root / "between"), (root / "b").rename(root / "a"), (root / "between").rename(root / "b")
    if draw.random() < 0.5:
        for path in root.rglob("*.bmp"):
            os.utime(path, ns=(0, times.get(path, 0)))
    return kind


@pytest.mark.cases(3)
def test_own_images_that_change_between_two_commands_are_refused_or_split_and_labelled_as_they_are(
    seed, tmp_path, monkeypatch, report
):
    """Each image has a grey level of its own, by which it is known in the batches."""
    draw, root, execute_schedule = random.Random(seed), tmp_path / "data", Engine.execute_schedule
    greys = draw.sample(range(10, 250), 48)
    for name in "abc":
        (root / name).mkdir(parents=True)
        for number in range(8):
            paint(root / name / f"{number}.bmp", greys.pop())
            os.utime(root / name / f"{number}.bmp", ns=(0, draw.choice([0, 10**18])))

    def watch(engine, batches, forward_only=False, **options):
        def look():
            for images, labels in batches:
                mean, std = (torch.tensor(gpc.config[key]).mean() for key in ("MEAN", "STD"))
                middle = (images.mean(dim=(1, 2, 3)) * std + mean) * 255  # MEAN and STD are those of grey
                with open(tmp_path / f"{command} {os.getpid()}", "a") as file:
                    for grey, label in zip(middle.round().int().tolist(), labels.tolist(), strict=True):
                        file.write(f"{int(forward_only)} {grey} {label}\n")
                yield images, labels

        return execute_schedule(engine, look(), forward_only, **options)

    def seen(command: str) -> set[tuple[int, ...]]:
        lines = {line for path in tmp_path.glob(f"{command} *") for line in path.read_text().splitlines()}
        return {tuple(map(int, line.split())) for line in lines if not line.endswith(" -100")}

    monkeypatch.setattr(Engine, "execute_schedule", watch)
    values = {"DATA": str(root), "NUM_CLASSES": 3, "NUM_EPOCHS": 2, "TEST_FRACTION": 0.25, "MEAN": (0.5,) * 3}
    values |= {"STD": (0.5,) * 3, "CACHE_SIZE": 16, "IMG_SIZE": 16, "DEPTH": 1, "CROP_AREA": (1.0, 1.0)}
    values["KEEP_DECODED"] = draw.random() < 0.7
    trained: set[int] = set()
    change = ""
    for command in ("first", "second"):
        ranks, batch = draw.choice([(1, 4), (2, 2)])
        output = "run" if command == "first" else draw.choice(["run", "other"])
        argv = training.flags(script=training.CALTECH101, **values, BATCH_SIZE=batch)
        argv += ["--output", str(tmp_path / output)]
        argv += ["--max-steps", str(draw.randint(1, 6))] if command == "first" else []
        label_of = {Image.open(path).getpixel((0, 0))[0]: "abc".index(path.parent.name) for path in root.rglob("*.bmp")}
        result = fork_ranks.run(training.CALTECH101, argv, ranks)
        codes = set(result.codes)
        if codes == {2}:
            assert command == "second", str(result)
            assert "was trained with other data" in str(result), str(result)
            break
        assert codes == {0}, str(result)
        assert {label_of[grey] - label for _, grey, label in seen(command)} == {0}, "another class's label"
        trained = trained if output == "run" else set()
        trained |= {grey for evaluated, grey, _ in seen(command) if not evaluated}
        tested = {grey for evaluated, grey, _ in seen(command) if evaluated}
        assert tested
        assert not trained & tested, "test images that the run has trained on"
        if command == "first":
            change = change_own_images(root, draw, greys)
    report(f"seed {seed}: {change}, {output}: exit codes {sorted(codes)}")


# ---- What is no valid run is found -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A run of five steps with two checkpoints."""
    values = {"DEPTH": 1, "BATCH_SIZE": 64, "checkpoint.every_steps": 2, "checkpoint.keep": 2}
    run = training.train(tmp_path_factory.mktemp("five") / "run", steps=5, **values)
    check_run(run.output)
    return run.output


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "a step is missing": (lambda lines: lines[:2] + lines[3:], "steps on record: "),
        "a record is there twice": (lambda lines: [*lines, lines[-1]], "a record twice"),
        "the first steps are missing": (lambda lines: lines[2:], "begins with step 3"),
    }.values(),
)
def test_records_that_are_not_those_of_a_run_are_found(change, words, valid, tmp_path):
    copy = shutil.copytree(valid, tmp_path / "run")
    (copy / METRICS).write_bytes(b"".join(change((copy / METRICS).read_bytes().splitlines(keepends=True))))
    with pytest.raises(AssertionError, match=words):
        check_run(copy)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", '{"LEARNING_RATE": 7.0}', "LEARNING_RATE.* is not the run's"),
        ("config.json", None, "no config.json"),
        ("checkpoints/step-00000005/model.safetensors", "", "damaged: .*model.safetensors"),
    ],
)
def test_files_that_are_not_those_of_a_run_are_found(file, content, words, valid, tmp_path):
    copy = shutil.copytree(valid, tmp_path / "run")
    (copy / file).unlink() if content is None else (copy / file).write_text(content)
    with pytest.raises(AssertionError, match=words):
        check_run(copy)
