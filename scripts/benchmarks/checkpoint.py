"""Cost of a checkpoint: the pause in training, the time to write, verify and load it, and its size.

About 6 minutes on 2 CPU cores; needs 12 GB of free memory, and 4 GB in the folder for temporary files (TMPDIR). Each
model is trained in a process of its own, in fp32 with LAMB on 2 random images. A round is one checkpoint: training
pauses while its state is gathered, and continues while the state is written; steps without and during a write are timed
one after the other. `Checkpointer.prepare` verifies from the disk, after the files are dropped from the page cache;
`load` then reads from the page cache, as when a run is restarted. "Every ... s for 1 %" is the shortest
interval between saves for which training pauses at most 1 % of the time. Slower steps during a write come on top.
"""

import argparse
import os
import shutil
import statistics
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.full_tensors import FullTensors
from colossal_vit.data.batches import SyntheticLoader
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.loop import Trainer
from colossal_vit.model.timm_vit import build_timm_vit
from colossalai.nn.lr_scheduler import LinearWarmupLR

from benchmarks.harness import ROOT, Benchmark, Case, Side, Values
from benchmarks.training import seconds, start_run

CONFIG = ROOT / "vit_imagenet_dali/config.py"
MODELS = ("vit_base_patch16_224", "vit_large_patch32_224")
SETTINGS = dict(BATCH_SIZE=2, gradient_accumulation=1, fp16=None)
NUM_BATCHES = 1000  # per epoch: more than are used
GOAL = 0.01  # largest share of the time that training may pause


def forget(path: Path) -> None:
    """Ask the kernel to drop a checkpoint's files from the page cache."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sides(model_name: str, args: argparse.Namespace) -> dict[str, Side]:
    run = start_run(args, CONFIG.with_name("train.py"), CONFIG, {**SETTINGS, "MODEL": model_name})
    config, device = run.config, run.device
    model = build_timm_vit(config).to(device)
    optimizer = Lamb(model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY)
    scheduler = LinearWarmupLR(optimizer, total_steps=NUM_BATCHES, warmup_steps=NUM_BATCHES // 2)
    sampler = GlobalBatchSampler(NUM_BATCHES * config.BATCH_SIZE, config.BATCH_SIZE, seed=config.SEED)
    batches = SyntheticLoader(sampler, config, device)
    engine, loader, _, scheduler = initialize(model, optimizer, torch.nn.CrossEntropyLoss(), batches, None, scheduler)
    trainer = Trainer(engine, scheduler, run.log)
    engine.train()
    folder = run.output / storage.FOLDER
    run.checkpointer.load(trainer, loader)
    steps_beside = [3]  # how many steps the last write took

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter(loader))
        engine.step()
        scheduler.step()

    def state() -> dict[str, Any]:
        return run.checkpointer.state(0, engine.num_steps)

    def checkpoint(number: int) -> Values:
        for old in storage.list_steps(folder):
            shutil.rmtree(old)
        alone = [seconds(step) for _ in range(steps_beside[-1])]
        path = folder / f"step-{engine.num_steps:08d}"
        taken: list[Any] = []
        pause = seconds(lambda: taken.extend((FullTensors(engine).copy(), state())))
        writing: list[float] = []
        writer = Thread(target=lambda: writing.append(seconds(lambda: storage.write(path, *taken))))
        writer.start()
        beside = []
        while writer.is_alive():
            beside.append(seconds(step))
        steps_beside.append(len(beside))
        beside = beside[:-1] or beside  # the write ended during the last step
        forget(path)
        found = {
            "training stops, s": pause,
            f"every ... s for {GOAL:.0%}": max(pause / GOAL, writing[0]),
            "write, s": writing[0],
            "verify, s": seconds(run.checkpointer.prepare),
            "restore, s": seconds(lambda: run.checkpointer.load(trainer, loader)),
            "step alone, s": statistics.median(alone),
            "step beside a write, s": statistics.median(beside),
            "parameters, M": sum(p.numel() for p in model.parameters()) / 1e6,
        }
        return found | {f"{file.name}, MB": file.stat().st_size / 1e6 for file in sorted(path.iterdir())}

    for _ in range(2):  # the first step creates the moments
        step()
    FullTensors(engine).copy()  # the first one allocates
    return {"a checkpoint": checkpoint}


def cases(args: argparse.Namespace) -> dict[str, Case]:
    models = ("vit_tiny_patch16_224",) if args.small else MODELS
    return {name: Case(partial(sides, name), 1) for name in models}


BENCHMARK = Benchmark(cases, rounds=5, compared=0)
