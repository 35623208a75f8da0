"""The training loop."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from colossal_vit.data.batches import Loader
from colossal_vit.engine.compilation import check_kernels
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.parallel.collectives import RankLogger
from colossalai.legacy.trainer.hooks import BaseHook
from torch.optim.lr_scheduler import LRScheduler


class Trainer:
    """Trains and evaluates the model of an engine, and calls hooks at the events that `BaseHook` names.

    Made and called like Colossal-AI's Trainer, with these differences: an iteration is an optimizer step, with all its
    micro-batches; the learning rate is scheduled here; training can begin in the middle of an epoch; and the average of
    the weights is evaluated too.

    Args:
        engine: from `initialize`.
        lr_scheduler: stepped after each optimizer step and its hooks; None leaves the learning rate to hooks.
        logger: says why there are no further steps.

    Attributes:
        cur_epoch: number of the current epoch, from 0 on; set by `Checkpointer.load`.
        cur_step: optimizer steps from the beginning of the first epoch to here, all with the global batch of now.
        steps_per_epoch: optimizer steps of an epoch.
        num_epochs: epochs of the whole run, once it trains.
        finished: whether no step and no evaluation of the run is left.
        evaluated: whether an evaluation of the current step is on record; set by `Checkpointer.load`.
        evaluating_ema: whether the current evaluation is of the averaged weights; it precedes that of the weights.
        hooks: in the order in which they are called.
        states: values that hooks share.
        test_dataloader: of the evaluation that is going on.
    """

    def __init__(self, engine: Engine, lr_scheduler: LRScheduler | None = None, logger: RankLogger | None = None):
        self.engine, self.lr_scheduler, self.logger = engine, lr_scheduler, logger or RankLogger()
        self.cur_epoch = self.cur_step = self.steps_per_epoch = self.num_epochs = 0
        self.evaluated = self.evaluating_ema = self.finished = False
        self.test_dataloader: Loader | None = None
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}

    def fit(
        self,
        train_dataloader: TrainLoader,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Loader | None = None,
        hooks: Iterable[BaseHook] = (),
    ) -> None:
        """Train up to the end of epoch `epochs`, and evaluate after each epoch.

        Args:
            train_dataloader: as `initialize` returned it; the first epoch begins at its `start`.
            epochs: those of the whole run.
            max_steps: stop at this optimizer step of the run; None makes all.
            test_dataloader: None evaluates nothing.
            hooks: called in the order of their priorities, the lowest first.

        Raises:
            UserError: if this machine lacks what the model's kernels need.
        """
        check_kernels(self.engine.model)
        self.steps_per_epoch, self.num_epochs = len(train_dataloader) // self.engine.accumulation, epochs
        self.cur_step = self.cur_epoch * self.steps_per_epoch + train_dataloader.start // self.engine.accumulation
        engine = self.engine
        left = max_steps - engine.num_steps if max_steps else math.inf
        last_step = min(epochs * self.steps_per_epoch, self.cur_step + left)
        # In the middle of an epoch the evaluation after the last step may be left.
        evaluated = self.evaluated or train_dataloader.start == 0 or self.cur_step > last_step
        self.finished = evaluated and self.cur_step >= last_step
        if self.finished:
            self.logger.info(f"nothing is left to do: the run has made its {engine.num_steps} steps")
        self._attach(hooks)
        self._call_hooks("before_train")
        while self.cur_epoch < epochs and not self.finished:
            self._train_epoch(train_dataloader, last_step)
            if test_dataloader is not None:
                self.evaluate(test_dataloader)
            self.cur_epoch += 1
            self.finished = self.cur_step >= last_step
        self._call_hooks("after_train")
        if engine.num_steps == max_steps:
            self.logger.info(f"stopped after step {max_steps}, as --max-steps says")

    def _train_epoch(self, train_dataloader: TrainLoader, last_step: float) -> None:
        engine = self.engine
        engine.train()
        batches = iter(train_dataloader)
        self._call_hooks("before_train_epoch")
        end = min((self.cur_epoch + 1) * self.steps_per_epoch, last_step)
        while self.cur_step < end:
            self._call_hooks("before_train_iter")
            for _ in range(engine.accumulation):
                engine.zero_grad()  # has an effect before the first micro-batch of a step only
                output, label, loss = engine.execute_schedule(batches)  # the forward and backward passes
                engine.step()  # after the last micro-batch: reduces and clips gradients, updates weights
            self._call_hooks("after_train_iter", output, label, loss)
            if self.lr_scheduler:
                self.lr_scheduler.step()
            self.cur_step += 1
        engine.wait_for_step()
        self._call_hooks("after_train_epoch")

    def evaluate(self, test_dataloader: Loader, hooks: Iterable[BaseHook] | None = None) -> None:
        """Evaluate the averaged weights, if there are any, and the weights; None keeps the hooks that there are."""
        if hooks is not None:
            self._attach(hooks)
        self.test_dataloader = test_dataloader
        if self.engine.ema:
            with self.engine.ema.swapped_in():
                self.evaluating_ema = True
                self._test(test_dataloader)
            self.evaluating_ema = False
        self._test(test_dataloader)

    def _test(self, test_dataloader: Loader) -> None:
        self.engine.eval()
        batches = iter(test_dataloader)
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        with torch.no_grad():
            for _ in range(len(test_dataloader)):
                self._call_hooks("before_test_iter")
                output, label, loss = self.engine.execute_schedule(batches, forward_only=True)
                self._call_hooks("after_test_iter", output, label, loss)
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")

    def _attach(self, hooks: Iterable[BaseHook]) -> None:
        self.hooks, self.states = sorted(hooks, key=lambda hook: hook.priority), {}
        self._call_hooks("after_hook_is_attached")

    def _call_hooks(self, event: str, *outcome: Any) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self, *outcome)
