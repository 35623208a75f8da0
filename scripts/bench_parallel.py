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
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit import launch
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.provenance import ResultFolder
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sides
from check_layouts import FOLDER, set_flags, tensor
from sides import Step
from turns import spread
from vit import full_vit, partition_blocks

GLOBAL_BATCH = 64
SETTINGS = {
    **dict(IMG_SIZE=32, PATCH_SIZE=4, HIDDEN_SIZE=384, DEPTH=12, NUM_HEADS=6, CHECKPOINT=False),
    **dict(NUM_MICRO_BATCHES=4, LEARNING_RATE=1e-3, fp16=None, clip_grad_norm=0.0),
    **{"BATCH_SIZE": GLOBAL_BATCH, "parallel.pipeline": 1},
}

# ---- The two sides ---------------------------------------------------------------------------------------------------


def ours(run: Run, criterion: nn.Module, compiled: bool = False) -> Step:
    run.config.COMPILE = compiled
    return sides.ours(sides.build_engine(run, criterion))


def torch_data(run: Run, model: nn.Module, criterion: nn.Module) -> Step:
    return sides.plain(DistributedDataParallel(model), build_optimizer(run.config, model), criterion)


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
    return sides.plain(model, build_optimizer(run.config, model), criterion)


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
    optimizer = build_optimizer(run.config, model)

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
    parser.add_argument(
        "--output", type=Path, default=FOLDER.parent / "results/parallel_cpu", help="where the result goes"
    )
    return parser


def compare() -> None:
    """Run on each rank of a pair: check that the sides agree, and time them."""
    args, more = get_parser().parse_known_args()
    run = sides.start_rank(args, more)
    criterion = col_nn.CrossEntropyLoss(label_smoothing=run.config.LABEL_SMOOTHING)
    pair = PAIRS[args.only[0]]
    if pair.torch_side:
        steps = ours(run, criterion), pair.torch_side(run, full_vit(run.config).to(run.device), criterion)
    else:
        steps = ours(run, criterion, compiled=True), ours(run, criterion)
    rates = sides.time_in_turns(run, dict(zip(pair.sides, steps, strict=True)), args.runs, args.steps)
    sides.give_back(run, {"config": configs.plain(run.config), "images_per_s": rates})


def main() -> None:
    args, more = get_parser().parse_known_args()
    benchmark = ResultFolder(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    results = {}
    for name in args.only:
        pair = PAIRS[name]
        flags = [f"--runs={args.runs}", f"--steps={args.steps}", *set_flags({**SETTINGS, **pair.values}), *more]
        results[name] = sides.start(__file__, name, pair.processes, flags, benchmark)[0]

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
    launch.call(compare) if "LOCAL_RANK" in os.environ else main()
