"""Weights of other libraries and trainings: their forward passes, their files, their wrappers."""

import argparse
import json
import os

import pytest
import torch
import torch.nn.functional as F
from colossal_vit.checkpoint import weights
from colossal_vit.checkpoint.names import HEAD
from colossal_vit.errors import UserError
from safetensors.torch import load_file, save_file
from torchvision.models import VisionTransformer
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

import fork_ranks
import test_finetune
import training
from layouts import LAYOUTS
from test_finetune import IMAGES, KEEP, LABELS, MODEL, assert_same, build_engine, call, full_weights, start_from

SIZES = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8)
CLOSE = dict(rtol=1e-5, atol=1e-5)
OTHER_CHANNELS = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


def randomized(model):
    """The model, with all its weights random, for an evaluation."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        scale = parameter.ndim == 1 and not name.endswith("bias")  # of norms and LayerScale
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator) + scale
    return model.eval()


def torchvisions_vit():
    sizes = dict(image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=128)
    return randomized(VisionTransformer(**sizes, num_classes=10))


def transformers_vit(kind=ViTForImageClassification):
    return randomized(kind(ViTConfig(**SIZES, intermediate_size=128, num_labels=10)))


def read(path, key=None):
    """The weights at a path, and what is logged of them."""
    said = []
    return weights.read(weights.find(str(path), key), said.append), said


def fitted(path, head="new", names=(), **values):
    """What becomes of weights in a model of those of `MODEL` and `names`, and what is logged of it."""
    shapes, said = {name: list(tensor.shape) for name, tensor in full_weights().items()}, []
    shapes |= dict.fromkeys(names)
    return weights.read_fitted(weights.find(str(path)), head, shapes, {**MODEL, **values}, said.append), said


def refusal(path, *arguments, of=fitted):
    with pytest.raises(UserError) as raised:
        of(path, *arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# Other libraries compute the same
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_torchvisions_weights_have_torchvisions_logits(zipped, tmp_path):
    """Also in a file as torch wrote them before version 1.6, with the names of that time."""
    model, path = torchvisions_vit(), tmp_path / "vit.pth"
    state = model.state_dict()
    if not zipped:
        state = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): x for name, x in state.items()}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with torch.no_grad():
        torch.testing.assert_close(test_finetune.started(path, **KEEP)[1], model(IMAGES), **CLOSE)


def test_torchvisions_weights_have_torchvisions_loss_in_a_pipeline_of_1d(tmp_path):
    model, path = torchvisions_vit(), tmp_path / "vit.pth"
    torch.save({"state_dict": model.state_dict()}, path)

    def loss():
        engine, run = build_engine()
        start_from(run, engine)
        engine.train()
        engine.zero_grad()
        engine.execute_schedule(iter([(IMAGES, LABELS)]))
        engine.step()
        return engine.loss

    world_size, layout = LAYOUTS["PP 2 × 1D 2"]
    losses = call(loss, world_size, **{"finetune.weights": str(path), **KEEP, **layout})
    with torch.no_grad():
        assert losses[-1] == pytest.approx(F.cross_entropy(model(IMAGES), LABELS).item(), rel=1e-5)


@pytest.mark.parametrize("form", ["folder", "older folder", "state_dict in memory"])
def test_transformers_weights_have_transformers_logits(form, tmp_path):
    """As it saves them, as it saved them before safetensors, and by the names that version 5 has in memory."""
    model, path = transformers_vit(), tmp_path
    model.save_pretrained(tmp_path)
    if form == "older folder":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    elif form == "state_dict in memory":
        path = tmp_path / "vit.pt"
        torch.save(model.state_dict(), path)
        assert "vit.layers.0.attention.q_proj.weight" in model.state_dict()
    with torch.no_grad():
        torch.testing.assert_close(test_finetune.started(path, **KEEP)[1], model(IMAGES).logits, **CLOSE)


def class_token():
    """What the head sees of `IMAGES` once `finetune.weights` are loaded."""
    engine, run = build_engine()
    start_from(run, engine)
    engine.eval()
    with torch.no_grad():
        return engine.bare_model.forward_features(IMAGES)[:, 0]


@pytest.mark.parametrize(
    ("model", "kind", "config"),
    [
        ("vit_small_patch14_dinov2", Dinov2Model, Dinov2Config),
        ("vit_small_patch14_dinov2", Dinov2ForImageClassification, Dinov2Config),
        ("vit_small_patch14_reg4_dinov2", Dinov2WithRegistersModel, Dinov2WithRegistersConfig),
        ("vit_small_patch16_224", ViTModel, ViTConfig),
    ],
)
def test_transformers_weights_have_transformers_features(model, kind, config, tmp_path):
    """With LayerScale and registers, and without those of its heads that timm's models lack."""
    # timm's epsilon, as in the original JAX code; transformers has 1e-12 for these, which would cost a digit here.
    more = dict(intermediate_size=128, layer_norm_eps=1e-6) if kind is ViTModel else {}
    theirs = randomized(kind(config(**SIZES, num_labels=10, **more)))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        body = theirs.dinov2 if kind is Dinov2ForImageClassification else theirs
        expected = body(IMAGES).last_hidden_state[:, 0]
    values = {key: value for key, value in MODEL.items() if key != "MLP_RATIO"}
    (found,) = fork_ranks.call(class_token, **values, MODEL=model, finetune={"weights": str(tmp_path), "head": "new"})
    torch.testing.assert_close(found, expected, **CLOSE)


