"""Hooks for Colossal-AI's Trainer: the learning rate, the record of the run, and its profile."""

import json
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossal_vit.config import Layout
from colossal_vit.data import IGNORED
from colossal_vit.engine import MicroBatches
from colossal_vit.errors import Preempted, TrainingError
from colossal_vit.launch import Run
from colossal_vit.ranks import RankLogger
from colossal_vit.report import draw
from colossal_vit.sharding import split_batch
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.legacy.utils import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule
from torch.utils._pytree import tree_leaves


class LRSchedulerHook(BaseHook):
    """Steps a learning-rate scheduler once per optimizer step, so that its unit is the optimizer step.

    Upstream's hook steps per batch, which under accumulation is several times a step. Runs after `MetricsHook`, which
    records the rate that the step was made with.
    """

    def __init__(self, lr_scheduler: Any, priority: int = 5):
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if trainer.engine.finished_step:
            self.lr_scheduler.step()


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


class MetricsHook(BaseHook):
    """Writes `metrics.jsonl` and TensorBoard events, and tells the progress bar what to show.

    One object per optimizer step: `step, epoch, loss, lr, grad_norm, images_per_s, data_s, step_s, memory_gb`, with
    loss scaling also `loss_scale, skipped`, on a GPU also `reserved_gb`, the peak of torch's allocator. One per
    evaluation: `step, epoch, eval_loss, eval_accuracy, eval_images`.
    `loss` is the mean over the whole global batch. Only the rank that sees the loss, in the last pipeline stage of
    the first replica, writes.

    At the end of the training the same rank draws the curves.

    Args:
        directory: the run directory.
        train_dataloader: what `engine.initialize` returned; it knows how long it was waited for.
        log: where evaluations, and without a progress bar epochs too, are announced.
    """

    def __init__(self, directory: Path, train_dataloader: MicroBatches, log: RankLogger, priority: int = 1):
        super().__init__(priority)
        self.train_dataloader = train_dataloader
        self.sees_loss = is_no_pp_or_last_stage()
        self.writes = self.sees_loss and is_dp_rank_0() and is_tp_rank_0()
        self.log = log
        self.directory = directory
        self.batch_parts = Layout.of(gpc.config, gpc.get_world_size(ParallelMode.GLOBAL)).batch_parts

    def _write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        for key in record.keys() - {"step", "epoch", "eval_images"}:
            self.events.add_scalar(key, record[key], record["step"])

    def before_train(self, trainer: Trainer) -> None:
        if self.writes:
            from torch.utils.tensorboard import SummaryWriter  # imports for seconds; one rank needs it

            self.file = open(self.directory / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 closed in after_train
            self.events = SummaryWriter(str(self.directory))
        self.losses: list[Tensor] = []
        self.step_started, self.waited = time.perf_counter(), 0.0

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.step_started = time.perf_counter()  # evaluation is not part of a step

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        engine = trainer.engine
        if self.sees_loss:
            self.losses.append(loss.detach())
        if not engine.finished_step:
            return
        if self.sees_loss:
            (total,) = _sum_over([ParallelMode.DATA], [torch.stack(self.losses).mean()], loss.device)
            self.losses.clear()
        now = time.perf_counter()
        step_s, self.step_started = now - self.step_started, now
        if not self.writes:
            return
        data_parallel_size = gpc.get_world_size(ParallelMode.DATA)
        images = engine.schedule.batch_size * engine.accumulation * data_parallel_size
        waited = self.train_dataloader.data_s
        record = {
            "step": engine.num_steps,
            "epoch": trainer.cur_epoch,
            "loss": total / data_parallel_size,
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
        trainer.states["step_metrics"] = {
            "loss": f"{record['loss']:.4f}",
            "lr": f"{record['lr']:.2e}",
            "images/s": f"{record['images_per_s']:.0f}",
        }
        self.last = record

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.writes and not sys.stderr.isatty():
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
        if self.writes:
            record = {
                "step": trainer.engine.num_steps,
                "epoch": trainer.cur_epoch,
                "eval_loss": loss / images,
                "eval_accuracy": correct / images,
                "eval_images": int(images),
            }
            self._write(record)
            self.log.info(
                f"epoch {record['epoch']}: test accuracy {record['eval_accuracy']:.2%} "
                f"({int(correct)} of {record['eval_images']} images), loss {record['eval_loss']:.4f}",
                ranks=None,
            )

    def after_train(self, trainer: Trainer) -> None:
        if self.writes:
            self.file.close()
            self.events.close()
            draw(self.directory)


class ProfileHook(BaseHook):
    """`--profile`: where the time of a step goes, and a trace of one.

    The second optimizer step is traced by torch's profiler into `profile-rank<N>.json`, for chrome://tracing or
    https://ui.perfetto.dev. The steps after it are timed: waiting for data, forward, backward, update (reduction of
    gradients, clipping, optimizer). The host waits for the device at the end of each, so that its work counts where it
    belongs; that makes a step a little longer.

    Args:
        directory: the run directory.
        train_dataloader: what `engine.initialize` returned; it knows how long it was waited for.
        log: where the times are announced.
    """

    TRACED = 2

    def __init__(self, directory: Path, train_dataloader: MicroBatches, log: RankLogger, priority: int = 3):
        super().__init__(priority)
        self.directory, self.train_dataloader, self.log = directory, train_dataloader, log
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update"), 0.0)
        self.step_s, self.num_timed = 0.0, 0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with record_function(name):
            yield
            get_accelerator().synchronize()
        if self.engine.model.training:  # not evaluating
            self.seconds[name] += time.perf_counter() - started

    def _export(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self.directory / f"profile-rank{gpc.get_global_rank()}.json"))

    def before_train(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        self.engine.part = self._timed
        steps = schedule(wait=0, warmup=self.TRACED - 1, active=1, repeat=1)
        self.profiler = profile(schedule=steps, on_trace_ready=self._export)
        self.profiler.start()
        self._restart()

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._restart()

    def _restart(self) -> None:
        self.step_started, self.waited = time.perf_counter(), self.train_dataloader.data_s

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        engine = trainer.engine
        if not engine.finished_step:
            return
        if engine.num_steps > self.TRACED:
            self.num_timed += 1
            self.step_s += time.perf_counter() - self.step_started
            self.seconds["data"] += self.train_dataloader.data_s - self.waited
        else:
            self.seconds = dict.fromkeys(self.seconds, 0.0)
            self.profiler.step()
        self._restart()

    def after_train(self, trainer: Trainer) -> None:
        self.profiler.stop()
        if not self.num_timed:
            self.log.info(f"--profile times steps after number {self.TRACED}: let the run make more of them")
            return
        step_s = self.step_s / self.num_timed
        means = {name: seconds / self.num_timed for name, seconds in self.seconds.items()}
        means["other"] = step_s - sum(means.values())
        said = ", ".join(f"{name} {1e3 * mean:.1f} ms ({mean / step_s:.1%})" for name, mean in means.items())
        self.log.info(f"a step takes {1e3 * step_s:.1f} ms, the mean of {self.num_timed}: {said}")


class DebugNanHook(BaseHook):
    """`--debug-nan`: ends the run at the first module whose output is not finite, or the gradient of its output.

    Looking costs a wait for the device after every module. Gradients are not looked at when the loss is scaled: then
    some overflow now and then, and the step is skipped.
    """

    def __init__(self, priority: int = 3):
        super().__init__(priority)

    def before_train(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        wrappers = r"^(module(\.|$))?(model(\.|$))?"  # DDP, and what changes the precision
        self.names = {module: re.sub(wrappers, "", name) for name, module in self.engine.model.named_modules()}
        for module in self.names:
            module.register_forward_hook(self._check_output)

    def _check(self, what: str, module: nn.Module, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                bad = int((~tensor.isfinite()).sum())
                raise TrainingError(
                    f"step {self.engine.num_steps + 1}, rank {gpc.get_global_rank()}: {what} "
                    f"{self.names[module] or 'the model'} ({type(module).__name__}) is not finite: {bad} of "
                    f"{tensor.numel()} values of shape {tuple(tensor.shape)}"
                )

    def _check_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._check("the output of", module, output)
        if self.engine.optimizer.loss_scale is None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._check, "the gradient at the output of", module))


class PreemptionHook(BaseHook):
    """Ends the run between two optimizer steps, the same on every rank, when any rank gets SIGUSR1 or SIGTERM.

    SLURM sends them ahead of a time limit, a preemption, a cancellation. The ranks tell each other in the background:
    what one hears during a step, all know one step later. A second signal has its usual effect.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self, priority: int = 9):  # the last, so that the step is on record
        super().__init__(priority)
        self.heard = 0
        self.asked: tuple[Tensor, dist.Work] | None = None

    def _hear(self, number: int, frame: Any) -> None:
        self.heard = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def before_train(self, trainer: Trainer) -> None:
        self.usual = {number: signal.signal(number, self._hear) for number in self.SIGNALS}

    def _answer(self) -> int:
        """What any rank had heard when all were asked last."""
        if self.asked is None:
            return 0
        number, work = self.asked
        self.asked = None
        work.wait()
        return int(number)

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if not trainer.engine.finished_step:
            return
        group, alone = gpc.get_cpu_group(ParallelMode.GLOBAL), gpc.get_world_size(ParallelMode.GLOBAL) == 1
        heard = self.heard if alone else self._answer()
        if heard:
            dist.barrier(group=group)  # the first rank to leave takes the rest along
            raise Preempted(
                f"stopped by {signal.Signals(heard).name} after step {trainer.engine.num_steps}; exit code "
                f"{Preempted.exit_code} says: start it again"
            )
        if not alone:
            number = torch.tensor(self.heard)
            self.asked = number, dist.all_reduce(number, dist.ReduceOp.MAX, group=group, async_op=True)

    def after_train(self, trainer: Trainer) -> None:
        self._answer()
        self._restore()


def standard_hooks(run: Run, train_dataloader: MicroBatches, lr_scheduler: Any) -> list[BaseHook]:
    """What every train script gives its trainer: first the `MetricsHook`, then what the command line asked for."""
    hooks = [MetricsHook(run.output, train_dataloader, run.log), LRSchedulerHook(lr_scheduler), PreemptionHook()]
    if run.profile:
        hooks.append(ProfileHook(run.output, train_dataloader, run.log))
    if run.debug_nan:
        hooks.append(DebugNanHook())
    return hooks
