"""Optimizer state split over data-parallel ranks changes nothing of what is learned."""

import functools
from types import SimpleNamespace

import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.engine import initialize, reduction, zero
from colossalai.legacy.core import global_context as gpc
from safetensors.torch import load_file

import training
from layouts import LAYOUTS, MODEL, OPTIMIZERS, PIPELINE, tensor
from test_dry_run import planned
from test_layouts import assert_same_curve

pytestmark = pytest.mark.usefixtures("few_test_images", "random_weights")
SPLIT = {"zero.stage": 1}
HALF = {"BATCH_SIZE": 16}
SPLITS = {  # what the layouts of the contract become with two replicas
    "DP 2": (2, HALF),
    "DP 4": (4, {"BATCH_SIZE": 8}),
    "DP 2 × PP 2": LAYOUTS["DP 2 × PP 2"],
    "DP 2 × PP 2 interleaved × 2": (4, {**PIPELINE, **HALF, "model.num_chunks": 2}),
    "DP 2 × 1D 2": (4, {**HALF, **tensor("1d", 2)}),
    "DP 2 × 2D 4": LAYOUTS["DP 2 × 2D 4"],
    "DP 2 × 2.5D 4": (8, {**HALF, **tensor("2.5d", 4, depth=1)}),
    "DP 2 × PP 2 × 1D 2": LAYOUTS["DP 2 × PP 2 × 1D 2"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The curve of one process, by optimizer and number of blocks."""

    @functools.cache
    def curve(optimizer, depth):
        values = {"DEPTH": depth, **training.RANDOM, **OPTIMIZERS[optimizer]}
        return training.train(tmp_path_factory.mktemp("reference"), **values).steps

    return curve


def small_buckets(monkeypatch, size):
    """Make many buckets of even a small model: some wait until others have arrived, some weights are sent alone."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", size)
    monkeypatch.setattr(zero, "LARGE_BYTES", size // 2)
    for module in (reduction, zero):
        monkeypatch.setattr(module, "IN_FLIGHT_BYTES", 2 * size)


# Eight ranks take long, and hold what four hold in other numbers: LAMB, which has accumulation and stage 2, is enough.
CURVES = [(layout, name) for layout, (ranks, _) in SPLITS.items() for name in OPTIMIZERS if ranks < 8 or name == "lamb"]


@pytest.mark.parametrize(("layout", "optimizer"), CURVES)
def test_every_layout_with_split_state_has_the_curve_of_one_process(
    layout, optimizer, reference, tmp_path, monkeypatch
):
    """Also with accumulation and stage 2, and with layers that wait for their weights in the next forward pass.

    With SGD by the collectives that GPUs and large groups use.
    """
    small_buckets(monkeypatch, 2**13)
    if optimizer == "sgd":
        monkeypatch.setattr(reduction, "DIRECT_SIZE", 0)
    world_size, values = SPLITS[layout]
    values = {
        "DEPTH": 4 if "interleaved" in layout else 2,
        **training.RANDOM,
        **values,
        **OPTIMIZERS[optimizer],
        **SPLIT,
    }
    if optimizer == "lamb":
        values |= {"zero.stage": 2, "gradient_accumulation": 2, "BATCH_SIZE": values["BATCH_SIZE"] // 2}
    num_steps = 20 if optimizer == "adamw" and values["DEPTH"] == 4 else 6 if world_size < 8 else 3
    expected = reference(optimizer, values["DEPTH"])
    assert min(r["grad_norm"] for r in expected) > MODEL["clip_grad_norm"], "clipping must change every step"
    run = training.train(tmp_path, world_size, steps=num_steps, **values)
    assert_same_curve(run.steps, expected[:num_steps])


@pytest.mark.parametrize(
    ("layout", "average"),
    [("DP 2", {}), ("DP 2 × PP 2", {}), ("DP 2 × PP 2 interleaved × 2", {"ema.decay": 0.5})],
)
def test_compiled_blocks_have_their_weights_before_their_forward_pass(layout, average, tmp_path, monkeypatch):
    """Also before the first one of an evaluation, in every schedule; test_compile.py and test_pairs.py make kernels."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    small_buckets(monkeypatch, 2**13)
    world_size, values = SPLITS[layout]
    common = {"DEPTH": 4 if "interleaved" in layout else 2, **training.RANDOM, **average, **OPTIMIZERS["sgd"]}
    expected = training.train(tmp_path / "one", steps=4, **common)
    run = training.train(tmp_path / "split", world_size, steps=4, **common, **values, **SPLIT, COMPILE=True)
    assert_same_curve(run.steps, expected.steps)
    for key in ["eval_loss"] + ["ema_loss"] * bool(average):
        assert run.evaluations[-1][key] == pytest.approx(expected.evaluations[-1][key], rel=1e-5)


PRECISIONS = {
    "fp32, AdamW": (None, "adamw", {}),
    "fp32, LAMB, stage 2, average": (None, "lamb", {"zero.stage": 2, "ema.decay": 0.9}),
    "TORCH in bf16, SGD": ("TORCH", "sgd", {}),
    "NAIVE in fp16, LAMB, average": ("NAIVE", "lamb", {"fp16.dtype": "fp16", "ema.decay": 0.9}),
    "NAIVE in bf16, AdamW, stage 2": ("NAIVE", "adamw", {"zero.stage": 2}),
    "fp32, SGD, split weights, average": (None, "sgd", {"zero.stage": 3, "ema.decay": 0.9}),
    "TORCH in bf16, SGD, split weights": ("TORCH", "sgd", {"zero.stage": 3}),
    "NAIVE in fp16, SGD, split weights, average": (
        "NAIVE",
        "sgd",
        {"fp16.dtype": "fp16", "zero.stage": 3, "ema.decay": 0.9},
    ),
    "NAIVE in bf16, SGD, split weights": ("NAIVE", "sgd", {"zero.stage": 3}),
    "APEX O2 in fp16, AdamW": ("APEX", "adamw", {"fp16.dtype": "fp16", "fp16.opt_level": "O2"}),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_replicas_make_the_bits_of_ddp(precision, tmp_path):
    """A sum of two has no order. Nor is there a norm over all in it, whose sum has: nothing is clipped.

    A fused optimizer's kernel rounds the rest of a tensor that fills no vector otherwise than the vectors before. Split
    weights have another rest: of 10 classes' biases, 5 on each rank. These may differ by a rounding.
    """
    amp, optimizer, more = PRECISIONS[precision]
    values = {"DEPTH": 1, "IMG_SIZE": 16, "clip_grad_norm": 0.0, **training.RANDOM, **HALF, **OPTIMIZERS[optimizer]}
    values |= {**SPLIT, **more}
    split = training.train(tmp_path / "split", 2, steps=4, amp=amp, **values)
    del values["zero.stage"]
    whole = training.train(tmp_path / "whole", 2, steps=4, amp=amp, **values)
    for name in [storage.MODEL, storage.OPTIMIZER] + [storage.EMA] * ("ema.decay" in more):
        found, expected = (load_file(run.output / "checkpoints/step-00000004" / name) for run in (split, whole))
        assert found.keys() == expected.keys()
        differ = {key for key in expected if not torch.equal(found[key], expected[key])}
        rest = {key for key in differ if more.get("zero.stage") == 3 and expected[key].numel() == 10}
        assert differ == rest
        for key in rest:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-8)
    for here, there in zip(split.records, whole.records, strict=True):
        assert {**here, "grad_norm": 0} == {**there, "grad_norm": 0}, "the norm's sum is in another order"


class Borrower(torch.nn.Module):
    """Uses a layer's weight without calling the layer, as timm's EvaAttention does."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x @ self.layer.weight


class Borrowers(Borrower):
    """In and outside of blocks, and in blocks in lists."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Borrower(), torch.nn.ModuleList([Borrower()])])

    def forward(self, x):
        first, (second,) = self.blocks
        return second(first(super().forward(x)))


def test_weights_used_without_calling_their_layer_are_gathered():
    def curve(settings):
        torch.manual_seed(0)
        gpc.config.zero, model = settings, Borrowers()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.Identity())
        norms = []
        for _ in range(3):
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
            norms.append(engine.grad_norm)
        return norms

    def function():
        settings, gpc.config.COMPILE = gpc.config.zero, False
        return curve(settings), curve({})

    for split, whole in training.call(function, 2, **HALF, **SPLIT):
        assert split == pytest.approx(whole, rel=1e-6)


def test_rank_that_owns_nothing_takes_part_in_all_collectives(tmp_path, monkeypatch):
    """Ranks that own nothing take part in all collectives."""
    monkeypatch.setattr(zero, "assign_owners", lambda parameters, ranks: dict.fromkeys(parameters, 1))
    learned = {"DEPTH": 1, **training.RANDOM, **OPTIMIZERS["lamb"]}
    expected = training.train(tmp_path / "one", steps=3, **learned)
    values = {**learned, **SPLITS["DP 2 × 1D 2"][1], **SPLIT, "ema.decay": 0.9}
    run = training.train(tmp_path / "split", 4, steps=3, **values)
    assert_same_curve(run.steps, expected.steps)


def wrong_owner(monkeypatch):
    """The second replica updates what the first one owns, and sends what it has not updated."""
    keep = zero.Zero.__init__

    def init(self, parameters, optimizer, group, stage):
        keep(self, parameters, optimizer, group, stage)
        for owner in self.owners:
            self.owners[owner] = 1 - self.owners[owner]

    monkeypatch.setattr(zero.Zero, "__init__", init)


def unsent_weights(monkeypatch):
    """The second owner keeps its new weights to itself."""
    send, unsent = zero.WeightBroadcast, SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(zero, "WeightBroadcast", lambda bucket: send(bucket) if bucket.owner == 0 else unsent)


@pytest.mark.parametrize("fault", [wrong_owner, unsent_weights])
def test_wrong_owner_or_unsent_weights_change_the_curve(fault, reference, tmp_path, monkeypatch):
    fault(monkeypatch)
    run = training.train(tmp_path, 2, steps=3, DEPTH=2, **training.RANDOM, **HALF, **SPLIT)
    with pytest.raises(AssertionError):
        assert_same_curve(run.steps, reference("adamw", 2)[:3])


@pytest.mark.parametrize(("ranks", "stage", "expected"), [(2, 1, 10), (8, 1, 5.5), (2, 2, 10), (8, 2, 4)])
def test_memory_of_a_rank_with_split_state_is_as_worked_out_by_hand(ranks, stage, expected, monkeypatch):
    """Bytes a parameter at the peak of a step of two micro-batches in NAIVE with LAMB, on d ranks.

    In the backward passes of stage 1, half-precision weights and gradients and an owner's fp32 state, 4 + 12/d; in the
    update, an owner has fp32 gradients instead of all in half precision, 2 + 16/d. test_dry_run.py holds dry runs
    against real ranks.
    """
    small_buckets(monkeypatch, 2**18)
    values = dict(HIDDEN_SIZE=384, NUM_HEADS=6, DEPTH=24, PATCH_SIZE=16, BATCH_SIZE=1, NUM_MICRO_BATCHES=1)
    values |= {**OPTIMIZERS["lamb"], "zero.stage": stage, "gradient_accumulation": 2, "fp16.initial_scale": 1.0}
    plan = planned(training.flags("NAIVE", **values), ranks)[0]
    assert plan.memory["peak"] / plan.parameters == pytest.approx(expected, rel=0.05)


def test_owners_are_balanced():
    parameters = [torch.empty(n) for n in (6, 1, 5, 3, 3, 2)]
    owners = zero.assign_owners(parameters, 2)
    assert [owners[p] for p in parameters] == [0, 0, 1, 1, 0, 1]
    assert zero.assign_owners(parameters, 10).keys() == set(parameters)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"zero.stage": 4}, "zero.stage = 4, but it must be one of 1, 2, 3"),
        ({**SPLIT, "torch_ddp.bucket_cap_mb": 5}, "torch_ddp has no effect with zero"),
    ],
)
def test_mistakes_are_refused_by_name(values, line, tmp_path):
    assert line in training.refused(tmp_path, 2, **values, **HALF)
