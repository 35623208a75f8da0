"""Real launchers for tests: their Debian packages, a one-node SLURM, and the losses that every launcher must give."""

import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from colossal_vit.provenance import has_driver
from colossal_vit.results import read_metrics

import fork_ranks
import training

FOLDER = fork_ranks.ROOT / "vit_cifar10_hybrid"
PYTHON_FOLDER = os.path.dirname(sys.executable)
STEPS = 3


def need(packages, *parts):
    """Install Debian packages unless their programs or folders exist; if that fails, skip the test (in CI, fail)."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"

    def missing():
        return [name for name in parts if not (shutil.which(name, path=path) or Path(name).is_dir())]

    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        with open(Path(tempfile.gettempdir(), "packages.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be installing them
            if missing():
                environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
                for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
                    subprocess.run(["apt-get", *command], env=environment, capture_output=True)
    if missing():
        reason = f"{', '.join(missing())} cannot be installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def environment(gpus=False, **more):
    """A user's environment: without the tests' variables, with this Python first on PATH, optionally with GPUs."""
    gone = (*fork_ranks.LAUNCHER_VARIABLES, "DATA", "PYTHONPATH", "HOST", "MY_GPUS", *(["CUDA_VISIBLE_DEVICES"] * gpus))
    clean = {key: value for key, value in os.environ.items() if key not in gone}
    if gpus and os.environ["MY_GPUS"] != "all":
        clean["CUDA_VISIBLE_DEVICES"] = os.environ["MY_GPUS"]
    path = f"{PYTHON_FOLDER}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return {**clean, "PATH": path, "OMP_NUM_THREADS": "1", **more}


@functools.cache
def num_gpus():
    """Number of GPUs that torch finds in a new process; conftest hides them from this one."""
    if not has_driver():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.check_output(command, env=environment(gpus=True)))


def small(output, stages=2, steps=STEPS, **values):
    """Flags of a run of the pipeline config that takes about a second."""
    settings = {**training.MODEL, **training.RANDOM, "BATCH_SIZE": 16, "parallel.pipeline": stages, **values}
    return ["--output", str(output), "--max-steps", str(steps), *training.set_flags(settings)]


def losses(output):
    """The losses of a run, by step."""
    return [record["loss"] for record in read_metrics(output)[0]]


def reference(output, world_size, **values):
    """The losses that every launcher must give for `small`."""
    argv = ["--config", training.CONFIG, *small(output, **values)]
    result = fork_ranks.run(training.HYBRID, argv, world_size)
    assert result.codes == [0] * world_size, str(result)
    return losses(output)


def run(command, cwd=FOLDER, **variables):
    """Run a command in `environment(**variables)`; returns its exit code and output."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=fork_ranks.PATIENCE
    )
    return done.returncode, fork_ranks.own_lines(done.stdout + done.stderr)


def wait_until(condition, what):
    """Wait until `condition()` is true, and return its value."""
    deadline = time.monotonic() + fork_ranks.PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.2)
    return answer


def has_ended(pid):
    """Whether a process, of whatever parent, has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes away before the file is read
        return True


def ip(*command):
    """What a command of iproute2 prints."""
    done = subprocess.run(["ip", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_on_record(output):
    path = Path(output) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Slurm:
    """A SLURM cluster of this machine only, with its state in a folder, running until `stop`."""

    def __init__(self, folder):
        need(["slurm-wlm", "munge"], "srun", "sbatch", "slurmctld", "slurmd", "munged")
        folder.chmod(0o755)
        name = socket.gethostname().split(".")[0]
        # A job's port follows from its number: each test process numbers its jobs from elsewhere.
        first_job = 500 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20) + random.randrange(1, 400)
        munge, ports = folder / "munge.socket", (fork_ranks.free_port(), fork_ranks.free_port())
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for part in ("state", "spool"):
            (folder / part).mkdir()
        (folder / "slurm.conf").write_text(
            f"""
            ClusterName=test
            SlurmctldHost={name}(127.0.0.1)
            SlurmctldPort={ports[0]}
            SlurmdPort={ports[1]}
            FirstJobId={first_job}
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket={munge},cred_expire=5
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/slurmd.pid
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SlurmdParameters=config_overrides
            ReturnToService=2
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core
            NodeName={name} NodeAddr=127.0.0.1 CPUs=8
            PartitionName=all Nodes=ALL Default=YES State=UP
        """.replace("            ", "")
        )
        self.folder, self.variables = folder, {"SLURM_CONF": str(folder / "slurm.conf")}
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self.daemons = []
        self._start("munged", "--foreground", "--force", f"--socket={munge}", *files)
        wait_until(munge.exists, "munged does not start")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_until(lambda: self("sinfo", "-h", "-o", "%T")[1].strip() == "idle", self.logs)

    def _start(self, program, *argv):
        log = open(self.folder / f"{program}.out", "w")  # noqa: SIM115 stays open as long as the daemon runs
        self.daemons.append(
            subprocess.Popen([program, *argv], env=environment(**self.variables), stdout=log, stderr=log)
        )

    def __call__(self, *command, **options):
        """Run a SLURM command; returns its exit code and output."""
        return run(command, **options, **self.variables)

    def logs(self):
        return "\n".join(path.read_text() for path in self.folder.glob("*.out"))

    def submit(self, *argv, cwd=fork_ranks.ROOT):
        """Run sbatch; returns the job's number."""
        code, said = self("sbatch", "--parsable", *argv, cwd=cwd)
        assert code == 0, said
        return said.strip()

    def state(self, job):
        return self("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")[1].strip()

    def ended(self, job):
        """Wait until a job ends; returns its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_until(lambda: next((s for s in ends if s == self.state(job)), None), self.logs)

    def stop(self):
        self("scancel", "--full", "--signal=KILL", "--user=root")
        self("scancel", "--user=root")  # cancels requeued jobs, too
        wait_until(lambda: not self("squeue", "-h")[1].strip(), self.logs)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
