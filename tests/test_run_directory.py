"""A run directory per command: the same command has one, another command has another."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from colossal_vit.checkpoint import lock, storage
from colossal_vit.checkpoint.lock import DirectoryLock
from colossal_vit.checkpoint.run_directory import MARK, MAX_NAME, default, is_taken, latest

import fork_ranks
import training
from training import contents

# A short command, to be run from elsewhere.
SHORT = [*training.flags(DEPTH=1, BATCH_SIZE=128), "--max-steps", "1"]
FOLDER = fork_ranks.ROOT / "vit_cifar10_hybrid"
SCRIPT, CONFIG = FOLDER / "train_hybrid.py", FOLDER / "configs" / "config_tensor_2d.py"


def name(*overrides, script=SCRIPT, config=CONFIG):
    return default(Path(script), Path(config), overrides, "auto")


OVERRIDES = ("parallel.pipeline=1", "BATCH_SIZE=16", "OPTIMIZER='adamw'", "fp16.mode=AMP_TYPE.NAIVE")


def test_a_directory_has_the_name_of_the_config_and_with_overrides_a_hash():
    runs = fork_ranks.ROOT / "runs" / "vit_cifar10_hybrid"
    assert name() == runs / "train_hybrid" / "config_tensor_2d"
    assert re.fullmatch(r"config_tensor_2d-[0-9a-f]{8}", name(*OVERRIDES).name)


def test_a_run_of_an_earlier_version_keeps_its_directory(tmp_path):
    """Which had the name of the whole command; where characters of it are left out, with a hash."""
    script = tmp_path / "example" / "train.py"
    commands = {
        "config_a,BATCH_SIZE=16,OPTIMIZER=adamw,fp16.mode=NAIVE,parallel.pipeline=1": OVERRIDES,
        "config_a,CROP_AREA=0.5,1.0~0d64561b": ["CROP_AREA=(0.5, 1.0)"],
    }
    for older, overrides in commands.items():
        new = name(*overrides, script=script, config=script.with_name("config_a.py"))
        (new.parent / older).mkdir(parents=True)
        assert name(*overrides, script=script, config=script.with_name("config_a.py")) == new.parent / older
        assert name(*overrides, "DEPTH=2", script=script, config=script.with_name("config_a.py")) not in (new, older)


def test_the_same_command_has_the_same_directory(tmp_path, monkeypatch):
    """In another order, said twice, written otherwise, from elsewhere, through a link."""
    expected = name("BATCH_SIZE=16", "LEARNING_RATE=0.001")
    assert name("LEARNING_RATE=1e-3", "BATCH_SIZE = 16") == expected
    assert name("BATCH_SIZE=8", "LEARNING_RATE=1e-3", "BATCH_SIZE=16") == expected
    assert name("OPTIMIZER=lamb", "fp16.mode=naive") == name("OPTIMIZER='lamb'", "fp16.mode=AMP_TYPE.NAIVE")
    (tmp_path / "link").symlink_to(FOLDER)
    linked = tmp_path / "link"
    here = name(script=linked / "train_hybrid.py", config=linked / "configs" / "config_tensor_2d.py")
    assert here == name()
    monkeypatch.chdir(FOLDER / "configs")
    assert name(script="../train_hybrid.py", config="config_tensor_2d.py") == name()


def test_another_command_has_another_directory(tmp_path):
    """Another script, config, value, or file of the same name; whatever is left out of a name is in its hash."""
    copies = [tmp_path / side / CONFIG.name for side in "ab"]
    long = [f"{key}={number}" for key in ("DEPTH", "NUM_HEADS", "HIDDEN_SIZE") for number in (10**70, 10**70 + 1)]
    directories = [
        name(),
        name(script=FOLDER / "train_dp.py"),
        name(config=CONFIG.with_name("config_tensor_1d.py")),
        name("BATCH_SIZE=16"),
        name("BATCH_SIZE=160"),
        name("CROP_AREA=(0.5, 1.0)"),
        name("CROP_AREA=[0.5, 1.0]"),
        name("DATA='/data/a b'"),
        name("DATA='/data/a_b'"),
        *(name(config=copy) for copy in copies),
        *(name(*long[start::2]) for start in range(2)),
    ]
    assert len(set(directories)) == len(directories)
    for directory in directories:
        assert len(os.fsencode(directory.name)) <= MAX_NAME + 9
        assert directory.name.isascii()
        assert not set(directory.name) & set(" '\"()[]{}$&;|<>*?/\\")


def test_two_commands_do_not_continue_each_other(tmp_path):
    """Through the command line: one is repeated and resumes, the other one begins."""
    script = tmp_path / "example" / "train_hybrid.py"
    script.parent.mkdir()
    for name in (SCRIPT.name, "vit.py", "vit_settings.py", "cifar10.py"):
        shutil.copy(FOLDER / name, script.parent)

    def run(*more):
        result = fork_ranks.run(script, [*SHORT, *more])
        assert result.codes == [0], str(result)
        return result.stdout[0]

    assert "resuming from" not in run()
    assert "resuming from" not in run("--set", "DEPTH=2")
    assert "resuming from" in run()
    runs = sorted((tmp_path / "runs" / "example" / "train_hybrid").iterdir())
    assert len(runs) == 2
    assert all(re.fullmatch(r"config_pipeline_parallel-[0-9a-f]{8}", run.name) for run in runs)


QUICKSTARTS = """
root=$PWD
python() {
    if [ "${2:-}" != colossal_vit.launch.torchrun ]; then return; fi
    echo "$output" >> "$root/said"
    if [ ! -v SECOND ]; then (cd "$root" && SECOND=1 bash scripts/quickstart.sh); fi
}
"""


def test_two_quickstarts_at_once_have_two_directories(tmp_path):
    """The second one begins before the first one's run has made anything; no run, no directory."""
    for folder in ("scripts", "vit_cifar10_hybrid"):
        (tmp_path / folder).mkdir()
    shutil.copy(fork_ranks.ROOT / "scripts/quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text(QUICKSTARTS)
    subprocess.run(["bash", "scripts/quickstart.sh"], cwd=tmp_path, check=True)
    runs = tmp_path / "runs"
    assert (tmp_path / "said").read_text() == f"{runs}/quickstart-1\n{runs}/quickstart-2\n"
    assert not any(runs.iterdir())


DRY_RUN = f"""
root=$PWD
python() {{
    if [ "$1" = - ]; then {sys.executable} "$@"; fi
    if [ "${{2:-}}" = colossal_vit.launch.torchrun ]; then touch "$output/layout.png"; fi
}}
"""


def test_a_quickstart_that_trains_nothing_ends_without_an_accuracy(tmp_path):
    """As with `--dry-run`, which leaves a picture only."""
    for folder in ("scripts", "vit_cifar10_hybrid"):
        (tmp_path / folder).mkdir()
    shutil.copy(fork_ranks.ROOT / "scripts/quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text(DRY_RUN)
    done = subprocess.run(["bash", "scripts/quickstart.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in (tmp_path / "runs/quickstart-1").iterdir()] == ["layout.png"]


# ---- What is in it already ----

RUN = ["config.json", "metrics.jsonl", ".lock"]
STEP = "checkpoints/step-00000002/state.json"


def fill(directory, names):
    """Make files, each with its name in it."""
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        ([], False),
        (["src/a.py", "checkpoints/mine.pt", "model.safetensors", "classes.txt"], False),  # is beside a run, untouched
        (["config.json", ".lock", MARK], False),  # a run that made no step
        (["config.json", ".lock"], True),  # another program's, where a run was killed before it wrote anything
        (RUN, True),
        ([STEP], True),
        (["metrics.jsonl"], True),
        (["loss.png"], True),
    ],
)
def test_a_directory_is_taken_if_a_run_would_overwrite_or_continue_what_is_there(names, taken, tmp_path):
    fill(tmp_path, names)
    assert is_taken(tmp_path) == taken
    assert not is_taken(tmp_path / "run")


def test_the_latest_directory_is_one_that_was_taken_for_the_one_asked_for(tmp_path):
    """Numbers alone say nothing: `lr0.1` need not be the second run of `lr0`."""
    asked = tmp_path / "lr0"
    assert latest(asked) == asked
    for number in range(1, 4):
        fill(tmp_path / f"lr0.{number}", RUN)
    assert latest(asked) == asked
    (tmp_path / "lr0.2" / MARK).write_text("lr0")
    (tmp_path / "lr0.3" / MARK).write_text("lr0.3")
    assert latest(asked) == tmp_path / "lr0.2"
    assert latest(Path("/")) == Path("/")


@pytest.mark.parametrize(
    ("output", "inside"),
    [("run", ".."), ("run/../run", ".."), ("link/", ".."), (".", ""), ("../link", ""), ("..", "checkpoints")],
)
def test_a_new_run_takes_the_next_directory_whatever_way_leads_to_an_earlier_one(output, inside, tmp_path):
    """All that was there is as it was; the same command then continues the new run, and evaluates it."""
    run = tmp_path / "run"
    fill(run, [*RUN, STEP, "notes.txt"])
    (tmp_path / "link").symlink_to(run)
    before = contents(run)

    def train(*more):
        result = fork_ranks.run(training.HYBRID, [*SHORT, "--output", output, *more], cwd=run / inside)
        assert result.codes == [0], str(result)
        return result.stdout[0]

    assert f"{run} has an earlier run: this one is in {run}.1" in train("--resume", "never")
    assert f"resuming from {run}.1/checkpoints/step-00000001" in train("--max-steps", "2")
    assert f"the weights are those of {run}.1/checkpoints/step-00000002, step 2" in train("--eval-only")
    assert f"this one is in {run}.2" in train("--resume", "never")
    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run", "run.1", "run.2"]
    assert storage.Checkpoint(Path(f"{run}.1/checkpoints/step-00000002")).state["step"] == 2


def test_a_run_that_a_launcher_starts_again_resumes_where_it_began(tmp_path):
    """By the same command, with `--resume never`."""
    run = tmp_path / "run"
    fill(run, [*RUN, STEP])
    argv = [*SHORT, "--output", str(run), "--resume", "never"]
    for count, said in (("0", f"this one is in {run}.1"), ("1", f"resuming from {run}.1/checkpoints/step-00000001")):
        result = fork_ranks.start(training.HYBRID, argv, [{"TORCHELASTIC_RESTART_COUNT": count}]).wait()
        assert result.codes == [0], str(result)
        assert said in result.stdout[0]
    assert not Path(f"{run}.2").exists()


def test_damaged_checkpoints_alone_are_left_to_the_earlier_run(tmp_path):
    fill(tmp_path / "run", [*RUN, STEP])
    before = contents(tmp_path / "run")
    said = training.train(tmp_path / "run", steps=1, DEPTH=1, BATCH_SIZE=128).said
    assert f"skipped: {tmp_path}/run/checkpoints/step-00000002" in said
    assert f"{tmp_path}/run has an earlier run: this one is in {tmp_path}/run.1" in said
    assert contents(tmp_path / "run") == before


def test_what_is_beside_a_run_is_not_changed(tmp_path):
    fill(tmp_path, names := ["src/a.py", "checkpoints/mine.pt"])
    training.train(tmp_path, steps=1, DEPTH=1, BATCH_SIZE=128)
    assert {name: (tmp_path / name).read_text() for name in names} == {name: name for name in names}


def test_a_refused_new_run_leaves_nothing(tmp_path):
    fill(tmp_path / "run", RUN)
    training.refused(tmp_path / "run", 1, "--resume", "never", NUM_CLASSES=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_directory_that_is_not_utf8_is_refused_before_training(tmp_path):
    output = tmp_path / os.fsdecode(b"r\xe4n")
    line = training.refused(output)
    assert line.endswith("/r\\udce4n: is not in UTF-8; give another --output")
    assert not any(tmp_path.iterdir())


def test_the_second_of_two_refused_runs_leaves_nothing(monkeypatch, tmp_path):
    """It waits for the lock of the first, which then removes the directory, and so creates one itself."""
    directory = tmp_path / "new" / "run"

    def second():
        ready, go = os.pipe(), os.pipe()
        own = DirectoryLock()
        if not (first := os.fork()):
            own.acquire(directory)
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            own.remove_unused()
            os._exit(0)
        os.read(ready[0], 1)

        def wait(seconds):
            os.write(go[1], b"1")
            os.waitpid(first, 0)

        monkeypatch.setattr(lock.time, "sleep", wait)
        assert own.acquire(directory) is None
        assert directory.exists()
        own.remove_unused()

    fork_ranks.call(second, launched=False)
    assert not directory.parent.exists()


def test_what_another_run_removes_in_this_moment_is_made_and_removed_again(tmp_path, monkeypatch):
    """The lock and its directory are there when they are looked for, and gone when they are opened."""
    directory = tmp_path / "run"

    def acquire_and_leave():
        exists, is_dir, first = Path.exists, Path.is_dir, [True]
        monkeypatch.setattr(Path, "exists", lambda path: path.parent in (tmp_path, directory) or exists(path))
        monkeypatch.setattr(Path, "is_dir", lambda path: first.pop() if first else is_dir(path))
        own = DirectoryLock()
        own.acquire(directory)
        monkeypatch.undo()
        assert (directory / lock.NAME).exists()
        own.remove_unused()

    fork_ranks.call(acquire_and_leave, launched=False)
    assert not directory.exists()
