"""A run directory is one run's: one writer, one config, one data set, whatever is typed, lost or killed between."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from colossal_vit import config
from colossal_vit.checkpoint import lock, storage, weights
from colossal_vit.data import identity
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossal_vit.results import read_metrics

import caltech101
import cifar10
import fork_ranks
import launchers
import schemas
import training
import warm
from layouts import LAYOUTS
from test_config import TUTORIAL_DATA_PARALLEL
from vit_settings import check_vit

SMALL = dict(DEPTH=1, BATCH_SIZE=128, NUM_EPOCHS=1)
LONG = dict(DEPTH=1, BATCH_SIZE=16, NUM_EPOCHS=10_000)
pytestmark = pytest.mark.usefixtures("few_test_images")


def argv(output, *more, **values):
    return [*training.flags(**{**SMALL, **values}), "--output", str(output), *more]


def run(output, *more, world_size=1, code=0, **values):
    """Train; returns what rank 0 printed, and its errors."""
    return training.train(output, world_size, *more, steps=None, code=code, **{**SMALL, **values}).said


def refused(output, *more, **values):
    """The one line that a command is refused with; whatever was there is as before."""
    return training.refused(output, 1, *more, steps=None, **{**SMALL, **values})


def begun(output, ranks):
    """Wait until a long run has made some steps."""
    launchers.wait_until(
        lambda: launchers.steps_on_record(output) >= 3, lambda: ranks.output(0) + ranks.output(0, "err")
    )


# ---------------------------------------------------------------------------------------------------------------------
# One writer
# ---------------------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    """An evaluation beside it is not; and a holder that is killed stands in nobody's way."""
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    output = tmp_path / "run"
    more = {**LONG, "checkpoint.every_steps": 2}
    ranks = fork_ranks.start(training.HYBRID, argv(output, **more), [{}])
    begun(output, ranks)
    line = fork_ranks.run(training.HYBRID, argv(output, **more)).stderr[0]
    assert f"{output}: process {ranks.pids[0]} on " in line
    assert line.count("\n") == 1
    assert line.endswith(" is writing here: wait until it has ended, or give another --output\n")
    launchers.wait_until(lambda: storage.newest(output / storage.FOLDER)[0], "no checkpoint")
    assert "test accuracy" in run(output, "--eval-only", **more)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert ranks.wait().codes == [-signal.SIGKILL]
    steps = read_metrics(output)[0][-1]["step"]
    assert "resuming from" in run(output, "--max-steps", str(steps + 1), **more)
    assert [r["step"] for r in read_metrics(output)[0]] == list(range(1, steps + 2))


def test_a_file_system_that_cannot_lock_is_named(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", cannot)
    said = run(tmp_path, "--max-steps", "1")
    assert f"{tmp_path}: cannot be locked (No locks available): see to it that no other run writes there" in said


# ---------------------------------------------------------------------------------------------------------------------
# The end of a launcher, a terminal, a reader
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_end_with_the_process_that_started_them(world_size, tmp_path):
    """With a checkpoint of their last step."""
    recipe = argv(tmp_path / "run", **LONG)
    environments = fork_ranks.by_torchrun(world_size)
    said = tmp_path / "pids"
    launcher = os.fork()
    if launcher == 0:
        ranks = fork_ranks.start(training.HYBRID, recipe, environments)
        said.with_suffix(".new").write_text(json.dumps(ranks.pids))
        said.with_suffix(".new").rename(said)
        time.sleep(fork_ranks.PATIENCE)
        os._exit(0)
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 3, "does not train")
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    launchers.wait_until(lambda: all(map(launchers.has_ended, json.loads(said.read_text()))), "the ranks go on")
    steps = read_metrics(tmp_path / "run")[0][-1]["step"]
    newest, _ = storage.newest(tmp_path / "run" / storage.FOLDER)
    assert storage.step_of(newest.path) == steps


def test_a_detached_run_outlives_its_shell(tmp_path):
    """Which nohup says: SIGHUP is ignored."""
    code = """if True:
        import signal, sys
        from colossal_vit.launch import parent
        print(parent.is_detached())
    """
    environment = launchers.environment(PYTHONPATH=str(fork_ranks.ROOT))

    def detached(*prefix):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )
        return process.communicate()[0].strip()

    assert [detached(), detached("nohup"), detached("setsid", "--wait")] == ["False", "True", "True"]


