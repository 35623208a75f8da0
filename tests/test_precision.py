"""Mixed precision: the loss stays close to fp32's, gradients are unscaled before they are clipped, overflows skip."""

import json
import math
from types import SimpleNamespace

import pytest
import timm
import torch
from colossal_vit.engine.amp_optimizer import AMPOptimizer, LossScale
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.engine import Scalars
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.muon import Muon
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from timm.layers import Attention

import fork_ranks
import training
import vit
from layouts import LAYOUTS

MODES = {
    "NAIVE bf16": dict(mode=AMP_TYPE.NAIVE, dtype="bf16"),
    "TORCH bf16": dict(mode=AMP_TYPE.TORCH, dtype="bf16"),
    # A scale of 2**8 leaves room for the gradients below: fp16 ends at 65,504.
    "NAIVE fp16": dict(mode=AMP_TYPE.NAIVE, dtype="fp16", initial_scale=2.0**8),
    "TORCH fp16": dict(mode=AMP_TYPE.TORCH, dtype="fp16", initial_scale=2.0**8),
}
LOSS_SCALED = ["NAIVE fp16", "TORCH fp16"]
APEX = {level: dict(mode=AMP_TYPE.APEX, opt_level=level, dtype="bf16") for level in ("O0", "O1", "O2", "O3")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Loss records of 100 steps on the digits, in fp32 and in the modes the CPU defaults to.

    The rate is low enough for two runs that differ by a rounding to stay together: at 2e-3 they drift apart by 10 %
    within the 100 steps, in either direction, which says nothing of their precision.
    """
    values = dict(BATCH_SIZE=64, NUM_EPOCHS=5, LEARNING_RATE=5e-4, WEIGHT_DECAY=0.05, CROP_PADDING=0, FLIP=False)
    values |= dict(IMG_SIZE=16, PATCH_SIZE=8, HIDDEN_SIZE=96, DEPTH=2)  # half precision is slow on a CPU

    def run(mode):
        return training.train(tmp_path_factory.mktemp(str(mode)), steps=100, amp=mode, **values).steps

    return {mode: run(mode) for mode in (None, "NAIVE", "TORCH")}


@pytest.mark.parametrize("mode", ["NAIVE", "TORCH"])
def test_loss_stays_within_two_percent_of_fp32(trained, mode):
    expected, steps = trained[None], trained[mode]
    assert len(steps) == len(expected) == 100
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"], "fp32 must have learnt something"
    assert steps[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.02)
    assert steps[10]["loss"] != expected[10]["loss"], "the mode must be in effect"


def vector_engine(size=2, init=0.0, optimizer=torch.optim.SGD, **options):
    """An engine for one weight vector, which SGD moves by its gradient."""
    model = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.constant_(model.weight, init)
    return initialize(model, optimizer(model.parameters(), lr=1.0, **options), torch.nn.Identity())[0]


def step_with(engine, gradient):
    """A step with a gradient of this value, whatever the scale; what it left."""
    engine.zero_grad()
    engine.backward(engine.criterion(engine(torch.tensor([gradient])).sum()))
    before = engine.optimizer.loss_scale
    engine.step()
    optimizer = engine.optimizer
    weight = optimizer.param_groups[0]["params"][0]
    return SimpleNamespace(
        norm=engine.grad_norm,
        weight=weight.flatten().tolist(),
        dtype=weight.dtype,
        skipped=optimizer.skipped,
        scale=optimizer.loss_scale,
        growth=optimizer.loss_scale and optimizer.loss_scale / before,
    )


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize(
    ("gradient", "clipped"),
    [([30.0, -40.0], [3.0, -4.0]), ([-3.0, 3.5], [-3.0, 3.5]), ([0.25, -0.5], [0.25, -0.5])],
)
def test_clipping_is_of_the_unscaled_gradient_if_it_is_large(gradient, clipped, mode):
    """To a norm of 5, as PyTorch clips; one SGD step of rate 1 is by the clipped gradient."""
    options = dict(fp16=mode and MODES[mode], clip_grad_norm=5.0)
    (left,) = fork_ranks.call(lambda: step_with(vector_engine(), gradient), **options)
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor(gradient)
    norm = torch.nn.utils.clip_grad_norm_([plain], 5.0)
    assert plain.grad.tolist() == pytest.approx(clipped, rel=1e-6)
    assert left.norm == pytest.approx(norm.item(), rel=1e-3)
    assert left.weight == pytest.approx([-value for value in clipped], rel=1e-3)


@pytest.mark.parametrize("mode", LOSS_SCALED)
def test_overflow_on_one_rank_skips_the_step_on_all(mode):
    """Only tensor-parallel rank 1 overflows; both leave the weights alone and lower the scale alike."""

    def function():
        first = gpc.get_local_rank(ParallelMode.TENSOR) == 0
        return step_with(vector_engine(init=0.5), [1.0 if first else float("inf"), 2.0])

    fp16 = {**MODES[mode], **({"hysteresis": 1} if "NAIVE" in mode else {})}
    parallel = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}
    for left in fork_ranks.call(function, 2, parallel=parallel, fp16=fp16):
        assert (left.skipped, left.growth, left.weight) == (True, 0.5, [0.5, 0.5])


@pytest.mark.parametrize("mode", LOSS_SCALED)
@pytest.mark.parametrize("name", ["fused AdamW", "Lamb", "Muon"])
def test_an_update_queued_before_the_norm_is_known_leaves_no_trace_of_an_overflow(name, mode):
    """Weights, moments and step counts are those of a run without that step."""
    kinds = {"fused AdamW": (torch.optim.AdamW, {"fused": True}), "Lamb": (Lamb, {"bias_correction": True})}
    kinds["Muon"] = lambda params, **more: Muon([dict(params=params, matrices=1)], **more), {}
    optimizer, options = kinds[name]

    def trained(gradients):
        engine = vector_engine(init=0.5, optimizer=optimizer, weight_decay=0.1, **options)
        lefts = [step_with(engine, values) for values in gradients]
        (state,) = engine.optimizer.optim.state.values()
        return [left.skipped for left in lefts], lefts[-1].weight, {key: torch.as_tensor(state[key]) for key in state}

    def function():
        good, bad = [3.0, 4.0], [math.inf, 1.0]
        return trained([good, good]), trained([bad, good, bad, good, bad])

    fp16 = {**MODES[mode], "hysteresis": 9}  # the scale stays
    ((_, expected, state), (skipped, weight, left)), *_ = fork_ranks.call(function, fp16=fp16)
    assert skipped == [True, False, True, False, True]
    assert weight == expected != [0.5, 0.5]
    assert state.keys() == left.keys()
    assert all(torch.equal(state[key], left[key]) for key in state)


@pytest.mark.parametrize("by_gradient", [False, True])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_on_a_gpu_the_result_of_a_step_is_read_when_the_next_forward_pass_is_queued(
    mode, by_gradient, read_late, monkeypatch
):
    """From the loss, or from the gradient that a pipeline stage receives, a backward pass begins with its scale."""
    order = []
    read = Scalars.read
    monkeypatch.setattr(Scalars, "read", lambda scalars: order.append("read") or read(scalars))

    def function():
        engine = vector_engine(optimizer=torch.optim.AdamW, fused=True)
        engine.model.register_forward_hook(lambda *_: order.append("forward"))
        engine.bare_model.weight.register_hook(lambda _: order.append("backward"))
        for _ in range(2):
            engine.zero_grad()
            loss = engine.criterion(engine(torch.tensor([[3.0, 4.0]])).sum())
            if by_gradient:
                engine.backward_by_grad(loss, torch.full_like(loss, engine.optimizer.loss_scale or 1.0))
            else:
                engine.backward(loss)
            order.append("update")
            engine.step()
        assert engine.read_steps == 1
        engine.wait_for_step()
        return order, engine.read_steps, engine.grad_norm

    step = ["forward", "backward", "update"]
    ((found, read_steps, norm),) = fork_ranks.call(function, fp16=mode and MODES[mode])
    assert found == [*step, "forward", "read", *step[1:], "read"]
    assert (read_steps, norm) == (2, 5.0)


def test_on_a_gpu_a_gradient_that_is_not_finite_ends_the_run_before_the_next_update(read_late):
    def function():
        engine = vector_engine(init=0.5, optimizer=torch.optim.AdamW, fused=True)
        before = step_with(engine, [3.0, 4.0]).weight
        step_with(engine, [math.inf, 1.0])
        with pytest.raises(TrainingError, match=r"^step 2: .* the weights are as after step 1"):
            step_with(engine, [3.0, 4.0])
        with pytest.raises(TrainingError, match=r"^step 2: "):
            engine.wait_for_step()  # as before a checkpoint
        return before, next(engine.model.parameters()).flatten().tolist()

    ((before, after),) = fork_ranks.call(function)
    assert before == after != [0.5, 0.5]


def test_gradient_that_stays_infinite_ends_the_run_at_the_smallest_scale():
    def function():
        engine = vector_engine()
        assert step_with(engine, [math.inf, 1.0]).skipped  # at the scale of 8
        with pytest.raises(TrainingError, match="step 2: the gradient is not finite"):
            step_with(engine, [math.inf, 1.0])
        return engine.optimizer.loss_scale

    fp16 = dict(mode=AMP_TYPE.NAIVE, dtype="fp16", initial_scale=8.0, min_scale=4.0, hysteresis=1)
    assert fork_ranks.call(function, fp16=fp16) == [4.0]
    with pytest.raises(UserError, match=r"fp16\.backoff_factor = 1\.0"):  # the scale would stay
        training.config_of(training.flags("NAIVE", **{"fp16.backoff_factor": 1.0}))


@pytest.mark.parametrize("mode", LOSS_SCALED)
def test_scale_that_grows_does_not_touch_the_gradient(mode):
    fp16 = {**MODES[mode], "growth_interval": 1}
    (left,) = fork_ranks.call(lambda: step_with(vector_engine(), [3.0, 4.0]), fp16=fp16)
    assert left.growth == 2
    assert left.norm == pytest.approx(5.0, rel=1e-3)
    assert left.weight == pytest.approx([-3.0, -4.0], rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_scaler_goes_on_where_another_one_stopped(mode):
    """Through JSON, after any of ten steps: amid a growth interval, and between two overflows that lower the scale."""
    overflow, fine = [float("inf"), 1.0], [1.0, 1.0]
    gradients = [fine, overflow, fine, overflow, fine, fine, fine, overflow, fine, overflow]
    gradients = [values for values in gradients if "fp16" in mode or values == fine]

    def function():
        def go_on(engine, part):
            lefts = [step_with(engine, values) for values in part]
            return [(left.scale, left.skipped) for left in lefts]

        found = []
        for stop in range(len(gradients)):
            first, second = vector_engine(), vector_engine()
            before = go_on(first, gradients[:stop])
            second.optimizer.load_scaler_state(json.loads(json.dumps(first.optimizer.scaler_state())))
            found.append(before + go_on(second, gradients[stop:]))
        return found

    scaling = {"growth_interval": 3} if "fp16" in mode else {}
    ((expected, *found),) = fork_ranks.call(function, fp16={**MODES[mode], **scaling})
    assert found == [expected] * (len(gradients) - 1)
    if "fp16" in mode:  # NAIVE's scaler forgives an overflow
        scales = [1, 1, 1, 1 / 2, 1 / 2, 1 / 2, 1, 1, 1, 1 / 2]
        scales = scales if "NAIVE" in mode else [1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 4, 1 / 4, 1 / 8]
        assert [scale / 2**8 for scale, _ in expected] == scales


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_loss_scale_is_the_one_that_other_scalers_have(hysteresis):
    """After each of 200 steps, some of which overflow: torch's GradScaler's, and Colossal-AI's."""
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    overflows = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.15
    factors = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=5)
    bounds = dict(min_scale=2.0**8, max_scale=2.0**12)

    def function():
        theirs = DynamicGradScaler(2.0**10, hysteresis=hysteresis, **factors, **bounds)
        ours = LossScale(2.0**10, hysteresis=hysteresis, **factors, **bounds)
        torchs, plain = torch.amp.GradScaler("cpu", init_scale=2.0**10, **factors), LossScale(2.0**10, **factors)
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        torchs.scale(weight)
        seen = set()
        for overflow in overflows.tolist():
            weight.grad = torch.tensor(math.inf if overflow else 0.0)
            torchs.step(optimizer)
            torchs.update()
            for scaler in (theirs, ours, plain):
                scaler.update(overflow)
            assert (ours.value, plain.value) == (theirs.scale.item(), torchs.get_scale())
            seen.add(ours.value)
        return seen

    assert len(fork_ranks.call(function)[0]) > 3


