"""The ViT built from Colossal-AI layers is timm's ViT: same weights, same outputs, same gradients, same names."""

import pytest
import torch
import torch.nn.functional as F
from colossal_vit import config as configs
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.sharding import full_parameters, global_norm, split_batch
from colossalai.context import Config
from colossalai.legacy import nn as col_nn

import fork_ranks
import recipes
import vit


def layout(world_size, pipeline=1, mode=None, size=1, **more):
    return world_size, {"pipeline": pipeline, "tensor": {"mode": mode, "size": size, **more}}


LAYOUTS = {
    "one process": layout(1),
    "PP 2": layout(2, 2),
    "1D 2": layout(2, 1, "1d", 2),
    "1D 4": layout(4, 1, "1d", 4),
    "2D 4": layout(4, 1, "2d", 4),
    "2.5D 4": layout(4, 1, "2.5d", 4, depth=1),
    "2.5D 8": layout(8, 1, "2.5d", 8, depth=2),
    "3D 8": layout(8, 1, "3d", 8),
    "PP 2 × 1D 2": layout(4, 2, "1d", 2),
    "PP 2 × 2D 4": layout(8, 2, "2d", 4),
}
MODEL = {
    **recipes.MODEL,
    "MLP_RATIO": 4,
    "NUM_CLASSES": 10,
    "DROP_RATE": 0.0,
    "DROP_PATH_RATE": 0.0,
    "NUM_MICRO_BATCHES": 2,
}


def build():
    from colossalai.legacy.core import global_context as gpc

    layout = Layout.of(gpc.config, torch.distributed.get_world_size())
    return vit.build_vit(gpc.config, layout), vit.full_vit(gpc.config), gpc.config


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "PP" not in name])
def test_equals_timm(layout, pool, random_weights):
    """Logits, loss, the gradient of every parameter, and its norm; on each rank, with what it holds joined."""
    world_size, parallel = LAYOUTS[layout]

    def compare():
        model, reference, config = build()
        images = torch.randn(8, 3, config.IMG_SIZE, config.IMG_SIZE, generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
        output, expected = model(images), reference(images)
        torch.testing.assert_close(output, split_batch(expected), rtol=1e-5, atol=1e-5)
        loss, expected_loss = col_nn.CrossEntropyLoss()(output, labels), F.cross_entropy(expected, labels)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        loss.backward()
        expected_loss.backward()
        references = dict(reference.named_parameters())
        with_grad = [p for p in model.parameters() if p.grad is not None]
        norm = global_norm([p.grad for p in with_grad], with_grad)
        expected_norm = torch.stack([p.grad.norm() for p in references.values()]).norm()
        torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            full, same = parameter.shard.gather(gradient), references.pop(parameter.shard.name).grad
            torch.testing.assert_close(
                full, same, rtol=1e-5, atol=1e-5, msg=lambda m, name=parameter.shard.name: f"{name}: {m}"
            )
        assert not references, f"parameters that our model lacks: {list(references)}"

    fork_ranks.call(compare, world_size, parallel=parallel, **MODEL, POOL=pool)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_timm_names_in_and_out(layout, random_weights):
    """What timm's state dict puts in comes out again, whole and under the same names."""
    world_size, parallel = LAYOUTS[layout]

    def names_and_errors():
        model, reference, _ = build()
        full, expected = full_parameters(model), reference.state_dict()
        return {name: (full[name] - expected[name]).abs().max().item() for name in full}, list(expected)

    answers = fork_ranks.call(names_and_errors, world_size, parallel=parallel, **MODEL)
    differences = {name: error for errors, _ in answers for name, error in errors.items()}
    assert sorted(differences) == sorted(answers[0][1])
    assert set(differences.values()) == {0.0}


def test_full_initialisation_depends_on_the_seed_only():
    config = Config(configs.complete({**MODEL, "SEED": 3}, "train_hybrid"))
    torch.manual_seed(0)
    first = vit.full_vit(config).state_dict()
    torch.manual_seed(1)
    second = vit.full_vit(config).state_dict()
    other = vit.full_vit(Config(configs.complete({**MODEL, "SEED": 4}, "train_hybrid"))).state_dict()
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("values", "world_size", "words"),
    [
        ({"IMG_SIZE": 30}, 1, ("IMG_SIZE = 30", "PATCH_SIZE = 8", "24 or 32")),
        ({"HIDDEN_SIZE": 30}, 1, ("HIDDEN_SIZE = 30", "NUM_HEADS = 4", "28 or 32")),
        ({"NUM_HEADS": 2, "parallel": LAYOUTS["1D 4"][1]}, 4, ("NUM_HEADS = 2", "parallel.tensor.size = 4", "use 4")),
        ({"NUM_HEADS": 1, "parallel": LAYOUTS["2D 4"][1]}, 4, ("NUM_HEADS = 1", "2d", "use 2")),
        ({"HIDDEN_SIZE": 30, "NUM_HEADS": 2, "parallel": LAYOUTS["3D 8"][1]}, 8, ("HIDDEN_SIZE = 30", "28 or 32")),
        ({"BATCH_SIZE": 30, "parallel": LAYOUTS["3D 8"][1]}, 8, ("BATCH_SIZE = 30", "3d", "28 or 32")),
        ({"NUM_MICRO_BATCHES": 32, "parallel": LAYOUTS["PP 2 × 2D 4"][1]}, 8, ("micro-batch", "2 parts", "2d")),
        ({"DEPTH": 1, "parallel": LAYOUTS["PP 2"][1]}, 2, ("parallel.pipeline = 2", "DEPTH = 1")),
        ({"SEQ_LENGTH": 16}, 1, ("SEQ_LENGTH = 16", "17")),
        ({"NUM_MICRO_BATCHES": 5, "parallel": LAYOUTS["PP 2"][1]}, 2, ("BATCH_SIZE = 32", "NUM_MICRO_BATCHES = 5")),
        ({"TENSOR_SHAPE": (1, 2, 3), "parallel": LAYOUTS["PP 2"][1]}, 2, ("(1, 2, 3)", "(16, 17, 32)")),
    ],
)
def test_refuses_a_model_that_does_not_fit(values, world_size, words):
    config = Config(configs.complete({"parallel": LAYOUTS["one process"][1], **MODEL, **values}, "train_hybrid"))
    with pytest.raises(UserError) as error:
        vit.check_vit(config, Layout.of(config, world_size))
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- Random masks ----

