"""A run that was stopped goes on as if it had not been: to the bit on one layout, within the contract on another."""

import functools
import itertools
import json
import random
import signal
import time

import pytest
import safetensors.torch
import torch
import vit
from check_layouts import LAYOUTS
from colossal_vit import checkpoint
from colossal_vit.config import Layout
from colossal_vit.engine import initialize
from colossal_vit.ranks import RankLogger
from colossal_vit.report import read_metrics
from colossal_vit.state import resume, take
from colossal_vit.trainer import Trainer
from colossalai.legacy import nn as col_nn

import recipes
import world

TIMES = {"images_per_s", "data_s", "step_s", "memory_gb"}  # what is allowed to differ


def record(output):
    """All that `metrics.jsonl` says, but for the times."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


# ---------------------------------------------------------------------------------------------------------------------
# The same layout: to the bit
# ---------------------------------------------------------------------------------------------------------------------

HYBRID = dict(recipes.MODEL, DEPTH=2, BATCH_SIZE=64, NUM_EPOCHS=2, WARMUP_EPOCHS=1, DROP_RATE=0.1, DROP_PATH_RATE=0.1)
PLAIN = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=2, NUM_HEADS=4, NUM_EPOCHS=2, WARMUP_EPOCHS=1)
PLAIN |= dict(DROP_RATE=0.1, NUM_CLASSES=10, BATCH_SIZE=64)
NAIVE = {"fp16.mode": "AMP_TYPE.NAIVE"}
FP16 = {"fp16.dtype": "fp16", "fp16.growth_interval": 3}  # the loss scale changes all the time

HYBRID_RUN = ("vit_cifar10_hybrid/train_hybrid.py", "configs/config_pipeline_parallel.py", HYBRID)
DALI_RUN = ("vit_imagenet_dali/train.py", "config_sample.py", PLAIN | dict(gradient_accumulation=4, BATCH_SIZE=16))
CALTECH_RUN = ("vit_caltech101_amp/train.py", "config/config_fp32.py", PLAIN | dict(CACHE_SIZE=36))
RUNS = {  # script, config, its values; processes; what else
    "hybrid, 1 process": (HYBRID_RUN, 1, {"parallel.pipeline": 1}),
    "hybrid, PP 2, fp16 with loss scaling": (HYBRID_RUN, 2, {**NAIVE, **FP16, "fp16.initial_scale": 2.0**22}),
    "hybrid, 1D 2, bf16": (HYBRID_RUN, 2, {**LAYOUTS["1D 2"][1], **NAIVE, "parallel.pipeline": 1}),
    "hybrid, PP 2 interleaved, recomputed": (HYBRID_RUN, 2, {"model.num_chunks": 2, "DEPTH": 4, "CHECKPOINT": True}),
    "hybrid, DP 2 × PP 2, SGD": (HYBRID_RUN, 4, {"OPTIMIZER": "sgd", "LEARNING_RATE": 0.1}),
    "hybrid, 2D 4, LAMB": (HYBRID_RUN, 4, {**LAYOUTS["2D 4"][1], "parallel.pipeline": 1, "OPTIMIZER": "lamb"}),
    "imagenet, 1 process": (DALI_RUN, 1, {}),
    "imagenet, 2 processes, bf16": (DALI_RUN, 2, {"fp16.mode": "AMP_TYPE.TORCH"}),
    "caltech101, 1 process, fp16 with loss scaling": (
        CALTECH_RUN,
        1,
        {**FP16, "fp16.mode": "AMP_TYPE.TORCH", "fp16.init_scale": 2.0**22},
    ),
    "caltech101, 4 processes, bf16": (CALTECH_RUN, 4, {**NAIVE, "BATCH_SIZE": 16}),
}


def argv(config, values, output, *more):
    values = {**values, "checkpoint.keep": 2}
    modes = [part for key in ("fp16.mode",) if key in values for part in ("--set", f"{key}={values.pop(key)}")]
    if modes:
        values.pop("fp16", None)
    return ["--config", config, "--output", str(output), *recipes.set_flags(values), *modes, *more]


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_runs_record_the_same_bits(name, tmp_path):
    """Stopped at the start, at random steps of the warm-up and after it, at the end of an epoch; and never."""
    (script, config, values), processes, more = RUNS[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def run(output, *flags):
        result = world.run(script, argv(config, {**values, **more}, output, *flags), processes)
        assert result.codes == [0] * processes, str(result)
        return result.stdout[0]

    run(whole)
    expected = record(whole)
    per_epoch, total = (line["step"] for line in expected if "eval_loss" in line)
    draw = random.Random(name)
    stops = [draw.choice([1, draw.randrange(2, per_epoch)]), per_epoch, draw.randrange(per_epoch + 1, total)]
    for stop in stops:
        run(parts, "--max-steps", str(stop))
        assert read_metrics(parts)[0][-1]["step"] == stop
    said = run(parts)
    assert f"going on from {parts}/checkpoints/step-{stops[-1]:08d}: step {stops[-1]}" in said
    assert record(parts) == expected
    assert checkpoint.list_steps(parts / "checkpoints")[0].name == f"step-{total:08d}"
    if "loss scaling" in name:
        assert len({line["loss_scale"] for line in expected if "loss" in line}) > 2, (
            "else the scaler's state is nothing"
        )
    last = [
        safetensors.torch.load_file(run / f"checkpoints/step-{total:08d}/model.safetensors") for run in (whole, parts)
    ]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])
