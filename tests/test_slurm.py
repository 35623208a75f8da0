"""A real SLURM of one node: srun in every example, sbatch of the template, cancelled jobs, time limits."""

import re
import shlex
import socket
from pathlib import Path

import pytest
from colossal_vit.checkpoint import storage

import fork_ranks
import launchers
import training
import warm

TEMPLATE = "scripts/slurm/train.sbatch"
NO_GPU = ["--gpus-per-node=0", "--cpus-per-task=1"]


# A train script as far as a time limit goes: it does nothing until it is asked to stop.
IDLE = """
import signal
import sys

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.pause()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster with one job in it, `cluster.timed`, that will run out of time."""
    cluster = launchers.Slurm(tmp_path_factory.mktemp("slurm"))
    project = tmp_path_factory.mktemp("project")
    (project / "example").mkdir()
    (project / "example/train.py").write_text(IDLE)
    options = ["--ntasks-per-node=1", *NO_GPU, f"--output={project}/log", "--time=3", "--signal=B:USR1@75"]
    cluster.timed = cluster.submit(
        *options, str(fork_ranks.ROOT / TEMPLATE), "example/train.py", "config.py", cwd=project
    )
    cluster.timed_log = project / "log"
    yield cluster
    cluster.stop()


def submit(slurm, tasks, output, *argv, options=(), style=(), **values):
    """A job of the template on the pipeline config."""
    flags = launchers.small(output, **values)
    command = ["vit_cifar10_hybrid/train_hybrid.py", training.CONFIG, *flags, *argv]
    log = f"--output={output}-%j.log"
    return slurm.submit(f"--ntasks-per-node={tasks}", *NO_GPU, log, *options, TEMPLATE, *style, *command)


def workers(output):
    """The training processes that write to a run directory."""
    code, said = launchers.run(["pgrep", "-f", rf"^\S*python\S* (-u )?train_hybrid\.py .*--output {output} "])
    return said.split() if code == 0 else []


@pytest.mark.parametrize(("tasks", "style"), [(2, []), (4, ["--torchrun"])])
def test_sbatch_trains_on_a_real_slurm(slurm, tasks, style, tmp_path):
    """A task a process, and one torchrun a node: the losses are the same."""
    job = submit(slurm, tasks, tmp_path / "run", style=style)
    assert slurm.ended(job) == "COMPLETED", (tmp_path / f"run-{job}.log").read_text()
    said = (tmp_path / f"run-{job}.log").read_text()
    assert f"ranks 0 to {tasks - 1} of {tasks} on " in said
    assert ("started by torchrun in a SLURM job" if style else f"started by srun in job {job}") in said
    assert launchers.losses(tmp_path / "run") == launchers.reference(tmp_path / "reference", tasks)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The variables of a shell whose `python` starts at once, also as a task of srun, with the name of this node."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as started:
        path = f"{started.bin}:{launchers.environment()['PATH']}"
        host = socket.gethostname().split(".")[0]
        yield dict(started.environment, PATH=path, PYTHONPATH=str(fork_ranks.ROOT), HOST=host)


@pytest.mark.parametrize("script", [training.IMAGENET, training.CALTECH101])
def test_published_srun_command_trains(slurm, script, programs, tmp_path):
    """HOST=<node> srun bash ./scripts/train_slurm.sh"""
    values = {key: value for key, value in training.SMALL[script].items() if key != "fp16"}
    flags = ["--output", str(tmp_path / "run"), "--max-steps", "1", *training.set_flags({**values, "SYNTHETIC": True})]
    command = ["srun", "--ntasks=2", "bash", "./scripts/train_slurm.sh", *flags]
    code, said = slurm(*command, cwd=(fork_ranks.ROOT / script).parent, **programs)
    assert code == 0, said
    assert re.search(
        rf"ranks 0 to 1 of 2 on .*, started by srun in job \d+, step 0, rendezvous at {programs['HOST']}:", said
    )
    assert len(launchers.losses(tmp_path / "run")) == 1


def test_two_steps_of_a_job_train_apart(slurm, programs, tmp_path):
    """As a sweep starts them, at once: each takes its own two tasks."""
    rates = (1e-3, 5e-3)
    flags = {rate: launchers.small(tmp_path / f"run-{rate}", LEARNING_RATE=rate) for rate in rates}
    srun = ["srun", "--overlap", "--exact", "--ntasks=2", "bash", "./scripts/train_slurm.sh", training.CONFIG]
    both = " & ".join(shlex.join([*srun, *flags[rate]]) for rate in rates)
    code, said = slurm("salloc", "--ntasks=4", "bash", "-c", f"{both} & wait", cwd=launchers.FOLDER, **programs)
    assert code == 0, said
    assert all(f", step {step}, rendezvous at" in said for step in (0, 1)), said
    for rate in rates:
        expected = launchers.reference(tmp_path / f"reference-{rate}", 2, LEARNING_RATE=rate)
        assert launchers.losses(tmp_path / f"run-{rate}") == expected, said


