"""Ranks end with the process that started them: a launcher that is killed must not leave them training.

Imported before all that is slow to import, so that it knows the parent even if that dies meanwhile.
"""

import os
import signal
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


def watch(launched: bool, timeout: float) -> None:
    """Stop this process when its parent is gone: with SIGTERM, and for good before `timeout` is over.

    Args:
        launched: by a launcher, so that being detached means nothing.
        timeout: seconds.
    """
    if not launched and is_detached():
        return
    parent = _parent if os.getpid() == _process else os.getppid()  # a fork has another one
    threading.Thread(target=_watch, args=(parent, timeout), daemon=True, name="parent").start()


def _watch(parent: int, timeout: float) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_EVERY)
    with suppress(OSError):
        print(f"the process that started this one ({parent}) is gone, so it stops too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(max(timeout - CHECK_EVERY - LEFT_OVER, 0.0))
    os._exit(1)
