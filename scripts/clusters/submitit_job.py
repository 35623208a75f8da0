"""Submit a command to SLURM, or run it on this machine, with submitit; it resumes after the time limit.

    python scripts/clusters/submitit_job.py [--cluster slurm|local] [--folder DIR] [--minutes N] [--gpus N] COMMAND ...

COMMAND is torchrun with a train script, and starts in the folder in which you type this. Before the time limit, and
when the job is preempted, the run stops with a checkpoint; submitit queues the job again, and its command resumes.
"""

import argparse
import os
import signal
import subprocess

import submitit


class Training:
    """The command, as submitit calls it."""

    def __init__(self, command: list[str]):
        self.command = command
        self.process: subprocess.Popen | None = None

    def __call__(self) -> None:
        self.process = subprocess.Popen(self.command, start_new_session=True)  # SLURM's signal would end torchrun
        if code := self.process.wait():
            raise subprocess.CalledProcessError(code, self.command)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Stop the run with a checkpoint; submitit calls it in the middle of `__call__`, and queues what it returns."""
        os.kill(self.process.pid, signal.SIGTERM)  # torchrun hands it on to its ranks
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # not `wait`, in which `__call__` is already
        return submitit.helpers.DelayedSubmission(Training(self.command))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("slurm", "local"), help="default: SLURM where there is one")
    parser.add_argument("--folder", default="runs/submitit", help="of logs (default %(default)s)")
    parser.add_argument("--minutes", type=int, default=24 * 60, help="time limit (default %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="default %(default)s")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    executor = submitit.AutoExecutor(args.folder, cluster=args.cluster)
    executor.update_parameters(name="vit", timeout_min=args.minutes, gpus_per_node=args.gpus, slurm_signal_delay_s=120)
    job = executor.submit(Training(args.command))
    print(f"job {job.job_id}, its output in {job.paths.stdout}", flush=True)
    if executor.cluster == "local":
        job.result()


if __name__ == "__main__":
    main()
