"""What splitting the optimizer state over data-parallel ranks saves in memory, and what it costs in time.

    python scripts/bench_zero.py [--runs N] [--steps N] [--output DIR] [--set KEY=VALUE ...]

About 15 minutes on 2 CPU cores. Memory: the peak of tensors of a rank in an optimizer step, in NAIVE fp16 with LAMB, on
1, 2, 4 and 8 processes, divided by the number of parameters of a model whose activations are small; beside it, the
6 + 12/d bytes that implementations with fp32 gradients take. Speed: on 2 and 4 processes, in fp32 with AdamW, the same
steps by our engine with `zero`, by torch's DistributedDataParallel, by it with ZeroRedundancyOptimizer, and by
`fully_shard`. All sides run in the same processes, start from the same weights, get the same batches, must compute the
same losses, and take turns step by step.

Writes zero.md (the tables), zero.json (every run), log.txt and provenance.json. Exit code 0 whatever the numbers are, 1
when a side fails or they disagree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from colossal_vit import launch
from colossal_vit.benchmark import Benchmark, in_turns, spread
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.plan.fakes import FakeBatches
from colossal_vit.plan.meter import measure
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"))

from vit import build_vit, check_vit, full_vit

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "vit_cifar10_hybrid/configs/config_pipeline_parallel.py"
GLOBAL_BATCH = 32
CHECKED_STEPS, TOLERANCE = 3, 1e-4  # relative tolerance of losses; these steps are also the warm-up
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
SPEED_PROCESSES, MEMORY_PROCESSES = (2, 4), (1, 2, 4, 8)
STAGES = {"stage 1": (1, 1), "stage 1, 2 micro-batches": (1, 2), "stage 2, 2 micro-batches": (2, 2)}

Step = Callable[[Tensor, Tensor], Tensor]


# ---- The sides -------------------------------------------------------------------------------------------------------


def ours(run: Run) -> Step:
    model = build_vit(run.config, run.layout)
    engine = initialize(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())[0]

    def step(images: Tensor, labels: Tensor) -> Tensor:
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(images, labels)]))[2]
        engine.step()
        return loss

    return step


def plain(model: nn.Module, optimizer: Optimizer) -> Step:
    criterion = nn.CrossEntropyLoss()

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config), gradient_as_bucket_view=True)
    return plain(model, build_optimizer(run.config, model))


def zero_redundancy(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config), gradient_as_bucket_view=True)
    options = dict(lr=run.config.LEARNING_RATE, weight_decay=run.config.WEIGHT_DECAY)
    return plain(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options))


def sharded(run: Run) -> Step:
    model = full_vit(run.config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return plain(model, build_optimizer(run.config, model))


SIDES: dict[str, Callable[[Run], Step]] = {
    "zero": ours,
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


def measure_speed(run: Run, num_runs: int, num_steps: int) -> dict[str, list[float]]:
    """Images/s of each side in each run; the sides must agree."""
    steps = {name: build(run) for name, build in SIDES.items()}
    generator = torch.Generator().manual_seed(run.config.SEED)

    def next_batch() -> list[Tensor]:
        images = torch.randn(GLOBAL_BATCH, 3, run.config.IMG_SIZE, run.config.IMG_SIZE, generator=generator)
        labels = torch.randint(run.config.NUM_CLASSES, (GLOBAL_BATCH,), generator=generator)
        return [whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in (images, labels)]

    for _ in range(CHECKED_STEPS):
        batch = next_batch()
        losses = {name: step(*batch).item() for name, step in steps.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE * min(losses.values()):
            sys.exit(f"the sides do not compute the same losses: {losses}")
    images_per_s: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_runs):
        seconds = dict.fromkeys(steps, 0.0)
        for index in range(num_steps):
            batch = next_batch()
            for name in in_turns(steps, number + index):
                dist.barrier()
                started = time.perf_counter()
                steps[name](*batch)
                dist.barrier()
                seconds[name] += time.perf_counter() - started
        for name, rates in images_per_s.items():
            rates.append(GLOBAL_BATCH * num_steps / seconds[name])
        run.log.info(
            f"run {number + 1}, images/s: { {name: round(rates[-1], 2) for name, rates in images_per_s.items()} }"
        )
    return images_per_s


def on_rank() -> None:
    args, more = get_parser().parse_known_args()
    sys.argv[1:] = [*more, f"--output={args.output}"]
    run = launch.start(script="train_hybrid", check=check_vit)
    result = measure_memory(run) if args.only == "memory" else measure_speed(run, args.runs, args.steps)
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        (run.output / "result.json").write_text(json.dumps(results))


# ---- All -------------------------------------------------------------------------------------------------------------


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="of each side (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a side in a run (default %(default)s)")
    parser.add_argument("--only", choices=("memory", "speed"), help="measure only this")
    parser.add_argument("--output", type=Path, default=ROOT / "results/zero_cpu", help="where the result goes")
    return parser


def start(what: str, processes: int, values: list[str], args: argparse.Namespace, benchmark: Benchmark) -> list:
    """Start processes, and return the result of each rank."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, f"--only={what}", f"--runs={args.runs}", f"--steps={args.steps}"]
        command += [*(f"--set={value}" for value in values), f"--config={CONFIG}", f"--output={output}"]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ}, **options) as ranks:
            for line in ranks.stdout:
                benchmark.say(line.rstrip("\n").replace(output, "SCRATCH"))
        if ranks.returncode:
            sys.exit(f"{what} on {processes} processes failed, see above")
        return json.loads((Path(output) / "result.json").read_text())


def main() -> None:
    parser = get_parser()
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train_hybrid.py")
    args = parser.parse_args()
    benchmark = Benchmark(args.output, changes_allowed=True)
    memory, speed = {}, {}
    for d in MEMORY_PROCESSES if args.only != "speed" else ():
        common = [*(f"{key}={value!r}" for key, value in MEMORY.items()), "fp16.mode=AMP_TYPE.NAIVE"]
        common += ["fp16.dtype='fp16'", "fp16.initial_scale=1.0", *args.set]
        for name, (stage, accumulation) in STAGES.items():
            own = [f"zero.stage={stage}", f"gradient_accumulation={accumulation}"]
            memory.setdefault(d, {})[name] = start("memory", d, [*common, *own], args, benchmark)
    for d in SPEED_PROCESSES if args.only != "memory" else ():
        values = [f"{key}={value!r}" for key, value in {**SPEED, "BATCH_SIZE": GLOBAL_BATCH // d}.items()]
        speed[d] = start("speed", d, [*values, "zero.stage=1", *args.set], args, benchmark)[0]

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
    launch.run(on_rank) if "LOCAL_RANK" in os.environ else main()
