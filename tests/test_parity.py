"""`--parity`: layouts agree with one process in float64, and the first tensor that a defect changes is named."""

from contextlib import suppress

import pytest
import torch
from colossal_vit.errors import TrainingError
from colossal_vit.parity import command

import train_hybrid
import training
import vit

VALUES = {"DEPTH": 2, "IMG_SIZE": 16, "DROP_RATE": 0.1, "DROP_PATH_RATE": 0.1, "mix.mixup": 0.8}
pytestmark = pytest.mark.usefixtures("few_test_images", "random_weights")


def said(capsys, *layouts, **flags):
    """The lines for the layouts."""
    args = training.arguments(train_hybrid.main, training.flags(**VALUES)).replace(parity=list(layouts), **flags)
    with suppress(TrainingError):
        command.run(train_hybrid.main, args)
    return capsys.readouterr().out.splitlines()


def test_layouts_agree(capsys):
    agreeing, refused = said(capsys, "PP 2 × 1D 2", "2D 9")
    assert agreeing.startswith("PP 2 × 1D 2: all 3")
    assert "tensors of 3 steps agree to " in agreeing
    assert refused.startswith("2D 9: not tried: MLP_RATIO = 4")


def test_in_the_config_s_own_precision_rounding_is_no_difference(capsys):
    (line,) = said(capsys, "PP 2", own_precision=True)
    assert "agree to" in line
    assert "e-1" not in line.split("agree to ")[1]


def test_the_first_tensor_that_a_defect_changes_is_named(monkeypatch, capsys):
    """A token is left out behind the second linear layer, on rank 1 only."""
    forward = vit.MLP.forward

    def with_defect(self, x, samples):
        y = forward(self, x, samples)
        if torch.distributed.get_rank() == 1:
            y = y * (torch.arange(y.shape[1]) != 2)[:, None]
        return y

    monkeypatch.setattr(vit.MLP, "forward", with_defect)
    (line,) = said(capsys, "1D 2")
    assert line.startswith("1D 2: differs first in step 1, output blocks.1.norm1: rank 1 has ")
