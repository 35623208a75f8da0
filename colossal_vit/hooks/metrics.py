"""The record of a run: `metrics.jsonl` and TensorBoard events."""

import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossal_vit.data.batches import IGNORED
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import RankLogger
from colossal_vit.parallel.sharding import split_batch
from colossal_vit.results import draw
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.legacy.utils import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from torch import Tensor


def _sum_over(modes: list[ParallelMode], values: list[Tensor | float], device: torch.device) -> list[float]:
    """Sums over the ranks of some groups, in float64."""
    total = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values])
    for mode in modes:
        if gpc.get_world_size(mode) > 1:
            dist.all_reduce(total, group=gpc.get_group(mode))
    return total.tolist()


def _memory_gb(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, or resident on a machine without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def _cut(path: Path, step: int, epoch: int) -> None:
    """Leave in a `metrics.jsonl` what a run has recorded that is to go on after `step`, in `epoch`."""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        with suppress(ValueError):  # a line that was cut off
            record = json.loads(line)
            if record["epoch"] < epoch if "eval_loss" in record else record["step"] <= step:
                kept.append(line)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text("".join(kept))
    scratch.replace(path)


class MetricsHook(BaseHook):
    """Writes `metrics.jsonl` and TensorBoard events.

    One object per optimizer step: `step, epoch, loss, lr, grad_norm, images_per_s, data_s, step_s, memory_gb`, with
    loss scaling also `loss_scale, skipped`, on a GPU also `reserved_gb`, the peak of torch's allocator. One per
    evaluation: `step, epoch, eval_loss, eval_accuracy, eval_images`.
    `loss` is the mean over the whole global batch. Only the rank that sees the loss, in the last pipeline stage of
    the first replica, writes.

    At the end of the training the same rank draws the curves. A run that goes on from a checkpoint goes on with the
    same file; records of what came after the checkpoint are taken out, since they will be made again.

    Args:
        directory: the run directory; None writes nothing.
        train_dataloader: what `engine.initialize` returned; it knows how long it was waited for.
        log: where evaluations are announced, and epochs too where there is no progress bar.
    """

    def __init__(self, directory: Path | None, train_dataloader: MicroBatches, log: RankLogger, priority: int = 1):
        super().__init__(priority)
        self.train_dataloader = train_dataloader
        self.sees_loss = is_no_pp_or_last_stage()
        self.writes = self.sees_loss and is_dp_rank_0() and is_tp_rank_0()
        self.log = log
        self.directory = directory
        self.accuracy = -1.0  # of the last evaluation, on the ranks that have seen it
        self.last: dict[str, Any] | None = None
        self.batch_parts = Layout.of(gpc.config, gpc.get_world_size(ParallelMode.GLOBAL)).batch_parts

    def _flush(self) -> None:
        while self.unwritten:  # a disk that is nearly full takes a part
            self.unwritten = self.unwritten[os.write(self.file, self.unwritten) :]

    def _write(self, record: dict[str, Any]) -> None:
        self.unwritten += json.dumps(record).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:  # there may be space again later, when a checkpoint that did not fit is gone
            self.log.info(f"{self.directory}: metrics.jsonl has to wait: {error.strerror}", ranks=None)
        try:
            for key in (record.keys() - {"step", "epoch", "eval_images"}) if self.events else ():
                self.events.add_scalar(key, record[key], record["step"])
        except OSError as error:
            self.events = None
            self.log.info(f"{self.directory}: TensorBoard's events end here: {error.strerror}", ranks=None)

    def before_train(self, trainer: Trainer) -> None:
        if self.writes:
            from torch.utils.tensorboard import SummaryWriter  # imports for seconds; one rank needs it

            path, step = self.directory / "metrics.jsonl", trainer.engine.num_steps
            try:
                if path.exists():
                    _cut(path, step, trainer.cur_epoch)
                self.file, self.unwritten = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), b""
                self.events = SummaryWriter(str(self.directory), purge_step=step + 1 if step else None)
            except OSError as error:
                raise UserError(f"--output {self.directory}: cannot be written: {error.strerror or error}") from None
        self.step_started, self.waited = time.perf_counter(), 0.0

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.step_started = time.perf_counter()  # evaluation is not part of a step

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        engine = trainer.engine
        if not engine.finished_step:
            return
        now = time.perf_counter()
        step_s, self.step_started = now - self.step_started, now
        if not self.writes:
            return
        images = engine.schedule.batch_size * engine.accumulation * gpc.get_world_size(ParallelMode.DATA)
        waited = self.train_dataloader.data_s
        record = {
            "step": engine.num_steps,
            "epoch": trainer.cur_epoch,
            "loss": engine.loss,
            "lr": engine.optimizer.param_groups[0]["lr"],
            "grad_norm": engine.grad_norm,
            "images_per_s": images / step_s,
            "data_s": waited - self.waited,
            "step_s": step_s,
            "memory_gb": _memory_gb(loss.device),
        }
        self.waited = waited
        if loss.device.type == "cuda":
            record["reserved_gb"] = torch.cuda.max_memory_reserved(loss.device) / 1e9
        if engine.optimizer.loss_scale is not None:
            record |= {"loss_scale": engine.optimizer.loss_scale, "skipped": engine.optimizer.skipped}
        self._write(record)
        self.last = record

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.writes and self.last and not sys.stderr.isatty():
            self.log.info(
                f"epoch {trainer.cur_epoch}: step {self.last['step']}, loss {self.last['loss']:.4f}, "
                f"{self.last['images_per_s']:.0f} images/s",
                ranks=None,
            )

    def before_test(self, trainer: Trainer) -> None:
        self.eval_loss = self.eval_correct = self.eval_images = 0.0

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if self.sees_loss:
            # 2D, 2.5D and 3D split each micro-batch over the tensor-parallel ranks: each has the logits of its part.
            micro_batches = getattr(trainer.engine.schedule, "num_microbatches", 1)
            label = split_batch(label.view(micro_batches, -1), dim=1).flatten()
            counted = label != IGNORED
            self.eval_loss += F.cross_entropy(output.float(), label, reduction="sum", ignore_index=IGNORED)
            self.eval_correct += ((output.argmax(-1) == label) & counted).sum()
            self.eval_images += counted.sum()

    def after_test(self, trainer: Trainer) -> None:
        if not self.sees_loss:
            return
        sums = [self.eval_loss, self.eval_correct, self.eval_images]
        loss, correct, images = _sum_over([ParallelMode.DATA, ParallelMode.TENSOR], sums, self.eval_images.device)
        copies = gpc.tensor_parallel_size // self.batch_parts  # tensor-parallel ranks that saw the same part of a batch
        loss, correct, images = loss / copies, correct / copies, images / copies
        self.accuracy = correct / images
        if self.writes:
            record = {
                "step": trainer.engine.num_steps,
                "epoch": trainer.cur_epoch,
                "eval_loss": loss / images,
                "eval_accuracy": self.accuracy,
                "eval_images": int(images),
            }
            if self.directory:
                self._write(record)
            # With --eval-only what is printed is all that there is.
            epoch, digits = (f"epoch {record['epoch']}: ", 4) if self.directory else ("", 8)
            self.log.info(
                f"{epoch}test accuracy {record['eval_accuracy']:.2%} "
                f"({int(correct)} of {record['eval_images']} images), loss {record['eval_loss']:.{digits}f}",
                ranks=None,
            )

    def sync(self) -> None:
        """Have the disk hold the records so far."""
        if self.writes:
            os.fsync(self.file)

    def after_train(self, trainer: Trainer) -> None:
        if self.writes:
            try:
                self._flush()
                os.close(self.file)
                if self.events:
                    self.events.close()
                draw(self.directory)
            except OSError as error:
                raise TrainingError(f"{self.directory}: cannot be written: {error.strerror or error}") from None