# ---------------------------------------------------------------------------------------------------------------------
# Files of torch.save
# ---------------------------------------------------------------------------------------------------------------------


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_is_refused_and_nothing_runs(zipped, tmp_path):
    path, made = tmp_path / "hostile.pth", tmp_path / "made"
    content = {**full_weights(), "epoch": Hostile(made)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    said = refusal(path)
    assert f"{path}: contains a posix.mkdir, which could run code and is not read" in said
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists(), "it would have"


ENDLESS = {}
ENDLESS["in"] = ENDLESS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no file of torch.save that can be read: EOFError"),
        (b"version https://git-lfs.github.com/spec/v1\n", "that can be read: Unsupported operand 118"),
        (b"PK\3\4 and no more", "no file of torch.save that can be read: "),
        (ENDLESS, "no file of torch.save that can be read: "),
        (torch.ones(2), "has no patch_embed.proj.weight: not a Vision Transformer"),
        (torch.nn.Linear(2, 2), "contains a torch.nn.modules.linear.Linear, which could run code and is not read"),
    ],
    ids=["empty", "LFS pointer", "damaged", "endless", "tensor", "module"],
)
def test_a_file_of_something_else_is_one_line(content, said, tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    assert said in refusal(path)


def test_a_training_checkpoint_with_its_command_line_is_read(tmp_path):
    """As the scripts of timm, DeiT, MAE and Lightning write it: the weights among other things."""
    expected, path = full_weights(), tmp_path / "checkpoint.ckpt"
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    others = {"optimizer": optimizer, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save({**others, "state_dict": {f"model._orig_mod.{name}": x for name, x in expected.items()}}, path)
    found, said = read(path)
    assert_same(found, expected)
    assert said == [f"{path}: state_dict.model._orig_mod. is taken off its names; its 1 other tensors are left out"]


def several(path):
    """A file with several models, as DINO writes it; returns them by name."""
    models = {name: {key: x + shift for key, x in full_weights().items()} for name, shift in DINO.items()}
    prefixes = {"teacher": "backbone.", "student": "module.backbone."}
    wrapped = {name: {f"{prefixes[name]}{key}": x for key, x in model.items()} for name, model in models.items()}
    wrapped["teacher"]["head.mlp.0.weight"] = torch.ones(2, 2)
    torch.save({**wrapped, "epoch": 3}, path)
    return models


DINO = {"student": 0.0, "teacher": 1.0}


@pytest.mark.parametrize(("key", "name"), [("teacher", "teacher"), ("student", "student"), ("module", "student")])
def test_the_checkpoint_key_chooses_one_of_several_models(key, name, tmp_path):
    models = several(tmp_path / "dino.pth")
    found, (line,) = read(tmp_path / "dino.pth", key)
    assert_same(found, models[name])
    assert f"{name}." in line
    assert " other tensors are left out" in line


@pytest.mark.parametrize("key", [None, "model_ema", "teach", "backbone"])
def test_a_model_that_is_not_clear_is_refused_with_a_list(key, tmp_path):
    several(tmp_path / "dino.pth")
    said = refusal(tmp_path / "dino.pth", key, of=read)
    assert f"finetune.checkpoint_key = {key!r}, but the file has " in said
    assert "student.module.backbone, teacher.backbone: set it to one of these" in said


def test_the_checkpoint_key_of_a_file_without_models_is_refused(tmp_path):
    save_file(full_weights(), tmp_path / "a.safetensors")
    said = refusal(tmp_path / "a.safetensors", "model_ema", of=read)
    assert "finetune.checkpoint_key = 'model_ema', but the file has no models with names: leave it out" in said


def test_a_head_beside_the_backbone_is_the_models(tmp_path):
    expected = full_weights()
    torch.save(
        {("" if name.startswith("head.") else "backbone.") + name: x for name, x in expected.items()}, tmp_path / "a.pt"
    )
    assert_same(read(tmp_path / "a.pt")[0], expected)


# ---------------------------------------------------------------------------------------------------------------------
# What is too much or too little, and what a folder says
# ---------------------------------------------------------------------------------------------------------------------


def test_what_the_features_do_not_depend_on_is_left_out_in_a_line(tmp_path):
    expected, path = full_weights(), tmp_path / "mae.pth"
    others = {f"decoder_blocks.{n}.weight": torch.ones(1) for n in range(3)} | {"pooler.bias": torch.ones(1)}
    torch.save({"model": {**expected, **others, "mask_token": torch.ones(1)}}, path)
    found, said = fitted(path, "keep")
    assert_same(found, expected)
    names = "decoder_blocks.0.weight, decoder_blocks.1.weight, decoder_blocks.2.weight, ... (4 in all)"
    assert said[-1] == f"{path}: left out, since this model has no place for it: {names}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("blocks.1.mlp.fc1.bias"), "has no blocks.1.mlp.fc1.bias (1 in all), which this model needs"),
        (lambda w: w.update({"blocks.4.norm1.bias": w["norm.bias"]}), "has blocks.4.norm1.bias (1 in all), which this"),
        (lambda w: w.update({"norm_pre.bias": w["norm.bias"]}), "has norm_pre.bias (1 in all), which this model lacks"),
    ],
)
def test_features_that_would_be_others_are_refused(change, said, tmp_path):
    state = full_weights()
    change(state)
    torch.save(state, tmp_path / "a.pth")
    assert said in refusal(tmp_path / "a.pth")