def test_nobody_has_to_read_what_a_run_says(tmp_path):
    """As `| head -1`: it trains on, to the end."""
    with warm.Warm(tmp_path / "warm") as programs:
        read, write = os.pipe()  # not before, since the programs' parent would have both ends, too
        environment = launchers.environment(
            PYTHONPATH=str(fork_ranks.ROOT), DATA=os.environ["DATA"], **programs.environment
        )
        command = [str(programs.bin / "python"), "train_hybrid.py", *argv(tmp_path / "run")]
        process = subprocess.Popen(command, cwd=fork_ranks.ROOT / "vit_cifar10_hybrid", env=environment, stdout=write)
        os.close(write)
        assert os.read(read, 10)
        os.close(read)
        assert process.wait(fork_ranks.PATIENCE) == 0
    assert read_metrics(tmp_path / "run")[1][-1]["step"] == 11


STREAMS = {  # what a process finds where stdout and stderr should be
    "a full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); os.dup2(1, 2)",
    "ASCII": "sys.stdout = open(1, 'w', encoding='ascii', closefd=False)",
    "nothing": "os.close(1); os.close(2); sys.stdout = sys.stderr = None; open_missing_streams()",
}


@pytest.mark.parametrize("found", STREAMS)
def test_a_run_that_cannot_print_trains_to_its_end(found, tmp_path):
    script = tmp_path / "script.py"
    begin = f"import os, runpy, sys; from colossal_vit.files import open_missing_streams; {STREAMS[found]}"
    script.write_text(f"{begin}; runpy.run_path({str(fork_ranks.ROOT / training.HYBRID)!r}, run_name='__main__')")
    result = fork_ranks.run(script, argv(tmp_path / "run", "--max-steps", "2"))
    assert result.codes == [0], str(result)
    assert len(read_metrics(tmp_path / "run")[0]) == 2
    assert ("\\xd7" in result.stdout[0]) == (found == "ASCII")
    assert fork_ranks.run(script, argv(tmp_path / "run", SEED=-1)).codes == [2]


def test_the_published_data_parallel_config_trains(tmp_path):
    """One that says nothing of classes, and has a block for DALI."""
    path = tmp_path / "published.py"
    path.write_text(TUTORIAL_DATA_PARALLEL)
    sizes = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=1, NUM_HEADS=2, BATCH_SIZE=16)
    options = dict(script=training.DATA_PARALLEL, config=path, small=False, steps=1)
    said = training.train(tmp_path / "run", **options, **sizes).said
    assert "dali does nothing in this script: TFRecords are read by another LOADER, and images are not mixed" in said


def test_no_file_gets_the_number_of_a_missing_stderr():
    code = "import os; from colossal_vit.files import protect_streams; protect_streams(); os._exit(os.open('/', 0))"
    environment = launchers.environment(PYTHONPATH=str(fork_ranks.ROOT))
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, env=environment).returncode > 2


# ---------------------------------------------------------------------------------------------------------------------
# One data set, one set of values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps(small_sample, tmp_path_factory):
    output = tmp_path_factory.mktemp("two") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(small_sample))
        run(output, "--max-steps", "2")
    return output


@pytest.fixture
def trained(two_steps, tmp_path):
    """A copy of a run of two steps."""
    return shutil.copytree(two_steps, tmp_path / "run")


def state_of(output):
    return storage.newest(output / storage.FOLDER)[0].state


def test_other_data_are_refused_or_put_on_record(trained, tmp_path, monkeypatch, small_sample):
    """Wherever they lie: a copy is the same data."""
    shutil.copytree(small_sample, tmp_path / "copy")
    monkeypatch.setenv("DATA", str(tmp_path / "copy"))
    assert "resuming from" in run(trained, "--max-steps", "3")
    folder = cifar10.write_images(tmp_path / "other")
    monkeypatch.setenv("DATA", str(folder.parent))
    line = refused(trained, "--max-steps", "4")
    assert "step-00000003: was trained with other data (content, test images 90 → 360): change that back" in line
    said = run(trained, "--accept-changes", "--max-steps", "4")
    assert "changed since then: data (content, test images 90 → 360)" in said
    assert state_of(trained)["changes"] == [{"step": 3, "values": {}, "data": "content, test images 90 → 360"}]
    run(trained, "--max-steps", "5")
    assert len(state_of(trained)["changes"]) == 1


def test_the_best_accuracy_is_one_on_the_same_images(tmp_path, monkeypatch):
    output, values = tmp_path / "run", dict(BATCH_SIZE=512, NUM_EPOCHS=2)
    for steps in (2, 3):
        run(output, "--max-steps", str(steps), **values)
        assert state_of(output)["best"]["step"] == 2
    monkeypatch.setenv("DATA", str(cifar10.write_images(tmp_path / "other").parent))
    run(output, "--accept-changes", "--max-steps", "4", **values)
    assert state_of(output)["best"]["step"] == 4