DROPPED = {**MODEL, "DROP_RATE": 0.2, "DROP_PATH_RATE": 0.3}


def logits_in_training():
    """Logits of three forward passes with dropout and drop path, and a mask of the activations that are split."""
    model, _, _ = build()
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    outputs = [model(images).detach() for _ in range(3)]
    mask = vit._dropout_of_parts(0.5)(torch.ones(64))
    assert not torch.equal(outputs[0], outputs[1]), "each pass has masks of its own"
    return outputs, mask


@pytest.mark.parametrize(("layout", "same"), [("1D 2", [{0, 1}]), ("2.5D 8", [{0, 4}, {1, 5}, {2, 6}, {3, 7}])])
def test_ranks_with_the_same_activations_drop_the_same(layout, same, random_weights):
    """In 1D all ranks have the whole logits; in 2.5D those of the second depth are copies of the first."""
    world_size, parallel = LAYOUTS[layout]
    answers = fork_ranks.call(logits_in_training, world_size, parallel=parallel, **DROPPED)
    for first, second in same:
        for here, there in zip(answers[first][0], answers[second][0], strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "different"), [("1D 4", 4), ("2D 4", 4), ("2.5D 8", 4), ("3D 8", 8)])
def test_ranks_with_different_activations_drop_others(layout, different, random_weights):
    world_size, parallel = LAYOUTS[layout]
    answers = fork_ranks.call(logits_in_training, world_size, parallel=parallel, **DROPPED)
    assert len({mask.numpy().tobytes() for _, mask in answers}) == different


@pytest.mark.parametrize("layout", ["one process", "1D 2", "2D 4", "2.5D 4", "3D 8"])
def test_drop_path_leaves_out_whole_images(layout):
    """One choice for the whole batch, of which each rank takes its images': zero, or scaled up."""
    world_size, parallel = LAYOUTS[layout]

    def function():
        from colossalai.legacy.core import global_context as gpc

        parts = Layout.of(gpc.config, world_size).batch_parts
        dropped = vit.DropPath(0.25, parts).train()(torch.ones(64 // parts, 3, 2))
        state = torch.get_rng_state()
        chosen = torch.rand(64)  # the stream that all tensor-parallel ranks share has moved by one batch on each
        torch.set_rng_state(state)
        return dropped, chosen, vit.DropPath(0.25, parts).eval()(torch.ones(1, 1, 1)).item()

    answers = fork_ranks.call(function, world_size, parallel=parallel)
    for dropped, chosen, in_evaluation in answers:
        per_image = dropped.flatten(1)
        assert all(row.unique().numel() == 1 for row in per_image), "an image as a whole"
        assert all(value == 0.0 or value == pytest.approx(1 / 0.75) for value in per_image[:, 0].tolist())
        assert torch.equal(chosen, answers[0][1])
        assert in_evaluation == 1.0
    kept = torch.cat([dropped[:, 0, 0] > 0 for dropped, _, _ in answers]).float().mean().item()
    assert 0.5 < kept < 0.95


@pytest.mark.parametrize("layout", ["one process", "1D 2", "2D 4", "3D 8"])
def test_recomputation_drops_the_same(layout, random_weights):
    """With dropout and drop path, gradients are the same whether activations are kept or computed again."""
    world_size, parallel = LAYOUTS[layout]

    def gradients():
        model, _, _ = build()
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
        for _ in range(2):  # the second pass shows that the streams go on as if nothing had been recomputed
            model.zero_grad()
            col_nn.CrossEntropyLoss()(model(images), labels).backward()
        return [p.grad for p in model.parameters()]

    kept = fork_ranks.call(gradients, world_size, parallel=parallel, **DROPPED)
    recomputed = fork_ranks.call(gradients, world_size, parallel=parallel, **{**DROPPED, "CHECKPOINT": True})
    for here, there in zip(kept, recomputed, strict=True):
        for expected, gradient in zip(here, there, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
