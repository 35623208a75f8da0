"""COMPILE under tensor and pipeline parallelism: the blocks are compiled between the collectives."""

import functools

import pytest
import torch
from colossal_vit.engine.assembly import initialize
from colossal_vit.parallel.layout import Layout
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch._dynamo.utils import counters

import training
import vit
from layouts import LAYOUTS

pytestmark = pytest.mark.usefixtures("compiler")
GRAPHS = "aot_eager_decomp_partition"  # a backend that makes graphs as Inductor does, but no kernels of them


def train(world_size, compiled):
    """Three steps on one batch; the losses and gradient norms, and a norm's weights."""
    config = gpc.config
    config.COMPILE = compiled
    model = vit.build_vit(config, Layout.of(config, world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(model, optimizer, col_nn.CrossEntropyLoss())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, config.IMG_SIZE, config.IMG_SIZE, generator=generator)
    batch = images, torch.arange(8)
    engine.train()
    said = []
    for _ in range(3):
        engine.zero_grad()
        engine.execute_schedule(iter([batch]))
        engine.step()
        said += [engine.loss or 0.0, engine.grad_norm]  # the loss is the last stage's
    return said, next(p for p in model.parameters() if p.shard.name.endswith("norm2.weight")).tolist()


def compare(layout, backend="inductor", **more):
    """What `train` returns on each rank: eager, compiled, and how many programs that took."""
    world_size, values = LAYOUTS[layout]

    def function():
        torch.compile = functools.partial(torch.compile, backend=backend)
        eager, before = train(world_size, False), counters["stats"]["unique_graphs"]
        return eager, train(world_size, True), counters["stats"]["unique_graphs"] - before

    return training.call(function, world_size, **values, BATCH_SIZE=8, **more)


@pytest.mark.parametrize(
    ("layout", "depth", "backend"),
    [
        ("1D 2", 2, "inductor"),
        ("2D 4", 2, "inductor"),
        ("2.5D 4", 2, GRAPHS),  # its kernels are those of 2D, as are those of 3D, which eight ranks would compile
        ("3D 8", 1, GRAPHS),
        ("PP 2 interleaved × 2", 4, "inductor"),
    ],
)
def test_compiled_blocks_train_as_eager_ones(layout, depth, backend, random_weights):
    """Drop path included, which all of a replica's ranks draw together."""
    for (eager, _), (compiled, _), programs in compare(layout, backend, DEPTH=depth, DROP_PATH_RATE=0.2):
        assert programs >= 3
        assert compiled == pytest.approx(eager, rel=1e-4)


def test_ranks_that_hold_the_same_draw_the_same(random_weights):
    """In 1D all ranks have what is between the layers: with other masks their copies of the norms would drift apart."""
    answers = compare("1D 2", DEPTH=1, DROP_RATE=0.5)
    (_, here), (_, there) = (compiled for _, compiled, _ in answers)
    assert here == there
    for eager, compiled, programs in answers:
        assert programs >= 3
        assert compiled != eager, "dropped by a compiled kernel, with random numbers of its own"


@pytest.mark.parametrize("recomputed", [False, True])
def test_split_optimizer_state(recomputed, random_weights):
    """The compiled model waits for all its weights, which other ranks send, before the forward pass.

    Compiled as a whole it has recomputed blocks in it, whose random streams no compiler can look into.
    """
    world_size, _ = LAYOUTS["DP 2"]

    def function():
        torch.compile = functools.partial(torch.compile, backend=GRAPHS)
        return train(world_size, False), train(world_size, True), counters["stats"]["unique_graphs"]

    values = {**LAYOUTS["DP 2"][1], "BATCH_SIZE": 8, "DEPTH": 1, "zero.stage": 1, "CHECKPOINT": recomputed}
    for (eager, _), (compiled, _), programs in training.call(function, world_size, **values):
        assert programs >= 1
        assert compiled == pytest.approx(eager, rel=1e-4)
        assert eager[-1] != eager[1], "it trains"
