"""`python -m colossal_vit.checkpoint`: what is in a run, weights to timm and back, and mistakes."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import timm
import torch
from colossal_vit.checkpoint import __main__, storage, timm_model, weights
from colossal_vit.errors import UserError
from colossal_vit.model.timm_vit import PatchProjection, build_timm_vit, skip_unused_tokens
from colossalai.context import Config
from safetensors.torch import load_file, save_file
from torch import nn

import cifar10
import test_checkpoint
import training
import vit

PLAIN = dict(script=training.DATA_PARALLEL, MODEL="vit_small_patch16_224", DEPTH=2, IMG_SIZE=32, DROP_RATE=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on two pipeline stages, which has three checkpoints, and one of train_dp.py."""
    folder = tmp_path_factory.mktemp("runs")
    values = dict(DEPTH=2, DROP_RATE=0.1, MLP_RATIO=3, DROP_PATH_RATE=0.1, NUM_EPOCHS=2)
    training.train(folder / "hybrid", 2, steps=None, **values, **{"parallel.pipeline": 2, "checkpoint.every_steps": 30})
    training.train(folder / "plain", steps=None, **PLAIN)
    return folder


@pytest.fixture(scope="module")
def exported(runs):
    """The runs' newest checkpoints as timm has them."""
    folder = runs / "exported"
    for name in ("hybrid", "plain"):
        assert __main__.main(["export", str(runs / name), str(folder / name)]) == 0
    return folder


def newest(run):
    return storage.list_steps(run / "checkpoints")[0]


def verb(capsys, *argv):
    """Exit code, and what was printed on stdout and stderr."""
    code = __main__.main([str(arg) for arg in argv])
    return code, *capsys.readouterr()


# ---------------------------------------------------------------------------------------------------------------------
# To timm and back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "build"), [("hybrid", vit.full_vit), ("plain", build_timm_vit)])
def test_timm_builds_what_was_trained(name, build, runs, exported):
    state = storage.Checkpoint(newest(runs / name)).state
    trained = build(Config(state["config"])).eval()
    trained.load_state_dict(load_file(newest(runs / name) / "model.safetensors"))
    model = timm.create_model(f"local-dir:{exported / name}", pretrained=True).eval()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = trained(images)
    assert expected.std() > 0.01
    if name == "plain":
        model.patch_embed.proj = PatchProjection(model.patch_embed.proj)  # the convolution rounds differently
    skip_unused_tokens(model)  # as do products of all tokens
    assert torch.equal(model(images), expected)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
    assert not any(isinstance(module, timm.layers.DropPath) for module in model.modules())
    transform = timm.data.resolve_model_data_config(model)
    assert (transform["input_size"], transform["crop_pct"]) == ((3, 32, 32), 1.0)
    assert (tuple(transform["mean"]), tuple(transform["std"])) == (cifar10.MEAN, cifar10.STD)
    assert not model.pretrained_cfg.keys() & {"tag", "license"}, "those of Google's weights"
    assert sorted(path.name for path in exported.iterdir()) == ["hybrid", "plain"], "nothing else stays behind"


@pytest.mark.parametrize(
    ("images", "values", "expected"),
    [
        ("CIFAR-10", {}, 1.0),
        ("Caltech101", {}, 192 / 219),  # 219 pixels, 8/7 of 192, are rounded
        ("class folders", {"CACHE_SIZE": 256}, 192 / 256),
        ("ImageNet", {"EVAL_CROP": 0.9}, 0.9),
    ],
)
def test_the_crop_of_the_test_images_is_exported(images, values, expected):
    """As the data are read, whatever the script: every one has the keys of all."""
    config = {"IMG_SIZE": 192, "CROP_PADDING": 4, "EVAL_CROP": 1.0, **values}
    found = timm_model._preprocessing({"data": {"images": images}}, config)
    assert found["crop_pct"] == pytest.approx(expected)
    assert found["crop_mode"] == "center", "some of timm's models squash their images"


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        ({"NUM_CLASSES": "x"}, ": NUM_CLASSES = 'x'"),
        ({"IMG_SIZE": -5}, ": IMG_SIZE = -5: should be greater"),
        ({"MODEL": ["a"]}, ": MODEL = ['a']: should be a valid string"),
        ({"MODEL": "no_such_model"}, " is not of a model with these weights: Unknown model"),
        ({"DEPTH": 3}, " is not of a model with these weights: Error"),
        ({"DEPTH": "x"}, " is not of a model with these weights: unsupported operand"),
        ({"NUM_HEADS": 0}, " is not of a model with these weights: "),
        ({"HIDDEN_SIZE": 65}, " is not of a model with these weights: "),
    ],
)
def test_a_forged_config_is_not_exported(forged, words, runs, tmp_path, capsys):
    path = shutil.copytree(newest(runs / "plain"), tmp_path / "step")
    state = storage.Checkpoint(path).state
    test_checkpoint.forge(path, storage.STATE, json.dumps({**state, "config": {**state["config"], **forged}}).encode())
    code, _, line = verb(capsys, "export", path, tmp_path / "new")
    assert (code, line.count("\n")) == (2, 1), line
    assert f"state.json: config{words}" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_writes_the_precision_that_is_asked_for(dtype, expected, runs, tmp_path, capsys):
    (folder := tmp_path / "empty").mkdir()
    code, said, _ = verb(capsys, "export", newest(runs / "plain"), folder, "--dtype", dtype)
    assert (code, f'timm.create_model("local-dir:{folder}", pretrained=True)' in said) == (0, True)
    trained, saved = (load_file(path / "model.safetensors") for path in (newest(runs / "plain"), folder))
    assert trained.keys() == saved.keys()
    assert all(torch.equal(saved[name], trained[name].to(expected)) for name in trained)
    assert saved["pos_embed"].dtype == expected


