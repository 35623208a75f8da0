"""COMPILE in every layout: a block is one program, and trains and evaluates as without it."""

import functools
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from colossal_vit.engine import Trainer, compilation, reduction
from colossal_vit.engine.assembly import initialize
from colossal_vit.errors import UserError
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossal_vit.rng.dropout import Dropout
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.utils import is_using_pp
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._inductor import compile_fx

import fork_ranks
import training
import vit
from layouts import LAYOUTS, tensor

pytestmark = pytest.mark.usefixtures("compiler")
GRAPHS = "aot_eager_decomp_partition"  # a backend that makes graphs as Inductor does, but no kernels of them
KERNELS = "inductor"


def train(world_size, compiled):
    """Losses and gradient norms of three steps on one batch, and the loss in an evaluation, if it may on half of it."""
    config = gpc.config
    config.COMPILE = compiled
    model = vit.build_vit(config, Layout.of(config, world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(model, optimizer, col_nn.CrossEntropyLoss())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, config.IMG_SIZE, config.IMG_SIZE, generator=generator)
    labels = torch.arange(8)
    engine.train()
    said = []
    for _ in range(3):
        for _ in range(config.gradient_accumulation):
            engine.zero_grad()
            engine.execute_schedule(iter([(images, labels)]))
            engine.step()
        said += [engine.loss or 0.0, engine.grad_norm]  # the loss is the last stage's
    engine.eval()
    part = slice(8 if is_using_pp() else 4)  # a pipeline's batches are always full
    with engine.ema.swapped_in() if engine.ema else nullcontext(), torch.no_grad():
        *_, loss = engine.execute_schedule(iter([(images[part], labels[part])]), forward_only=True)
    return [*said, 0.0 if loss is None else loss.item()]


def compare(world_size, backend, **values):
    """What `train` returns on each rank: eager, compiled, and how many programs and graph breaks that took."""

    def function():
        torch.compile = functools.partial(torch.compile, backend=backend)
        eager = train(world_size, False)
        counters.clear()
        compiled = train(world_size, True)
        return eager, compiled, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    return training.call(function, world_size, **{"BATCH_SIZE": 8, "DROP_RATE": 0.2, "DROP_PATH_RATE": 0.2, **values})


NAIVE, TORCH = {"amp": "NAIVE"}, {"amp": "TORCH"}
ACCUMULATION, EMA, RECOMPUTED = {"gradient_accumulation": 2}, {"ema.decay": 0.5}, {"CHECKPOINT": True}
NO_PATHS = {"DROP_PATH_RATE": 0.0}
# Each layout and each feature, in as few runs as may be, and the number of programs on the first and the last rank. All
# pairs of features, and resuming to the bit, are in test_pairs.py. In training there is one for blocks that drop paths,
# one for the first block, which does not, and one for the last, which computes the class token only; in evaluation
# there is one for the last block, one for the others, and one for blocks whose input another stage has sent.
ROWS = [
    ("1D 2", 2, KERNELS, {}, (4, 4)),
    ("2D 4", 2, KERNELS, NO_PATHS, (4, 4)),
    # Their kernels are those of 2D, and eight ranks would make them.
    ("2.5D 4", 2, GRAPHS, TORCH | EMA | RECOMPUTED, (4, 4)),
    ("3D 8", 2, GRAPHS, NAIVE | ACCUMULATION | NO_PATHS, (4, 4)),
    ("PP 2 interleaved × 2", 4, GRAPHS, EMA, (4, 4)),
    ("PP 2 × 1D 2", 4, GRAPHS, NAIVE | RECOMPUTED, (3, 4)),
    ("DP 2 × 1D 2", 2, GRAPHS, TORCH | ACCUMULATION, (4, 4)),
    ("DP 2, split weights", 2, GRAPHS, EMA | RECOMPUTED, (4, 4)),
]
OTHERS = {"DP 2 × 1D 2": (4, tensor("1d", 2)), "DP 2, split weights": (2, {"zero.stage": 3})}


@pytest.mark.parametrize(("layout", "depth", "backend", "features", "programs"), ROWS, ids=[row[0] for row in ROWS])
def test_block_is_one_program_that_trains_as_an_eager_one(layout, depth, backend, features, programs, random_weights):
    world_size, values = (LAYOUTS | OTHERS)[layout]
    answers = compare(world_size, backend, **{**values, **features, "DEPTH": depth})
    for eager, compiled, *_ in answers:
        assert compiled == pytest.approx(eager, rel=0.02 if "amp" in features else 1e-4)
    assert tuple(answers[rank][2] for rank in (0, -1)) == programs
    assert not any(breaks for *_, breaks in answers)


@pytest.mark.parametrize("features", [{}, RECOMPUTED])
def test_compiled_model_with_split_optimizer_state_trains_as_an_eager_one(features, random_weights):
    """A block waits for its weights, which other ranks send, outside of its program, which that would break.

    The first and the last block have a program each for training and for evaluation, as in `ROWS`.
    """
    for eager, compiled, *counts in compare(2, GRAPHS, DEPTH=2, **{"zero.stage": 1}, **features):
        assert counts == [4, 0]
        assert compiled == pytest.approx(eager, rel=1e-4)
        assert eager[-2] != eager[1], "it trains"


EVENTS = []  # of a backward pass, in order


@torch.library.custom_op("tests::mark_images", mutates_args=())
def mark_images(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tests::reach_images", mutates_args=())
def reach_images(x: torch.Tensor) -> torch.Tensor:
    EVENTS.append("images")
    return x.clone()


mark_images.register_fake(torch.empty_like)
reach_images.register_fake(torch.empty_like)
mark_images.register_autograd(lambda context, gradient: reach_images(gradient))


class MarkedImages(torch.nn.Module):
    """A model whose backward pass reaches the images and tells when it does, compiled or not."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(mark_images(images.requires_grad_()))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_a_compiled_model_with_split_optimizer_state_are_reduced_during_the_backward_pass(accumulation):
    """As many buckets as of an eager model start before the backward pass has come to the images, in its order."""

    def buckets_before_images(compiled):
        gpc.config.COMPILE = compiled
        model = MarkedImages(vit.build_vit(gpc.config, Layout.of(gpc.config, 2)))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), col_nn.CrossEntropyLoss())
        engine.train()
        for _ in range(accumulation):
            EVENTS.clear()
            engine.zero_grad()
            engine.backward(engine.criterion(engine(torch.randn(4, 3, 32, 32)), torch.arange(4)))
            engine.step()
        return EVENTS[: EVENTS.index("images")], len(engine._gradient_handlers[0].buckets)

    def function():
        torch.compile = functools.partial(torch.compile, backend=GRAPHS)
        reduction.BUCKET_BYTES = 2**13
        start = reduction.GradientBucket.start
        reduction.GradientBucket.start = lambda bucket: (EVENTS.append(bucket.owner), start(bucket))[1]
        return buckets_before_images(False), buckets_before_images(True)

    values = {"zero.stage": 1, "gradient_accumulation": accumulation, "BATCH_SIZE": 4}
    for eager, compiled in training.call(function, 2, DEPTH=3, **values):
        early, num_buckets = compiled
        assert compiled == eager
        assert len(early) > num_buckets / 2 > 5


class Layer(torch.nn.Linear):
    """torch 2.10 compiles no module that PyTorch defines."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("wanted", [True, False])
def test_every_process_has_the_same_kernels_where_runs_have_to_resume_to_the_bit(wanted, monkeypatch):
    """On a GPU the backward pass has a thread of its own, which would not have this thread's configuration."""
    found = []

    def inner(*args, **options):
        found.append(compile_fx.config.deterministic)
        return compile_fx.compile_fx_inner(*args, **options)

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", wanted)
    model = Layer(2, 2)
    apart = functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=not wanted)
    with compile_fx.config.patch(deterministic=not wanted), apart:
        compilation.compile_model(
            model, by_block=False, backend=functools.partial(compile_fx.compile_fx, inner_compile=inner)
        )
        backward = threading.Thread(target=model(torch.ones(2, 2)).sum().backward)
        backward.start()
        backward.join()
    assert model.weight.grad.tolist() == [[2.0, 2.0]] * 2
    assert found == [wanted] * 2


@pytest.mark.parametrize("by_block", [False, True])
def test_a_second_evaluation_runs_the_programs_of_the_first(by_block):
    """As the only one of a run that resumes does, although the last batch was smaller."""
    programs, run = [], []

    def backend(graph, inputs):
        programs.append(graph)
        number = len(programs)

        def program(*inputs):
            run.append(number)
            return graph(*inputs)

        return program

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleDict({"0": Layer(2, 2)})
    model.forward = lambda x: model.blocks["0"](x)
    compilation.compile_model(model, by_block, backend=backend)
    with torch.no_grad():
        for size in (8, 5, 8, 5):
            model(torch.ones(size, 2))
    assert run == [1, 2, 1, 2]


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


def test_auto_compiles_on_all_ranks_or_on_none():
    def function():
        compilation.compile_model = lambda *_, **__: None
        compilation.missing = lambda _: "a compiler" if gpc.get_global_rank() == 1 else None
        return compilation.compile_if_chosen(torch.nn.Linear(2, 2), "auto", torch.device("cuda"))

    assert fork_ranks.call(function, 2) == [False, False]


@pytest.mark.parametrize(
    ("kind", "variable", "value", "lacks"),
    [
        ("cpu", "CXX", "env g++", None),
        ("cpu", "CXX", "", "a C++ compiler"),
        ("cuda", "CC", "env gcc", "a C compiler, and 'env gcc' is not on PATH"),
        ("cuda", "CC", "env gcc", "or name it in CC, one program without options"),
    ],
)
def test_compiler_with_options_is_accepted_only_where_torch_accepts_it(kind, variable, value, lacks, monkeypatch):
    monkeypatch.setenv(variable, value)
    said = compilation.missing(torch.device(kind))
    assert said is None if lacks is None else lacks in said


def test_training_with_dropout_on_a_gpu_needs_a_c_compiler(monkeypatch):
    """To train: the kernel of dropout does, compiled model or not."""
    accelerator = SimpleNamespace(get_current_device=lambda: torch.device("cuda"))
    monkeypatch.setattr(compilation, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(compilation, "missing", lambda _: "a C compiler")
    compilation.check_kernels(torch.nn.Sequential(Dropout(0.0)))
    config = training.config_of(training.flags(script=training.CALTECH101, DROP_RATE=0.0), training.CALTECH101)
    compilation.check_kernels(build_timm_vit(config))
    engine = SimpleNamespace(model=torch.nn.Sequential(Dropout(0.0), Dropout(0.1)))
    with pytest.raises(UserError) as error:
        Trainer(engine).fit(train_dataloader=None, epochs=1)
    said = str(error.value)
    assert said == "on a GPU, DROP_RATE and DROP_PATH_RATE need a C compiler; or set both to 0"


@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_trains_eagerly_where_kernels_cannot_be_made(world_size, random_weights):
    """Each program whose compilation fails on a rank runs operator by operator on all its ranks, with a line there.

    On two ranks although all programs are in Inductor's cache.
    """

    def compiles(*_, **__):
        if gpc.get_global_rank() == world_size - 1:
            raise OSError("no space left\nin the cache")
        return pytest.fail  # the other rank has a program, which it must not run

    def function():
        compilation.why_eager = lambda device: None
        before = train(world_size, "auto" if world_size == 2 else False)
        torch.compiler.reset()
        compile_fx.compile_fx_inner = compiles
        said = []
        compilation.RankLogger.info = lambda self, message, ranks=None: said.append(message)
        return before, train(world_size, "auto"), said

    values = tensor("1d", 2) if world_size == 2 else {}
    answers = training.call(function, world_size, DEPTH=1, BATCH_SIZE=8, DROP_RATE=0.2, **values)
    for rank, (before, auto, (first, *failures)) in enumerate(answers):
        assert auto == pytest.approx(before, rel=1e-4)
        assert first.startswith("COMPILE = 'auto': on")
        failed = rank == world_size - 1
        assert len(failures) == 3 * failed, "of training's forward and backward pass, and of evaluation"
        assert all(line.endswith("is not compiled, since that failed: OSError: no space left") for line in failures)


def test_buckets_that_are_too_small_to_compile_with_are_refused():
    values = {"torch_ddp.bucket_cap_mb": 0.5, "BATCH_SIZE": 8}

    def refused():
        with pytest.raises(UserError, match=r"bucket_cap_mb = 0\.5 does not work with COMPILE = True, which takes"):
            train(2, True)
        return len(train(2, False))

    assert training.call(refused, 2, DEPTH=1, **values) == [7, 7]
