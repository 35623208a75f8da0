"""Saves checkpoints during training, and stops a run cleanly on a signal."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.capture import Snapshot, capture
from colossal_vit.config.schema import default
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.errors import Interrupted, Preempted, TrainingError
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.ranks import all_gather_object, run_on_rank_0
from colossal_vit.run import Run
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor


class CheckpointHook(BaseHook):
    """Saves checkpoints into the run directory, and stops the run after one on a signal.

    A checkpoint is saved every `every_steps` steps and `every_minutes` minutes (config block `checkpoint`), after the
    evaluation of each epoch, and at `--max-steps`. The newest `keep` are kept, and the best by test accuracy. All ranks
    wait while rank 0 gathers the state; it is written to disk in the background while training continues.

    On SIGUSR1, SIGTERM or SIGINT to any rank, all ranks stop after the same step, with a checkpoint. SLURM sends the
    first two before a time limit, a preemption or a cancellation; the last is Ctrl-C. The ranks exchange the signal by
    an asynchronous all-reduce: all know one step later. A second signal has its default effect, unless it comes within
    `SAME_SIGNAL` seconds: Ctrl-C reaches a rank twice, from the terminal and from torchrun.

    Args:
        run: from `launch.start`.
        train_dataloader: as `engine.initialize` returned it; has the position in the epoch.
        metrics: has the test accuracy.

    Raises:
        Preempted: in `after_train_iter`, on SIGUSR1 or SIGTERM.
        Interrupted: in `after_train_iter`, on SIGINT.
        TrainingError: if the last checkpoint cannot be written, or with `--on-save-error stop` any.
    """

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    SAME_SIGNAL = 2.0  # seconds

    def __init__(
        self, run: Run, train_dataloader: MicroBatches, metrics: MetricsHook, priority: int = Priority.CHECKPOINT
    ):
        super().__init__(priority)
        self.run, self.train_dataloader, self.metrics = run, train_dataloader, metrics
        self.stop_on_error = run.args.on_save_error == "stop"
        settings = {key: default("checkpoint", key) for key in ("every_minutes", "keep")}
        settings |= run.config.get("checkpoint") or {}
        self.every_steps, self.keep = settings.get("every_steps"), settings["keep"]
        self.every_s = 60.0 * settings["every_minutes"]
        self.group, self.alone = gpc.get_cpu_group(ParallelMode.GLOBAL), gpc.get_world_size(ParallelMode.GLOBAL) == 1
        self.heard = 0
        self.asked: tuple[Tensor, dist.Work] | None = None
        self.writer: threading.Thread | None = None
        self.failure: str | None = None  # of the last save
        self.bug: Exception | None = None  # what else went wrong in the thread that writes

    # ---- Signals ----

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if not self.heard:
            self.heard, self.heard_at = number, now
        elif now - self.heard_at > self.SAME_SIGNAL:
            self._restore_handlers()
            os.kill(os.getpid(), number)

    def _restore_handlers(self) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def _own_request(self) -> Tensor:
        """The signal that this rank has received, or 0, and whether it is time for a checkpoint (on rank 0 only)."""
        due = gpc.get_global_rank() == 0 and time.monotonic() - self.saved_at >= self.every_s
        return torch.tensor([self.heard, int(due)])

    def _finish_exchange(self) -> list[int]:
        """The maximum of all ranks' requests at the previous step."""
        if self.alone:
            return self._own_request().tolist()
        if self.asked is None:
            return [0, 0]
        answer, work = self.asked
        self.asked = None
        work.wait()
        return answer.tolist()

    def _start_exchange(self) -> None:
        if not self.alone:
            answer = self._own_request()
            self.asked = answer, dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group, async_op=True)

    # ---- Saving ----

    def _save(self, trainer: Trainer, epoch: int, start: int) -> Path:
        """Save a checkpoint that resumes at micro-batch `start` of `epoch`; returns the path it is being written to."""
        path = self.run.output / storage.FOLDER / f"step-{trainer.engine.num_steps:08d}"
        run_on_rank_0(self._finish)
        self.metrics.sync()
        snapshot = capture(trainer, self.train_dataloader, epoch, start, self.run.best)
        if snapshot is not None:
            run = self.run
            snapshot.state.update(data=run.data, started_from=run.started_from, changes=run.changes)
            self.writer = threading.Thread(target=self._write, args=(path, snapshot), daemon=True)
            self.writer.start()
        self.saved_at = time.monotonic()
        return path

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        """Write a checkpoint and remove old ones; in a thread of its own, whose exceptions nobody else would see."""
        try:
            self.failure = self._why_not_written(path, snapshot)
            if self.failure is None:
                best = snapshot.state["best"]
                storage.prune(path.parent, self.keep, best and best["step"])
            elif not self.stop_on_error:
                self.run.log.info(f"{self.failure}; training continues")
        except OSError as error:  # the new checkpoint is there; the next save tries again to remove the old ones
            self.run.log.info(f"{error.filename or path.parent}: cannot be removed: {error.strerror or error}")
        except Exception as error:
            self.bug = error

    def _why_not_written(self, path: Path, snapshot: Snapshot) -> str | None:
        """Write a checkpoint; returns why that has failed, or None."""
        try:
            if not path.exists():  # it does if the run was stopped just before an epoch's evaluation, and resumed
                storage.write(path, *snapshot)
        except OSError as error:
            return f"{path}: cannot be written: {error.strerror or error}"
        except MemoryError:
            return f"{path}: cannot be written: out of memory"

    def _finish(self) -> None:
        """Wait until the checkpoint in progress is written (rank 0)."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.bug:
            raise self.bug

    def _check(self) -> None:
        if self.bug:
            raise self.bug
        if self.failure and self.stop_on_error:
            raise TrainingError(f"{self.failure}; earlier checkpoints are as they were (--on-save-error stop)")

    # ---- Events of the trainer ----

    def before_train(self, trainer: Trainer) -> None:
        self.saved_at = time.monotonic()
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a shell does so for its background jobs
        heard = [number for number in self.SIGNALS if not (ignored and number == signal.SIGINT)]
        self.usual = {number: signal.signal(number, self._on_signal) for number in heard}

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        step, taken = trainer.engine.num_steps, self.train_dataloader.taken
        self._check()
        heard, due = self._finish_exchange()
        if heard:
            path = self._save(trainer, trainer.cur_epoch, taken)
            run_on_rank_0(self._finish)  # before any rank exits, since its exit ends the others
            kept = f"its checkpoint is not written: {self.failure}" if self.failure else f"which {path} has"
            kind = Interrupted if heard == signal.SIGINT else Preempted
            meaning = "the same command resumes it" if kind is Interrupted else "exit code 75 says: start it again"
            raise kind(f"stopped by {signal.Signals(heard).name} after step {step}, {kept}; {meaning}")
        due = due or (self.every_steps and step % self.every_steps == 0) or step == self.run.args.max_steps
        if due and taken < len(self.train_dataloader):  # at the end of an epoch, `after_test` saves
            self._save(trainer, trainer.cur_epoch, taken)
        self._start_exchange()

    def after_test(self, trainer: Trainer) -> None:
        if trainer.evaluating_ema:
            return
        if self.train_dataloader.taken < len(self.train_dataloader):
            return  # --max-steps ended the epoch early, and `after_train_iter` has saved
        accuracy = max(all_gather_object(self.metrics.accuracy))
        if self.run.best is None or accuracy > self.run.best["accuracy"]:
            self.run.best = {"accuracy": accuracy, "step": trainer.engine.num_steps}
        self._save(trainer, trainer.cur_epoch + 1, 0)

    def after_train(self, trainer: Trainer) -> None:
        self._finish_exchange()
        self._restore_handlers()
        run_on_rank_0(self._finish)
        if self.failure:
            raise TrainingError(
                f"{self.failure}; the last checkpoint of the run is missing, the others are as they were"
            )
