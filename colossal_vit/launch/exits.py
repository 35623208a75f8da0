"""`Exits`: how the process of a run ends, with its exit code and error message."""

import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from colossal_vit.errors import Interrupted, Preempted, TrainingError, UserError, as_user_error, end_process, error_line
from colossal_vit.files import protect_streams
from colossal_vit.launch.launchers import rank_host_port
from colossal_vit.launch.signals import SIGNALS
from colossal_vit.launch.watchdog import Watchdog
from colossal_vit.parallel.collectives import write_line
from colossalai.legacy.core import global_context as gpc

WATCHDOG_GRACE = 5.0  # seconds that a rank which lost a connection waits for the watchdog to name the dead rank


class Ending(NamedTuple):
    """How a process ends.

    Attributes:
        code: the exit code.
        all_leave: whether every rank ends by itself, with this code.
        interrupted: by Ctrl-C, which is not to wait for anything.
        after_another: since another rank has ended.
    """

    code: int
    all_leave: bool = False
    interrupted: bool = False
    after_another: bool = False


class Exits:
    """What a process still has to do when it ends, whatever ends it.

    The parts of a run register it here: `add` what takes time, `add_cleanup` what is to be done at once. Whichever
    thread ends the process calls each of them once, the newest first.
    """

    def __init__(self):
        self.watchdog: Watchdog | None = None
        self._cleanups: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[Ending], None]] = []
        self._ending = threading.RLock()  # held by the thread that ends this process

    def add(self, callback: Callable[[Ending], None], last: bool = False) -> None:
        """Call `callback(ending)` before the other ranks are told that this process ends; `last` after the others."""
        self._callbacks.insert(0 if last else len(self._callbacks), callback)

    def add_cleanup(self, callback: Callable[[], None]) -> None:
        """Call `callback()` as soon as an error ends this process."""
        self._cleanups.append(callback)

    def watch(self, rank: int, world_size: int, host: str) -> None:
        """End this process when another rank ends, and the others when this one does; see `Watchdog`."""
        self.watchdog = Watchdog(rank, world_size, host, self._end_after_another)

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function, then end the process if it failed, on all ranks.

        Exit codes: 0 for success, 2 for a `UserError` or too little memory, 75 or `--exit-code-stopped` for
        `Preempted`, 130 for Ctrl-C, 1 for anything else. Too little memory, a `UserError`, `TrainingError` or
        `Preempted` becomes one line on stderr, printed by one rank.
        """
        protect_streams()
        try:
            function()
            if dist.is_initialized():
                dist.barrier()
                self.close(Ending(0))
                gpc.destroy()
        except (Exception, KeyboardInterrupt) as error:
            self._fail(error)

    def close(self, ending: Ending) -> None:
        """Do what was registered with `add`, then tell the other ranks that this one ends."""
        while self._callbacks:
            with suppress(dist.DistError):  # without rank 0's store there is nobody to tell
                self._callbacks.pop()(ending)
        if self.watchdog and not ending.after_another:
            self.watchdog.leave(ending.code, ending.all_leave)

    def clean_up(self) -> None:
        """Do what was registered with `add_cleanup`; a thread that ends this process meanwhile waits for it."""
        with self._ending:
            while self._cleanups:
                self._cleanups.pop()()

    def _end_after_another(self, code: int, message: str | None) -> NoReturn:
        """End this process from the watchdog's thread, with another rank's exit code."""
        with self._ending:
            self.clean_up()
            if message:
                print(message, file=sys.stderr, flush=True)
            self.close(Ending(code, after_another=True))
            end_process(code)

    def _fail(self, error: Exception | KeyboardInterrupt) -> NoReturn:
        """Say what the error is, keep what the run has made, tell the other processes, and end this one."""
        self.clean_up()
        error = _as_user_error(error)
        in_one_line = isinstance(error, UserError | TrainingError | Preempted)
        ending = Ending(1)
        if in_one_line:
            ending = Ending(error.exit_code, all_leave=isinstance(error, Preempted))
            if self.watchdog:
                self.watchdog.leaving.set()  # so that another rank's message does not end this process before the line
            if _prints(error):
                write_line(error_line(error), sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            ending = Ending(Interrupted.exit_code, interrupted=True)
        elif self.watchdog and lost_connection(error):
            time.sleep(WATCHDOG_GRACE)  # if another rank has died, the watchdog's thread is ending this process
        with self._ending:
            if not in_one_line and not ending.interrupted:
                traceback.print_exception(error)
            # A launcher sends signals once another rank has ended; what follows has limits of its own.
            for number in SIGNALS:
                if number != signal.SIGINT or ending.all_leave:
                    signal.signal(number, signal.SIG_IGN)
            self.close(ending)
            end_process(ending.code)


def _prints(error: Exception) -> bool:
    """Return whether this rank prints an error that other ranks may have too.

    With process groups, the first rank to increment a counter in their common store does. Before, rank 0 does. Any
    other rank waits, and then prints too if something listens at rank 0's address, because rank 0 then still runs and
    does not have the error. Otherwise rank 0 has presumably ended with the same error.
    """
    if dist.is_initialized():
        with suppress(Exception):  # the store has ended with rank 0, which has printed the error
            return dist.distributed_c10d._get_default_store().add("error-printed", 1) == 1
        return False
    rank, host_name, port = rank_host_port()
    own = getattr(error, "own", None)
    if rank == 0 or own is not None:
        return rank == 0 or own
    time.sleep(5)  # meanwhile, a launcher that ends all ranks after the first has ended this one
    if not host_name or not port or not port.isdigit():
        return True
    try:
        socket.create_connection((host_name, int(port)), timeout=2).close()
        return True
    except (OSError, OverflowError):
        return False


def lost_connection(error: BaseException) -> bool:
    """Return whether an error may be a mere consequence of another rank's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection reset by peer" in str(error)


def _as_user_error(error: BaseException) -> BaseException:
    """Return a `UserError` for too little memory, and see `errors.as_user_error`; any other error as it is."""
    _, on_cpu, size = str(error).partition("DefaultCPUAllocator: ")
    if isinstance(error, torch.OutOfMemoryError) or on_cpu:
        needed = size.partition(". Error")[0] or str(error).partition(". Including")[0]
        advice = "lower BATCH_SIZE and raise gradient_accumulation as much; --dry-run says how much memory a run needs"
        return UserError(f"{needed}; {advice}", own=True)
    return as_user_error(error)
