"""Stops this process when the process that launched it dies, so that a killed launcher leaves no ranks training."""

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from colossal_vit import STARTED_BY

CHECK_EVERY = 1.0  # seconds
LEFT_OVER = 5.0  # seconds before the end of the timeout at which the process is killed


def is_detached() -> bool:
    """Return whether this process was started with nohup or setsid, to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or os.getsid(0) == os.getpid()


def srun_listens() -> bool:
    """Return whether srun started this process from this machine and is still running.

    The parent of a SLURM task is a daemon, which outlives srun. But srun keeps a port open for its tasks, so binding
    that port fails as long as srun runs. (Connecting instead would make srun print an error.)
    """
    address = os.environ.get("SLURM_SRUN_COMM_HOST", ""), int(os.environ.get("SLURM_SRUN_COMM_PORT", 0))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def watch(launched: bool, timeout: float) -> None:
    """Start a thread that ends this process once its parent or its srun has ended: SIGTERM first, exit if that fails.

    Args:
        launched: whether a launcher started it; otherwise nothing is watched if the process is detached.
        timeout: seconds until the exit, which is a little earlier.
    """
    if not launched and is_detached():
        return
    process, parent = STARTED_BY  # known even if it has died during the imports
    parent = parent if os.getpid() == process else os.getppid()  # after a fork it is another process
    threading.Thread(target=_watch, args=(parent, srun_listens(), timeout), daemon=True, name="parent").start()


def _watch(parent: int, srun: bool, timeout: float) -> None:
    while os.getppid() == parent and (not srun or srun_listens()):
        time.sleep(CHECK_EVERY)
    gone = "srun" if os.getppid() == parent else f"the process that started this one ({parent})"
    with suppress(OSError):
        print(f"{gone} is gone, so this process stops too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(max(timeout - CHECK_EVERY - LEFT_OVER, 0.0))
    os._exit(1)
