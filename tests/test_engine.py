"""What all layouts share: a step, its loss, an order, the first weights, as in plain torch or worked out by hand."""

import inspect
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from colossal_vit import config as configs
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine import build_criterion, initialize
from colossal_vit.model.timm_vit import build_timm_vit
from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from timm.loss import BinaryCrossEntropy
from timm.models.vision_transformer import VisionTransformer

import fork_ranks
import training
import vit

# ---- A step ----

LOSSES = [[1.0, 2.0], [6.0, 31.0]]  # of two images each: of a rank, by micro-batch


@pytest.mark.parametrize("read_late", [False, True])
def test_loss_and_gradient_are_the_mean_over_the_global_batch(read_late):
    """Two ranks and two micro-batches; with one weight of 1 an image's loss is its value, and so is its gradient."""

    def function():
        rank = gpc.get_local_rank(ParallelMode.DATA)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), torch.nn.L1Loss())
        type(engine).reads_late = read_late
        engine.train()
        for value in LOSSES[rank]:
            images = torch.tensor([[value - 1], [value + 1]])
            engine.zero_grad()
            engine.execute_schedule(iter([(images, torch.zeros(2, 1))]))
            engine.step()
        engine.wait_for_step()
        return engine.loss, engine.grad_norm, model.weight.item()

    mean = np.mean(LOSSES)
    assert mean == 10
    for found in fork_ranks.call(function, 2, gradient_accumulation=2):
        assert found == pytest.approx((mean, mean, 1 - 0.5 * mean))


def test_loss_scalers_begin_as_the_ones_they_stand_for():
    """AMP_TYPE.TORCH's as torch's, AMP_TYPE.NAIVE's as Colossal-AI's."""

    def scale(mode):
        def function():
            model = torch.nn.Linear(2, 2)
            return vars(initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))[0].optimizer.scale)

        return fork_ranks.call(function, fp16=dict(mode=mode, dtype="fp16"))[0]

    theirs = torch.amp.GradScaler("cpu")
    found = scale(AMP_TYPE.TORCH)
    assert found["value"] == theirs.get_scale()
    for key in ("growth_factor", "backoff_factor", "growth_interval"):
        assert found[key] == getattr(theirs, f"get_{key}")(), key
    assert found["hysteresis"] == 1
    found, usual = scale(AMP_TYPE.NAIVE), inspect.signature(DynamicGradScaler).parameters
    assert found["value"] == usual["initial_scale"].default
    for key in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis"):
        assert found[key] == usual[key].default, key


# ---- Losses ----


def criterion_of(**values):
    return build_criterion(Config(configs.complete(dict(LEARNING_RATE=0.1, WEIGHT_DECAY=0.0, **values))))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_cross_entropy_smooths_the_labels(smoothing):
    """By its definition: each class has a part of `smoothing`, an image's own the rest, too."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 4, 1, 1, 3, 2])

    def function():
        return criterion_of(LABEL_SMOOTHING=smoothing, NUM_CLASSES=5)(logits, labels).item()

    targets = (1 - smoothing) * np.eye(5)[labels] + smoothing / 5
    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    assert fork_ranks.call(function) == pytest.approx([-(targets * np.log(probabilities)).sum(1).mean()], rel=1e-6)


def test_a_target_at_the_threshold_becomes_0():
    """As in timm: Mixup with equal shares of two images and a threshold of one half asks for neither."""
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.75, 0.0, 0.25, 0.0]])
    criterion = criterion_of(LABEL_SMOOTHING=0.0, NUM_CLASSES=4, bce=dict(threshold=0.5))
    expected = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.5)
    torch.testing.assert_close(criterion(logits, targets), expected(logits, targets))
    by_hand = F.softplus(logits).sum() - logits[1, 0]
    torch.testing.assert_close(criterion(logits, targets), by_hand / 8)


# ---- The order of the images ----


def test_the_order_is_another_for_each_seed_and_epoch():
    """And no epoch of one seed is an epoch of another."""
    orders = {}
    for seed in range(4):
        sampler = GlobalBatchSampler(97, 8, seed=seed, rank=0, num_ranks=1)
        for epoch in range(20):
            order = sampler.order(epoch)
            assert sorted(order.tolist()) == list(range(97))
            orders[seed, epoch] = tuple(order.tolist())
    assert len(set(orders.values())) == len(orders)


def test_a_run_takes_the_order_of_its_seed(tmp_path):
    first, other = (training.train(tmp_path / str(seed), steps=2, DEPTH=1, SEED=seed).steps for seed in (0, 1))
    assert first[0]["loss"] == pytest.approx(other[0]["loss"], rel=1e-6), "the head begins with zeros"
    assert first[0]["grad_norm"] != pytest.approx(other[0]["grad_norm"], rel=1e-3)


# ---- The first weights ----


def test_first_weights_are_those_of_timms_initialisation():
    """That of the paper's JAX code for `vit.py`, timm's usual one for timm's models."""
    config = training.config_of(training.flags(SEED=5))
    torch.manual_seed(5)
    sizes = dict(img_size=config.IMG_SIZE, patch_size=config.PATCH_SIZE, embed_dim=config.HIDDEN_SIZE)
    sizes |= dict(depth=config.DEPTH, num_heads=config.NUM_HEADS, num_classes=config.NUM_CLASSES)
    expected = VisionTransformer(**sizes, weight_init="jax").state_dict()
    found = vit.full_vit(config).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    limit = math.sqrt(6 / (config.HIDDEN_SIZE + 4 * config.HIDDEN_SIZE))  # Glorot's, of an MLP's matrix
    assert found["blocks.0.mlp.fc1.weight"].abs().max() == pytest.approx(limit, rel=0.01)

    name = "vit_tiny_patch16_224"
    config = training.config_of(training.flags(script=training.CALTECH101, MODEL=name, SEED=5), training.CALTECH101)
    torch.manual_seed(5)
    sizes["patch_size"] = config.PATCH_SIZE
    sizes |= dict(img_size=config.IMG_SIZE, embed_dim=config.HIDDEN_SIZE, depth=config.DEPTH)
    sizes |= dict(num_heads=config.NUM_HEADS, num_classes=config.NUM_CLASSES)
    expected, found = timm.create_model(name, **sizes).state_dict(), build_timm_vit(config).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