def test_sbatch_without_arguments_says_what_to_type(slurm, tmp_path):
    job = slurm.submit(*NO_GPU, "--ntasks-per-node=1", f"--output={tmp_path}/log", TEMPLATE, "no/such.py")
    assert slurm.ended(job) == "FAILED"
    assert "train.sbatch: error: type, in the root of the repository: sbatch" in (tmp_path / "log").read_text()


LONG = dict(NUM_EPOCHS=1000)


def test_a_cancelled_job_ends_between_two_steps(slurm, tmp_path):
    job = submit(slurm, 2, tmp_path / "run", steps=100_000, **LONG)
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") > 3, slurm.logs)
    assert len(workers(tmp_path / "run")) == 2
    assert slurm("scancel", job)[0] == 0
    assert slurm.ended(job) == "CANCELLED"
    said = launchers.wait_until(lambda: (tmp_path / f"run-{job}.log").read_text(), "no log")
    assert re.search(r"train_hybrid\.py: stopped by SIGTERM after step \d+", said), said
    assert "Traceback" not in said
    launchers.wait_until(lambda: not workers(tmp_path / "run"), "something of the job is left")


def test_ranks_end_with_srun(slurm, tmp_path):
    """With a checkpoint, while the batch script that called srun continues."""
    output = tmp_path / "run"
    flags = launchers.small(output, steps=100_000, NUM_EPOCHS=1000)
    command = shlex.join(["python", "-u", "train_hybrid.py", "--config", training.CONFIG, *flags])
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nsrun {command}\necho srun gave $?\nsleep 600\n")
    options = ["--ntasks=2", f"--output={tmp_path}/log", f"--chdir={launchers.FOLDER}"]
    job = slurm.submit(*options, str(tmp_path / "job.sh"))
    launchers.wait_until(lambda: launchers.steps_on_record(output) > 3, (tmp_path / "log").read_text)
    assert len(workers(output)) == 2
    for signal in ("-STOP", "-KILL"):  # srun, and its child at once, which would kill the ranks when srun is gone
        launchers.run(["pkill", signal, "-f", f"^srun .*--output {output} "])
    launchers.wait_until(lambda: not workers(output), (tmp_path / "log").read_text)
    assert slurm.state(job) == "RUNNING"
    assert "srun gave 137" in (tmp_path / "log").read_text()
    newest, _ = storage.newest(output / storage.FOLDER)
    assert storage.step_of(newest.path) == launchers.steps_on_record(output)
    slurm("scancel", "--full", job)
    slurm.ended(job)


def queued_again(slurm, job, log):
    """Wait until a job has stopped and is in the queue again; returns what it said."""
    launchers.wait_until(lambda: log.exists() and "is queued again" in log.read_text(), slurm.logs)
    launchers.wait_until(lambda: re.search(r"Restarts=[1-9]", slurm("scontrol", "show", "job", job)[1]), slurm.logs)
    slurm("scancel", "--full", job)
    slurm.ended(job)
    return log.read_text()


@pytest.mark.parametrize(
    ("style", "ready"),
    [
        ([], lambda output: launchers.steps_on_record(output) > 1),
        (["--torchrun"], lambda output: len(workers(output)) == 2),
    ],
    ids=["a task a process, training", "one torchrun a node, importing"],
)
def test_a_job_that_is_told_to_stop_is_queued_again(slurm, style, ready, tmp_path):
    """The batch script hands USR1 on to the training, also to one that cannot hear it yet, and puts the job back."""
    output = tmp_path / "run"
    job = submit(slurm, 2, output, style=style, steps=100_000, **LONG)
    launchers.wait_until(lambda: ready(output), slurm.logs)
    assert slurm("scancel", "--batch", "--signal=USR1", job)[0] == 0
    said = queued_again(slurm, job, Path(f"{output}-{job}.log"))
    assert len(re.findall(r": stopped by SIGUSR1 after step \d+, saved as \S+; exit code 75: ", said)) == 1
    assert launchers.losses(output)


def test_a_job_out_of_time_is_queued_again(slurm):
    """The job that was submitted first: SLURM sends the signal 75 seconds before its end, or up to a minute earlier."""
    assert "not finished in time" in queued_again(slurm, slurm.timed, slurm.timed_log)


def test_a_shell_in_an_allocation_is_told_to_use_srun(slurm, tmp_path):
    """salloc leaves a shell with SLURM's variables, and one process of it is not the job."""
    command = ["salloc", "--ntasks=4", "python", "train_hybrid.py", "--config", training.CONFIG]
    code, said = slurm(*command, *launchers.small(tmp_path / "run"), cwd=launchers.FOLDER)
    assert code == 2, said
    assert "this is a SLURM job of 4 tasks, but srun did not start this process: type `srun bash" in said
