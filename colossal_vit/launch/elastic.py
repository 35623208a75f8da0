"""The processes of an elastic run that have no work: they wait until the ranks have ended."""

import math
import signal
import sys
import time
from typing import Any, NoReturn

import torch.distributed as dist
from colossal_vit.errors import TrainingError
from colossal_vit.launch.exits import Ending
from colossal_vit.launch.launchers import Rendezvous
from colossal_vit.launch.signals import heard_signals

OVER = "run is over"  # a key in the store of the ranks: the exit code, once they have ended as they should
LOOK = 0.2  # seconds between two looks of a process without work
END_TIMEOUT = 10.0  # seconds that rank 0 waits for processes without work to end


def _acknowledgement(rank: int) -> str:
    return f"rank {rank} has seen the end"


class ExitStore:
    """Where rank 0 tells the processes without work that the run is over.

    Args:
        store: see `join_store`.
        without_work: their ranks.
    """

    def __init__(self, store: dist.Store, without_work: range):
        self.store = store.clone()  # a connection for the watchdog, too, while another thread waits in a collective
        self.acknowledged = [_acknowledgement(rank) for rank in without_work]

    def announce(self, ending: Ending) -> None:
        """Tell them the exit code, and wait until they know it, since they may still use rank 0's store."""
        if ending.interrupted:
            return
        self.store.set(OVER, str(ending.code))
        deadline = time.monotonic() + END_TIMEOUT
        while not self.store.check(self.acknowledged) and time.monotonic() < deadline:
            time.sleep(LOOK)


def wait_without_work(store: dist.Store, rendezvous: Rendezvous, timeout: float) -> NoReturn:
    """Wait until the run is over, and end this process with its exit code.

    On a signal to stop, the ranks still have to save a checkpoint, and srun and mpirun kill them if this process ends
    before. So it ignores the signal for `timeout` seconds. (torchrun waits for all processes itself.)

    Args:
        store: see `join_store`.
        rendezvous: this process, which is not one of the ranks.
        timeout: seconds to wait for the ranks after a signal.

    Raises:
        TrainingError: if the ranks end otherwise.
    """
    deadline = math.inf

    def wait_for_ranks(number: int, frame: Any) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + timeout)

    try:
        if rendezvous.launcher != "torch":
            for number in heard_signals():
                signal.signal(number, wait_for_ranks)
        while not store.check([OVER]):
            if time.monotonic() > deadline:
                raise TrainingError(f"the ranks have not ended {timeout:g} s after a signal to stop")
            time.sleep(LOOK)
        code = int(store.get(OVER))
        store.set(_acknowledgement(rendezvous.rank), "")
    except dist.DistError:
        raise TrainingError("the ranks have ended early, while this process had no work") from None
    sys.exit(code)
