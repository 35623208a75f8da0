"""Which elements training drops, on every rank of a layout: its part of the one mask that all layouts share.

Recorded in steps of the engine. That a rank's part is the one that belongs to its activations is what `test_vit` sees:
outputs and gradients with dropout are those of timm's model.
"""

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from colossal_vit.data.batches import SyntheticLoader
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine import build_criterion, build_optimizer, initialize
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossal_vit.rng import dropout, philox
from colossal_vit.rng.dropout import Dropout, DropPath
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import nn

import fork_ranks
import training
import vit
from layouts import LAYOUTS
from mixup import with_mixup

MICRO_STEPS = 4
RANDOM = {"DROP_RATE": 0.5, "DROP_PATH_RATE": 0.5, "DEPTH": 2, **training.MIXED_CIFAR10, "mix.mode": "batch"}
KINDS = {  # name: processes, values, into how many parts the tensor-parallel ranks split a batch
    "DP 2, accumulation": (2, {"BATCH_SIZE": 8, "gradient_accumulation": 2}, 1),
    "PP 2, accumulation": (2, {**LAYOUTS["PP 2"][1], "BATCH_SIZE": 16, "gradient_accumulation": 2}, 1),
    "PP 2 interleaved × 2": (2, {**LAYOUTS["PP 2 interleaved × 2"][1], "DEPTH": 4}, 1),
    "1D 2": (*LAYOUTS["1D 2"], 1),
    "2D 4": (*LAYOUTS["2D 4"], 2),
    "2.5D 8": (*LAYOUTS["2.5D 8"], 2),
    "3D 8": (*LAYOUTS["3D 8"], 4),
    "DP 2 × PP 2 × 1D 2": (*LAYOUTS["DP 2 × PP 2 × 1D 2"], 1),
}


def states():
    """Of all generators that something could draw from."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def recorded(model):
    """Train for `MICRO_STEPS`; returns what dropout layers had and returned, by name, and whether nothing drew."""
    config, calls = gpc.config, defaultdict(list)
    for chunk in model if isinstance(model, nn.ModuleList) else [model]:
        for name, module in chunk.named_modules():
            if isinstance(module, Dropout) and module.rate:

                def record(module, inputs, output, name=name):
                    calls[name].append((module, inputs[0], output))

                module.register_forward_hook(record)
    num_images = MICRO_STEPS * config.BATCH_SIZE * gpc.get_world_size(ParallelMode.DATA)
    sampler = GlobalBatchSampler(num_images, config.BATCH_SIZE, config.gradient_accumulation)
    batches = with_mixup(SyntheticLoader(sampler, config, torch.device("cpu")), config)
    engine, batches, *_ = initialize(model, build_optimizer(config, model), build_criterion(config), batches)
    engine.train()
    before, batches = states(), iter(batches)
    for _ in range(MICRO_STEPS):
        engine.zero_grad()
        engine.execute_schedule(batches)
        engine.step()
    return calls, states() == before


def mask(module, name, number, channels):
    """What the whole model's layer does to its input in a forward pass of this data-parallel rank: 0 or a factor.

    Args:
        module, name: of the layer.
        number: of the forward pass, from the first on.
        channels: of the layer in the whole model.
    """
    config, replicas = gpc.config, gpc.get_world_size(ParallelMode.DATA)
    passes = config.NUM_MICRO_BATCHES if config.parallel.pipeline > 1 else 1  # of a micro-step
    micro_step, part = divmod(number, passes)
    step, micro_step = divmod(micro_step, config.gradient_accumulation)
    size = config.BATCH_SIZE // passes
    first = (micro_step * replicas + gpc.get_local_rank(ParallelMode.DATA)) * config.BATCH_SIZE + part * size
    samples = torch.tensor([(step, first + row) for row in range(size)])
    class_only = name.startswith(f"blocks.{config.DEPTH - 1}.")
    tokens = 1 if class_only or isinstance(module, DropPath) else (config.IMG_SIZE // config.PATCH_SIZE) ** 2 + 1
    key = torch.tensor([config.SEED, philox.word(name), round(module.rate * philox.ONE)])
    return dropout.drop(torch.ones(size, tokens, channels), samples, key, 0, channels, False)


def parts(calls, rows):
    """By layer, which part of the whole mask it applies in all forward passes: row and column, and how many there are.

    Args:
        calls: from `recorded`.
        rows: into how many parts the tensor-parallel ranks split a batch.
    """
    found = {}
    for name, passes in calls.items():
        module, x, *_ = passes[0]
        width = 1 if isinstance(module, DropPath) else gpc.config.HIDDEN_SIZE * (4 if "drop1" in name else 1)
        columns = width // (1 if isinstance(module, DropPath) else x.shape[-1])
        candidates = set(itertools.product(range(rows), range(columns)))
        for number, (_, x, y) in enumerate(passes):
            whole, x = mask(module, name, number, width), nn.functional.gelu(x) if module.gelu else x
            cut = [part.chunk(columns, dim=2) for part in whole.chunk(rows)]
            candidates = {(row, column) for row, column in candidates if y.equal(cut[row][column] * x)}
        assert len(candidates) == 1, f"{name}: its mask is that of {candidates or 'no part'}"
        found[name] = (*candidates.pop(), rows, columns)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_drop_their_parts_of_the_mask_of_all_layouts(kind):
    """Element by element, without any generator's state; and together the ranks have all parts."""
    processes, values, rows = KINDS[kind]

    def function():
        calls, nothing_drew = recorded(vit.build_vit(gpc.config, Layout.of(gpc.config, processes)))
        assert nothing_drew
        return parts(calls, rows)

    answers = training.call(function, processes, **{**RANDOM, **values})
    found = {(name, *part) for answer in answers for name, part in answer.items()}
    sizes = {(name, *numbers) for name, _, _, *numbers in found}
    depth = values.get("DEPTH", 2)
    assert len(sizes) == 1 + depth * 3 + (depth - 1) * 2, "layers: the first block has no drop path"
    assert len(found) == sum(rows * columns for _, rows, columns in sizes)


def test_replicas_of_a_timm_model_drop_their_parts_of_the_mask():
    def function():
        calls, nothing_drew = recorded(build_timm_vit(gpc.config))
        assert nothing_drew
        return len(parts(calls, rows=1))

    values = dict(training.TINY, MODEL="vit_tiny_patch16_224", DROP_RATE=0.5, DROP_PATH_RATE=0.5, DEPTH=2, BATCH_SIZE=4)
    assert fork_ranks.call(function, 2, **values, mix={"mixup": 0.8}) == [1 + 2 * 3 + 2] * 2


@pytest.mark.parametrize("script", [training.HYBRID, training.CALTECH101, training.IMAGENET])
def test_runs_in_float64_draw_the_images_and_weights_of_runs_in_float32(script, tmp_path):
    """PyTorch's generator would draw others."""
    values = {"augment.policy": "rand", "augment.erase": 0.5, **training.MIXED[script], "DROP_RATE": 0.1}
    runs = [
        training.train(tmp_path / dtype, steps=2, script=script, DTYPE=dtype, **values)
        for dtype in ("float32", "float64")
    ]
    for step, expected in zip(*(run.steps for run in runs), strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
