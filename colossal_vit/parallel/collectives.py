"""Collectives on Python objects and errors, work done by rank 0 alone, and logging.

A process without process groups is the only rank: an export reads a run's data as the run did.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

import torch
import torch.distributed as dist
from colossal_vit.errors import UserError
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from tqdm import tqdm

# tqdm's default lock is shared with forked processes, and is never released if one of them is killed while holding it.
tqdm.set_lock(threading.RLock())


def write_line(line: str, file: TextIO) -> None:
    """Print a line above the progress bar."""
    with tqdm.external_write_mode(file):
        print(line, file=file, flush=True)


class RankLogger:
    """A logger to stdout with time stamps, and with the interface of Colossal-AI's: `info(message, ranks=[0])`."""

    def __init__(self, rank: int = 0):
        self.rank = rank

    def info(self, message: str, ranks: Iterable[int] | None = (0,)) -> None:
        """Log on the given ranks; `ranks=None` means every rank."""
        if ranks is None or self.rank in ranks:
            write_line(f"{datetime.now():%H:%M:%S} {message}", sys.stdout)


def all_gather_object(value: Any, mode: ParallelMode = ParallelMode.GLOBAL) -> list[Any]:
    """Collective: the values of all ranks of a group, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * gpc.get_world_size(mode)
    dist.all_gather_object(values, value, group=gpc.get_cpu_group(mode))
    return values


def gather_object(value: Any) -> list[Any] | None:
    """Collective: the values of all ranks, in the order of the ranks, on rank 0; None on the others."""
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    return values


def broadcast_object(value: Any) -> Any:
    """Collective: rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, 0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    return box[0]


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Collective context: a `UserError` of any rank in the block is raised on every rank at the end of the block."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    for spoken in filter(None, all_gather_object(message)):
        raise UserError(spoken)


def run_on_rank_0(work: Callable[[], Any]) -> Any:
    """Collective: call `work` on rank 0 while the others wait, without a limit of time.

    Meanwhile the ranks communicate every second, so that the timeout of the process group applies to hangs but not to
    long work, such as a download.

    Returns:
        On every rank, what `work` returned.

    Raises:
        UserError: on every rank, if `work` raises it.
    """
    if not dist.is_initialized():
        return work()
    future = None
    if dist.get_rank() == 0:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)  # ends its thread once the work is done
    running = torch.ones(1)
    while running:
        if future:
            running.fill_(len(wait([future], timeout=1.0).not_done))
        dist.broadcast(running, src=0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    with raise_on_all_ranks():
        result = future.result() if future else None
    return broadcast_object(result)
