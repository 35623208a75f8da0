"""Saves checkpoints during training, and stops a run cleanly on a signal."""

import signal
import time
from pathlib import Path

from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.errors import Interrupted, Preempted, TrainingError
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.hooks.priority import Priority
from colossal_vit.launch.signals import StopRequests
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.run import Run
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor

# What checkpoints after epochs may amount to. Copying them from a GPU, at about 1 GB/s, then takes 1 % of the time.
BYTES_PER_S = 10e6
LONGEST_WAIT = 300.0  # seconds after which one is worth it, however large it is


class CheckpointHook(BaseHook):
    """Has checkpoints saved into the run directory, and stops the run after one on a signal, see `StopRequests`.

    A checkpoint is saved every `every_steps` steps and `every_minutes` minutes (config block `checkpoint`), at
    `--max-steps`, and after the evaluation of an epoch if that is the last one, or the best so far, or if checkpoints
    then amount to no more than `BYTES_PER_S`, or the last one is `LONGEST_WAIT` old. On SIGUSR1, SIGTERM, SIGHUP or
    SIGINT to any rank, all ranks stop after the same step or batch of an evaluation, with a checkpoint.

    Args:
        run: from `main.start`.
        train_dataloader: as `engine.initialize` returned it; has the position in the epoch.
        metrics: has the test accuracy.

    Raises:
        Preempted: in `after_train_iter` or `after_test_iter`, on SIGUSR1, SIGTERM or SIGHUP.
        Interrupted: in `after_train_iter` or `after_test_iter`, on SIGINT.
        TrainingError: if the last checkpoint cannot be written, or with `--on-save-error stop` any.
    """

    def __init__(self, run: Run, train_dataloader: TrainLoader, metrics: MetricsHook):
        super().__init__(Priority.CHECKPOINT)
        self.run, self.train_dataloader, self.metrics = run, train_dataloader, metrics
        self.every_steps = run.config.checkpoint.get("every_steps")
        self.every_s = 60.0 * run.config.checkpoint.every_minutes
        self.requests = StopRequests()
        self.due = False  # whether a checkpoint is to be saved after this step, or the epoch that it ends

    def _age(self) -> float:
        """Return seconds since the last checkpoint was saved, or training began."""
        return time.monotonic() - self.saved_at

    def _save(self, epoch: int, start: int, accuracy: float | None = None) -> Path:
        """Save a checkpoint, see `Checkpointer.save`; returns its path."""
        self.metrics.sync()
        path = self.run.checkpointer.save(epoch, start, accuracy)
        self.saved_at = time.monotonic()
        return path

    def _stop(self, trainer: Trainer, heard: int) -> None:
        path = self._save(trainer.cur_epoch, self.train_dataloader.taken)
        failure = self.run.checkpointer.finish()  # before any rank exits, since its exit ends the others
        kept = f"its checkpoint is not written: {failure}" if failure else f"saved as {path}"
        said = f"stopped by {signal.Signals(heard).name} after step {trainer.engine.num_steps}, {kept}"
        if heard == signal.SIGINT:
            raise Interrupted(f"{said}; the same command resumes it")
        code = self.run.args.exit_code_stopped
        raise Preempted(f"{said}; exit code {code}: the same command resumes it", code)

    def before_train(self, trainer: Trainer) -> None:
        self.saved_at = time.monotonic()
        self.requests.listen()

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        step, taken = trainer.engine.num_steps, self.train_dataloader.taken
        self.run.checkpointer.check()
        heard, due = self.requests.answer()
        if heard:
            self._stop(trainer, heard)
        every_steps = self.every_steps and step % self.every_steps == 0
        self.due = due or every_steps or step == self.run.args.max_steps
        in_epoch = taken < len(self.train_dataloader)  # after its last step, `after_test` decides
        if self.due and in_epoch:
            self._save(trainer.cur_epoch, taken)
        self.requests.ask(save=gpc.get_global_rank() == 0 and in_epoch and self._age() >= self.every_s)

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        heard, due = self.requests.answer()
        self.due |= due
        if heard and trainer.evaluating_ema:
            with trainer.engine.ema.swapped_in():  # exchanges them again: the checkpoint is of the weights
                self._stop(trainer, heard)
        if heard:
            self._stop(trainer, heard)
        self.requests.ask(save=False)

    def after_test(self, trainer: Trainer) -> None:
        if trainer.evaluating_ema or self.train_dataloader.taken < len(self.train_dataloader):
            return  # --max-steps has ended the epoch early, and `after_train_iter` has saved
        checkpointer, epochs = self.run.checkpointer, trainer.cur_epoch + 1
        old = self._age() >= min(checkpointer.num_bytes / BYTES_PER_S, LONGEST_WAIT, self.every_s)
        seen = all_gather_object((self.metrics.accuracy, old, checkpointer.best))
        accuracy, (_, old, best) = max(accuracy for accuracy, *_ in seen), seen[0]  # rank 0 decides
        better = best is None or accuracy > best["accuracy"]
        if self.due or better or epochs == self.run.config.NUM_EPOCHS or old:
            self._save(epochs, 0, accuracy)

    def after_train(self, trainer: Trainer) -> None:
        failure = self.run.checkpointer.finish()
        self.requests.close()  # a signal until here would have lost that checkpoint
        if failure:
            raise TrainingError(f"{failure}; the last checkpoint of the run is missing, the others are as they were")
