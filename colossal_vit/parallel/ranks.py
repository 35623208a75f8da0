"""Objects, errors and log lines of all ranks; rank 0 working while the others wait."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

import torch
import torch.distributed as dist
from colossal_vit.errors import UserError
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from tqdm import tqdm

# tqdm's own lock is shared with forks of this process, and stays held for good if one of them is killed holding it.
tqdm.set_lock(threading.RLock())


def say(line: str, file: TextIO) -> None:
    """Print a line above a progress bar; to nobody if nobody reads any more, which is no reason to stop training."""
    try:
        with tqdm.external_write_mode(file):
            print(line, file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class RankLogger:
    """A log on stdout that Colossal-AI's Trainer takes too: `info(message, ranks=[0])`."""

    def __init__(self, rank: int = 0):
        self.rank = rank

    def info(self, message: str, ranks: Iterable[int] | None = (0,)) -> None:
        """Log on the given ranks; `ranks=None` on every rank."""
        if ranks is None or self.rank in ranks:
            say(f"{datetime.now():%H:%M:%S} {message}", sys.stdout)


def all_gather_object(value: Any) -> list[Any]:
    """The values that all ranks call this with, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    return values


def broadcast_object(value: Any) -> Any:
    """The value that rank 0 calls this with."""
    box = [value]
    dist.broadcast_object_list(box, 0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    return box[0]


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Make a `UserError` of any rank inside the block the error of every rank, at the end of the block."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    for spoken in filter(None, all_gather_object(message)):
        raise UserError(spoken)


def run_on_rank_0(work: Callable[[], Any]) -> Any:
    """Have rank 0 do `work` while the others wait, however long it takes; its `UserError` is raised on every rank.

    The ranks exchange a message every second meanwhile, so that the timeout of the process group bounds a hang and not
    the work: a download may take an hour.

    Returns:
        On every rank, what `work` returned.
    """
    errors: list[BaseException] = []
    result = None

    def guarded() -> None:
        nonlocal result
        try:
            result = work()
        except BaseException as error:  # carried over to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    first = dist.get_rank() == 0
    if first:
        thread.start()
    running = torch.ones(1)
    while running:
        if first:
            thread.join(timeout=1.0)
            running.fill_(thread.is_alive())
        dist.broadcast(running, src=0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    with raise_on_all_ranks():
        if errors:
            raise errors[0]
    return broadcast_object(result)