def test_the_two_versions_of_cifar10_are_the_same_data(tmp_path):
    """The digest is of labels and pixels in one order."""
    import numpy as np

    records = np.random.default_rng(0).integers(0, 9, (5, cifar10.RECORD_BYTES), dtype=np.uint8)
    images, labels, digest = cifar10._split_records(records)
    pickled = images.permute(0, 2, 3, 1).numpy().transpose(0, 3, 1, 2)
    again = np.concatenate([labels.numpy().astype(np.uint8)[:, None], pickled.reshape(5, -1)], axis=1)
    assert cifar10._split_records(again)[2] == digest


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"classes": ["a", "c"]}, "classes → 2 without b"),
        ({"classes": ["b", "a", "c"]}, "classes in another order"),
        ({"classes": ["a", "b", "d"]}, "without c with d"),
        ({"training images": 5}, "training images 10 → 5"),
        ({"content": "other"}, "content"),
        ({"images": "ImageNet"}, "images Caltech101 → ImageNet"),
        ({"classes": 4}, "classes ['a', 'b', 'c'] → 4"),
        ({}, ""),
    ],
)
def test_differences_of_data_are_said_in_words(new, words):
    old = identity.identify("Caltech101", (10, 2), ["a", "b", "c"], "digest")
    assert words in identity.differences(old, {**old, **new})
    assert bool(identity.differences(old, {**old, **new})) == bool(new)


def test_names_of_classes_that_were_numbers_before_are_no_difference():
    old = identity.identify("CIFAR-10", (10, 2), 3, "digest")
    assert identity.differences(old, {**old, "classes": ["a", "b", "c"]}) == ""
    assert identity.differences(old, {**old, "classes": ["a", "b"]}) == "classes 3 → ['a', 'b']"


def test_a_class_that_is_gone_is_noticed(tmp_path, monkeypatch):
    """All labels after it are others then."""
    root = tmp_path / "data"
    caltech101.write_sample(root)
    options = dict(script=training.CALTECH101, BATCH_SIZE=64, CACHE_SIZE=16, DATA=str(root))
    training.train(tmp_path / "run", steps=1, **options)
    shutil.rmtree(root / "caltech101/101_ObjectCategories/3")
    line = training.refused(tmp_path / "run", steps=2, **options)
    assert "other data (10 classes → 9 without 3, content, " in line


def test_values_that_change_what_is_learned_are_refused_or_put_on_record(trained):
    line = refused(trained, LEARNING_RATE=1e-3, gradient_accumulation=2)
    assert "step-00000002: was trained with other values (LEARNING_RATE 0.003 → 0.001, global batch 128 → 256)" in line
    assert "resume it as it is with --accept-changes" in line
    run(trained, "--accept-changes", "--max-steps", "2", LEARNING_RATE=1e-3)
    assert json.loads((trained / "config.json").read_text())["LEARNING_RATE"] == 3e-3, "no step was made with 1e-3"
    run(trained, "--accept-changes", "--max-steps", "3", LEARNING_RATE=1e-3)
    (change,) = state_of(trained)["changes"]
    assert change == {"step": 2, "values": {"LEARNING_RATE": [0.003, 0.001]}, "data": ""}
    assert json.loads((trained / "config.json").read_text())["LEARNING_RATE"] == 1e-3


def test_layout_length_and_files_may_change(trained):
    """None of them changes what is learned."""
    world_size, values = LAYOUTS["1D 2"]
    more = {**values, "NUM_EPOCHS": 2, "CHECKPOINT": True, "checkpoint.keep": 1}
    assert "resuming from" in run(trained, "--max-steps", "3", world_size=world_size, **more)
    assert state_of(trained)["changes"] == []


# ---------------------------------------------------------------------------------------------------------------------
# Which run it is
# ---------------------------------------------------------------------------------------------------------------------


def test_a_command_that_starts_from_a_checkpoint_resumes_its_own_run(trained, tmp_path):
    output = tmp_path / "next"
    flags = ["--resume", str(trained)]
    assert "step 2," in run(output, *flags, "--max-steps", "4")
    said = run(output, *flags, "--max-steps", "6")
    assert f"resuming from {output}/checkpoints/step-00000004" in said
    assert [r["step"] for r in read_metrics(output)[0]] == [3, 4, 5, 6]
    line = refused(tmp_path / "done", *flags, "--max-steps", "2")
    assert line.endswith("step-00000002 has made all steps of this run: raise --max-steps")
    assert not (tmp_path / "done").exists()
    assert "test accuracy" in run(output, *flags, "--eval-only")
    assert f"resuming from {output}/checkpoints/step-00000006" in run(output, "--max-steps", "7")
    assert not (tmp_path / "next.1").exists()
    line = refused(output, "--resume", str(output / "checkpoints/step-00000004"))
    assert "has newer ones, up to step-00000007" in line