def test_a_run_that_resumes_with_a_shorter_growth_interval_raises_its_loss_scale():
    scale = LossScale(2.0**10, growth_interval=5)
    scale.growth_step = 12
    scale.update(overflow=False)
    assert (scale.value, scale.growth_step) == (2.0**11, 0)


def test_the_loss_scale_begins_and_resumes_within_its_bounds():
    """Beyond them it stayed there until it was raised, or at the first overflow ended the run."""
    optimizer = AMPOptimizer(torch.optim.SGD([torch.zeros(1)]), LossScale(max_scale=2.0**10))
    assert optimizer.loss_scale == 2.0**10
    optimizer.load_scaler_state({"loss_scale": 2.0**16, "growth_step": 3})
    assert optimizer.loss_scale == 2.0**10
    assert LossScale(min_scale=2.0**20).value == 2.0**20


def test_bounds_of_the_loss_scale_that_exclude_each_other_are_refused(tmp_path):
    bounds = {"fp16.dtype": "fp16", "fp16.min_scale": 8.0, "fp16.max_scale": 4.0}
    line = training.refused(tmp_path / "run", amp="NAIVE", steps=1, DEPTH=1, **bounds)
    assert "fp16.min_scale = 8 is above fp16.max_scale = 4" in line


def test_upstream_unscales_by_the_grown_scale():
    """Why `AMPOptimizer` has its own master weights: when the scale grows, upstream halves that step's gradient."""
    from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer

    def function():
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), "fp16", 2.0**8, growth_interval=1)
        optimizer.backward((weight * torch.tensor([3.0, 4.0])).sum())
        optimizer.step()
        return weight.tolist()

    assert fork_ranks.call(function) == [[-1.5, -2.0]]


