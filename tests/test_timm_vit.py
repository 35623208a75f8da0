"""What the config keys make of timm's models."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from colossal_vit import config as configs
from colossal_vit.engine import initialize
from colossal_vit.errors import UserError, reason
from colossal_vit.model import timm_vit
from colossal_vit.model.timm_vit import build_timm_vit, check_timm_vit, describe_timm_vit
from colossal_vit.parallel.layout import Layout
from colossal_vit.rng.dropout import DropPath, batch_of
from colossalai.context import Config

import fork_ranks
import schemas
import training

TINY = dict(SEED=1, NUM_CLASSES=5, IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=16, DEPTH=2, NUM_HEADS=2, DROP_RATE=0.0)


def config_of(model, **values):
    return Config(configs.complete({**TINY, "MODEL": model, **values}, schemas.schema(schemas.IMAGENET)))


def build(model="vit_tiny_patch16_224", **values):
    return build_timm_vit(config_of(model, **values))


@pytest.mark.parametrize("size", [32, 37])
def test_patch_embedding_is_timms_convolution(size):
    projection = build(IMG_SIZE=size).patch_embed.proj
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    convolved = F.conv2d(images, projection.weight, projection.bias, stride=8)
    torch.testing.assert_close(projection(images), convolved)


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "vit_base_patch16_gap_224", "deit3_small_patch16_224"])
def test_fixed_positions_are_sines_and_cosines_of_row_and_column(model):
    vit, learned = build(model, POSITIONS="sincos2d"), build(model)
    assert "pos_embed" not in dict(vit.named_parameters())
    assert vit.state_dict().keys() == learned.state_dict().keys()
    assert vit.pos_embed.shape == learned.pos_embed.shape
    *other, grid = vit.pos_embed[0].split([vit.pos_embed.shape[1] - 16, 16])
    assert not any(tokens.any() for tokens in other)
    for place, position in enumerate(grid):
        row, column = divmod(place, 4)
        waves = [10_000 ** (-k / 4) for k in range(4)]
        expected = [function(at * wave) for function in (math.sin, math.cos) for at in (row, column) for wave in waves]
        torch.testing.assert_close(position, torch.tensor(expected), atol=1e-6, rtol=0)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    vit.eval(), learned.eval()
    learned.pos_embed.data.copy_(vit.pos_embed)
    assert torch.equal(vit(images), learned(images))


def test_a_model_without_positions_keeps_none():
    config = config_of("vit_small_patch16_rope_224", POSITIONS="sincos2d")
    with pytest.raises(UserError, match="has no position embedding that POSITIONS could replace"):
        check_timm_vit(config, Layout(1, 1, 1, None, 1))


def test_a_model_of_other_sizes_is_not_called_by_timms_name_alone():
    """Parameters by hand: a linear layer of 3 inputs and 2 outputs has 8."""
    model = torch.nn.Linear(3, 2)
    own = Config({"MODEL": "vit_base_patch16_224", "IMG_SIZE": 224, "DROP_RATE": 0.1})
    assert describe_timm_vit(own, model) == "vit_base_patch16_224: 8 parameters"
    other = Config({**own, "HIDDEN_SIZE": 64, "DEPTH": 4, "POOL": "avg"})
    assert (
        describe_timm_vit(other, model) == "vit_base_patch16_224 with HIDDEN_SIZE 64, DEPTH 4, POOL avg: 8 parameters"
    )


def test_a_model_that_timm_cannot_build_is_refused():
    config = config_of("vit_base_mci_224", IMG_SIZE=1, HIDDEN_SIZE=768)
    too_small = r"Kernel size can't be greater|Calculated output size per channel: \[0, 0\]"  # of torch 2.14 | 2.10
    with pytest.raises(UserError, match=rf"cannot be built with these sizes: .*({too_small})"):
        check_timm_vit(config, Layout(1, 1, 1, None, 1))


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        ("vit_relpos_small_patch16_224", {}, "timm's model has no pos_drop_rate, which DROP_RATE sets: take another m"),
        ("vit_srelpos_small_patch16_224", {"DROP_RATE": 0.1}, "timm's model has no pos_drop_rate, which DROP_RATE"),
        (
            "vit_medium_patch16_reg4_256",
            {},
            "no Vision Transformer of timm; did you mean vit_medium_patch16_reg4_gap_256?",
        ),
        ("maxwell", {}, "no Vision Transformer of timm: see timm.list_models(['vit_*', 'deit3_*'])"),
        ("vit_small_r26_s32_224", {"PATCH_SIZE": 3}, "IMG_SIZE = 32 is not a multiple of the patch size of MODEL = "),
    ],
)
def test_why_a_model_cannot_be_built_is_said_in_words(model, values, words):
    with pytest.raises(UserError, match=re.escape(words)):
        check_timm_vit(config_of(model, **values), Layout(1, 1, 1, None, 1))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError(), "AssertionError"),
        (KeyError("head"), "KeyError: 'head'"),
        (MemoryError(), "out of memory"),
        (ValueError("too long\nfor a line"), "too long"),
    ],
)
def test_an_error_without_words_is_named(error, words):
    assert reason(error) == words


@pytest.mark.parametrize(
    ("model", "size", "patch_size", "patch", "nearest"),
    [
        ("vit_tiny_patch16_224", 31, 32, 32, "32"),
        ("vit_small_patch16_rope_224", 8, 9, 9, "9"),
        ("vit_tiny_patch16_224", 31, 16, 16, "16 or 32"),
        ("deit3_small_patch16_224", 223, None, 16, "208 or 224"),
        ("vit_base_patch16_224", 250, None, 16, "240 or 256"),
        ("vit_small_patch14_reg4_dinov2", 32, None, 14, "28 or 42"),
        ("vit_so400m_patch14_siglip_384", 384, None, 14, "378 or 392"),  # its own size
        ("vit_base_mci_224", 47, None, 16, "32 or 48"),  # timm computes that a patch has 47 // 2 = 23 pixels
        ("vit_tiny_r_s16_p8_224", 250, None, 32, "224 or 256"),
        ("vit_tiny_r_s16_p8_224", 244, 3, 12, "240 or 252"),
        ("vit_base_r50_s16_224", 225, 2, 32, "224 or 256"),
    ],
)
def test_images_that_are_not_whole_patches_are_refused(model, size, patch_size, patch, nearest):
    layout, config = Layout(1, 1, 1, None, 1), config_of(model, PATCH_SIZE=patch_size, IMG_SIZE=size, HIDDEN_SIZE=768)
    if patch_size is None:
        del config["PATCH_SIZE"]
    with pytest.raises(UserError) as error:
        check_timm_vit(config, layout)
    assert str(error.value) == (
        f"IMG_SIZE = {size} is not a multiple of the patch size of MODEL = '{model}', {patch} pixels: use {nearest}"
    )
    for multiple in nearest.split(" or "):
        check_timm_vit(Config(config | {"IMG_SIZE": int(multiple)}), layout)


@pytest.mark.parametrize(
    ("model", "values", "seen"),
    [
        ("vit_tiny_patch16_224", {"IMG_SIZE": 34}, {*range(32)}),
        ("vit_tiny_patch16_224", {"IMG_SIZE": 40}, None),
        ("vit_base_mci_224", {"IMG_SIZE": 33, "PATCH_SIZE": 1, "HIDDEN_SIZE": 768}, {*range(32)}),
        ("vit_base_mci_224", {"IMG_SIZE": 48, "PATCH_SIZE": 1, "HIDDEN_SIZE": 768}, None),
        ("vit_small_r26_s32_224", {"IMG_SIZE": 65, "PATCH_SIZE": 1}, None),
        ("vit_small_resnet50d_s16_224", {"IMG_SIZE": 41, "PATCH_SIZE": 1}, None),
        ("vit_tiny_r_s16_p8_224", {"IMG_SIZE": 63}, None),
    ],
)
def test_images_of_an_accepted_size_are_seen_whole(model, values, seen):
    """Convolutional stems that pad their input do so whatever its size; others are refused, see above."""
    config = config_of(model, **values)
    images = torch.randn(1, 3, *[config.IMG_SIZE] * 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    build_timm_vit(config).eval().patch_embed(images).square().sum().backward()
    rows, columns = (images.grad.abs().sum((0, 1, axis)).nonzero().flatten().tolist() for axis in (3, 2))
    assert set(rows) == set(columns) == (seen or {*range(config.IMG_SIZE)})
    if seen is None:
        check_timm_vit(config, Layout(1, 1, 1, None, 1))
    else:
        with pytest.raises(UserError, match="is not a multiple of the patch size of MODEL"):
            check_timm_vit(config, Layout(1, 1, 1, None, 1))


@pytest.mark.parametrize("script", training.CONFIGS)
def test_every_script_refuses_images_that_are_not_whole_patches(script, tmp_path):
    line = training.refused(tmp_path, script=script, IMG_SIZE=31, PATCH_SIZE=16)
    assert "IMG_SIZE = 31 is not a multiple of " in line
    assert line.endswith("use 16 or 32")


@pytest.mark.parametrize(
    ("model", "paths"),
    [("vit_tiny_patch16_224", 2), ("vit_small_patch16_18x2_224", 4)],
)
@pytest.mark.parametrize(("uniform", "expected"), [(False, [0, 0.1, 0.2]), (True, [0.2, 0.2, 0.2])])
def test_drop_path_grows_or_is_the_same_in_all_blocks(model, paths, uniform, expected):
    vit = build(model, DEPTH=3, DROP_PATH_RATE=0.2, DROP_PATH_UNIFORM=uniform)
    for block, rate in zip(vit.blocks, expected, strict=True):
        rates = [module.rate for module in block.modules() if isinstance(module, DropPath)]
        assert rates == pytest.approx([rate] * paths)


def logits_and_gradients(vit, images=3):
    """With weights, and in training dropout, that are the same for each model."""
    random = torch.Generator().manual_seed(1)
    for parameter in vit.parameters():
        parameter.data.normal_(std=0.3, generator=random)
    samples = torch.tensor([[5, place] for place in range(images)])
    with batch_of(samples if vit.training else None):
        logits = vit.double()(torch.randn(images, 3, 32, 32, generator=random).double())
    logits.square().sum().backward()
    return [logits, *(parameter.grad for parameter in vit.parameters())]


def with_timms_blocks(monkeypatch, model, **values):
    with monkeypatch.context() as patch:
        patch.setattr(timm_vit, "skip_unused_tokens", lambda model: None)
        return build(model, **values)


@pytest.mark.parametrize(
    ("model", "values", "skips"),
    [
        ("vit_tiny_patch16_224", {"DROP_PATH_RATE": 0.5}, True),
        ("vit_small_patch14_reg4_dinov2", {}, True),
        ("deit3_small_patch16_224", {"LAYER_SCALE": 0.3}, True),
        ("vit_base_patch16_clip_224", {}, True),
        ("vit_base_patch16_clip_quickgelu_224", {}, True),
        ("vit_giant_patch14_dinov2", {"HIDDEN_SIZE": 48, "DROP_RATE": 0.1}, True),
        ("vit_tiny_patch16_224", {"POOL": "avg"}, False),
        ("vit_small_patch16_18x2_224", {}, False),
    ],
)
def test_the_last_block_computes_what_the_head_sees(model, values, skips, monkeypatch):
    """Logits and gradients are those of timm's own blocks, and tokens that nobody reads are not computed."""
    ours, timms = build(model, **values).eval(), with_timms_blocks(monkeypatch, model, **values).eval()
    assert ours.state_dict().keys() == timms.state_dict().keys()
    shapes = []
    for vit in (ours, timms):
        vit.blocks[-1].register_forward_hook(lambda block, inputs, output: shapes.append(output.shape[1]))
    for one, other in zip(logits_and_gradients(ours), logits_and_gradients(timms), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert shapes[0] == (1 if skips else shapes[1])
    assert shapes[1] > 1


def test_layer_scale_starts_as_it_is_told():
    assert (build("deit3_small_patch16_224", LAYER_SCALE=1e-4).blocks[0].ls1.gamma == 1e-4).all()
    assert (build("deit3_small_patch16_224").blocks[0].ls1.gamma == 1e-6).all(), "timm's"
    assert (build(LAYER_SCALE=0.1).blocks[1].ls2.gamma == 0.1).all()


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (torch.nn.Dropout(0.1), "'0' is torch's Dropout, which drops other elements in each layout"),
        (torch.nn.BatchNorm2d(3), "'0' is a BatchNorm2d, which normalises over a rank's micro-batch"),
    ],
)
def test_layers_that_compute_something_else_in_each_layout_are_refused(layer, why):
    def refused():
        with pytest.raises(UserError) as error:
            initialize(torch.nn.Sequential(layer), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        return str(error.value)

    assert why in fork_ranks.call(refused)[0]