def test_nothing_is_left_of_a_command_that_is_refused(tmp_path, monkeypatch):
    """In folders that it made or found, wherever it is refused: before the ranks meet, or when they have."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/metrics.jsonl").write_text("somebody's")
    for output in (tmp_path / "a/b/c", tmp_path / "there"):
        refused(output, NO_SUCH_KEY=1)
        refused(output, "--resume", str(tmp_path / "nothing"))
    monkeypatch.setenv("DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(cifar10, "ARCHIVE", "http://localhost:1/no.tar.gz")
    refused(tmp_path / "a/b/c")
    assert not (tmp_path / "a").exists()
    assert os.listdir(tmp_path / "there") == ["metrics.jsonl"]


# ---------------------------------------------------------------------------------------------------------------------
# Every key counts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "override"),
    [
        (training.DATA_PARALLEL, "MLP_RATIO=8"),
        (training.DATA_PARALLEL, "IMAGES_PER_S=1.0"),
        (training.HYBRID, "POSITIONS='sincos2d'"),
        *((script, "mix.mixup=0.2") for script in (training.HYBRID, training.DATA_PARALLEL, training.CALTECH101)),
        (training.CALTECH101, "MLP_RATIO=2"),
        (training.IMAGENET, "CHECKPOINT=True"),
    ],
)
def test_a_key_that_the_script_does_not_use_is_refused(script, override, tmp_path):
    (tmp_path / "config.py").touch()
    with pytest.raises(UserError, match=rf"^--set: unknown key {override.split('=')[0].split('.')[0]}"):
        schemas.script(script).load(tmp_path / "config.py", [override])


@pytest.mark.parametrize("name", ["config_pipeline_parallel.py", "config_tensor_1d.py"])
def test_the_tutorials_names_set_the_layout_whether_a_file_computes_it_from_them_or_not(name):
    path = fork_ranks.ROOT / "vit_cifar10_hybrid/configs" / name
    loaded = schemas.script(training.HYBRID).load(path, ["TENSOR_PARALLEL_SIZE=4", "TENSOR_PARALLEL_MODE='2d'"])
    assert loaded.parallel.tensor == {"mode": "2d", "size": 4}


def test_blocks_may_be_calls_of_dict_and_leave_the_depth_out():
    """`dict(...)` is a literal too; a depth that is left out is 1."""
    assert config.parse_override("checkpoint=dict(every_steps=20)") == (("checkpoint",), {"every_steps": 20})
    assert config.parse_override("parallel=dict(tensor=dict(mode='1d', size=2))")[1] == {
        "tensor": {"mode": "1d", "size": 2}
    }
    path = fork_ranks.ROOT / "vit_cifar10_hybrid/configs/config_pipeline_parallel.py"
    loaded = schemas.script(training.HYBRID).load(
        path, ["parallel.pipeline=1", "parallel.tensor=dict(mode='2.5d', size=4)"]
    )
    assert loaded.parallel.tensor.depth == 1


@pytest.mark.parametrize(
    ("layout", "values", "words"),
    [
        ("2D 4", {"MLP_RATIO": 1.3, "HIDDEN_SIZE": 24}, "makes 31 hidden units, but it takes a multiple of 4 in 2d"),
        ("1D 2", {"MLP_RATIO": 1.3, "HIDDEN_SIZE": 24}, "makes 31 hidden units, but it takes a multiple of 2 in 1d"),
        ("1D 2", {"MLP_RATIO": 0.01}, "makes 0 hidden units"),
    ],
)
def test_hidden_units_that_cannot_be_split_are_refused_with_a_ratio_that_works(layout, values, words):
    world_size, where = LAYOUTS[layout]
    loaded = training.config_of(training.flags(**where, **values))
    with pytest.raises(UserError, match=words) as error:
        check_vit(loaded, Layout.of(loaded, world_size))
    loaded.MLP_RATIO = float(str(error.value).rpartition(" ")[2])
    check_vit(loaded, Layout.of(loaded, world_size))


def test_a_disk_that_takes_a_part_of_a_record_gets_the_rest_too(tmp_path, monkeypatch):
    """Also at the end of a run."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:7]))
    run(tmp_path, "--max-steps", "2")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 2]


