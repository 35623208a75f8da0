"""What splitting optimizer state and weights over data-parallel ranks saves in memory.

17 minutes on 2 CPU cores, and 21 GB of memory. The peak of tensors of a rank in optimizer steps with AdamW:

- in NAIVE fp16 on 1 to 8 processes, of the rank that has most, divided by the number of parameters of a model whose
  activations are small. Beside it, the 6 + 12/d bytes that implementations with fp32 gradients take on d ranks.
- in NAIVE bf16 of ViT-L/16 and g/14, with two micro-batches of an image, beside what a dry run says. Such ranks do not
  fit into one machine together: rank 0 is real, and the others are those of torch's fake process groups.

PyTorch's `fully_shard` has its policy of mixed precision.
"""

import argparse
import gc
from functools import partial

import torch
from colossal_vit.data.batches import FakeLoader
from colossal_vit.dry_run.meter import StepMeter, measure
from colossal_vit.dry_run.report import plan_rank
from colossal_vit.main import load_script
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.run import Run
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import in_new_process, return_freed_memory, start_hybrid, start_rank_0
from benchmarks.zero import COMMON, SMALL, build_engine, split
from dry_run_tables import HYBRID, MODELS, builder
from layouts import CONFIG, FOLDER, set_flags

VALUES = {**COMMON, "BATCH_SIZE": 1, "fp16.mode": "NAIVE"}
TOGETHER = {**VALUES, "IMG_SIZE": 32, "PATCH_SIZE": 16, "DEPTH": 6, "HIDDEN_SIZE": 1024, "NUM_HEADS": 16}
TOGETHER |= {"fp16.dtype": "fp16", "fp16.initial_scale": 1.0, "zero.stage": 1}
ALONE = {**VALUES, "IMG_SIZE": 224, "NUM_CLASSES": 1000, "gradient_accumulation": 2, "fp16.dtype": "bf16"}
STAGES = {"stage 1": (1, 1), "stage 1, 2 micro-batches": (1, 2), "stage 2, 2 micro-batches": (2, 2)}
STAGES |= {"stage 3": (3, 1), "stage 3, 2 micro-batches": (3, 2)}
KINDS = {"not split": {}} | {f"stage {stage}": {"zero.stage": stage} for stage in (1, 2, 3)} | {"fully_shard": {}}


def random_images(run: Run, micro_batches: int) -> FakeLoader:
    size = run.config.IMG_SIZE
    return FakeLoader(micro_batches, (run.config.BATCH_SIZE, 3, size, size), "cpu")


def peak_of_fully_shard(run: Run, dtype: torch.dtype, micro_batches: int) -> tuple[int, int]:
    """Return the peak of tensors in optimizer steps of plain PyTorch, in bytes, and the number of parameters."""
    model = split(run, mp_policy=MixedPrecisionPolicy(dtype, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with StepMeter([parameter.to_local() for parameter in model.parameters()]) as meter:
        for _ in range(2):  # in the second step there are moments from the start
            optimizer.zero_grad()
            for images, labels in random_images(run, micro_batches):
                nn.functional.cross_entropy(model(images).float(), labels).backward()
            optimizer.step()
    return meter.peak, sum(parameter.numel() for parameter in model.parameters())


def together(processes: int, args: argparse.Namespace) -> dict[str, Side]:
    run = start_hybrid(args, {**TOGETHER, **(SMALL if args.small else {})})
    return_freed_memory()

    def side(stage: int, accumulation: int, number: int) -> dict[str, float]:
        gc.collect()  # what can be freed of the engine before, as eight ranks share the memory
        gpc.config["zero"]["stage"], gpc.config["gradient_accumulation"] = stage, accumulation
        plan = measure(build_engine(run, col_nn.CrossEntropyLoss()), random_images(run, 2))
        whole = plan.parameters * (processes if stage == 3 else 1)  # elements, also of the last rank's smaller pieces
        return {"bytes a parameter": max(all_gather_object(plan.memory["peak"] / whole))}

    def plain(number: int) -> dict[str, float]:
        gc.collect()
        peak, parameters = peak_of_fully_shard(run, torch.float16, 1)
        return {"bytes a parameter": max(all_gather_object(peak / parameters))}

    formula = {"6 + 12/d": lambda number: {"bytes a parameter": 6 + 12 / processes}}
    found = formula | {name: partial(side, *how) for name, how in STAGES.items()}
    return found | ({"fully_shard": plain} if processes > 1 else {})


def peak_alone(flags: list[str], ranks: int, plain: bool) -> float:
    """Return the peak of rank 0 in GB, in a process of its own."""
    script = load_script(HYBRID)
    run = start_rank_0(script, flags, ranks)
    return_freed_memory()
    if plain:
        return peak_of_fully_shard(run, torch.bfloat16, run.config.gradient_accumulation)[0] / 1e9
    training = script.build(run)
    return measure(training.engine, training.train_dataloader).memory["peak"] / 1e9


def alone(model: str, ranks: int, args: argparse.Namespace) -> dict[str, Side]:
    values, config = {**ALONE, **MODELS[model], **(SMALL if args.small else {})}, FOLDER / CONFIG

    def side(kind: str, number: int) -> dict[str, float | None]:
        given, plain = {**values, **KINDS[kind]}, kind == "fully_shard"
        flags, fake = ["--config", str(config), *set_flags(given)], builder(HYBRID, config, ranks, **given)
        return {
            "peak of rank 0, GB": in_new_process(peak_alone, flags, ranks, plain),
            "dry run, GB": None if plain else plan_rank(fake, 0).memory["peak"] / 1e9,
        }

    return {kind: partial(side, kind) for kind in KINDS}


CASES = {f"on {number}": Case(partial(together, number), number, once=True) for number in (1, 2, 4, 8)}
CASES |= {f"{name} on {n}": Case(partial(alone, name, n), once=True) for name in ("L/16", "g/14") for n in (4, 8)}
BENCHMARK = Benchmark(lambda args: CASES, rounds=1)