def test_a_query_without_its_key_is_refused(tmp_path):
    state = transformers_vit().state_dict()
    del state["vit.layers.1.attention.k_proj.bias"]
    torch.save(state, tmp_path / "a.pth")
    assert "its names cannot be converted to timm's: KeyError: 'vit.blocks.1.attn.k.bias'" in refusal(
        tmp_path / "a.pth"
    )


def test_dinov2s_head_of_two_tokens_is_left_out(tmp_path):
    state = full_weights()
    torch.save({**state, HEAD: torch.ones(10, 64)}, tmp_path / "a.pth")
    assert (
        "its head is left out, since it sees 64 features and not the 32 of one token"
        in fitted(tmp_path / "a.pth")[1][-1]
    )
    assert "has no head, but finetune.head = 'keep' needs one" in refusal(tmp_path / "a.pth", "keep")


@pytest.fixture
def folder(tmp_path):
    """A folder of transformers, of a model that tells blue from red and has names for its classes."""
    model = transformers_vit()
    model.config.id2label = {n: f"class {n}" for n in range(10)}
    model.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(image_mean=OTHER_CHANNELS[0], image_std=OTHER_CHANNELS[1]).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_folder_of_transformers_tells_heads_normalisation_and_classes(folder):
    state = weights.find_state(weights.find(str(folder)))
    assert tuple(map(list, state["normalization"])) == OTHER_CHANNELS
    assert state["data"] == {"classes": [f"class {n}" for n in range(10)]}
    assert "was trained with NUM_HEADS = 4, not 8: set it to theirs" in refusal_of_heads(folder)


def refusal_of_heads(folder):
    with pytest.raises(UserError) as raised:
        fitted(folder, NUM_HEADS=8)
    return str(raised.value)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_what_a_folder_of_transformers_may_say_otherwise(file, folder):
    """Another activation is another function; images that were not normalised have no mean; labels may be numbers."""
    config = json.loads((folder / file).read_text())
    config |= {"hidden_act": "gelu_new", "do_normalize": False}
    (folder / file).write_text(json.dumps(config))
    if file == "config.json":
        assert "config.json: hidden_act = 'gelu_new': should be 'gelu'" in refusal(folder)
    else:
        assert weights.find_state(weights.find(str(folder)))["normalization"] is None


def test_another_mean_than_that_of_the_weights_is_said(folder, few_test_images, tmp_path):
    values = {"finetune.weights": str(folder), "STD": OTHER_CHANNELS[1], "MEAN": [0.5, 0.5, 0.5]}
    said = training.train(tmp_path / "run", steps=1, **values).said
    assert "MEAN = [0.5, 0.5, 0.5], but finetune.weights were trained with (0.1, 0.2, 0.3)" in said
    assert "STD = " not in said
