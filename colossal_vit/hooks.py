"""Hooks for Colossal-AI's Trainer: the learning rate, the record of the run, and its profile."""

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossal_vit import checkpoint
from colossal_vit.config import Layout
from colossal_vit.data import IGNORED
from colossal_vit.engine import MicroBatches
from colossal_vit.errors import Interrupted, Preempted, TrainingError, UserError
from colossal_vit.launch import Run
from colossal_vit.ranks import RankLogger, everyone, on_one_rank
from colossal_vit.report import draw
from colossal_vit.sharding import split_batch
from colossal_vit.state import Snapshot, take
from colossal_vit.waits import WaitCounter
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.legacy.utils import is_dp_rank_0, is_no_pp_or_last_stage, is_tp_rank_0
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm


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


class ProgressHook(BaseHook):
    """A progress bar over the steps of the run, with the time left, where stderr is a terminal.

    Args:
        run: of `launch.start`.
        train_dataloader: what `engine.initialize` returned.
        metrics: knows the last step; the rank that records it shows the bar.
    """

    def __init__(self, run: Run, train_dataloader: MicroBatches, metrics: MetricsHook, priority: int = 3):
        super().__init__(priority)
        self.run, self.train_dataloader, self.metrics = run, train_dataloader, metrics

    def before_train(self, trainer: Trainer) -> None:
        steps = self.run.config.NUM_EPOCHS * (len(self.train_dataloader) // trainer.engine.accumulation)
        self.bar = tqdm(
            total=min(steps, self.run.max_steps or steps),
            initial=trainer.engine.num_steps,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.metrics.writes else True,  # None: unless stderr is a terminal
        )

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if trainer.engine.finished_step and not self.bar.disable:
            last = self.metrics.last
            self.bar.set_postfix_str(
                f"epoch {last['epoch']}, loss {last['loss']:.4f}, {last['images_per_s']:.0f} images/s", refresh=False
            )
            self.bar.update()

    def after_train(self, trainer: Trainer) -> None:
        self.bar.close()


class ProfileHook(BaseHook):
    """`--profile`: where the time of a step goes, and a trace of one.

    The second optimizer step is traced by torch's profiler into `profile-rank<N>.json`, for chrome://tracing or
    https://ui.perfetto.dev. In the third it is counted how often the host waits for the device (see `waits`). The steps
    after it are timed: waiting for data, forward, backward, update (reduction of gradients, clipping, optimizer). The
    host waits for the device at the end of each, so that its work counts where it belongs; that makes a step a little
    longer.

    Args:
        directory: the run directory.
        train_dataloader: what `engine.initialize` returned; it knows how long it was waited for.
        log: where the times are announced.
    """

    TRACED, COUNTED = 2, 3

    def __init__(self, directory: Path, train_dataloader: MicroBatches, log: RankLogger, priority: int = 3):
        super().__init__(priority)
        self.directory, self.train_dataloader, self.log = directory, train_dataloader, log
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update"), 0.0)
        self.step_s, self.num_timed = 0.0, 0
        self.waits: WaitCounter | None = None

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
        if engine.num_steps == self.COUNTED - 1 and not gpc.config.get("COMPILE"):  # which does not know such modes
            states = engine.optimizer.optim.state.values()
            self.waits = WaitCounter(state["step"] for state in states if "step" in state)
            self.waits.__enter__()
        elif engine.num_steps == self.COUNTED and self.waits:
            self.waits.__exit__(None, None, None)
        if engine.num_steps > self.COUNTED:
            self.num_timed += 1
            self.step_s += time.perf_counter() - self.step_started
            self.seconds["data"] += self.train_dataloader.data_s - self.waited
        else:
            self.seconds = dict.fromkeys(self.seconds, 0.0)
            self.profiler.step()  # does no harm after the traced one
        self._restart()

    def after_train(self, trainer: Trainer) -> None:
        self.profiler.stop()
        if not self.num_timed:
            self.log.info(f"--profile times steps after number {self.COUNTED}: let the run make more of them")
            return
        if self.waits:
            others = "".join(f", {count} for {name}" for name, count in self.waits.others.items())
            self.log.info(f"in a step the host waits for the device: {self.waits.reads} for loss and norm{others}")
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


class CheckpointHook(BaseHook):
    """Saves checkpoints into the run directory, and ends the run after one when it is told to.

    One is saved every `every_steps` steps and `every_minutes` minutes of the config's `checkpoint` block, after each
    epoch and its evaluation, and at `--max-steps`. The newest `keep` are kept, and the best by test accuracy. All ranks
    wait while rank 0 takes the state; it is written while they train on.

    On SIGUSR1, SIGTERM or SIGINT to any rank, all stop after the same step, with a checkpoint. SLURM sends the first
    two ahead of a time limit, a preemption, a cancellation; the last is Ctrl-C. The ranks tell each other in the
    background: what one hears during a step, all know one step later. A second signal has its usual effect, unless it
    comes at once: Ctrl-C reaches a rank from the terminal, and from torchrun once more.

    Args:
        run: of `launch.start`.
        train_dataloader: what `engine.initialize` returned; it knows the place in the epoch.
        metrics: knows the accuracy.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    SAME_SIGNAL = 2.0  # seconds

    def __init__(self, run: Run, train_dataloader: MicroBatches, metrics: MetricsHook, priority: int = 9):
        super().__init__(priority)  # the last, so that the step is on record, and its scheduler moved
        self.run, self.train_dataloader, self.metrics = run, train_dataloader, metrics
        settings = run.config.get("checkpoint") or {}
        self.every_steps, self.keep = settings.get("every_steps"), settings.get("keep", 3)
        self.every_s = 60.0 * settings.get("every_minutes", 30)
        self.group, self.alone = gpc.get_cpu_group(ParallelMode.GLOBAL), gpc.get_world_size(ParallelMode.GLOBAL) == 1
        self.heard = 0
        self.asked: tuple[Tensor, dist.Work] | None = None
        self.writer: threading.Thread | None = None
        self.failure: str | None = None  # of the last save

    # ---- What the ranks tell each other ----

    def _hear(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if not self.heard:
            self.heard, self.heard_at = number, now
        elif now - self.heard_at > self.SAME_SIGNAL:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def _own_answer(self) -> Tensor:
        """The signal that this rank has heard, and whether it finds a checkpoint due."""
        due = gpc.get_global_rank() == 0 and time.monotonic() - self.saved_at >= self.every_s
        return torch.tensor([self.heard, int(due)])

    def _answer(self) -> list[int]:
        """The largest answer of any rank when all were asked last."""
        if self.alone:
            return self._own_answer().tolist()
        if self.asked is None:
            return [0, 0]
        answer, work = self.asked
        self.asked = None
        work.wait()
        return answer.tolist()

    def _ask(self) -> None:
        if not self.alone:
            answer = self._own_answer()
            self.asked = answer, dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group, async_op=True)

    # ---- Saving ----

    def _save(self, trainer: Trainer, epoch: int, start: int) -> Path:
        """Save what it takes to go on with micro-batch `start` of `epoch`; returns where it will be."""
        path = self.run.output / checkpoint.FOLDER / f"step-{trainer.engine.num_steps:08d}"
        on_one_rank(self._finish)
        self.metrics.sync()
        snapshot = take(trainer, self.train_dataloader, epoch, start, self.run.best)
        if snapshot is not None:
            run = self.run
            snapshot.state.update(data=run.data, started_from=run.started_from, changes=run.changes)
            self.writer = threading.Thread(target=self._write, args=(path, snapshot), daemon=True)
            self.writer.start()
        self.saved_at = time.monotonic()
        return path

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        try:
            if not path.exists():  # as it does when the run was stopped just before the evaluation of an epoch
                checkpoint.write(path, *snapshot)
            best = snapshot.state["best"]
            checkpoint.prune(path.parent, self.keep, best and best["step"])
            self.failure = None
        except OSError as error:
            self.failure = f"{path}: cannot be written: {error.strerror or error}"
            if not self.run.stop_on_save_error:
                self.run.log.info(f"{self.failure}; training goes on")

    def _finish(self) -> None:
        """Rank 0: wait for the checkpoint that is being written."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None

    def _check(self) -> None:
        if self.failure and self.run.stop_on_save_error:
            raise TrainingError(f"{self.failure}; earlier checkpoints are as they were (--on-save-error stop)")

    # ---- When ----

    def before_train(self, trainer: Trainer) -> None:
        self.saved_at = time.monotonic()
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in the background jobs of a shell
        heard = [number for number in self.SIGNALS if not (ignored and number == signal.SIGINT)]
        self.usual = {number: signal.signal(number, self._hear) for number in heard}

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        step, taken = trainer.engine.num_steps, self.train_dataloader.taken
        if not trainer.engine.finished_step:
            return
        self._check()
        heard, due = self._answer()
        if heard:
            path = self._save(trainer, trainer.cur_epoch, taken)
            on_one_rank(self._finish)  # the first rank to leave takes the rest along
            kept = f"its checkpoint is not written: {self.failure}" if self.failure else f"which {path} has"
            kind = Interrupted if heard == signal.SIGINT else Preempted
            meaning = "the same command resumes it" if kind is Interrupted else "exit code 75 says: start it again"
            raise kind(f"stopped by {signal.Signals(heard).name} after step {step}, {kept}; {meaning}")
        due = due or (self.every_steps and step % self.every_steps == 0) or step == self.run.max_steps
        if due and taken < len(self.train_dataloader):  # else there is an evaluation to come before
            self._save(trainer, trainer.cur_epoch, taken)
        self._ask()

    def after_test(self, trainer: Trainer) -> None:
        if self.train_dataloader.taken < len(self.train_dataloader):
            return  # --max-steps ended the epoch, and the state before this evaluation is saved
        accuracy = max(everyone(self.metrics.accuracy))
        if self.run.best is None or accuracy > self.run.best["accuracy"]:
            self.run.best = {"accuracy": accuracy, "step": trainer.engine.num_steps}
        self._save(trainer, trainer.cur_epoch + 1, 0)

    def after_train(self, trainer: Trainer) -> None:
        self._answer()
        self._restore()
        on_one_rank(self._finish)
        if self.failure:
            raise TrainingError(
                f"{self.failure}; the last checkpoint of the run is missing, the others are as they were"
            )


def standard_hooks(run: Run, train_dataloader: MicroBatches, lr_scheduler: Any) -> list[BaseHook]:
    """What every train script gives its trainer: first the `MetricsHook`, then what the command line asked for.

    With `--eval-only` that is all.
    """
    metrics = MetricsHook(None if run.eval_only else run.output, train_dataloader, run.log)
    if run.eval_only:
        return [metrics]
    hooks = [
        metrics,
        ProgressHook(run, train_dataloader, metrics),
        LRSchedulerHook(lr_scheduler),
        CheckpointHook(run, train_dataloader, metrics),
    ]
    if run.profile:
        hooks.append(ProfileHook(run.output, train_dataloader, run.log))
    if run.debug_nan:
        hooks.append(DebugNanHook())
    return hooks
