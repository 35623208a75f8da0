"""Which ranks draw which random numbers: ranks with the same activations the same, all others their own.

Compared are the masks themselves, of the layers as the models build them.
"""

import functools
import itertools

import pytest
import torch
from colossal_vit import config as configs
from colossal_vit import models
from colossal_vit.config.settings import IMAGENET
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.seeds import seed_ranks
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import nn

import fork_ranks
import test_resume
import training
import vit
from layouts import LAYOUTS

DROPPED = {"DROP_RATE": 0.5, "DROP_PATH_RATE": 0.5, "DEPTH": 4}
NAMES = ["DP 2", "PP 2", "PP 2 interleaved × 2", "1D 2", "2D 4", "2.5D 8", "3D 8", "DP 2 × PP 2", "DP 2 × PP 2 × 1D 2"]
NAMES += ["DP 2 × 2D 4"]


def masks(model: nn.Module, layout: Layout) -> dict[str, tuple[tuple, bytes]]:
    """By kind of layer: whose activations this rank has there, and what of them a training pass of two drops."""
    tensor = gpc.get_local_rank(ParallelMode.TENSOR)
    copies = gpc.config.parallel.tensor.get("depth") or 1  # in 2.5D the squares hold the same activations
    part = tensor % (layout.tensor // copies)
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if layout.pipeline > 1 else 0
    replica = gpc.get_local_rank(ParallelMode.DATA), stage
    block = list((model[0] if isinstance(model, nn.ModuleList) else model).train().blocks.values())[-1]
    ones = torch.ones(64, 1, 8)

    def dropped(module):
        return torch.stack([module(ones) == 0 for _ in range(2)]).numpy().tobytes()

    between = part if layout.tensor_mode in ("2d", "2.5d", "3d") else 0  # in 1D all have what is between the layers
    block.drop_path.rate = 0.5  # else it depends on the block, which is another one in each stage
    return {
        "between layers": ((*replica, between), dropped(block.attn.drop)),
        "inside the MLP": ((*replica, part), dropped(block.mlp.drop1)),
        "drop path": ((*replica, between), dropped(block.drop_path)),
    }


def assert_own_masks(answers):
    """The same where the activations are the same, and other ones everywhere else."""
    for kind in ("between layers", "inside the MLP"):
        whose = {answer[kind][0] for answer in answers}
        assert len({answer[kind] for answer in answers}) == len(whose), f"{kind}: same activations, other masks"
        assert len({answer[kind][1] for answer in answers}) == len(whose), f"{kind}: other activations, same mask"


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_every_layout(name):
    """As the run starts, and as it resumes from another layout's checkpoint."""
    world_size, values = LAYOUTS[name]

    def function():
        layout = Layout.of(gpc.config, world_size)
        model = vit.build_vit(gpc.config, layout)
        first = masks(model, layout)
        seed_ranks(gpc.config.SEED + 7)  # what `state.resume` does then
        return first, masks(model, layout)

    answers = training.call(function, world_size, **{**values, **DROPPED})
    for moment in zip(*answers, strict=True):
        assert_own_masks(moment)
        paths = {}
        for answer in moment:  # chosen for a replica's whole batch; in 2D, 2.5D and 3D a rank has some of its images
            (replica, stage, _), mask = answer["drop path"]
            paths.setdefault((replica, stage), set()).add(mask)
        assert all(first.isdisjoint(second) for first, second in itertools.combinations(paths.values(), 2))
    assert answers[0][0]["between layers"][1] != answers[0][1]["between layers"][1]


def test_masks_of_replicas_of_a_timm_model():
    """The data parallel scripts': drawing the weights must not reset the random numbers of the ranks."""

    def function():
        model = models.build_timm_vit(Config(configs.complete(dict(IMG_SIZE=32, DROP_RATE=0.5, DEPTH=1), IMAGENET)))
        weights = model.blocks[0].mlp.fc1.weight[0, :4].tolist()
        return weights, (model.train().pos_drop(torch.ones(64)) == 0).tolist()

    (weights, first), (same, second) = fork_ranks.call(function, 2)
    assert weights == same
    assert first != second


def test_masks_after_resuming(tmp_path, random_weights):
    """On the same layout those that would have come; on another one, new ones for each."""
    size, values = LAYOUTS["DP 2 × PP 2"]

    def save():
        trainer, loader = test_resume.build()
        test_resume.save(test_resume.load(trainer, loader, tmp_path / "there"))
        return masks(trainer.engine.bare_model, Layout.of(gpc.config, size))

    def load(world_size):
        trainer, loader = test_resume.build()
        test_resume.load(trainer, loader, tmp_path / f"{world_size}", tmp_path / "there")
        return masks(trainer.engine.bare_model, Layout.of(gpc.config, world_size))

    expected = training.call(save, size, **{**values, **DROPPED})
    assert_own_masks(expected)
    assert training.call(functools.partial(load, size), size, **{**values, **DROPPED}) == expected
    others, values = LAYOUTS["DP 2 × 2D 4"]
    assert_own_masks(training.call(functools.partial(load, others), others, **{**values, **DROPPED}))