def test_master_weights_keep_steps_too_small_for_the_working_ones():
    def function():
        engine = vector_engine(init=1.0)
        left = [step_with(engine, [2**-12, 0.0]) for _ in range(3)][-1]
        return left, next(engine.model.parameters()).flatten()[0].item()

    ((left, working),) = fork_ranks.call(function, fp16=MODES["NAIVE bf16"])
    assert left.dtype == torch.float32
    assert left.weight[0] == 1.0 - 3 * 2**-12
    assert working == 1.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["TORCH", "NAIVE"])
def test_norm_and_softmax_accumulate_in_fp32(mode, dtype):
    """Sums of 4,096 equal numbers: in bf16 they would end at 256, in fp16 at 2,048, whatever comes after."""

    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = torch.nn.LayerNorm(4096), Attention(64, num_heads=1)
            torch.nn.init.zeros_(self.attention.qkv.weight)
            torch.nn.init.eye_(self.attention.qkv.weight[128:])  # values are the input; all keys are alike
            torch.nn.init.eye_(self.attention.proj.weight)
            torch.nn.init.zeros_(self.attention.proj.bias)

        def forward(self, x):  # (1, 4096, 64)
            half = torch.cat([x[0, :2048, 0], -x[0, 2048:, 0]])
            return self.norm(half)[:64].float() + self.attention(x)[0, 0].float() - 1

    def function():
        answers = []
        for by_hand in (False, True):
            model = Sums()
            model.attention.fused_attn = not by_hand
            engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            answers.append(engine(torch.ones(1, 4096, 64)).tolist())
        return answers

    for answer in fork_ranks.call(function, fp16=MODES[f"{mode} {dtype}"])[0]:
        assert answer == pytest.approx([1.0] * 64, abs=2e-2)