def test_weights_evaluate_the_same_after_export(runs, exported, tmp_path):
    def evaluate(*flags, **values):
        run = training.train(tmp_path / "output", 1, "--eval-only", *flags, **PLAIN, **values)
        return re.findall(r"test accuracy .*", run.said)

    after = {"finetune.weights": str(exported / "plain"), "finetune.head": "keep"}
    assert evaluate(**after) == evaluate("--resume", str(newest(runs / "plain"))) != []


@pytest.mark.parametrize("form", ["run", "file", "folder"])
def test_weights_of_a_run_keep_what_no_shape_tells(form, runs, exported, tmp_path):
    """Their number of heads, for an evaluation and a training."""
    source = {"run": runs / "plain", "file": newest(runs / "plain") / "model.safetensors"}.get(form, exported / "plain")
    values = {**PLAIN, "NUM_HEADS": 8, "finetune.weights": str(source), "finetune.head": "keep"}
    for flags in (["--eval-only"], ["--max-steps", "1"]):
        line = training.refused(tmp_path / "run", 1, *flags, steps=None, **values)
        assert f"{source}: was trained with NUM_HEADS = 4, not 8: set it to theirs" in line


def test_a_run_from_exported_weights_begins_with_a_head_of_zeros_and_learns(exported, tmp_path):
    """On larger images and for other classes: the loss begins at that of a head of zeros, and falls."""
    values = dict(IMG_SIZE=48, NUM_CLASSES=12, LEARNING_RATE=1e-3)
    values["finetune.weights"] = str(exported / "plain")
    steps = training.train(tmp_path / "run", steps=8, **{**PLAIN, **values}).steps
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert steps[0]["loss"] == pytest.approx(math.log(12), rel=1e-6)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1e-2


def test_weights_of_a_run_are_fitted_to_larger_images_as_timm_does(exported):
    source = exported / "plain"
    given = load_file(source / "model.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in given.items()}
    shapes["pos_embed"][1] = 1 + 6**2
    model = weights.read_fitted(weights.find(str(source)), "new", shapes, {"IMG_SIZE": 48, "NUM_CLASSES": 12})
    resized = timm.create_model(f"local-dir:{source}", pretrained=True, img_size=48)
    assert torch.equal(model["pos_embed"], resized.pos_embed)
    assert model["head.weight"].shape == (12, 32)
    assert not model["head.weight"].any()
    same = model.keys() - {"pos_embed", "head.weight", "head.bias"}
    assert len(same) > 20
    assert all(torch.equal(model[name], given[name]) for name in same)


EMBEDDING = {"patch_embed.proj.weight": torch.ones(8, 3, 4, 4)}


def fitted(path, tensors, num_tokens):
    """What becomes of tensors in a file, for images of 16 px and 5 classes."""
    save_file(tensors, path)
    shapes = {"patch_embed.proj.weight": [8, 3, 4, 4], "pos_embed": [1, num_tokens, 8]}
    return weights.read_fitted(weights.find(str(path)), "new", shapes, {"IMG_SIZE": 16, "NUM_CLASSES": 5})


@pytest.mark.parametrize("prefix", [0, 1])
def test_fitted_weights_are_fp32_and_have_a_head_where_theirs_had_neither(prefix, tmp_path):
    """Half precision, no head, with a class token's position or without."""
    given = {**EMBEDDING, "pos_embed": torch.ones(1, 9 + prefix, 8)}
    model = fitted(tmp_path / "some.safetensors", {name: x.half() for name, x in given.items()}, 16 + prefix)
    assert {name: tuple(tensor.shape) for name, tensor in model.items()} == {
        "patch_embed.proj.weight": (8, 3, 4, 4),
        "pos_embed": (1, 16 + prefix, 8),
        "head.weight": (5, 8),
        "head.bias": (5,),
    }
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}


def test_positions_that_are_no_square_are_not_resampled(tmp_path):
    with pytest.raises(UserError, match=r"pos_embed of .* is of shape \(1, 12, 8\), which is not \(1, N, width\)"):
        fitted(tmp_path / "oblong.safetensors", {**EMBEDDING, "pos_embed": torch.ones(1, 12, 8)}, 16)


