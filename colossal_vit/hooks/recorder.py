"""The record of a run: `metrics.jsonl` and TensorBoard events."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossal_vit.errors import TrainingError, UserError
from colossal_vit.files import write_text
from colossal_vit.parallel.ranks import RankLogger
from colossal_vit.results import METRICS, draw


def _cut(path: Path, step: int, epoch: int) -> list[int]:
    """Remove from a `metrics.jsonl` what was recorded after `step`, or evaluated in `epoch` or later.

    Returns:
        The steps up to `step` that should be there and are not.
    """
    kept, steps = [], [step + 1]
    for line in path.read_text().splitlines(keepends=True):
        with suppress(ValueError):  # a line that was cut off
            record = json.loads(line)
            if record["epoch"] < epoch if "eval_loss" in record else record["step"] <= step:
                kept.append(line)
                steps += [record["step"]]
    write_text(path, "".join(kept))
    return sorted(set(range(min(steps), step + 1)) - set(steps))


class Recorder:
    """Writes the records of one rank, and in the end the curves.

    A run that resumes appends to the same file; records of what came after its checkpoint are removed first, since they
    will be made again.

    Args:
        directory: the run directory.
        log: where it is said that something could not be written.
    """

    def __init__(self, directory: Path, log: RankLogger):
        self.directory, self.log = directory, log
        self.path, self.unwritten = directory / METRICS, b""

    def open(self, step: int, epoch: int) -> None:
        """Make ready for the records after `step`, in `epoch`.

        Raises:
            UserError: if the run directory cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter  # imports for seconds; one rank needs it

        try:
            if self.path.exists() and (lost := _cut(self.path, step, epoch)):
                what = f"lacks {len(lost)} of the steps up to {step}, the first is {lost[0]}"
                self.log.info(f"{self.path}: {what}", ranks=None)
            self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self.events = SummaryWriter(str(self.directory), purge_step=step + 1 if step else None)
        except OSError as error:
            raise UserError(f"--output {self.directory}: cannot be written: {error.strerror or error}") from None

    def _flush(self) -> None:
        while self.unwritten:  # a disk that is nearly full takes a part
            self.unwritten = self.unwritten[os.write(self.file, self.unwritten) :]

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; one that the disk has no space for is kept for later."""
        self.unwritten += json.dumps(record).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:  # there may be space again later, when a checkpoint that did not fit is gone
            self.log.info(f"{self.directory}: {METRICS} has to wait: {error.strerror}", ranks=None)
        try:
            for key in (record.keys() - {"step", "epoch", "eval_images"}) if self.events else ():
                self.events.add_scalar(key, record[key], record["step"])
        except OSError as error:
            self.events = None
            self.log.info(f"{self.directory}: TensorBoard's events end here: {error.strerror}", ranks=None)

    def sync(self) -> None:
        """Have the disk hold the records so far."""
        os.fsync(self.file)

    def close(self) -> None:
        """Write what is left, and draw the curves.

        Raises:
            TrainingError: if that is not possible.
        """
        try:
            self._flush()
            os.close(self.file)
            if self.events:
                self.events.close()
            draw(self.directory)
        except OSError as error:
            raise TrainingError(f"{self.directory}: cannot be written: {error.strerror or error}") from None
