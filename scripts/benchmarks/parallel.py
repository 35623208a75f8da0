"""Training speed of each kind of parallelism, compared with plain PyTorch's; and compiled, compared with eager.

About 15 minutes on 2 CPU cores. Data parallelism is compared with DistributedDataParallel, 1D tensor parallelism with
torch.distributed.tensor.parallel, the 1F1B pipeline with torch.distributed.pipelining; PyTorch's side is timm's model.
Cases that only --only runs compare COMPILE with eager in a layout, such as `compile-1d`. All sides run in the same
processes, start from the same weights, get the same batches, and must compute the same losses before they are timed.
`--set DEPTH=4` measures a smaller model.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from timm.layers import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import Step, add_set, engine_step, plain_step, start_hybrid, step_sides
from layouts import PIPELINE, tensor
from vit import build_vit, full_vit, partition_blocks

GLOBAL_BATCH = 64
SETTINGS = {
    **dict(IMG_SIZE=32, PATCH_SIZE=4, HIDDEN_SIZE=384, DEPTH=12, NUM_HEADS=6, CHECKPOINT=False),
    **dict(NUM_MICRO_BATCHES=4, LEARNING_RATE=1e-3, fp16=None, clip_grad_norm=0.0, COMPILE=False),
    **{"BATCH_SIZE": GLOBAL_BATCH, "parallel.pipeline": 1},
}
SMALL = dict(DEPTH=2, HIDDEN_SIZE=32, NUM_HEADS=2, PATCH_SIZE=8)

# ---- The sides -------------------------------------------------------------------------------------------------------


def our_step(run: Run, criterion: nn.Module) -> Step:
    model = build_vit(run.config, run.layout)
    return engine_step(initialize(model, build_optimizer(run.config, model), criterion)[0])


def torch_data(run: Run, model: nn.Module, criterion: nn.Module) -> Step:
    return plain_step(DistributedDataParallel(model), build_optimizer(run.config, model), criterion)


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
        if isinstance(block.attn, Attention):  # the last block's reads its size off its weights
            block.attn.attn_dim //= world_size
        parallelize_module(block, mesh, plan)
    optimizer = build_optimizer(run.config, model)
    # The fused AdamW updates a group in one call, which takes either DTensors or plain tensors.
    optimizer.param_groups = [
        {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) == sharded]}
        for group in optimizer.param_groups
        for sharded in (True, False)
    ]
    return plain_step(model, optimizer, criterion)


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


# ---- The cases -------------------------------------------------------------------------------------------------------


def beside_torch(
    values: Mapping[str, Any], torch_step: Callable[[Run, nn.Module, nn.Module], Step], args: argparse.Namespace
) -> dict[str, Side]:
    """PyTorch's own implementation of a kind of parallelism, and our engine."""
    run = start_hybrid(args, {**SETTINGS, **values, **(SMALL if args.small else {})})
    criterion = col_nn.CrossEntropyLoss(label_smoothing=run.config.LABEL_SMOOTHING)
    theirs = torch_step(run, full_vit(run.config).to(run.device), criterion)
    return step_sides(run, {"torch": theirs, "ours": our_step(run, criterion)}, args.steps)


def compiled(values: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Side]:
    """Our engine, eager and compiled."""
    run = start_hybrid(args, {**SETTINGS, **values, **(SMALL if args.small else {})})
    criterion = col_nn.CrossEntropyLoss(label_smoothing=run.config.LABEL_SMOOTHING)
    eager = our_step(run, criterion)
    run.config.COMPILE = True
    return step_sides(run, {"eager": eager, "compiled": our_step(run, criterion)}, args.steps)


DATA = {"BATCH_SIZE": GLOBAL_BATCH // 2}
CASES = {
    "data": Case(partial(beside_torch, DATA, torch_data), 2),
    "tensor": Case(partial(beside_torch, tensor("1d", 2), torch_tensor), 2),
    "pipeline": Case(partial(beside_torch, PIPELINE, torch_pipeline), 2),
    "compile-data": Case(partial(compiled, DATA), 2, by_default=False),
    "compile-pipeline": Case(partial(compiled, PIPELINE), 2, by_default=False),
    "compile-1d": Case(partial(compiled, tensor("1d", 2)), 2, by_default=False),
    "compile-2d": Case(partial(compiled, tensor("2d", 4)), 4, by_default=False),
    "compile-2.5d": Case(partial(compiled, tensor("2.5d", 4, depth=1)), 4, by_default=False),
    "compile-3d": Case(partial(compiled, {**tensor("3d", 8), "NUM_HEADS": 8}), 8, by_default=False),
}
BENCHMARK = Benchmark(lambda args: CASES, rounds=7, steps=2, flags=add_set)
