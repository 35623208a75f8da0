"""docs/changing-the-model.md: with its diff every layout computes what one process does, without its sum not."""

import importlib.util
import re
import shutil
import subprocess

import pytest
import torch
from colossal_vit.parallel.layout import Layout
from colossalai.legacy.core import global_context as gpc

import fork_ranks
import train_hybrid
import training
from tools.parity import command

PAGE = (fork_ranks.ROOT / "docs/changing-the-model.md").read_text()
(DIFF,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STEP = "if gpc.tensor_parallel_size > 1:"
VALUES = {"DEPTH": 2, "IMG_SIZE": 16}


def changed_model(folder, diff):
    """The module `vit.py` of a copy to which the diff has been applied."""
    path = folder / "vit_cifar10_hybrid/vit.py"
    path.parent.mkdir()
    shutil.copy(fork_ranks.ROOT / "vit_cifar10_hybrid/vit.py", path)
    subprocess.run(["git", "apply", "-p0", "-"], cwd=folder, input=diff, text=True, check=True)
    spec = importlib.util.spec_from_file_location("changed_vit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcomes(folder, diff, *layouts):
    """What parity says of the model with the diff in each layout: whether it agrees, and in words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_hybrid, "build_vit", changed_model(folder, diff).build_vit)
        _, args = command.parse([training.HYBRID, *training.flags(**VALUES)])
        comparison = command.Comparison(train_hybrid.build, args, command.read_config(args)[0], folder)
        return [comparison.outcome(command.parse_layout(name)) for name in layouts]


@pytest.mark.usefixtures("few_test_images")
def test_the_page_s_diff_computes_the_same_in_every_layout(tmp_path):
    for agrees, text in outcomes(tmp_path, DIFF, "PP 2", "1D 2", "2D 4"):
        assert agrees, text


@pytest.mark.usefixtures("few_test_images")
def test_the_page_s_diff_without_the_sum_of_gradients_differs_under_tensor_parallelism(tmp_path):
    assert DIFF.count(STEP) == 1
    pipeline, *tensor = outcomes(tmp_path, DIFF.replace(STEP, "if False:"), "PP 2", "1D 2", "2D 4")
    assert pipeline[0], pipeline
    for agrees, text in tensor:
        assert agrees is False
        assert "gradient of blocks.0.attn.q_norm.weight" in text


def test_the_page_s_diff_makes_timm_s_model_with_normalised_queries_and_keys(tmp_path):
    changed = changed_model(tmp_path, DIFF)

    def differences():
        model, reference = changed.build_vit(gpc.config, Layout.of(gpc.config, 1)), changed.full_vit(gpc.config)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.normal_(std=0.3)
        changed.load_full(model, reference.state_dict())
        names = {parameter.shard.name for parameter in model.parameters()}
        images = torch.randn(3, 3, gpc.config.IMG_SIZE, gpc.config.IMG_SIZE)
        error = (model(images) - reference(images)).abs().max() / reference(images).abs().max()
        return names ^ set(reference.state_dict()), error.item()

    ((names, error),) = training.call(differences, **VALUES)
    assert not names
    assert error < 1e-5
