"""One config, any layout, one loss curve: the first 20 steps of every layout equal those of one process.

Dropout, drop path, mixing, crops and mirror images included.
"""

import functools
import itertools
import re

import pytest
import torch
from colossal_vit.engine import reduction
from colossal_vit.engine.assembly import initialize
from colossal_vit.parallel.layout import Layout
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc

import fork_ranks
import training
import vit
from conftest import NUM_TEST_IMAGES
from layouts import LAYOUTS, MODEL, OPTIMIZERS

pytestmark = pytest.mark.usefixtures("few_test_images")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The curves of one process, by optimizer and number of blocks."""

    @functools.cache
    def curves(optimizer="adamw", depth=4):
        return training.train(
            tmp_path_factory.mktemp("reference"), DEPTH=depth, **training.RANDOM, **OPTIMIZERS[optimizer]
        )

    return curves


def small(layout, **more):
    """Processes and overrides; no more blocks than a pipeline needs.

    One with eight ranks whose many small messages take long on a few cores: test_vit.py compares all gradients of two.
    """
    world_size, values = LAYOUTS[layout]
    split = values.get("parallel.tensor.mode") in ("2d", "2.5d", "3d")
    depth = 4 if "PP" in layout and not split else 1 if world_size == 8 and "PP" not in layout else 2
    return world_size, {"DEPTH": depth, **training.RANDOM, **values, **more}


def one_block(layout):
    """A single block where no pipeline needs more: enough where another test has compared more steps."""
    return {"DEPTH": 1} if small(layout)[1]["DEPTH"] == 2 else {}


def assert_same_curve(steps, expected):
    assert [r["step"] for r in steps] == [r["step"] for r in expected] == list(range(1, len(steps) + 1))
    for here, there in zip(steps, expected, strict=True):
        tolerance = 1e-5 if here["step"] == 1 else 1e-4
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=tolerance), (here["step"], key)
        assert here["lr"] == there["lr"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_curve_of_one_process(layout, reference, tmp_path, random_weights):
    world_size, values = small(layout)
    one = reference(depth=values["DEPTH"])
    expected = one.steps
    assert min(r["grad_norm"] for r in expected) > MODEL["clip_grad_norm"], "clipping must change every step"
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.15, "the model must learn, or equality says little"
    run = training.train(tmp_path, world_size, **values)
    assert len(run.steps) == 20
    assert_same_curve(run.steps, expected)
    here, there = run.evaluations[-1], one.evaluations[-1]
    assert here["eval_images"] == NUM_TEST_IMAGES
    assert here["eval_loss"] == pytest.approx(there["eval_loss"], rel=1e-4)
    assert here["eval_accuracy"] == pytest.approx(there["eval_accuracy"], abs=1.5 / NUM_TEST_IMAGES)


@pytest.mark.parametrize("layout", ["DP 2", "1D 2", "PP 2 interleaved × 2, 4 micro-batches", "DP 2 × PP 2"])
def test_every_layout_with_accumulation_has_the_curve_of_one_process(layout, reference, tmp_path, random_weights):
    """Two micro-batches of half the size make the same steps, and so the same curve as without accumulation."""
    batch = LAYOUTS[layout][1].get("BATCH_SIZE", 32) // 2
    world_size, values = small(layout, BATCH_SIZE=batch, gradient_accumulation=2)
    steps = training.train(tmp_path, world_size, **values).steps
    assert_same_curve(steps, reference(depth=values["DEPTH"]).steps)


# Each way to split a model, alone and combined: the others are of the same parts in other numbers.
KINDS = ["DP 2", "PP 2", "1D 2", "2D 4", "2.5D 8", "3D 8", "PP 2 × 1D 2", "DP 2 × 2D 4"]


@pytest.mark.parametrize("layout", KINDS)
def test_layout_with_lamb_recomputation_and_more_micro_batches_has_the_curve_of_one_process(
    layout, reference, tmp_path, random_weights
):
    """LAMB's trust ratios need the norms of whole parameters, of which ranks hold pieces; the others must not matter.

    SGD in layouts is in test_zero.py.
    """
    world_size, values = small(layout, CHECKPOINT=True, NUM_MICRO_BATCHES=4, **OPTIMIZERS["lamb"], **one_block(layout))
    expected = reference("lamb", values["DEPTH"]).steps
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.15
    steps = training.train(tmp_path, world_size, steps=6, **values).steps
    assert_same_curve(steps, expected[:6])


def test_replicas_of_a_pipeline_reduce_during_their_last_backward_pass(monkeypatch):
    """And not before: each bucket once a step, in the same order on all of them, with accumulation too."""
    world_size, values = LAYOUTS["DP 2 × PP 2"]
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 20_000)

    def events():
        config = gpc.config
        model = vit.build_vit(config, Layout.of(config, world_size))
        optimizer = torch.optim.SGD(model.parameters())
        engine, *_ = initialize(model, optimizer, col_nn.CrossEntropyLoss())
        (handler,) = engine._gradient_handlers
        found = []
        start = reduction.GradientBucket.start

        def note_start(bucket):
            found.append(handler.buckets.index(bucket))
            start(bucket)

        def note(function, *args):
            found.append("begin")
            function(*args)
            found.append("end")

        monkeypatch.setattr(reduction.GradientBucket, "start", note_start)
        last = gpc.is_last_rank(ParallelMode.PIPELINE)
        name = "backward" if last else "backward_by_grad"
        backward = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *args: note(backward, *args))
        batch = torch.randn(16, 3, config.IMG_SIZE, config.IMG_SIZE), torch.randint(10, (16,))
        engine.train()
        for _ in range(4):  # two optimizer steps
            engine.zero_grad()
            engine.execute_schedule(iter([batch]), forward_only=False, return_loss=True)
            engine.step()
        return len(handler.buckets), found

    for num_buckets, found in training.call(events, world_size, **values, gradient_accumulation=2):
        assert num_buckets > 3
        passes = ["begin", "end"] * 3
        assert found == 2 * [*passes, "begin", *range(num_buckets), "end"]


@pytest.mark.parametrize(
    ("layout", "amp"),
    [
        *itertools.product(["1D 2", "2D 4"], ["NAIVE", "TORCH"]),  # all of them in fp16, below
        ("PP 2 interleaved × 2", "NAIVE"),  # TORCH does not work with a pipeline, and is refused
        ("PP 2 × 1D 2", "NAIVE"),
    ],
)
def test_bf16_follows_fp32(layout, amp, reference, tmp_path, random_weights):
    """bf16 keeps 8 bits: the first steps follow fp32 to a few per cent, but not exactly."""
    world_size, values = small(layout)
    steps = training.train(tmp_path, world_size, steps=3, amp=amp, **values).steps
    for here, there in zip(steps, reference(depth=values["DEPTH"]).steps, strict=False):
        assert here["loss"] == pytest.approx(there["loss"], rel=0.02)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=0.1)
        assert here["loss"] != there["loss"]


FP16 = dict(training.RANDOM, IMG_SIZE=16)  # half precision is slow on a CPU


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    """The steps of one process, by number of blocks."""

    @functools.cache
    def steps(depth):
        return training.train(tmp_path_factory.mktemp("fp32"), steps=12, **{**FP16, "DEPTH": depth}).steps

    return steps


@pytest.mark.parametrize(
    ("layout", "amp"),
    [
        *itertools.product(["DP 2", "1D 2", "2D 4", "2.5D 4", "3D 8"], ["NAIVE", "TORCH"]),
        ("1D 2", "APEX"),
        ("PP 2", "NAIVE"),
        ("PP 2 interleaved × 2", "NAIVE"),
        ("PP 2 × 1D 2", "NAIVE"),
    ],
)
def test_fp16_with_loss_scaling_in_every_mode(layout, amp, fp32, tmp_path, random_weights):
    """In fp16, CUDA's default, losses follow fp32 to 1 %, until an overflow skips a step; the loss scale grows."""
    world_size, values = LAYOUTS[layout]
    scaling = {"fp16.dtype": "fp16"}
    if amp != "APEX":  # whose scaler keeps its defaults
        scaling |= {"fp16.growth_interval": 3, "fp16.init_scale" if amp == "TORCH" else "fp16.initial_scale": 2.0**15}
    if amp == "NAIVE":
        scaling["fp16.hysteresis"] = 1
    depth = 4 if "interleaved" in layout else 2 if "PP" in layout else 1
    run = training.train(tmp_path, world_size, steps=12, amp=amp, **{**FP16, "DEPTH": depth, **values, **scaling})
    steps, expected = run.steps, fp32(depth)
    assert len(steps) == len(expected) == 12
    skips = [number for number, step in enumerate(steps) if step.get("skipped")]
    assert all(number >= 6 for number in skips)
    for here, there in itertools.islice(zip(steps, expected, strict=True), min(skips, default=11) + 1):
        assert here["loss"] == pytest.approx(there["loss"], rel=0.01)
    assert steps[5]["loss"] != expected[5]["loss"], "the mode must be in effect"
    assert run.evaluations[-1]["eval_images"] == NUM_TEST_IMAGES
    if amp != "APEX":
        assert any(after["loss_scale"] == 2 * before["loss_scale"] for before, after in itertools.pairwise(steps))
        assert 1 <= sum(record["skipped"] for record in steps) <= 4


CONFIGS = sorted((fork_ranks.ROOT / "vit_cifar10_hybrid/configs").glob("config_*.py"))


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "data_parallel" not in path.name], ids=lambda path: path.stem
)
def test_shipped_config_trains_a_smaller_model_in_its_own_layout_and_precision(path, tmp_path):
    processes = int(re.search(r"--nproc_per_node (\d+)", path.read_text()).group(1))
    smaller = {key: value for key, value in MODEL.items() if key not in ("fp16", "NUM_MICRO_BATCHES")}
    smaller["DEPTH"] = 4 if "interleaved" in path.name else 2
    run = training.train(tmp_path, processes, steps=1, config=path, small=False, **smaller)
    assert run.evaluations[-1]["eval_images"] == NUM_TEST_IMAGES
    mixed = re.search(r"^fp16 = dict", path.read_text(), re.MULTILINE)
    assert ("AMP_TYPE.NAIVE in bfloat16" in run.said) == bool(mixed)
