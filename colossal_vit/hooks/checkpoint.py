"""Checkpoints while training, and the end of a run that is asked to stop."""

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
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.errors import Interrupted, Preempted, TrainingError
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.ranks import all_gather_object, run_on_rank_0
from colossal_vit.run import Run
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer import Trainer
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor


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

    def __init__(
        self, run: Run, train_dataloader: MicroBatches, metrics: MetricsHook, priority: int = Priority.CHECKPOINT
    ):
        super().__init__(priority)
        self.run, self.train_dataloader, self.metrics = run, train_dataloader, metrics
        settings = {key: default("checkpoint", key) for key in ("every_minutes", "keep")}
        settings |= run.config.get("checkpoint") or {}
        self.every_steps, self.keep = settings.get("every_steps"), settings["keep"]
        self.every_s = 60.0 * settings["every_minutes"]
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
        """Save what it takes to resume with micro-batch `start` of `epoch`; returns where it will be."""
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
        try:
            if not path.exists():  # as it does when the run was stopped just before the evaluation of an epoch
                storage.write(path, *snapshot)
            best = snapshot.state["best"]
            storage.prune(path.parent, self.keep, best and best["step"])
            self.failure = None
        except OSError as error:
            self.failure = f"{path}: cannot be written: {error.strerror or error}"
            if not self.run.stop_on_save_error:
                self.run.log.info(f"{self.failure}; training continues")

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
            run_on_rank_0(self._finish)  # the first rank to leave takes the rest along
            kept = f"its checkpoint is not written: {self.failure}" if self.failure else f"which {path} has"
            kind = Interrupted if heard == signal.SIGINT else Preempted
            meaning = "the same command resumes it" if kind is Interrupted else "exit code 75 says: start it again"
            raise kind(f"stopped by {signal.Signals(heard).name} after step {step}, {kept}; {meaning}")
        due = due or (self.every_steps and step % self.every_steps == 0) or step == self.run.max_steps
        if due and taken < len(self.train_dataloader):  # else there is an evaluation to come before
            self._save(trainer, trainer.cur_epoch, taken)
        self._ask()

    def after_test(self, trainer: Trainer) -> None:
        if trainer.averaged:
            return
        if self.train_dataloader.taken < len(self.train_dataloader):
            return  # --max-steps ended the epoch, and the state before this evaluation is saved
        accuracy = max(all_gather_object(self.metrics.accuracy))
        if self.run.best is None or accuracy > self.run.best["accuracy"]:
            self.run.best = {"accuracy": accuracy, "step": trainer.engine.num_steps}
        self._save(trainer, trainer.cur_epoch + 1, 0)

    def after_train(self, trainer: Trainer) -> None:
        self._answer()
        self._restore()
        run_on_rank_0(self._finish)
        if self.failure:
            raise TrainingError(
                f"{self.failure}; the last checkpoint of the run is missing, the others are as they were"
            )
