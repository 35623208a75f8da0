"""Writes the metrics of a run: `metrics.jsonl`, TensorBoard events and, if asked to, Weights & Biases."""

import json
import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from colossal_vit.errors import TrainingError, UserError
from colossal_vit.files import write_bytes
from colossal_vit.hooks.wandb_run import WandbRun
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.results import METRICS, draw, read_records


def _cut(path: Path, step: int, epoch: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Remove from a `metrics.jsonl` the steps after `step`, the evaluations of `epoch` and later, and damaged lines.

    Returns:
        The records of `step` that stay, and what else is missing, in words.
    """
    records, faults = read_records(path)
    kept = [
        (line, record)
        for line, record in records
        if (record["epoch"] < epoch if "eval_loss" in record else record["step"] <= step)
    ]
    write_bytes(path, b"".join(line for line, _ in kept))
    said = [f"left out: {fault}" for fault in faults]
    steps = sorted({record["step"] for _, record in kept if record["step"] <= step})
    first = min([*steps, step + 1])
    if lost := step + 1 - first - len(steps):
        missing = next(number for number, there in zip(count(first), [*steps, None]) if number != there)
        said.append(f"{path}: lacks {lost} of the steps up to {step}, the first is {missing}")
    return [record for _, record in kept if record["step"] == step], said


def _tag(key: str) -> str:
    """Return TensorBoard's tag for a key of a record, in a group: `train/loss`, `eval/accuracy`, `ema/accuracy`."""
    return key.replace("_", "/", 1) if key.startswith(("eval_", "ema_")) else f"train/{key}"


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    """Print what a thread died of, but not if it is TensorBoard's on a full disk: `Recorder` says that in a line."""
    if not isinstance(failure.exc_value, OSError) or not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


class Recorder:
    """Writes the records of a run, on one rank, and at the end its curves.

    A resumed run appends to the same file, after removing the records of steps after its checkpoint, which it repeats.

    Args:
        directory: the run directory.
        log: where write errors are reported.
        wandb: gets the records too.
        curves: whether to draw them.
    """

    def __init__(self, directory: Path, log: RankLogger, wandb: WandbRun | None, curves: bool):
        self.directory, self.log, self.wandb, self.curves = directory, log, wandb, curves
        self.path, self.unwritten, self.waiting = directory / METRICS, b"", False

    def open(self, step: int, epoch: int) -> None:
        """Open the files for the records after `step`, in `epoch`.

        Raises:
            UserError: if the run directory cannot be written, or Weights & Biases has no login.
        """
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import; only one rank needs it

        try:
            if self.wandb:
                self.wandb.open()
            last, said = _cut(self.path, step, epoch) if self.path.exists() else ([], [])
            for line in said:
                self.log.info(line, ranks=None)
            self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # The evaluation of `step` may be made again, so that TensorBoard forgets what it has of that step.
            self.events = SummaryWriter(str(self.directory), purge_step=step)
            for record in last:
                self._add_event(record)
            threading.excepthook = _report_thread
        except OSError as error:
            raise UserError(f"--output {self.directory}: cannot be written: {error.strerror or error}") from None

    def _flush(self) -> None:
        while self.unwritten:  # a nearly full disk may accept only a part
            self.unwritten = self.unwritten[os.write(self.file, self.unwritten) :]

    def _add_event(self, record: dict[str, Any]) -> None:
        """Hand TensorBoard's thread a record in one event: `add_scalar` would make one of each value, a ms in all."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = record.keys() - {"step", "epoch", "eval_images"}
        values = [Summary.Value(tag=_tag(key), simple_value=record[key]) for key in shown]
        self.events.file_writer.add_summary(Summary(value=values), record["step"])

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; if the disk is full, keep it in memory and retry at the next one.

        Args:
            record: scalars by name; `step` is the step of the TensorBoard events.
        """
        self.unwritten += json.dumps(record).encode() + b"\n"
        try:
            self._flush()
            self.waiting = False
        except OSError as error:  # there may be space again once a partly written checkpoint is removed
            if not self.waiting:
                self.log.info(f"{self.directory}: {METRICS} has to wait: {error.strerror}", ranks=None)
            self.waiting = True
        try:
            if self.events:
                self._add_event(record)
        except OSError as error:
            self.events = None
            self.log.info(f"{self.directory}: TensorBoard's events end here: {error.strerror}", ranks=None)
        if self.wandb:
            self.wandb.write(record)

    def sync(self) -> None:
        """fsync the records so far, if the disk takes them; `write` says so if not."""
        with suppress(OSError):
            os.fsync(self.file)

    def close(self) -> None:
        """Write the remaining records, close the files and draw the curves.

        Raises:
            TrainingError: if the run directory cannot be written.
        """
        try:
            self._flush()
            os.close(self.file)
            if self.events:
                self.events.close()
            if self.curves:
                draw(self.directory)
        except OSError as error:
            raise TrainingError(f"{self.directory}: cannot be written: {error.strerror or error}") from None