def test_lost_records_are_counted_when_the_run_resumes(trained):
    path = trained / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    said = run(trained, "--max-steps", "3")
    assert "stopped after step 3, as --max-steps says" in said
    assert f"{path}: lacks 1 of the steps up to 2, the first is 2" in said
    assert [record["step"] for record in read_metrics(trained)[0]] == [1, 3]


def test_a_run_that_is_beyond_its_end_stays_as_it_is(tmp_path):
    """Stopped in the middle of its second epoch, and evaluated there."""
    run(tmp_path, "--max-steps", "3", BATCH_SIZE=512, NUM_EPOCHS=2)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    assert b'"step": 3, "epoch": 1, "eval_loss"' in before
    for more, num_epochs in ((["--max-steps", "2"], 2), (["--accept-changes"], 1)):
        said = run(tmp_path, *more, BATCH_SIZE=512, NUM_EPOCHS=num_epochs)
        assert "nothing is left to do: the run has made its 3 steps" in said
        assert "stopped after" not in said
        assert path.read_bytes() == before


def test_a_run_that_max_steps_has_ended_is_evaluated_once(tmp_path):
    """In the middle of its epoch; killed before the evaluation, which is made when it is started again."""
    run(tmp_path, "--max-steps", "3", BATCH_SIZE=256)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    assert b'"step": 3, "epoch": 0, "eval_loss"' in before
    said = run(tmp_path, "--max-steps", "3", BATCH_SIZE=256)
    assert "nothing is left to do: the run has made its 3 steps" in said
    assert "test accuracy" not in said
    assert path.read_bytes() == before
    path.write_bytes(b"".join(before.splitlines(keepends=True)[:3]))
    said = run(tmp_path, "--max-steps", "3", BATCH_SIZE=256)
    assert "test accuracy" in said
    assert path.read_bytes() == before


def test_another_number_of_heads_is_not_evaluated(tmp_path):
    """No shape tells it."""
    run(tmp_path, "--max-steps", "1", NUM_HEADS=4)
    line = refused(tmp_path, "--eval-only", NUM_HEADS=2)
    assert line.endswith("step-00000001: was trained with NUM_HEADS = 4, not 2: set it back")
    finetune = {"finetune.weights": str(tmp_path), "finetune.head": "keep"}
    line = refused(tmp_path.with_name("other"), NUM_HEADS=2, **finetune)
    assert "was trained with NUM_HEADS = 4, not 2: set it to theirs" in line
    assert "test accuracy" in run(tmp_path, "--eval-only", "--accept-changes", NUM_HEADS=2)


def test_the_number_of_heads_may_be_that_of_a_model_of_timm():
    usual, named = {"MODEL": "vit_tiny_patch16_224"}, {"NUM_HEADS": 3}
    assert weights.other_heads(usual, named) == weights.other_heads(named, usual) == ""
    assert weights.other_heads(usual, {"NUM_HEADS": 6}) == "was trained with NUM_HEADS = 3, not 6"
    assert weights.other_heads({}, named) == "", "nobody knows"


def test_damaged_records_are_left_out_and_named_and_the_run_resumes(trained):
    """As by a disk that failed, or an editor; the record that a killed run had begun is no news."""
    path = trained / "metrics.jsonl"
    first, second, *_ = path.read_bytes().splitlines(keepends=True)
    strange = [b"null\n", b"\xff\n", b"\0\0\0\n", b"[]\n", b"{}\n", b"[" * 100_000 + b"\n", b"\n"]
    strange += [second.replace(b'"step": 2', other) for other in (b'"step": "2"', b'"step": -2', b'"step": 1e400')]
    strange += [second.replace(b'"epoch": 0, ', b""), second.replace(b'"loss"', b'"loss": null, "x"')]
    path.write_bytes(b"".join([first, *strange, second, second[:20]]))
    assert [record["step"] for record in read_metrics(trained)[0]] == [1, 2]
    said = run(trained, "--max-steps", "4")
    left_out = re.findall(rf"left out: {path}, line (\d+): (.+)", said)
    assert [int(number) for number, _ in left_out] == list(range(2, 2 + len(strange)))
    assert [words for _, words in left_out[-5:-2]] == [
        "step = '2': should be a valid integer",
        "step = -2: should be greater than or equal to 0",
        "step = inf: should be a valid integer",
    ]
    assert path.read_bytes().splitlines(keepends=True)[:2] == [first, second]
    assert [record["step"] for record in read_metrics(trained)[0]] == [1, 2, 3, 4]
