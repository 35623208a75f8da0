"""`launch.run`: the end of every train script, however it comes."""

import functools
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from colossal_vit.checkpoint import lock
from colossal_vit.errors import Preempted, TrainingError, UserError, end_process, error_line
from colossal_vit.launch import watchdog
from colossal_vit.launch.launchers import rank_host_port
from colossal_vit.parallel.ranks import say
from colossal_vit.plan import report
from colossalai.legacy.core import global_context as gpc

WATCHDOG_GRACE = 5.0  # seconds that a rank which lost a connection waits to be told who died


def _prints(error: Exception) -> bool:
    """Whether this rank is the one that prints an error that others may have too.

    Once the process groups exist, the first to ask their common store is. Before, rank 0 is; another rank waits, and
    then prints it too unless nobody listens where rank 0 would, so that it seems to have ended with the same error.
    """
    if dist.is_initialized():
        with suppress(Exception):  # the store is gone with rank 0, which has spoken
            return dist.distributed_c10d._get_default_store().add("error-printed", 1) == 1
        return False
    rank, host_name, port = rank_host_port()
    if rank == 0 or getattr(error, "own", False):
        return True
    time.sleep(5)  # a launcher that ends all ranks with the first does it now
    if not host_name or not port or not port.isdigit():
        return True
    try:
        socket.create_connection((host_name, int(port)), timeout=2).close()
        return True
    except (OSError, OverflowError):
        return False


def _lost_connection(error: BaseException) -> bool:
    """Whether an error may only be the echo of another rank's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection reset by peer" in str(error)


def run(main: Callable[[], None]) -> None:
    """Call `main` and end the process: exit code 0, 2 for a user's mistake, 75 when asked to stop, 130 by Ctrl-C, 1 for
    anything else.

    A `UserError`, `TrainingError` or `Preempted` becomes one line on stderr, printed by one rank. When one rank ends
    early, all do.
    """
    if "--dry-run" in sys.argv[1:]:
        main = functools.partial(report.report, main, prints=rank_host_port()[0] == 0)
    code = 0
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
            watchdog.current.leave()
            gpc.destroy()
    except (UserError, TrainingError, Preempted) as error:
        code = error.exit_code
        lock.leave_nothing()
        if watchdog.current:
            watchdog.current.leaving.set()  # another rank's goodbye must not cut the line off
        if _prints(error):
            say(error_line(error), sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = 1
        if watchdog.current and _lost_connection(error):
            time.sleep(WATCHDOG_GRACE)  # if it is, the watchdog ends this process now
        traceback.print_exc()
    if code:
        if watchdog.current:
            watchdog.current.leave(code)
        end_process(code)
