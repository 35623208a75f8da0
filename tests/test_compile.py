"""COMPILE under tensor and pipeline parallelism: the blocks are compiled between the collectives."""

import functools
import os

import pytest
import torch
from colossal_vit.engine import compilation
from colossal_vit.engine.assembly import initialize
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import fork_ranks
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
    return said


def compare(layout, backend="inductor", **more):
    """What `train` returns on each rank: eager, compiled, and how many programs that took."""
    world_size, values = LAYOUTS[layout]

    def function():
        torch.compile = functools.partial(torch.compile, backend=backend)
        eager, before = train(world_size, False), counters["stats"]["unique_graphs"]
        return eager, train(world_size, True), counters["stats"]["unique_graphs"] - before

    return training.call(function, world_size, **{**values, "BATCH_SIZE": 8, **more})


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
    """With dropout and stochastic depth; a pipeline's blocks are whole programs, one for all that drop paths."""
    answers = compare(layout, backend, DEPTH=depth, DROP_RATE=0.2, DROP_PATH_RATE=0.2)
    for rank, (eager, compiled, programs) in enumerate(answers):
        assert programs >= 3 if "PP" not in layout else programs == (2 if rank == 0 else 1)
        assert compiled == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize("recomputed", [False, True])
def test_split_optimizer_state(recomputed, random_weights):
    """The compiled model waits for all its weights, which other ranks send, before the forward pass.

    It is one program, with dropout and with recomputed blocks in it.
    """
    values = {"DEPTH": 2, "zero.stage": 1, "CHECKPOINT": recomputed, "DROP_RATE": 0.2, "DROP_PATH_RATE": 0.2}
    for eager, compiled, programs in compare("DP 2", GRAPHS, **values):
        assert programs == 1
        assert compiled == pytest.approx(eager, rel=1e-4)
        assert eager[-1] != eager[1], "it trains"


def test_auto_compiles_on_gpus_that_have_a_compiler():
    """The other values say what they do."""

    def function():
        done = []
        compilation.compile_model = lambda model, by_block, **options: done.append(sorted(options))
        model, gpu = torch.nn.Linear(2, 2), torch.device("cuda")
        chosen = [compilation.compile_if_chosen(model, "auto", device) for device in (gpu, torch.device("cpu"))]
        os.environ["CC"] = "no-such"
        chosen.append(compilation.compile_if_chosen(model, "auto", gpu))
        assert not compilation.compile_if_chosen(model, False, gpu)
        with pytest.raises(UserError, match="COMPILE = True needs a C compiler, and 'no-such' is not on PATH"):
            compilation.compile_if_chosen(model, True, gpu)
        return chosen, done

    result = fork_ranks.call(function)
    assert result == [([True, False, False], [["backend"]])]


def test_auto_trains_eagerly_where_kernels_cannot_be_made(random_weights):
    """Each program of the forward and backward pass whose compilation fails runs operator by operator, with a line."""

    def fails(*_, **__):
        raise OSError("no space left\nin the cache")

    def function():
        eager = train(1, False)
        compile_fx.compile_fx_inner = fails
        compilation.why_eager = lambda device: None
        said = []
        compilation.RankLogger.info = lambda self, message, ranks=None: said.append(message)
        return eager, train(1, "auto"), said

    ((eager, auto, said),) = training.call(function, DEPTH=1, BATCH_SIZE=8, DROP_RATE=0.2)
    assert auto == pytest.approx(eager, rel=1e-4)
    assert said[0].startswith("COMPILE = 'auto': on")
    assert len(said) == 3, "one of forward, one of backward pass"
    assert said[1].endswith("is not compiled, since that failed: OSError: no space left")
