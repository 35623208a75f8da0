"""Training speed of each kind of parallelism, compared with plain PyTorch's; and compiled, compared with eager.

    python scripts/bench_parallel.py [--runs N] [--steps N] [--only NAME ...] [--output DIR] [--set KEY=VALUE ...]

About 15 minutes on 2 CPU cores. Three pairs: `data`, data parallel against DistributedDataParallel; `tensor`, 1D tensor
parallel against torch.distributed.tensor.parallel; `pipeline`, 1F1B against torch.distributed.pipelining. PyTorch's
side is timm's model. Other pairs, run only with `--only`, compare COMPILE with eager in a layout, such as `compile-1d`.

Both sides of a pair run in the same processes, start from the same weights, get the same batches, and must compute the
same losses before they are timed. Then they alternate step by step, so that other load on the machine affects both
alike. A ratio above 1 means that the first is faster. `--set DEPTH=4` measures a smaller model.

Writes parallel.md (the table), parallel.json (every run), log.txt and provenance.json. Exit code 0 whatever the ratios
are, 1 when a side fails or the two disagree.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit import launch
from colossal_vit.benchmark import Benchmark, in_turns, spread
from colossal_vit.engine.assembly import initialize
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"))

from check_layouts import tensor
from vit import build_vit, check_vit, full_vit, partition_blocks

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "vit_cifar10_hybrid/configs/config_pipeline_parallel.py"
GLOBAL_BATCH = 64
CHECKED_STEPS, TOLERANCE = 3, 1e-4  # relative tolerance of losses; these steps are also the warm-up
SETTINGS = {
    **dict(IMG_SIZE=32, PATCH_SIZE=4, HIDDEN_SIZE=384, DEPTH=12, NUM_HEADS=6, CHECKPOINT=False),
    **dict(NUM_MICRO_BATCHES=4, LEARNING_RATE=1e-3, fp16=None, clip_grad_norm=0.0),
    **{"BATCH_SIZE": GLOBAL_BATCH, "parallel.pipeline": 1},
}

# One optimizer step on this rank's part of a batch; returns the loss, or None if this rank does not compute it.
Step = Callable[[Tensor, Tensor], Tensor | None]

# ---- The two sides ---------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY)


def ours(run: Run, criterion: nn.Module, compiled: bool = False) -> Step:
    """The model and the engine of train_hybrid.py, whatever the layout."""
    run.config.COMPILE = compiled
    model = build_vit(run.config, run.layout)
    engine = initialize(model, adamw(model), criterion)[0]

    def step(images: Tensor, labels: Tensor) -> Tensor | None:
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([(images, labels)]))
        engine.step()
        return loss

    return step


def plain(model: nn.Module, criterion: nn.Module) -> Step:
    optimizer = adamw(model)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def torch_data(run: Run, model: nn.Module, criterion: nn.Module) -> Step:
    return plain(DistributedDataParallel(model), criterion)


def torch_tensor(run: Run, model: nn.Module, criterion: nn.Module) -> Step:
    world_size = dist.get_world_size()
    mesh = init_device_mesh(run.device.type, (world_size,))
    plan = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
    plan |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
    for block in model.blocks:
        # timm stores all queries, then all keys, then all values; splitting that over two ranks would give one of them
        # the queries and half of the keys. In the order (rank, 3, heads of the rank), each rank gets timm's order.
        for parameter in block.attn.qkv.parameters():
            parameter.data = parameter.data.unflatten(0, (3, world_size, -1)).transpose(0, 1).flatten(0, 2)
        block.attn.num_heads //= world_size
        block.attn.attn_dim //= world_size
        parallelize_module(block, mesh, plan)
    return plain(model, criterion)


def torch_pipeline(run: Run, model: nn.Module, criterion: nn.Module) -> Step:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    blocks = partition_blocks(run.config, world_size)[rank]
    model.blocks = model.blocks[blocks.start : blocks.stop]
    if rank == 0:
        model.norm = model.head = nn.Identity()
        model.forward = model.forward_features
    else:  # timm skips embeddings that are None
        model.patch_embed, model.cls_token, model.pos_embed = nn.Identity(), None, None
    stage = PipelineStage(model, rank, world_size, run.device)
    schedule = Schedule1F1B(stage, run.config.NUM_MICRO_BATCHES, loss_fn=criterion)
    optimizer = adamw(model)

    def step(images: Tensor, labels: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(images)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return step


class Pair(NamedTuple):
    """A comparison: our engine with `torch_side` or, if that is None, our engine compiled with itself in eager mode."""

    title: str
    processes: int
    values: dict[str, Any]
    torch_side: Callable[[Run, nn.Module, nn.Module], Step] | None = None

    @property
    def sides(self) -> tuple[str, str]:
        return ("ours", "torch") if self.torch_side else ("compiled", "eager")


PIPELINE = {"parallel.pipeline": 2}
PAIRS = {
    "data": Pair("data parallel / DistributedDataParallel", 2, {"BATCH_SIZE": GLOBAL_BATCH // 2}, torch_data),
    "tensor": Pair("1D tensor parallel / torch.distributed.tensor.parallel", 2, tensor("1d", 2), torch_tensor),
    "pipeline": Pair("1F1B pipeline / torch.distributed.pipelining", 2, PIPELINE, torch_pipeline),
    "compile-data": Pair("data parallel on 2, compiled / eager", 2, {"BATCH_SIZE": GLOBAL_BATCH // 2}),
    "compile-pipeline": Pair("1F1B pipeline on 2, compiled / eager", 2, PIPELINE),
    "compile-1d": Pair("1D on 2, compiled / eager", 2, tensor("1d", 2)),
    "compile-2d": Pair("2D on 4, compiled / eager", 4, tensor("2d", 4)),
    "compile-2.5d": Pair("2.5D on 4, compiled / eager", 4, tensor("2.5d", 4, depth=1)),
    "compile-3d": Pair("3D on 8, compiled / eager", 8, {**tensor("3d", 8), "NUM_HEADS": 8}),
}

# ---- The processes of a pair -----------------------------------------------------------------------------------------


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="paired runs (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a side in a run (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=["data", "tensor", "pipeline"])
    parser.add_argument("--output", type=Path, default=ROOT / "results/parallel_cpu", help="where the result goes")
    return parser


def compare() -> None:
    """Run on each rank of a pair: check that the sides agree, time them, write `pair.json` into the run directory."""
    args, more = get_parser().parse_known_args()
    sys.argv[1:] = [*more, f"--output={args.output}"]
    run = launch.start(script="train_hybrid", check=check_vit)
    criterion = col_nn.CrossEntropyLoss(label_smoothing=run.config.LABEL_SMOOTHING)
    pair, generator = PAIRS[args.only[0]], torch.Generator().manual_seed(run.config.SEED)
    if pair.torch_side:
        steps = ours(run, criterion), pair.torch_side(run, full_vit(run.config).to(run.device), criterion)
    else:
        steps = ours(run, criterion, compiled=True), ours(run, criterion)
    sides = dict(zip(pair.sides, steps, strict=True))

    def next_batch() -> list[Tensor]:
        images = torch.randn(GLOBAL_BATCH, 3, run.config.IMG_SIZE, run.config.IMG_SIZE, generator=generator)
        labels = torch.randint(run.config.NUM_CLASSES, (GLOBAL_BATCH,), generator=generator)
        replica = gpc.get_local_rank(ParallelMode.DATA)
        return [whole.chunk(run.layout.data)[replica].to(run.device) for whole in (images, labels)]

    def mean_loss(loss: Tensor | None) -> float:
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, None if loss is None else loss.item())
        return statistics.fmean(value for value in losses if value is not None)

    losses, images_per_s = {side: [] for side in sides}, {side: [] for side in sides}
    for _ in range(CHECKED_STEPS):
        batch = next_batch()
        for side, step in sides.items():
            losses[side].append(mean_loss(step(*batch)))
    run.log.info(f"losses: {losses}")
    agree = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(*losses.values(), strict=True))
    for number in range(args.runs if agree else 0):
        seconds = dict.fromkeys(sides, 0.0)
        for index in range(args.steps):
            batch = next_batch()
            for side in in_turns(sides, number + index):
                dist.barrier()
                started = time.perf_counter()
                sides[side](*batch)
                dist.barrier()
                seconds[side] += time.perf_counter() - started
        for side, rates in images_per_s.items():
            rates.append(GLOBAL_BATCH * args.steps / seconds[side])
        run.log.info(f"run {number + 1}, images/s: {[round(rates[-1], 2) for rates in images_per_s.values()]}")
    if dist.get_rank() == 0:
        result = {"config": configs.plain(run.config), "losses": losses, "images_per_s": images_per_s}
        (run.output / "pair.json").write_text(json.dumps(result))


def measure(name: str, args: argparse.Namespace, more: list[str], benchmark: Benchmark) -> dict:
    """Start the processes of a pair and return their measurements; `benchmark` logs their output."""
    pair = PAIRS[name]
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={pair.processes}"]
        command += [__file__, f"--only={name}", f"--runs={args.runs}", f"--steps={args.steps}"]
        command += [f"--set={key}={value!r}" for key, value in {**SETTINGS, **pair.values}.items()]
        command += [f"--config={CONFIG}", f"--output={output}", *more]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ}, **options) as processes:
            for line in processes.stdout:
                benchmark.say(line.rstrip("\n"))
        if processes.returncode:
            sys.exit(f"{name}: a side fails, see above")
        result = json.loads((Path(output) / "pair.json").read_text())
    if not result["images_per_s"][pair.sides[0]]:
        sys.exit(f"{name}: the two sides do not compute the same losses: {result['losses']}")
    return result


def main() -> None:
    args, more = get_parser().parse_known_args()
    benchmark = Benchmark(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    results = {name: measure(name, args, more, benchmark) for name in args.only}

    # ---- Result ----------------------------------------------------------------------------------------------------
    table = [
        "| comparison | first, images/s | second | ratio: median | min | max |",
        "| --- |" + " ---: |" * 5,
    ]
    for name, result in results.items():
        here, there = result["images_per_s"].values()
        ratios = result["ratios"] = [a / b for a, b in zip(here, there, strict=True)]
        medians = f"{statistics.median(here):.1f} | {statistics.median(there):.1f}"
        table.append(f"| {PAIRS[name].title} | {medians} | {' | '.join(spread(ratios, '.3f'))} |")
    benchmark.finish("parallel", table, {"steps": args.steps, **results})


if __name__ == "__main__":
    launch.run(compare) if "LOCAL_RANK" in os.environ else main()
