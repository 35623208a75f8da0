"""Features in pairs: a table in which each pair of them, on and off, is in some run, made by a program from a seed.

Each run is compared with one process in fp32 that has of its features only those that change what is learned.
"""

import functools
import itertools
import os
import random

import pytest
import torch
from colossal_vit.data import loaders
from colossal_vit.data.batches import SyntheticLoader
from safetensors.torch import save_file

import cifar10
import conftest
import fork_ranks
import layouts
import training
from layouts import OPTIMIZERS, tensor
from test_compile import GRAPHS
from test_finetune import full_weights
from test_layouts import assert_same_curve

# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

FEATURES = {  # what each may be besides off; tests of its own try a feature alone
    "data": ("DDP", "zero", "split weights"),
    "pipeline": ("1F1B", "interleaved"),
    "tensor": ("1D",),
    "COMPILE": (True,),
    "accumulation": (True,),
    "CHECKPOINT": (True,),
    "finetune": ("weights", "frozen"),
    "mix": (True,),
    "ema": (True,),
    "LAMB": (True,),
    "NAIVE": (True,),
    "resume": (True,),
    "SYNTHETIC": (True,),
}
LAYOUT = ("data", "pipeline", "tensor")  # each doubles the number of processes
MOST_PROCESSES = 4
MOST_FEATURES = 7  # with all in one run, a failure would say little
APART = {"mix", "SYNTHETIC"}  # images are mixed by a loader of CIFAR-10
# What three features together have broken: each is in some run, too.
TRIPLES = [{"data": "zero", "pipeline": "1F1B", "COMPILE": True}]
SEED = 16  # a short table that compiles little, of those of 90 seeds


def num_processes(row):
    return 2 ** sum(feature in row for feature in LAYOUT)


def pairs(row):
    """The pairs of features that a run tests; in half precision, whose tolerance is wide, only those with it."""
    found = itertools.combinations(sorted(row.items()), 2)
    return {pair for pair in found if "NAIVE" not in row or ("NAIVE", True) in pair}


def all_pairs():
    return {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(sorted(FEATURES), 2)
        if set(names) != APART
        for values in itertools.product(*(FEATURES[name] for name in names))
    }


def covering_array(seed):
    """Runs, as dicts of the features that are on, which test all pairs: greedily, each the best of some candidates.

    A candidate begins with a missing pair, and gets of the other features, in a random order, what adds missing pairs.
    """
    draw, missing, rows = random.Random(seed), all_pairs(), []
    while missing:
        candidates = []
        for _ in range(50):
            row = dict(TRIPLES[len(rows)] if len(rows) < len(TRIPLES) else draw.choice(sorted(missing, key=str)))
            for feature in draw.sample(sorted(FEATURES), len(FEATURES)):
                options = [{**row, feature: value} for value in FEATURES[feature] if feature not in row]
                options = [m for m in options if num_processes(m) <= MOST_PROCESSES and len(m) <= MOST_FEATURES]
                options = [m for m in options if not m.keys() >= APART]
                row = max([row, *options], key=lambda more: len(pairs(more) & missing))
            candidates.append(row)
        # Compiling takes longest: of two that are as good, the one without it.
        rows.append(max(candidates, key=lambda row: (len(pairs(row) & missing), "COMPILE" not in row)))
        missing -= pairs(rows[-1])
    return rows


TABLE = covering_array(SEED)


def title(row):
    return ", ".join(name if value is True else f"{name} {value}" for name, value in row.items())


def test_table_has_every_pair():
    assert not all_pairs() - set().union(*map(pairs, TABLE))
    for triple in TRIPLES:
        assert any(triple.items() <= row.items() for row in TABLE)
    assert max(map(num_processes, TABLE)) <= MOST_PROCESSES


def test_table_is_that_of_its_seed():
    """So a run that fails is there the next time."""
    assert covering_array(SEED) == TABLE


# ---------------------------------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------------------------------

LEARNED = ("finetune", "mix", "ema", "LAMB", "SYNTHETIC")  # these change what is learned, the others must not
STEPS_PER_EPOCH, NUM_EPOCHS = 3, 2
HALF = 0.02  # how far half precision may be from fp32, as in test_layouts.py


@pytest.fixture(scope="module", autouse=True)
def no_kernels():
    """COMPILE makes forward and backward graphs, whose operators stay PyTorch's: test_compile.py has kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=GRAPHS))
        # Imports what compiling needs, before there are ranks that would all do it.
        torch.compile(torch.nn.GELU())(torch.ones(32, requires_grad=True)).sum().backward()
        yield


@pytest.fixture(scope="module", autouse=True)
def hundred_images(tmp_path_factory):
    """Epochs of three steps, so that two of them and their ends are cheap, of random images too."""
    root = tmp_path_factory.mktemp("hundred")
    folder = cifar10.write_images(root)
    for name in cifar10.TRAIN_FILES:
        os.truncate(folder / name, 20 * cifar10.RECORD_BYTES)
    os.truncate(folder / cifar10.TEST_FILES[0], conftest.NUM_TEST_IMAGES * cifar10.RECORD_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(root))
        patch.setattr(loaders, "SYNTHETIC_IMAGES", 100)
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files with weights of models of 2 and of 4 blocks."""
    folder = tmp_path_factory.mktemp("weights")
    for depth in (2, 4):
        save_file(full_weights(DEPTH=depth), folder / f"{depth}.safetensors")
    return {depth: str(folder / f"{depth}.safetensors") for depth in (2, 4)}


