"""`launch.run`: how every train script ends, with its exit code and error message."""

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from colossal_vit import streams
from colossal_vit.checkpoint import checkpointer, lock
from colossal_vit.errors import Preempted, TrainingError, UserError, as_mistake, end_process, error_line
from colossal_vit.hooks import wandb_run
from colossal_vit.hooks.signals import SIGNALS
from colossal_vit.launch import elastic, watchdog
from colossal_vit.launch.flags import Script
from colossal_vit.launch.launchers import launched_rank, rank_host_port
from colossal_vit.parallel.ranks import write_line
from colossalai.legacy.core import global_context as gpc

WATCHDOG_GRACE = 5.0  # seconds that a rank which lost a connection waits for the watchdog to name the dead rank


def _prints(error: Exception) -> bool:
    """Whether this rank prints an error that other ranks may have too.

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
    """Whether an error may be a mere consequence of another rank's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection reset by peer" in str(error)


def _as_mistake(error: BaseException) -> BaseException:
    """A `UserError` for too little memory, and see `errors.as_mistake`; any other error as it is."""
    _, on_cpu, size = str(error).partition("DefaultCPUAllocator: ")
    if isinstance(error, torch.OutOfMemoryError) or on_cpu:
        needed = size.partition(". Error")[0] or str(error).partition(". Including")[0]
        advice = "lower BATCH_SIZE and raise gradient_accumulation as much; --dry-run says how much memory a run needs"
        return UserError(f"{needed}; {advice}", own=True)
    return as_mistake(error)


def run(script: Script) -> None:
    """Parse the command line, and `call` a script's `main`, or what `--dry-run` asks for."""

    def parse_and_call() -> None:
        args = script.parse()
        # No training needs what is imported here.
        if args.dry_run:
            from colossal_vit.launch import dry_run

            if launched_rank() == 0:  # under a launcher, one process answers for all
                dry_run.run(script.build, args)
        else:
            script.main(args)

    call(parse_and_call)


def call(function: Callable[[], Any]) -> None:
    """Call a function, then end the process if it failed, on all ranks.

    Exit codes: 0 for success, 2 for a `UserError` or too little memory, 75 or `--exit-code-stopped` for `Preempted`,
    130 for Ctrl-C, 1 for anything else. Too little memory, a `UserError`, `TrainingError` or `Preempted` becomes one
    line on stderr, printed by one rank.
    """
    streams.protect()
    try:
        function()
        if dist.is_initialized():
            dist.barrier()
            elastic.end()
            watchdog.current.leave()
            gpc.destroy()
    except (Exception, KeyboardInterrupt) as error:
        _fail(error)
    wandb_run.finish(0)


def _fail(error: Exception | KeyboardInterrupt) -> NoReturn:
    """Say what the error is, keep what the run has made, tell the other processes, and end this one."""
    lock.remove_unused()
    error = _as_mistake(error)
    code, all_leave = 1, isinstance(error, Preempted)
    if isinstance(error, UserError | TrainingError | Preempted):
        code = error.exit_code
        if watchdog.current:
            watchdog.current.leaving.set()  # so that another rank's message does not end this process before the line
        if _prints(error):
            write_line(error_line(error), sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        code = 130
    else:
        if watchdog.current and lost_connection(error):
            checkpointer.wait_for_writer()  # as the watchdog does
            time.sleep(WATCHDOG_GRACE)  # if another rank has died, the watchdog ends this process meanwhile
        traceback.print_exception(error)
    # A launcher sends signals once another rank has ended; what follows has limits of its own.
    for number in SIGNALS:
        if number != signal.SIGINT or all_leave:
            signal.signal(number, signal.SIG_IGN)
    if not isinstance(error, KeyboardInterrupt):  # which is to end at once
        checkpointer.wait_for_writer()
        with suppress(dist.DistError):  # without rank 0's store there is nobody to tell
            elastic.end(code)
    wandb_run.finish(code)
    if watchdog.current:
        watchdog.current.leave(code, all_leave)
    end_process(code)
