"""What splitting optimizer state and weights over data-parallel ranks saves in memory, and what it costs in time.

About 40 minutes on 2 CPU cores. Speed: on 2 and 4 processes, in fp32 with AdamW, plain PyTorch by
DistributedDataParallel, by it with ZeroRedundancyOptimizer, and by `fully_shard`; and our engine with stage 1 and 3 of
`zero` and without, where it uses DistributedDataParallel. All start from the same weights, get the same batches, and
must compute the same losses; a round of ours ends when its last weights have arrived.

Memory: the peak of tensors of a rank in optimizer steps with AdamW, in NAIVE fp16, divided by the number of parameters
of a model whose activations are small; beside it, that of PyTorch's `fully_shard` with its policy of mixed precision,
and the 6 + 12/d bytes that implementations with fp32 gradients take on d ranks. Then the peak of ViT-L/16 and g/14 in
bf16, with two micro-batches of an image, beside what a dry run says. These ranks would not fit into the memory of one
machine: rank 0 is real, and the others are torch's fake process group's. It needs 21 GB.
"""

import argparse
import gc
from functools import partial
from typing import Any

import torch
from colossal_vit.data.batches import FakeLoader
from colossal_vit.dry_run.meter import StepMeter, measure
from colossal_vit.dry_run.report import plan_rank
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.main import load_script
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import (
    Step,
    add_set,
    engine_step,
    in_new_process,
    plain_step,
    start_hybrid,
    start_rank_0,
    step_sides,
)
from dry_run_tables import MODELS, builder
from layouts import CONFIG, FOLDER, set_flags
from vit import build_vit, full_vit

SCRIPT = FOLDER / "train_hybrid.py"
GLOBAL_BATCH = 32
COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "CHECKPOINT": False, "IMG_SIZE": 32}
COMMON |= {"HIDDEN_SIZE": 512, "NUM_HEADS": 8}
SPEED = {**COMMON, "PATCH_SIZE": 8, "DEPTH": 8, "fp16": None, "clip_grad_norm": 0.0, "OPTIMIZER": "adamw"}
SPEED |= {"zero.stage": 1, "COMPILE": False}
MEMORY = {**COMMON, "PATCH_SIZE": 16, "DEPTH": 12, "BATCH_SIZE": 1, "OPTIMIZER": "adamw", "COMPILE": False}
MEMORY |= {"HIDDEN_SIZE": 1024, "NUM_HEADS": 16, "fp16.dtype": "fp16", "fp16.initial_scale": 1.0}
LARGE = {**COMMON, "IMG_SIZE": 224, "NUM_CLASSES": 1000, "BATCH_SIZE": 1, "gradient_accumulation": 2, "COMPILE": False}
LARGE |= {"fp16.mode": "NAIVE", "fp16.dtype": "bf16", "OPTIMIZER": "adamw"}
SMALL = dict(DEPTH=2, HIDDEN_SIZE=32, NUM_HEADS=2)
STAGES = {"stage 1": (1, 1), "stage 1, 2 micro-batches": (1, 2), "stage 2, 2 micro-batches": (2, 2)}
STAGES |= {"stage 3": (3, 1), "stage 3, 2 micro-batches": (3, 2)}


# ---- Speed -----------------------------------------------------------------------------------------------------------


def ddp(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config).to(run.device), gradient_as_bucket_view=True)
    return plain_step(model, build_optimizer(run.config, model), nn.CrossEntropyLoss())


def zero_redundancy(run: Run) -> Step:
    model = DistributedDataParallel(full_vit(run.config).to(run.device), gradient_as_bucket_view=True)
    options = dict(lr=run.config.LEARNING_RATE, weight_decay=run.config.WEIGHT_DECAY)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
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