# ---------------------------------------------------------------------------------------------------------------------
# What is in a run
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(runs, tmp_path):
    """A copy of the hybrid run; the newest of its checkpoints is cut off."""
    shutil.copytree(runs / "hybrid", tmp_path / "run")
    os.truncate(newest(tmp_path / "run") / "model.safetensors", 1000)
    return tmp_path / "run"


def test_ls_marks_the_best_and_names_damage(runs, tmp_path, capsys):
    """A run whose second epoch was the best one, as its first had been until then."""
    state = storage.Checkpoint(newest(runs / "plain")).state
    (folder := tmp_path / "checkpoints").mkdir()
    for epoch, accuracy, best_step in ((1, 0.25, 10), (2, 0.5, 20), (3, 0.5, 20)):
        state |= dict(step=10 * epoch, epoch=epoch, best=dict(accuracy=accuracy, step=best_step))
        files = {storage.MODEL: {"weight": torch.ones(400_000)}, storage.OPTIMIZER: {}}
        storage.write(folder / f"step-{10 * epoch:08d}", files, state)
    third, second, first = (
        "step-00000030  epoch 3  1.6 MB",
        "step-00000020  epoch 2  1.6 MB  best: 50.00%",
        "step-00000010  epoch 1  1.6 MB",
    )
    assert verb(capsys, "ls", tmp_path) == (0, f"{third}\n{second}\n{first}\n", "")

    os.truncate(folder / "step-00000030" / "model.safetensors", 1000)
    code, said, _ = verb(capsys, "ls", folder)
    fault, *others = said.splitlines()
    assert code == 0
    assert fault.startswith(f"step-00000030  damaged: {folder}/step-00000030/model.safetensors: has 1000 bytes")
    assert others == [second, first]


def test_verify_names_damage_and_returns_1(runs, damaged, capsys):
    good = newest(runs / "plain")
    assert verb(capsys, "verify", good) == (0, f"{good}: good, step 44\n", "")
    code, said, _ = verb(capsys, "verify", good, damaged)
    assert code == 1
    first, fault, *others = said.splitlines()
    assert first == f"{good}: good, step 44"
    assert fault.startswith(f"{damaged}/checkpoints/step-00000088/model.safetensors: has 1000 bytes")
    assert others == [f"{damaged}/checkpoints/step-000000{n}: good, step {n}" for n in (60, 44)]


def test_export_of_a_run_takes_its_newest_valid_checkpoint(damaged, tmp_path, capsys):
    code, said, _ = verb(capsys, "export", damaged, tmp_path / "folder")
    assert (code, "step-00000060 is in" in said) == (0, True)


def test_verify_in_a_new_process_imports_neither_colossalai_nor_timm(damaged):
    """As a module, and without what takes seconds to import."""
    command = [sys.executable, "-X", "importtime", "-m", "colossal_vit.checkpoint", "verify", str(damaged)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "good, step 60" in done.stdout
    assert "colossal_vit.errors" in done.stderr
    assert not re.search(r"\| *(colossalai|timm)\b", done.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------


def mistakes(runs, exported, damaged, tmp_path):
    """What is given, and what the line must say."""
    good, file = newest(runs / "plain"), exported / "plain" / "model.safetensors"
    new = tmp_path / "new"
    (tmp_path / "nothing").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").touch()
    return [
        ([], ["required: verb"]),
        (["show", runs], ["show", "ls"]),
        (["ls"], ["RUN_DIRECTORY"]),
        (["ls", tmp_path / "nowhere"], ["nowhere: no such file"]),
        (["ls", tmp_path / "nothing"], ["nothing: is no checkpoint"]),
        (["ls", tmp_path / ("long" * 100)], ["longlong: "]),
        (["verify", good, tmp_path / "nowhere"], ["nowhere: no such file"]),
        (["verify", file], ["model.safetensors: is no checkpoint"]),
        (["verify", exported / "plain"], ["plain: is no checkpoint"]),
        (["export", good, new, "--dtype", "int8"], ["--dtype", "int8", "bf16"]),
        (["export", newest(damaged), new], ["model.safetensors: has 1000 bytes"]),
        (["export", good, tmp_path / "old"], ["old: exists already"]),
        (["export", good, file], ["model.safetensors: exists already"]),
        (["export", good, file / "below"], ["below: cannot be written: ", "File exists", "model.safetensors'"]),
    ]


def test_checkpoint_command_with_a_mistake_ends_in_one_line(runs, exported, damaged, tmp_path, capsys):
    for argv, words in mistakes(runs, exported, damaged, tmp_path):
        capsys.readouterr()
        code, said, line = verb(capsys, *argv)
        assert (code, said) == (2, ""), argv
        assert re.fullmatch(r"checkpoint: error: .+\n", line), (argv, line)
        assert all(word in line for word in words), (argv, line)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*")), "nothing half-written"


def test_checkpoint_command_interrupted_ends_in_one_line(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "named_by", interrupt)
    assert verb(capsys, "verify", "run") == (130, "", "checkpoint: interrupted\n")
