"""Mixed precision: the loss stays close to fp32's, gradients are unscaled before they are clipped, overflows skip."""

import pytest
import torch
from colossal_vit.engine import initialize
from colossal_vit.precision import NaiveAMPOptimizer, TorchAMPOptimizer
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc

import recipes
import world

MODES = {
    "NAIVE bf16": dict(mode=AMP_TYPE.NAIVE, dtype="bf16"),
    "TORCH bf16": dict(mode=AMP_TYPE.TORCH, dtype="bf16"),
    # A scale of 2**8 leaves room for the gradients below: fp16 ends at 65,504.
    "NAIVE fp16": dict(mode=AMP_TYPE.NAIVE, dtype="fp16", initial_scale=2.0**8),
    "TORCH fp16": dict(mode=AMP_TYPE.TORCH, dtype="fp16", init_scale=2.0**8),
}
LOSS_SCALED = ["NAIVE fp16", "TORCH fp16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Loss records of 100 steps on the digits, in fp32 and in the modes the CPU defaults to.

    The rate is low enough for two runs that differ by a rounding to stay together: at 2e-3 they drift apart by 10 %
    within the 100 steps, in either direction, which says nothing of their precision.
    """
    values = dict(
        BATCH_SIZE=128,
        NUM_EPOCHS=10,
        LEARNING_RATE=5e-4,
        WEIGHT_DECAY=0.05,
        HIDDEN_SIZE=96,
        DEPTH=2,
        CROP_PADDING=0,
        FLIP=False,
    )

    def run(mode):
        return recipes.train(tmp_path_factory.mktemp(str(mode)), steps=100, amp=mode, **values)[0]

    return {mode: run(mode) for mode in (None, "NAIVE", "TORCH")}


@pytest.mark.parametrize("mode", ["NAIVE", "TORCH"])
def test_loss_stays_within_two_percent_of_fp32(trained, mode):
    expected, steps = trained[None], trained[mode]
    assert len(steps) == len(expected) == 100
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"], "fp32 must have learnt something"
    assert steps[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.02)
    assert steps[10]["loss"] != expected[10]["loss"], "the mode must be in effect"


def engine_with_gradient(values, fp16, init):
    """An engine for one weight vector, and a backward pass that gives it the gradient `values`, whatever the scale."""
    model = torch.nn.Linear(len(values), 1, bias=False)
    torch.nn.init.constant_(model.weight, init)
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.nn.Identity())
    engine.zero_grad()
    engine.backward(engine.criterion(engine(torch.tensor([values])).sum()))
    return engine


@pytest.mark.parametrize("mode", MODES)
def test_clips_the_unscaled_gradient(mode):
    """The gradient (30, 40) has norm 50; clipped to 5 it is (3, 4), and so is one SGD step of rate 1."""

    def function():
        engine = engine_with_gradient([30.0, 40.0], MODES[mode], init=0.0)
        engine.step()
        return engine.grad_norm, engine.optimizer.param_groups[0]["params"][0].flatten().tolist()

    ((norm, weight),) = world.call(function, fp16=MODES[mode], clip_grad_norm=5.0)
    assert norm == pytest.approx(50.0, rel=1e-3)
    assert weight == pytest.approx([-3.0, -4.0], rel=1e-3)


@pytest.mark.parametrize("mode", LOSS_SCALED)
def test_overflow_on_one_rank_skips_the_step_on_all(mode):
    """Only tensor-parallel rank 1 overflows; both leave the weights alone and lower the scale alike."""

    def function():
        rank = gpc.get_local_rank(ParallelMode.TENSOR)
        gradient = [1.0, 2.0] if rank == 0 else [float("inf"), 2.0]
        engine = engine_with_gradient(gradient, MODES[mode], init=0.5)
        before = engine.optimizer.loss_scale
        engine.step()
        weights = engine.optimizer.param_groups[0]["params"][0].flatten().tolist()
        return engine.optimizer.skipped, before, engine.optimizer.loss_scale, weights

    scaling = {"hysteresis": 1} if "NAIVE" in mode else {}
    parallel = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}
    answers = world.call(function, 2, parallel=parallel, fp16={**MODES[mode], **scaling})
    for skipped, before, after, weights in answers:
        assert skipped
        assert after == before / 2
        assert weights == [0.5, 0.5]


@pytest.mark.parametrize("mode", LOSS_SCALED)
def test_scale_grows_and_its_growth_does_not_touch_the_gradient(mode):
    def function():
        engine = engine_with_gradient([3.0, 4.0], MODES[mode], init=0.0)
        before = engine.optimizer.loss_scale
        engine.step()
        growth = engine.optimizer.loss_scale / before
        return growth, engine.grad_norm, engine.optimizer.param_groups[0]["params"][0].flatten().tolist()

    ((growth, norm, weight),) = world.call(function, fp16={**MODES[mode], "growth_interval": 1})
    assert growth == 2
    assert norm == pytest.approx(5.0, rel=1e-3)
    assert weight == pytest.approx([-3.0, -4.0], rel=1e-3)


def test_upstream_unscales_by_the_grown_scale():
    """The defect behind `NaiveAMPOptimizer.step`: when the scale grows, upstream halves that step's gradient."""
    from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer

    def function():
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), "fp16", 2.0**8, growth_interval=1)
        optimizer.backward((weight * torch.tensor([3.0, 4.0])).sum())
        optimizer.step()
        return weight.tolist()

    assert world.call(function) == [[-1.5, -2.0]]


def test_masters_are_fp32_and_weights_follow():
    def function():
        engine = engine_with_gradient([2**-12, 0.0], None, init=1.0)
        for _ in range(3):
            engine.step()
            engine.zero_grad()
            engine.backward(engine(torch.tensor([[2**-12, 0.0]])).sum())
        master = engine.optimizer.param_groups[0]["params"][0]
        return master.dtype, master.flatten()[0].item(), next(engine.model.parameters()).flatten()[0].item()

    ((dtype, master, working),) = world.call(function, fp16=MODES["NAIVE bf16"])
    assert dtype == torch.float32
    assert master == 1.0 - 3 * 2**-12, "steps too small for bf16 must add up in the master"
    assert working == 1.0


def test_wrappers_are_the_ones_asked_for():
    expected = {
        "NAIVE fp16": NaiveAMPOptimizer,
        "TORCH fp16": TorchAMPOptimizer,
    }
    for mode, wrapper in expected.items():
        (name,) = world.call(lambda: type(engine_with_gradient([1.0], None, 0.0).optimizer), fp16=MODES[mode])
        assert name is wrapper
