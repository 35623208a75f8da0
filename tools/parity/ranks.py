"""Ranks as forks of this process or, under a launcher, of the processes that it has started, one for each rank."""

import json
import math
import multiprocessing
import os
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from colossal_vit.engine import Trainer
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.hooks.checkpoint import CheckpointHook
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.launch.exits import Ending, lost_connection
from colossal_vit.launch.flags import Arguments
from colossal_vit.launch.groups import device_index
from colossal_vit.launch.launchers import find_rendezvous, free_port
from colossal_vit.launch.rendezvous import join_store
from colossal_vit.main import Build, start
from colossal_vit.parallel.collectives import gather_object
from colossalai.legacy.core import global_context as gpc

from tools.parity.record_tensors import Record, RecordTensorsHook
from tools.parity.records import Recorded, by_key, of_run_directory

INSTALLED = (*(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")), "<")
GRACE = 2.0  # seconds in which the cause may follow the failure of a rank that has lost its connection to another one
POLL = 0.1  # seconds


class Failure(NamedTuple):
    """Why a rank has no answer.

    Attributes:
        rank: of those that train together.
        text: the exception and its place, or how the process ended.
        refused: whether it is a `UserError`.
        is_consequence: whether it may be a mere consequence of another rank's failure.
    """

    rank: int
    text: str
    refused: bool = False
    is_consequence: bool = False


def _failure(rank: int, error: BaseException) -> Failure:
    """Return the failure that an exception is: in one line, with the innermost place that is not in an installed
    package.
    """
    if isinstance(error, (UserError, TrainingError)):
        return Failure(rank, str(error), isinstance(error, UserError))
    frames = traceback.extract_tb(error.__traceback__)
    place = ([frame for frame in frames if not frame.filename.startswith(INSTALLED)] or frames)[-1]
    text = traceback.format_exception_only(error)[-1].splitlines()[0]
    return Failure(
        rank, f"{text} ({os.path.relpath(place.filename)}:{place.lineno})", is_consequence=lost_connection(error)
    )


def _answer(rank: int, function: Callable[[], Any], send: Connection) -> None:
    """Send what a function returns, or its failure; what it prints is not shown."""
    # Repairs PyTorch's thread pool after the fork, before autograd's.
    torch.set_num_threads(torch.get_num_threads())
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            send.send(function())
        except BaseException as error:
            send.send(_failure(rank, error))


def call_ranks(
    functions: Mapping[int, Callable[[], Any]], given_up: Callable[[], bool]
) -> tuple[dict[int, Any], Failure | None]:
    """Call functions at the same time, each in a forked process; the first failure ends all.

    Args:
        functions: by rank.
        given_up: whether to end all for another reason; asked again and again.

    Returns:
        The answers by rank, and the failure or None.
    """
    fork = multiprocessing.get_context("fork")
    waiting: dict[Connection, tuple[int, multiprocessing.Process]] = {}
    processes = []
    answers: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline = math.inf
    try:
        for rank, function in functions.items():
            receive, send = fork.Pipe(duplex=False)
            processes.append(fork.Process(target=_answer, args=(rank, function, send)))
            processes[-1].start()
            waiting[receive] = rank, processes[-1]
            send.close()
        while waiting and time.monotonic() < deadline and not given_up():
            for receive in connection.wait(waiting, POLL):
                rank, process = waiting.pop(receive)
                try:
                    answers[rank] = receive.recv()
                except EOFError:
                    process.join()
                    code = process.exitcode
                    end = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
                    # 1 is the exit code of a rank whose watchdog has noticed another one's end.
                    answers[rank] = Failure(rank, end, is_consequence=code == 1)
                if isinstance(answers[rank], Failure):
                    failures.append(answers[rank])
                    deadline = min(deadline, time.monotonic() + GRACE) if failures[-1].is_consequence else 0.0
    finally:
        for process in processes:
            process.kill()
            process.join()
    return answers, min(failures, key=lambda failure: failure.is_consequence, default=None)


class Ranks:
    """Trains with any number of ranks or, under a launcher, with one or all of those that it has started.

    CUDA is started in forks only, since no fork of a process that has started it can use a GPU.

    Args:
        build, args: of the train script.

    Attributes:
        launched: this process among those of a launcher.
        store: shared by these; None without a launcher.
    """

    def __init__(self, build: Build, args: Arguments):
        self.build, self.args, self.launched = build, args, find_rendezvous(args)
        self.store = join_store(self.launched, args.timeout, {}) if self.launched.world_size > 1 else None
        self._runs = self._exchanged = 0

    def train(
        self, world_size: int, values: Mapping[str, Any], output: Path, steps: int, resume: str | Path = "never"
    ) -> Recorded:
        """Train from scratch or a checkpoint on. Collective for the processes of a launcher.

        Args:
            world_size: number of ranks.
            values: of the config, over those of the command line.
            output: the run directory. Rank 0 of the run has its checkpoints.
            steps: the last optimizer step.
            resume: as the flag.

        Returns:
            What all ranks have recorded, in launched processes other than the first nothing.

        Raises:
            UserError: if this layout is refused.
            TrainingError: if a rank fails.
        """
        self._runs += 1
        own = range(world_size) if self.store is None else {self.launched.rank} & set(range(world_size))
        overrides = [*self.args.set, *(f"{key}={value!r}" for key, value in values.items())]
        place = dict(launcher="none", world_size=world_size, host=self.launched.host, output=output)
        place["port"] = int(self.of_first(str(free_port())))
        args = self.args.replace(**place, set=overrides, max_steps=steps, resume=str(resume))
        answers, failure = call_ranks({rank: partial(self._rank, args, rank) for rank in own}, self._given_up)
        self._raise(failure)
        return by_key(answers.get(0, []))

    def _rank(self, args: Arguments, rank: int) -> list[list[Record]] | None:
        """Train as a rank; the records of all ranks, on rank 0."""
        if self.store is None:
            local_rank = rank
            if args.world_size > 1:
                torch.set_num_threads(1)
        else:
            local_rank = device_index(self.launched)
        args.output.mkdir(parents=True, exist_ok=True)  # where ranks of other machines write
        records: list[Record] = []
        self._fit(args.replace(rank=rank, local_rank=local_rank), records)
        records += of_run_directory(args.output)
        records.sort(key=lambda record: record.key[0])
        of_all = gather_object(records)
        args.exits.close(Ending(0))
        gpc.destroy()
        return of_all

    def _fit(self, args: Arguments, records: list[Record]) -> None:
        """Train as a script's `main` does, with a hook that appends to the records."""
        run = start(args)
        engine, train_dataloader, test_dataloader, lr_scheduler = self.build(run)
        trainer = Trainer(engine, lr_scheduler, run.log)
        run.checkpointer.load(trainer, train_dataloader)
        metrics = MetricsHook(run.output, train_dataloader, run.log, curves=False)
        trainer.fit(
            train_dataloader,
            epochs=run.config.NUM_EPOCHS,
            max_steps=args.max_steps,
            test_dataloader=test_dataloader,
            hooks=[metrics, CheckpointHook(run, train_dataloader, metrics), RecordTensorsHook(records)],
        )

    # ---- Among launched processes ----

    def _get(self, key: str) -> str:
        """Return a value of the store, however long it takes."""
        while not self.store.check([key]):
            time.sleep(POLL)
        return self.store.get(key).decode()

    def of_first(self, value: str) -> str:
        """Return the value of the first launched process, on all. Collective for them."""
        if self.store is None:
            return value
        self._exchanged += 1
        if self.launched.rank == 0:
            self.store.set(f"value-{self._exchanged}", value)
        return self._get(f"value-{self._exchanged}")

    def _given_up(self) -> bool:
        return self.store is not None and self.store.check([f"failed-{self._runs}"])

    def _raise(self, failure: Failure | None) -> None:
        """Raise the failure that any process has, on all of them."""
        failures = [failure]
        if self.store is not None:
            if failure:
                self.store.set(f"failed-{self._runs}", "")
            self.store.set(f"failure-{self._runs}-{self.launched.rank}", json.dumps(failure))
            texts = [self._get(f"failure-{self._runs}-{rank}") for rank in range(self.launched.world_size)]
            failures = [Failure(*found) if (found := json.loads(text)) else None for text in texts]
        failure = min(filter(None, failures), key=lambda failure: failure.is_consequence, default=None)
        if failure and failure.refused:
            raise UserError(failure.text)
        if failure:
            raise TrainingError(f"fails on rank {failure.rank}: {failure.text}")

    def leave(self) -> None:
        """Wait for the other launched processes, which may use a store that ends with this process."""
        if self.store is not None:
            self.store.set(f"left-{self.launched.rank}", "")
            if self.launched.rank == 0:
                for rank in range(self.launched.world_size):
                    self._get(f"left-{rank}")
