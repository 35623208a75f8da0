"""Processes that end with this one, and a progress bar for what they do."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the workers
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, even if that is killed
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def worker_pool(num_workers: int) -> Iterator[Executor]:
    """A pool of processes that end with this process, and if one dies, which raises an error in the `with` block."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(),)) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def run_all(
    pool: Executor, function: Callable, tasks: list[tuple], sizes: list[int], unit: str, done: int = 0
) -> Iterator[tuple[tuple, Any]]:
    """Yield arguments and result of each task as it finishes; a progress bar counts the tasks' sizes."""
    futures = {pool.submit(function, *task): (task, size) for task, size in zip(tasks, sizes, strict=True)}
    bar = {"total": sum(sizes) + done, "initial": done, "unit": unit, "unit_scale": unit == "B"}
    with tqdm(**bar, disable=None) as progress:  # on a terminal only
        for future in as_completed(futures):
            task, size = futures[future]
            yield task, future.result()
            progress.update(size)