def after_steps(fp16, steps=3):
    """A small ViT after some AdamW steps: the losses, and by name the data types of parameters."""

    def function():
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=4, img_size=32)
        engine, *_ = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.nn.CrossEntropyLoss())
        images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
        losses = []
        for _ in range(steps):
            engine.zero_grad()
            loss = engine.criterion(engine(images), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        masters = {parameter.dtype for parameter in engine.optimizer.param_groups[0]["params"]}
        types = {name: parameter.dtype for name, parameter in engine.model.named_parameters()}
        return losses, types, masters

    return fork_ranks.call(function, fp16=fp16)[0]


def test_apex_levels_are_what_the_table_says():
    """By torch: O0 is fp32, O1 is TORCH, O2 is NAIVE with fp32 norms, O3 is all half."""
    found = {level: after_steps(fp16) for level, fp16 in APEX.items()}
    fp32, torch_, naive = (after_steps(fp16) for fp16 in (None, MODES["TORCH bf16"], MODES["NAIVE bf16"]))
    assert found["O0"] == fp32
    in_fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O1", dtype="fp16")
    assert after_steps(in_fp16) == after_steps(dict(mode=AMP_TYPE.TORCH, dtype="fp16")), "loss scaling included"
    assert found["O1"] == torch_
    assert set(found["O1"][1].values()) == {torch.float32}
    norms = {name for name in found["O2"][1] if "norm" in name}
    assert norms
    for name, dtype in found["O2"][1].items():
        assert dtype == (torch.float32 if name in norms else torch.bfloat16), name
    assert found["O2"][0] == pytest.approx(naive[0], rel=1e-2)
    assert found["O2"][0] != naive[0]
    assert found["O2"][2] == {torch.float32}
    assert set(found["O3"][1].values()) == found["O3"][2] == {torch.bfloat16}
    assert found["O3"][0] == pytest.approx(fp32[0], rel=2e-2)


def test_norms_of_o2_compute_in_fp32():
    """A sum of squares beyond bf16's 8 bits, which a norm in bf16 would round."""

    def function():
        model = torch.nn.Sequential(torch.nn.LayerNorm(256))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        inputs = torch.linspace(1, 2, 256)[None].bfloat16()
        return engine(inputs)[0], torch.nn.functional.layer_norm(inputs[0].float(), (256,)).bfloat16().float()

    ((output, expected),) = fork_ranks.call(function, fp16=APEX["O2"])
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_half_residual_sums_in_half_precision():
    """What each block hands to the next one stays near sums in fp32."""

    def function():
        config = gpc.config
        model = vit.build_vit(config, Layout.of(config, 1))
        outputs = []
        for block in model.blocks.values():
            block.register_forward_hook(lambda block, inputs, output: outputs.append(output.detach()))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        engine.eval()
        random = torch.Generator().manual_seed(0)
        engine(torch.randn(config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE, generator=random))
        return outputs

    full, half = (training.call(function, amp="TORCH", **more)[0] for more in ({}, {"fp16.half_residual": True}))
    for one, other in zip(full, half, strict=True):
        assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(other.float(), one, rtol=0, atol=0.02 * one.abs().max().item())


@pytest.mark.parametrize(
    "name",
    [
        "deit3_small_patch16_224",
        "vit_small_patch16_rope_224",
        "vit_small_patch16_18x2_224",
        "vit_base_patch16_clip_224",
    ],
)
def test_half_residual_sums_in_half_precision_behind_a_layer_scale_or_a_norm(name):
    def function():
        config = training.config_of(training.flags(script=training.CALTECH101, MODEL=name), training.CALTECH101)
        model = build_timm_vit(config)
        model.norm_pre.register_forward_hook(lambda norm, inputs, output: output.float())  # as autocast does on a GPU
        dtypes = []
        for block in model.blocks:
            block.register_forward_hook(lambda block, inputs, output: dtypes.append(output.dtype))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        engine(torch.randn(2, 3, config.IMG_SIZE, config.IMG_SIZE))
        return dtypes

    assert set(training.call(function, amp="TORCH", **{"fp16.half_residual": True})[0]) == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["one process", "1D 2", "2D 4", "2.5D 4", "3D 8"])
def test_the_position_embedding_is_added_in_fp32_under_autocast(layout):
    """As in timm's model. In fp16 its gradient, a sum over the batch times the loss scale, would overflow."""
    processes, values = LAYOUTS.get(layout, (1, {}))

    def function():
        model = vit.build_vit(gpc.config, Layout.of(gpc.config, processes))
        with torch.autocast("cpu", torch.bfloat16):
            return model.patch_embed(torch.ones(gpc.config.BATCH_SIZE, 3, *[gpc.config.IMG_SIZE] * 2)).dtype

    assert training.call(function, processes, **values) == [torch.float32] * processes