@pytest.fixture(scope="module")
def references():
    """Records of one process, by its settings."""
    return {}


def settings(row, depth, weights):
    """The arguments of `training.train` for some features; a global batch of 32 and dropout in any case."""
    values = {"DEPTH": depth, "NUM_EPOCHS": NUM_EPOCHS, "BATCH_SIZE": 32 // (1 + ("data" in row))}
    values |= training.RANDOM if "mix" in row else layouts.RANDOM
    if row.get("data") == "zero":
        values |= {"zero.stage": 2 if "accumulation" in row else 1}
    if row.get("data") == "split weights":
        values |= {"zero.stage": 3}
    if "pipeline" in row:
        values |= {"parallel.pipeline": 2, "model.num_chunks": 2 if row["pipeline"] == "interleaved" else 1}
    if "tensor" in row:
        values |= tensor("1d", 2)
    if "accumulation" in row:
        values |= {"gradient_accumulation": 2, "BATCH_SIZE": values["BATCH_SIZE"] // 2}
    if "finetune" in row:
        values |= {"finetune.weights": weights[depth], "finetune.head": "keep"}
    if row.get("finetune") == "frozen":
        values |= {"finetune.frozen_blocks": depth // 2}
    if "ema" in row:
        values |= {"ema.decay": 0.9}
    if "LAMB" in row:
        values |= OPTIMIZERS["lamb"]
    if "NAIVE" in row:
        values |= {"amp": "NAIVE", "fp16.dtype": "fp16", "fp16.initial_scale": 2.0**10}
    return values | {key: True for key in ("COMPILE", "CHECKPOINT", "SYNTHETIC") if key in row}


def reference(row, depth, weights, references, folder):
    """The run of one process with those features only that change what is learned."""
    values = settings({key: row[key] for key in LEARNED if key in row}, depth, weights)
    key = str(values)
    if key not in references:
        references[key] = training.train(folder, **values)
    return references[key]


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_features_together_learn_what_one_process_learns(row, weights, references, tmp_path, random_weights):
    depth = 4 if row.get("pipeline") == "interleaved" else 2
    one = reference(row, depth, weights, references, tmp_path / "one")
    values, processes = settings(row, depth, weights), num_processes(row)
    run = training.train(tmp_path / "run", processes, **values)
    steps, expected = run.steps, one.steps
    assert len(expected) == STEPS_PER_EPOCH * NUM_EPOCHS
    assert len(run.evaluations) == len(one.evaluations) == NUM_EPOCHS
    if "NAIVE" in row:
        assert [r["loss"] for r in steps] == pytest.approx([r["loss"] for r in expected], rel=HALF)
        assert not any(r["skipped"] for r in steps)
    else:
        assert_same_curve(steps, expected)
    for here, there in zip(run.evaluations, one.evaluations, strict=True):
        assert here.keys() == there.keys()
        num_images = SyntheticLoader.DISTINCT if "SYNTHETIC" in row else conftest.NUM_TEST_IMAGES
        assert here["eval_images"] == there["eval_images"] == num_images
        for key in {"eval_loss", "ema_loss"} & there.keys():
            assert here[key] == pytest.approx(there[key], rel=HALF if "NAIVE" in row else 1e-4), key
    if "resume" in row:
        stopped = STEPS_PER_EPOCH + 1  # in the middle of an epoch
        training.train(tmp_path / "parts", processes, steps=stopped, **values)
        training.train(tmp_path / "parts", processes, **values)
        assert training.records(tmp_path / "parts") == run.records


# Pairs that cannot exist, and the line that refuses them.
REFUSED = [
    ({"finetune.frozen_blocks": 1}, [], 1, "but there are no weights to start from"),
    ({"zero.stage": 1, "torch_ddp.bucket_cap_mb": 5}, [], 1, "torch_ddp has no effect with zero"),
    (
        {"torch_ddp.static_graph": True, "gradient_accumulation": 2},
        [],
        1,
        "torch_ddp.static_graph = True does not work with gradient_accumulation = 2",
    ),
    ({"amp": "TORCH", "parallel.pipeline": 2}, [], 2, "does not work with a pipeline: use AMP_TYPE.NAIVE or None"),
    (
        {"amp": "TORCH", "fp16.half_residual": True, "parallel.tensor.mode": "1d", "parallel.tensor.size": 2},
        [],
        2,
        "fp16.half_residual = True does not work with tensor parallelism",
    ),
    ({"COMPILE": True}, ["--debug-nan"], 1, "--debug-nan looks into the model, which COMPILE merges into one piece"),
]


@pytest.mark.parametrize(("values", "flags", "processes", "line"), REFUSED, ids=lambda value: str(value)[:40])
def test_pairs_that_cannot_exist_are_refused_in_one_line(values, flags, processes, line, tmp_path):
    argv = [*training.flags(**values), "--output", str(tmp_path / "run"), *flags]
    result = fork_ranks.run(training.HYBRID, argv, processes)
    assert result.codes == [2] * processes, str(result)
    assert line in "".join(result.stderr)
    assert "Traceback" not in "".join(result.stderr)
