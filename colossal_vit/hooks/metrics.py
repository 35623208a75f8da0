"""What is measured in each optimizer step and each evaluation."""

import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossal_vit.compat.norms import at_least_fp32
from colossal_vit.data.batches import IGNORED
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.hooks.priority import Priority
from colossal_vit.hooks.recorder import Recorder
from colossal_vit.hooks.wandb_run import WandbRun
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.sharding import split_batch
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.legacy.utils import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from torch import Tensor

TOP = 5  # a model with more classes than these has a top-5 accuracy


def writes_metrics() -> bool:
    """Return whether this rank has the records of a run: in the last pipeline stage, which sees the loss, the first."""
    return is_no_pp_or_last_stage() and is_dp_rank_0() and is_tp_rank_0()


def _memory_gb(device: torch.device) -> float:
    """Return the peak memory so far: allocated on the GPU, or resident on a machine without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


class MetricsHook(BaseHook):
    """Measures each optimizer step and each evaluation, and gives the records to a `Recorder`.

    One object per optimizer step: `step, epoch, loss, lr, grad_norm, images_per_s, data_s, step_s, memory_gb`, with
    loss scaling also `loss_scale, skipped`, on a GPU also `reserved_gb`, the peak of torch's allocator. One per
    evaluation: `step, epoch, eval_loss, eval_accuracy, eval_images`, of a model with more than five classes also
    `eval_top5`; with the block `ema` also `ema_loss, ema_accuracy, ema_top5`.
    `loss` is the mean over the whole global batch. Only one rank writes, see `writes_metrics`; there the records of the
    epoch's steps so far are in `trainer.states["records"]` for other hooks. On a GPU the last one is missing until its
    result is read, in the next step or at the end of the epoch, see `Engine`.

    Args:
        directory: the run directory; None writes nothing.
        train_dataloader: what `engine.initialize` returned; it knows how long it was waited for.
        log: where evaluations are announced.
        wandb: gets the records too.
        curves: whether to draw them at the end, which takes longer than a few steps of a small model.
    """

    def __init__(
        self,
        directory: Path | None,
        train_dataloader: TrainLoader,
        log: RankLogger,
        wandb: WandbRun | None = None,
        curves: bool = True,
    ):
        super().__init__(Priority.METRICS)
        self.train_dataloader = train_dataloader
        self.sees_loss = is_no_pp_or_last_stage()
        self.writes = writes_metrics()
        self.log = log
        self.recorder = Recorder(directory, log, wandb, curves) if directory else None
        self.accuracy = -1.0  # the last evaluation's, on the ranks that have seen it
        self.of_average: dict[str, float] = {}  # loss and accuracies of the averaged weights, if there are any
        self.batch_parts = Layout.current().batch_parts

    def before_train(self, trainer: Trainer) -> None:
        self.trainer = trainer
        if self.writes:
            # An epoch's evaluation stays on record only if it is not made again.
            self.recorder.open(trainer.engine.num_steps, trainer.cur_epoch + trainer.finished)
        self.waited = 0.0
        self.begun: dict[str, Any] = {}  # the record of a step whose result has not been read

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.step_started = time.perf_counter()  # evaluation is not part of a step
        if self.writes:
            trainer.states["records"] = []

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if not self.writes:
            return
        engine, waited = trainer.engine, self.train_dataloader.data_s
        self._end_step(engine.result_time)  # that before
        self.begun = {
            "step": engine.num_steps,
            "epoch": trainer.cur_epoch,
            "loss": None,
            "lr": engine.optimizer.param_groups[0]["lr"],
            "grad_norm": None,
            "images_per_s": None,
            "data_s": waited - self.waited,
            "step_s": None,
            "memory_gb": _memory_gb(loss.device),
        }
        self.waited = waited
        if loss.device.type == "cuda":
            self.begun["reserved_gb"] = torch.cuda.max_memory_reserved(loss.device) / 1e9
        if engine.read_steps == engine.num_steps:
            self._end_step(time.perf_counter())

    def _end_step(self, ended: float) -> None:
        """Complete the record of the step that `begun` is of, if there is one, with its result, and write it."""
        if not self.begun:
            return
        engine, optimizer = self.trainer.engine, self.trainer.engine.optimizer
        images = engine.schedule.batch_size * engine.accumulation * gpc.get_world_size(ParallelMode.DATA)
        step_s, self.step_started = ended - self.step_started, ended
        self.begun |= {"loss": engine.loss, "grad_norm": engine.grad_norm}
        self.begun |= {"images_per_s": images / step_s, "step_s": step_s}
        if optimizer.loss_scale is not None:
            self.begun |= {"loss_scale": optimizer.loss_scale, "skipped": optimizer.skipped}
        record, self.begun = self.begun, {}
        self.recorder.write(record)
        self.trainer.states["records"].append(record)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._end_step(trainer.engine.result_time)

    def before_test(self, trainer: Trainer) -> None:
        self.eval_loss = self.eval_top5 = self.eval_correct = self.eval_images = 0.0

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if self.sees_loss:
            # 2D, 2.5D and 3D split each micro-batch over the tensor-parallel ranks: each has the logits of its part.
            micro_batches = getattr(trainer.engine.schedule, "num_microbatches", 1)
            label = split_batch(label.view(micro_batches, -1), dim=1).flatten()
            counted, classes = label != IGNORED, output.size(-1)
            correct = (output.argmax(-1) == label) & counted
            self.eval_loss += F.cross_entropy(at_least_fp32(output), label, reduction="sum", ignore_index=IGNORED)
            self.eval_top5 += (output.topk(min(TOP, classes)).indices == label[:, None]).sum()
            each = torch.zeros(2, classes, dtype=torch.int64, device=label.device)  # right and all images of a class
            each.index_add_(1, label.clamp(min=0), torch.stack([correct, counted]).long())
            self.eval_correct, self.eval_images = self.eval_correct + each[0], self.eval_images + each[1]

    def after_test(self, trainer: Trainer) -> None:
        if not self.sees_loss:
            return
        totals = torch.stack([self.eval_loss.double(), self.eval_top5.double()])
        sums = torch.cat([totals, self.eval_correct.double(), self.eval_images.double()])
        for mode in (ParallelMode.DATA, ParallelMode.TENSOR):
            if gpc.get_world_size(mode) > 1:
                dist.all_reduce(sums, group=gpc.get_group(mode))
        copies = gpc.tensor_parallel_size // self.batch_parts  # tensor-parallel ranks that saw the same part of a batch
        totals, by_class = (sums / copies).cpu().tensor_split([len(totals)])
        right, of_class = by_class.chunk(2)  # by class
        (loss, in_top5), correct, images = totals.tolist(), int(right.sum()), int(of_class.sum())
        found = {"loss": loss / images, "accuracy": correct / images}
        if len(right) > TOP:
            found["top5"] = in_top5 / images
        if trainer.evaluating_ema:
            self.of_average = {f"ema_{key}": value for key, value in found.items()}
            return
        self.accuracy = found["accuracy"]
        if self.writes:
            record = {
                "step": trainer.engine.num_steps,
                "epoch": trainer.cur_epoch,
                **{f"eval_{key}": value for key, value in found.items()},
                "eval_images": images,
                **self.of_average,
            }
            if self.recorder:
                self.recorder.write(record)
            # With --eval-only what is printed is all that there is.
            epoch, digits = (f"epoch {record['epoch']} of {trainer.num_epochs}: ", 4) if self.recorder else ("", 8)
            recall = (right / of_class).nanmean().item()  # of the classes that there are images of
            top5, ema_top5 = (
                f", top-5 {record[key]:.2%}" if key in record else "" for key in ("eval_top5", "ema_top5")
            )
            said = f"{self.accuracy:.2%} ({correct} of {images} images){top5}, macro recall {recall:.2%}"
            average = ""
            if self.of_average:
                average = f"; EMA {record['ema_accuracy']:.2%}{ema_top5}, loss {record['ema_loss']:.{digits}f}"
            loss_said = f"loss {record['eval_loss']:.{digits}f}"
            self.log.info(f"{epoch}test accuracy {said}, {loss_said}{average}", ranks=None)

    def sync(self) -> None:
        """Have the disk hold the records so far. Raises what `Engine.wait_for_step` does."""
        self.trainer.engine.wait_for_step()
        self._end_step(self.trainer.engine.result_time)
        if self.writes:
            self.recorder.sync()

    def after_train(self, trainer: Trainer) -> None:
        if self.writes:
            self.recorder.close()
