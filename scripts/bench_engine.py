"""Overhead of our engine, trainer and hooks over plain PyTorch, with the same timm ViT, optimizer, autocast, clipping.

    python scripts/bench_engine.py [--runs N] [--steps N] [--output DIR] [--set KEY=VALUE ...]

About 8 minutes on 2 CPU cores. In fp32 and under autocast to bf16, a plain PyTorch loop and `Trainer.fit` with the
hooks of the train scripts (metrics.jsonl, TensorBoard, learning rate) alternate step by step in one process, on the
same batches and from the same weights; their losses must agree before they are timed. The overhead of a run is the time
of our steps divided by that of the plain ones, minus 1. `--set` overrides values of
vit_caltech101_amp/config/config_fp32.py; on a CPU, BATCH_SIZE is 4 by default.

Writes engine.md (the table), engine.json (every run), log.txt and provenance.json. Exit code 0 whatever the overheads
are, 1 when the two sides do not agree.
"""

import argparse
import copy
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from colossal_vit import launch
from colossal_vit.data.batches import SyntheticBatches
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.hooks.standard import standard_hooks
from colossal_vit.models import build_timm_vit
from colossal_vit.provenance import ResultFolder
from colossal_vit.results import read_metrics
from colossalai.accelerator import get_accelerator
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.nn.lr_scheduler import LinearWarmupLR
from torch import Tensor, nn

from turns import spread

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "vit_caltech101_amp/config/config_fp32.py"
MODES = {"fp32": [], "autocast to bf16": ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bf16'"]}
SIDES = ("bare_s", "ours_s")
# Have glibc keep freed memory. By default it returns memory to the system and requests it again, at a cost of up to 7 %
# of a step, which falls on either loop by chance.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_TOP_PAD_": "500000000"}
CHECKED_STEPS, TOLERANCE = 3, 1e-4  # relative tolerance of losses; these steps are also the warm-up

Batch = tuple[Tensor, Tensor]


class Turns(BaseHook):
    """Alternates the plain loop and the trainer. As the trainer's data loader it also makes the plain loop's step with
    each batch, alternately before and after the trainer's; as the trainer's last hook it stops the time of its step.

    Attributes:
        bare, ours: seconds of each step so far.
        losses: of the plain loop.
    """

    def __init__(self, step: Callable[[Batch], Tensor], batches: SyntheticBatches):
        super().__init__(priority=10)
        self.step, self.batches = step, batches
        self.bare, self.ours, self.losses = [], [], []

    def __len__(self) -> int:
        return len(self.batches)

    def _bare_step(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.losses.append(self.step(batch).detach())
        get_accelerator().synchronize()
        self.bare.append(time.perf_counter() - started)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.batch = batch
            if len(self.ours) % 2:
                self._bare_step(batch)
            self.started = time.perf_counter()
            yield batch

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        get_accelerator().synchronize()
        self.ours.append(time.perf_counter() - self.started)
        if len(self.ours) % 2:
            self._bare_step(self.batch)


def bare_step(model: nn.Module, autocast: bool, config, device: torch.device) -> Callable[[Batch], Tensor]:
    """An optimizer step in plain PyTorch."""
    criterion = nn.CrossEntropyLoss()
    optimizer = build_optimizer(config, model)
    scheduler = LinearWarmupLR(optimizer, total_steps=1000, warmup_steps=100)

    def step(batch: Batch) -> Tensor:
        images, labels = batch
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            loss = criterion(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def measure(args: argparse.Namespace, output: Path, settings: list[str]) -> list[dict[str, float]]:
    """Times of every run in one mode; runs in a separate process."""
    fixed = ["DROP_RATE=0.0"]  # with dropout, both sides would draw from the same random stream
    if not torch.cuda.is_available():
        fixed.append("BATCH_SIZE=4")
    flags = [part for text in [*fixed, *settings, *args.set] for part in ("--set", text)]
    argv = ["--config", str(CONFIG), "--output", str(output), *flags]
    run = launch.start(launch.parse(argv, script="caltech101"))
    config = run.config
    model = build_timm_vit(config).to(run.device)
    step = bare_step(copy.deepcopy(model), bool(config.fp16), config, run.device)
    optimizer = build_optimizer(config, model)
    scheduler = LinearWarmupLR(optimizer, total_steps=1000, warmup_steps=100)
    shape = (config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE)

    turns = Turns(step, SyntheticBatches(args.steps, shape, config.NUM_CLASSES, run.device, config.SEED))
    engine, loader, _, scheduler = initialize(model, optimizer, nn.CrossEntropyLoss(), turns, None, scheduler)
    trainer = Trainer(engine, scheduler, run.log)
    trainer.fit(loader, epochs=args.runs + 1, hooks=[*standard_hooks(run, loader), turns])
    for bare, ours in zip(turns.losses[:CHECKED_STEPS], read_metrics(output)[0], strict=False):
        if abs(ours["loss"] / bare.item() - 1) > TOLERANCE:
            raise SystemExit(f"the losses differ: {bare.item()} in the bare loop, {ours['loss']} in ours")
    assert len(turns.ours) == len(turns.bare) == (args.runs + 1) * args.steps
    runs = []
    for number in range(1, args.runs + 1):  # the first epoch is the warm-up
        part = slice(number * args.steps, (number + 1) * args.steps)
        bare, ours = (sum(times[part]) / args.steps for times in (turns.bare, turns.ours))
        runs.append({"bare_s": bare, "ours_s": ours, "overhead": ours / bare - 1})
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="paired runs (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of a side in a run (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train.py")
    device = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--output", type=Path, default=ROOT / f"results/engine_overhead/{device}")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)

    os.environ.update(KEEP_MEMORY)  # for the processes that measure
    results = {}
    table = ["| precision | bare PyTorch, s a step | ours, s a step | overhead: median | min | max |"]
    table.append("| --- |" + " ---: |" * 5)
    for name, settings in MODES.items():
        with (
            tempfile.TemporaryDirectory() as scratch,
            ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
        ):
            results[name] = process.submit(measure, args, Path(scratch) / "run", settings).result()
        for run in results[name]:
            benchmark.print(f"{name}: {run}")
        seconds = " | ".join(f"{statistics.median(run[side] for run in results[name]):.4f}" for side in SIDES)
        overheads = spread((run["overhead"] for run in results[name]), "+.2%")
        table.append(f"| {name} | {seconds} | {' | '.join(overheads)} |")
    details = {"config": CONFIG.name, "set": args.set, "steps": args.steps, "runs": results}
    benchmark.finish("engine", table, details)


if __name__ == "__main__":
    main()
