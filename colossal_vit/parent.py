"""Ranks end with what started them: a launcher that is killed must not leave them training.

Imported before all that is slow to import, so that it knows the parent even if that dies meanwhile.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

_process, _parent = os.getpid(), os.getppid()

CHECK_EVERY = 1.0  # seconds
LEFT_OVER = 5.0  # seconds of the timeout that are not for ending in good order


def is_detached() -> bool:
    """Whether this process was told to outlive its terminal, by nohup or setsid."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or os.getsid(0) == os.getpid()


def srun_listens() -> bool:
    """Whether srun started this process from this machine and is still there.

    The parent of a task is a daemon of SLURM's, which outlives srun. But srun has a port open for its tasks, and a
    process that binds it succeeds only when srun is gone. (To connect would make srun print an error.)
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
    """Stop this process when its parent or its srun is gone: with SIGTERM, and for good before `timeout` is over.

    Args:
        launched: by a launcher, so that being detached means nothing.
        timeout: seconds.
    """
    if not launched and is_detached():
        return
    parent = _parent if os.getpid() == _process else os.getppid()  # a fork has another one
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
