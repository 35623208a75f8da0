"""Overhead of our engine, loop and hooks over plain PyTorch, with the same timm ViT, optimizer, autocast, clipping.

About 8 minutes on 2 CPU cores. In fp32 and under autocast to bf16, a plain PyTorch loop and `Trainer.fit` with the
hooks of the train scripts (metrics.jsonl, TensorBoard) alternate step by step in one process, on the same batches and
from the same weights; their losses must agree. `--set` overrides values of vit_caltech101_amp/config/config_fp32.py; on
a CPU, BATCH_SIZE is 4 by default.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from colossal_vit.data.batches import SyntheticBatches
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.hooks.standard import standard_hooks
from colossal_vit.models import build_timm_vit
from colossal_vit.run import Run
from colossalai.accelerator import get_accelerator
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.nn.lr_scheduler import LinearWarmupLR
from torch import Tensor, nn

from benchmarks.harness import ROOT, Benchmark, Case, Side
from benchmarks.training import CHECKED_STEPS, Batch, add_set, check_agreement, start_run

CONFIG = ROOT / "vit_caltech101_amp/config/config_fp32.py"
# Have glibc keep freed memory. By default it returns memory to the system and requests it again, at a cost of up to 7 %
# of a step, which falls on either loop by chance.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "500000000"}
SMALL = {"IMG_SIZE": 32, "PATCH_SIZE": 8, "HIDDEN_SIZE": 32, "DEPTH": 1, "NUM_HEADS": 2}


class Alternating(BaseHook):
    """The loader of a trainer, which makes a plain step with each batch, too, before or after the trainer's step.

    The trainer's step ends when it asks for the next batch; so that of the last batch is not timed.

    Args:
        batches: of the trainer.
        plain_step: an optimizer step in plain PyTorch; returns the loss.

    Attributes:
        seconds: of each step so far, by side.
        losses: of each step so far, by side.
    """

    def __init__(self, batches: SyntheticBatches, plain_step: Callable[[Batch], Tensor]):
        super().__init__(priority=10)
        self.batches, self.plain_step = batches, plain_step
        self.seconds: dict[str, list[float]] = {"plain PyTorch": [], "ours": []}
        self.losses: dict[str, list[Tensor]] = {name: [] for name in self.seconds}

    def __len__(self) -> int:
        return len(self.batches)

    def _stop_time(self, name: str) -> None:
        get_accelerator().synchronize()
        self.seconds[name].append(time.perf_counter() - self.started)

    def _step_plainly(self, batch: Batch) -> None:
        self.started = time.perf_counter()
        self.losses["plain PyTorch"].append(self.plain_step(batch).detach())
        self._stop_time("plain PyTorch")

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            if number % 2:
                self._step_plainly(batch)
            self.started = time.perf_counter()
            yield batch
            self._stop_time("ours")
            if number % 2 == 0:
                self._step_plainly(batch)

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        self.losses["ours"].append(loss.detach())


def plain_step(model: nn.Module, run: Run) -> Callable[[Batch], Tensor]:
    """An optimizer step in plain PyTorch."""
    criterion, optimizer = nn.CrossEntropyLoss(), build_optimizer(run.config, model)
    scheduler = LinearWarmupLR(optimizer, total_steps=1000, warmup_steps=100)

    def step(batch: Batch) -> Tensor:
        images, labels = batch
        optimizer.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16) if run.config.fp16 else nullcontext():
            loss = criterion(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.config.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def sides(precision: list[str], args: argparse.Namespace) -> dict[str, Side]:
    # With dropout, both sides would draw from the same random stream.
    values = {"DROP_RATE": 0.0, "COMPILE": False, **({} if torch.cuda.is_available() else {"BATCH_SIZE": 4})}
    args.set = [*precision, *args.set]
    run = start_run(args, CONFIG, {**values, **(SMALL if args.small else {})}, script="caltech101")
    config = run.config
    model = build_timm_vit(config).to(run.device)
    plain = plain_step(copy.deepcopy(model), run)
    optimizer = build_optimizer(config, model)
    scheduler = LinearWarmupLR(optimizer, total_steps=1000, warmup_steps=100)
    shape, num_steps = (config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE), args.rounds * args.steps
    batches = SyntheticBatches(CHECKED_STEPS + num_steps + 1, shape, config.NUM_CLASSES, run.device, config.SEED)
    both = Alternating(batches, plain)
    engine, loader, _, scheduler = initialize(model, optimizer, nn.CrossEntropyLoss(), both, None, scheduler)
    trainer = Trainer(engine, scheduler, run.log)
    trainer.fit(loader, epochs=1, hooks=[*standard_hooks(run, loader), both])
    for number in range(CHECKED_STEPS):
        check_agreement({name: losses[number].item() for name, losses in both.losses.items()})

    def measured(name: str, number: int) -> dict[str, float]:
        """The loop calls the loader, not the other way round: all has been measured when the harness asks."""
        first = CHECKED_STEPS + number * args.steps
        return {"s a step": sum(both.seconds[name][first : first + args.steps]) / args.steps}

    return {name: partial(measured, name) for name in both.seconds}


CASES = {
    "fp32": Case(partial(sides, []), 1, variables=KEEP_MEMORY),
    "autocast to bf16": Case(
        partial(sides, ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bf16'"]), 1, variables=KEEP_MEMORY
    ),
}
BENCHMARK = Benchmark(lambda args: CASES, rounds=7, steps=6, flags=add_set)
