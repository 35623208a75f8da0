"""What splitting the optimizer state over data-parallel ranks saves in memory, and what it costs in time.

    python scripts/bench_zero.py [--runs N] [--steps N] [--output DIR] [--set KEY=VALUE ...]

About 25 minutes on 2 CPU cores. Memory: the peak of tensors of a rank in an optimizer step, in NAIVE fp16 with LAMB, on
1, 2, 4 and 8 processes, divided by the number of parameters of a model whose activations are small; beside it, the
6 + 12/d bytes that implementations with fp32 gradients take. Speed: on 2 and 4 processes, in fp32 with AdamW, the same
steps by our engine with `zero` and without, where it uses DistributedDataParallel; and in plain PyTorch by
DistributedDataParallel, by it with ZeroRedundancyOptimizer, and by `fully_shard`. All sides run in the same processes,
start from the same weights, get the same batches, must compute the same losses, and take turns run by run. A run of
ours ends when its last weights have arrived.

Writes zero.md (the tables), zero.json (every run), log.txt and provenance.json. Exit code 0 whatever the numbers are, 1
when a side fails or they disagree.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from colossal_vit import launch
from colossal_vit.data.batches import FakeBatches
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.plan.meter import measure
from colossal_vit.provenance import ResultFolder
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import sides
from check_layouts import FOLDER, set_flags
from sides import Step
from turns import spread
from vit import build_vit, full_vit

GLOBAL_BATCH = 32
COMMON = {
    "parallel.pipeline": 1,
    "NUM_MICRO_BATCHES": 1,
    "CHECKPOINT": False,
    "IMG_SIZE": 32,
    "HIDDEN_SIZE": 512,
    "NUM_HEADS": 8,
}
SPEED = {**COMMON, "PATCH_SIZE": 8, "DEPTH": 8, "fp16": None, "clip_grad_norm": 0.0, "OPTIMIZER": "adamw"}
MEMORY = {**COMMON, "PATCH_SIZE": 16, "DEPTH": 12, "BATCH_SIZE": 1, "OPTIMIZER": "lamb"}
MEMORY |= {"HIDDEN_SIZE": 1024, "NUM_HEADS": 16, "fp16.dtype": "fp16", "fp16.initial_scale": 1.0}
SPEED_PROCESSES, MEMORY_PROCESSES = (2, 4), (1, 2, 4, 8)
STAGES = {"stage 1": (1, 1), "stage 1, 2 micro-batches": (1, 2), "stage 2, 2 micro-batches": (2, 2)}


# ---- The sides -------------------------------------------------------------------------------------------------------


def ddp(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config), gradient_as_bucket_view=True)
    return sides.plain(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())


def zero_redundancy(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config), gradient_as_bucket_view=True)
    options = dict(lr=run.config.LEARNING_RATE, weight_decay=run.config.WEIGHT_DECAY)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return sides.plain(model, optimizer, nn.CrossEntropyLoss())


def sharded(run: Run) -> Step:
    model = full_vit(run.config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return sides.plain(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())


OTHERS: dict[str, Callable[[Run], Step]] = {
    "DistributedDataParallel": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "fully_shard": sharded,
}


# ---- On each rank ----------------------------------------------------------------------------------------------------


def measure_memory(run: Run) -> dict[str, float]:
    """Bytes per parameter of this rank at the peak of a step."""
    model = build_vit(run.config, run.layout)
    engine = initialize(model, build_optimizer(run.config, model), col_nn.CrossEntropyLoss())[0]
    plan = measure(engine, FakeBatches(2, (run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE), "cpu"))
    return {part: size / plan.parameters for part, size in plan.memory.items()}


def on_rank() -> None:
    args, more = get_parser().parse_known_args()
    run = sides.start_rank(args, more)
    if args.only == "memory":
        sides.give_back(run, measure_memory(run))
    else:
        engine = sides.build_engine(run, nn.CrossEntropyLoss())
        gpc.config["zero"] = None
        not_split = sides.build_engine(run, nn.CrossEntropyLoss())
        assert not not_split.zero
        steps = {"zero": sides.ours(engine), "the same without zero": sides.ours(not_split)}
        steps |= {name: build(run) for name, build in OTHERS.items()}
        sides.give_back(run, sides.time_in_turns(run, steps, args.runs, args.steps, engine.zero.receive_weights))


# ---- All -------------------------------------------------------------------------------------------------------------


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11, help="of each side (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a side in a run (default %(default)s)")
    parser.add_argument("--only", choices=("memory", "speed"), help="measure only this")
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "results/zero_cpu", help="where the result goes")
    return parser


def main() -> None:
    parser = get_parser()
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train_hybrid.py")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output, changes_allowed=True)
    overrides = [f"--set={value}" for value in args.set]
    memory, speed = {}, {}
    for d in SPEED_PROCESSES if args.only != "memory" else ():
        flags = [*set_flags({**SPEED, "BATCH_SIZE": GLOBAL_BATCH // d, "zero.stage": 1}), *overrides]
        flags += [f"--runs={args.runs}", f"--steps={args.steps}"]
        speed[d] = sides.start(__file__, "speed", d, flags, benchmark)[0]
    for d in MEMORY_PROCESSES if args.only != "speed" else ():
        for name, (stage, accumulation) in STAGES.items():
            values = {**MEMORY, "zero.stage": stage, "gradient_accumulation": accumulation}
            flags = [*set_flags(values), "--set=fp16.mode=AMP_TYPE.NAIVE", *overrides]
            memory.setdefault(d, {})[name] = sides.start(__file__, "memory", d, flags, benchmark)

    table = []
    if memory:
        table += [f"| bytes a parameter at the peak, by data-parallel ranks d | {' | '.join(STAGES)} | 6 + 12/d |"]
        table += ["| ---: |" + " ---: |" * (len(STAGES) + 1)]
    for d, stages in memory.items():
        peaks = " | ".join(f"{max(rank['peak'] for rank in ranks):.2f}" for ranks in stages.values())
        table.append(f"| {d} | {peaks} | {6 + 12 / d:.2f} |")
    if speed:
        table += [""] * bool(table)
        table += ["| processes | side | images/s | zero / side: median | min | max |", "| ---: | --- |" + " ---: |" * 4]
    for d, rates in speed.items():
        for side, values in rates.items():
            ratios = [a / b for a, b in zip(rates["zero"], values, strict=True)]
            table.append(f"| {d} | {side} | {statistics.median(values):.1f} | {' | '.join(spread(ratios, '.3f'))} |")
    details = {"memory, bytes a parameter": memory, "images_per_s": speed, "steps": args.steps, "set": args.set}
    benchmark.finish("zero", table, details)


if __name__ == "__main__":
    launch.call(on_rank) if "LOCAL_RANK" in os.environ else main()