def speed(processes: int, args: argparse.Namespace) -> dict[str, Side]:
    values = {**SPEED, "BATCH_SIZE": GLOBAL_BATCH // processes, **(SMALL if args.small else {})}
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


# ---- Memory ----------------------------------------------------------------------------------------------------------


def peak_of_fully_shard(run: Run, dtype: torch.dtype, batches: FakeLoader) -> tuple[int, int]:
    """Return the peak of tensors in optimizer steps of plain PyTorch, in bytes, and the number of parameters."""
    model = split(run, mp_policy=MixedPrecisionPolicy(dtype, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with StepMeter([parameter.to_local() for parameter in model.parameters()]) as meter:
        for _ in range(2):  # in the second step there are moments from the start
            optimizer.zero_grad()
            for images, labels in batches:
                nn.functional.cross_entropy(model(images).float(), labels).backward()
            optimizer.step()
    return meter.peak, sum(parameter.numel() for parameter in model.parameters())


def memory(processes: int, args: argparse.Namespace) -> dict[str, Side]:
    args.set = ["fp16.mode=AMP_TYPE.NAIVE", *args.set]
    run = start_hybrid(args, {**MEMORY, "zero.stage": 1, **(SMALL if args.small else {})})
    shape = (run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE)

    def side(stage: int, accumulation: int, number: int) -> dict[str, float]:
        gc.collect()  # the engine before has cycles, and eight ranks share the memory
        gpc.config["zero"]["stage"], gpc.config["gradient_accumulation"] = stage, accumulation
        plan = measure(build_engine(run, col_nn.CrossEntropyLoss()), FakeLoader(2, shape, "cpu"))
        whole = plan.parameters * (processes if stage == 3 else 1)  # elements, also of the last rank's smaller pieces
        return {"bytes a parameter": max(all_gather_object(plan.memory["peak"] / whole))}

    def plain(number: int) -> dict[str, float]:
        gc.collect()
        peak, parameters = peak_of_fully_shard(run, torch.float16, FakeLoader(1, shape, "cpu"))
        return {"bytes a parameter": max(all_gather_object(peak / parameters))}

    formula = {"6 + 12/d": lambda number: {"bytes a parameter": 6 + 12 / processes}}
    found = formula | {name: partial(side, *how) for name, how in STAGES.items()}
    return found | ({"fully_shard": plain} if processes > 1 else {})


def peak_alone(flags: list[str], ranks: int, plain: bool) -> float:
    """Return the peak of rank 0 in GB, in a process of its own."""
    script = load_script(SCRIPT)
    run = start_rank_0(script, flags, ranks)
    if plain:
        shape = (run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE)
        loader = FakeLoader(run.config.gradient_accumulation, shape, "cpu")
        return peak_of_fully_shard(run, torch.bfloat16, loader)[0] / 1e9
    training = script.build(run)
    return measure(training.engine, training.train_dataloader).memory["peak"] / 1e9


def rank_0(model: str, ranks: int, args: argparse.Namespace) -> dict[str, Side]:
    values = {**LARGE, **MODELS[model], **(SMALL if args.small else {})}

    def side(name: str, number: int) -> dict[str, float | None]:
        more = {"zero.stage": int(name[-1])} if name.startswith("stage") else {}
        flags, plain = ["--config", str(FOLDER / CONFIG), *set_flags({**values, **more})], name == "fully_shard"
        fake = builder(SCRIPT, FOLDER / CONFIG, ranks, **values, **more)
        return {
            "peak of rank 0, GB": in_new_process(peak_alone, flags, ranks, plain),
            "dry run, GB": None if plain else plan_rank(fake, 0).memory["peak"] / 1e9,
        }

    return {name: partial(side, name) for name in ("not split", "stage 1", "stage 2", "stage 3", "fully_shard")}


CASES = {f"speed on {number}": Case(partial(speed, number), number) for number in (2, 4)}
CASES |= {f"memory on {number}": Case(partial(memory, number), number, once=True) for number in (1, 2, 4, 8)}
CASES |= {f"{name} on {n}": Case(partial(rank_0, name, n), once=True) for name in ("L/16", "g/14") for n in (4, 8)}
BENCHMARK = Benchmark(lambda args: CASES, rounds=11, steps=8, flags=add_set)
