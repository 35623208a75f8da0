"""What splitting optimizer state and weights over data-parallel ranks costs in time.

15 minutes on 2 CPU cores. On 2 and 4 processes, in fp32 with AdamW: plain PyTorch by DistributedDataParallel, by it
with ZeroRedundancyOptimizer, and by `fully_shard`; and our engine with stage 1 and 3 of `zero` and without, where it
uses DistributedDataParallel. All start from the same weights, get the same batches, and must compute the same losses; a
round of ours ends when its last weights have arrived.
"""

import argparse
from functools import partial
from typing import Any

from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.run import Run
from colossalai.legacy.core import global_context as gpc
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import Step, add_set, engine_step, plain_step, start_hybrid, step_sides
from vit import build_vit, full_vit

GLOBAL_BATCH = 32
COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "CHECKPOINT": False, "OPTIMIZER": "adamw", "COMPILE": False}
VALUES = {**COMMON, "IMG_SIZE": 32, "PATCH_SIZE": 8, "DEPTH": 8, "HIDDEN_SIZE": 512, "NUM_HEADS": 8}
VALUES |= {"fp16": None, "clip_grad_norm": 0.0, "zero.stage": 1}
SMALL = dict(DEPTH=2, HIDDEN_SIZE=32, NUM_HEADS=2)


def ddp(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config).to(run.device), gradient_as_bucket_view=True)
    return plain_step(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())


def zero_redundancy(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config).to(run.device), gradient_as_bucket_view=True)
    options = dict(lr=run.config.LEARNING_RATE, weight_decay=run.config.WEIGHT_DECAY)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)
    return plain_step(model, optimizer, nn.CrossEntropyLoss())


def sharded(run: Run) -> Step:
    model = split(run)
    return plain_step(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())


def split(run: Run, **options: Any) -> nn.Module:
    """Return a model that `fully_shard` has split by block."""
    model = full_vit(run.config).to(run.device)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build_engine(run: Run, criterion: nn.Module) -> Engine:
    model = build_vit(run.config, run.layout)
    return initialize(model, build_optimizer(run.config, model), criterion)[0]


def sides(processes: int, args: argparse.Namespace) -> dict[str, Side]:
    values = {**VALUES, "BATCH_SIZE": GLOBAL_BATCH // processes, **(SMALL if args.small else {})}
    run = start_hybrid(args, values)
    owned = build_engine(run, nn.CrossEntropyLoss())
    gpc.config["zero"]["stage"] = 3
    pieces = build_engine(run, nn.CrossEntropyLoss())
    gpc.config["zero"] = None
    whole = build_engine(run, nn.CrossEntropyLoss())
    assert [engine.zero is not None for engine in (owned, pieces, whole)] == [True, False, False]
    steps = {"DistributedDataParallel": ddp(run), "ZeroRedundancyOptimizer": zero_redundancy(run)}
    steps |= {
        "fully_shard": sharded(run),
        "ours": engine_step(whole),
        "ours, stage 1": engine_step(owned),
        "ours, stage 3": engine_step(pieces),
    }
    return step_sides(run, steps, args.steps, owned.zero.receive_weights)


CASES = {f"on {number}": Case(partial(sides, number), number) for number in (2, 4)}
BENCHMARK = Benchmark(lambda args: CASES, rounds=11, steps=8, flags=add_set)
