"""The ViT built from Colossal-AI layers is timm's ViT: same weights, same outputs, same gradients, same names."""

import pytest
import torch
import torch.nn.functional as F
from colossal_vit.engine.assembly import initialize
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.sharding import global_norm, split_batch
from colossal_vit.rng import dropout
from colossalai.context import Config
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc

import vit
from vit_layouts import LAYOUTS, SHARDED, build, call, settings
from vit_settings import check_vit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vit_of_any_layout_equals_timms(layout, random_weights):
    """Logits, loss, the gradient of every parameter, and its norm, through the engine, on each rank, with what it holds
    joined; with dropout and stochastic depth, with recomputation, and with the other kind of pooling."""
    kinds = [("token", False), ("token", True), *[("avg", False)] * (layout in SHARDED)]

    def compare():
        config = gpc.config
        images = torch.randn(32, 3, config.IMG_SIZE, config.IMG_SIZE, generator=torch.Generator().manual_seed(1))
        labels = torch.randint(10, (32,), generator=torch.Generator().manual_seed(2))
        found = []
        micro_batches = config.NUM_MICRO_BATCHES if config.parallel.pipeline > 1 else 1
        for config.POOL, config.CHECKPOINT in kinds:
            model, reference, _ = build()
            with dropout.batch_of(torch.tensor([[0, place] for place in range(32)])):  # of the first step
                logits = reference(images)
            F.cross_entropy(logits, labels).backward()
            references = {name: parameter.grad for name, parameter in reference.named_parameters()}
            engine, *_ = initialize(model, torch.optim.SGD(model.parameters()), col_nn.CrossEntropyLoss())
            replicas, replica = gpc.get_world_size(ParallelMode.DATA), gpc.get_local_rank(ParallelMode.DATA)
            own_images, own_labels = images.chunk(replicas)[replica], labels.chunk(replicas)[replica]
            engine.train()
            engine.zero_grad()
            output, _, loss = engine.execute_schedule(iter([(own_images, own_labels)]))
            engine._all_reduce_gradients()
            if output is not None:  # in the last stage
                expected = logits.detach().chunk(replicas)[replica]
                outputs = torch.cat([split_batch(part) for part in expected.chunk(micro_batches)])
                torch.testing.assert_close(output, outputs, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(loss.squeeze(), F.cross_entropy(expected, own_labels), rtol=1e-5, atol=1e-5)
            held = [parameter for parameter in model.parameters() if parameter.grad is not None]
            norm = global_norm([parameter.grad for parameter in held], held)
            expected_norm = torch.stack([gradient.norm() for gradient in references.values()]).norm()
            torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
            for parameter in model.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                full, name = parameter.shard.gather(gradient), parameter.shard.name
                error = ((full - references[name]).abs().max() / references[name].abs().max()).item()
                assert error < 1e-5, f"{name}, {config.POOL}, CHECKPOINT = {config.CHECKPOINT}: relative error {error}"
            found.append(({parameter.shard.name for parameter in model.parameters()}, set(references)))
        return found

    depth = 4 if layout in ("PP 4", "PP 2 interleaved × 2") else 2
    answers = call(compare, layout, DEPTH=depth, DROP_RATE=0.2, DROP_PATH_RATE=0.3)
    for compared in zip(*answers, strict=True):
        assert set.union(*(names for names, _ in compared)) == compared[0][1]


@pytest.mark.parametrize(("layout", "classes"), [*((layout, 10) for layout in SHARDED), ("1D 2", 2050)])
def test_vit_reads_and_writes_timms_names(layout, classes, random_weights):
    """What timm's state dict puts in comes out again, whole and under the same names; of more than 2,048 classes, too,
    which upstream would split."""

    def names_and_errors():
        model, reference, _ = build()
        expected = reference.state_dict()
        full = {p.shard.name: p.shard.gather(p.detach()) for p in model.parameters()}
        return {name: (full[name] - expected[name]).abs().max().item() for name in full}, list(expected)

    answers = call(names_and_errors, layout, NUM_CLASSES=classes)
    differences = {name: error for errors, _ in answers for name, error in errors.items()}
    assert sorted(differences) == sorted(answers[0][1])
    assert set(differences.values()) == {0.0}


def test_full_initialisation_depends_on_the_seed_only():
    config = settings("one process", SEED=3)
    torch.manual_seed(0)
    first = vit.full_vit(config).state_dict()
    torch.manual_seed(1)
    second = vit.full_vit(config).state_dict()
    other = vit.full_vit(settings("one process", SEED=4)).state_dict()
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("layout", "values", "words"),
    [
        ("one process", {"IMG_SIZE": 30}, ("IMG_SIZE = 30", "PATCH_SIZE = 8", "24 or 32")),
        ("one process", {"HIDDEN_SIZE": 30}, ("HIDDEN_SIZE = 30", "NUM_HEADS = 4", "28 or 32")),
        ("1D 4", {"NUM_HEADS": 2}, ("NUM_HEADS = 2", "parallel.tensor.size = 4", "use 4")),
        ("2D 4", {"NUM_HEADS": 1}, ("NUM_HEADS = 1", "2d", "use 2")),
        ("3D 8", {"HIDDEN_SIZE": 30, "NUM_HEADS": 2}, ("HIDDEN_SIZE = 30", "28 or 32")),
        ("3D 8", {"BATCH_SIZE": 30}, ("BATCH_SIZE = 30", "3d", "28 or 32")),
        ("PP 2 × 2D 4", {"NUM_MICRO_BATCHES": 32}, ("micro-batch", "2 parts", "2d")),
        ("PP 2", {"DEPTH": 1}, ("parallel.pipeline = 2", "DEPTH = 1")),
        ("one process", {"SEQ_LENGTH": 16}, ("SEQ_LENGTH = 16", "17")),
        ("PP 2", {"NUM_MICRO_BATCHES": 5}, ("BATCH_SIZE = 32", "NUM_MICRO_BATCHES = 5")),
        ("PP 2", {"TENSOR_SHAPE": (1, 2, 3)}, ("(1, 2, 3)", "(16, 17, 32)")),
    ],
)
def test_vit_that_does_not_fit_its_layout_is_refused(layout, values, words):
    config = Config({**settings(layout), **values})
    with pytest.raises(UserError) as error:
        check_vit(config, Layout.of(config, LAYOUTS[layout][0]))
    assert all(word in str(error.value) for word in words), str(error.value)
