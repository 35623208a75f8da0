"""`--plan`: memory by formula is that of dry runs, and the layouts that it names run."""

import re
import runpy
import shlex
from functools import partial
from types import SimpleNamespace

import pytest
from colossal_vit.config.settings import PATHS
from colossal_vit.launch.flags import parse
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.partition import partition_blocks
from colossal_vit.plan import command, memory, report, search
from colossal_vit.plan.enumeration import Choice, enumerate_layouts, own_layout
from colossal_vit.plan.machines import MACHINES, RESERVED_GB, Gpus
from colossal_vit.plan.request import request_of
from colossal_vit.plan.search import Prediction
from colossal_vit.plan.trace import Message

import fork_ranks
import train_dp
import train_hybrid
import training
import vit
from layouts import PIPELINE, tensor

SIZE = dict(IMG_SIZE=64, PATCH_SIZE=8, HIDDEN_SIZE=192, DEPTH=6, NUM_HEADS=6, NUM_CLASSES=10, BATCH_SIZE=64)
SIZE |= {"NUM_MICRO_BATCHES": 1, "fp16.initial_scale": 1.0}


def argv_of(**values):
    return training.flags("NAIVE", **{**SIZE, **values})


def request_for(argv, world_size):
    args = training.arguments(train_hybrid.main, [*argv, "--plan", "h100", "--world_size", str(world_size)])
    return request_of(train_hybrid.build, args)


LAYOUTS = {
    "accumulation": (1, {"gradient_accumulation": 2}),
    "recomputed": (1, {"CHECKPOINT": True}),
    "DP 2": (2, {}),
    "DP 2, two images": (2, {"BATCH_SIZE": 2}),
    "average": (1, {"ema.decay": 0.99, "BATCH_SIZE": 2}),
    "DP 2, accumulation": (2, {"gradient_accumulation": 2, "BATCH_SIZE": 8}),
    "zero 2, accumulation": (8, {"zero.stage": 2, "gradient_accumulation": 2}),
    "PP 2, 8 micro-batches": (2, {**PIPELINE, "NUM_MICRO_BATCHES": 8}),
    "interleaved": (4, {**PIPELINE, "NUM_MICRO_BATCHES": 4, "model.num_chunks": 2, "zero.stage": 1}),
    "1D 2": (2, tensor("1d", 2)),
    "2D 4 × PP 2": (8, {**PIPELINE, "NUM_MICRO_BATCHES": 4, **tensor("2d", 4), "NUM_HEADS": 6}),
    "2.5D 8": (8, tensor("2.5d", 8, depth=2)),
    "3D 8": (8, tensor("3d", 8)),
}


def peaks_of_dry_run(argv, world_size):
    """Bytes, by stage."""
    args = training.arguments(train_hybrid.main, [*argv, "--dry-run", "--world_size", str(world_size)])
    return [each.memory["peak"] for each in report.plan_stages(partial(train_hybrid.SCRIPT.build_fake, args))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_that_of_a_dry_run(name):
    world_size, values = LAYOUTS[name]
    argv = argv_of(**values)

    def peaks():
        request = request_for(argv, world_size)
        choice = own_layout(request.config, world_size)
        trace = request.trace(choice.tensor)
        blocks = partition_blocks(request.config, choice.layout.pipeline * choice.chunks)
        stages = memory.cut(blocks, choice.layout.pipeline)
        image = 3 * 4 * request.config.IMG_SIZE**2
        predicted = [memory.stage_memory(choice, trace, chunks, stage, image) for stage, chunks in enumerate(stages)]
        return predicted, peaks_of_dry_run(argv, world_size)

    predicted, measured = fork_ranks.call(peaks, launched=False)[0]
    assert predicted == pytest.approx(measured, rel=0.05)


def test_every_layout_is_one_that_the_scripts_accept():
    """And each comes once; on 8 ranks there are some of every kind."""
    config = training.config_of(argv_of())
    choices = enumerate_layouts(config, 8, 64, "train_hybrid", vit.check_vit)
    assert len(set(choices)) == len(choices)
    assert {choice.tensor for choice in choices} == {
        *((None, 1, None), ("1d", 2, None), ("2d", 4, None), ("2.5d", 8, 2), ("3d", 8, None))
    }
    for choice in choices:
        layout = choice.layout
        assert layout.data * layout.pipeline * layout.tensor == 8
        assert choice.batch * choice.accumulation * layout.data == 64
        assert choice.batch % (choice.micro_batches * layout.batch_parts) == 0


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({}, lambda choice: True),
        ({"mix.mixup": 0.8}, lambda choice: choice.batch % 2 == 0),
        ({"torch_ddp.static_graph": True}, lambda choice: choice.accumulation == 1 and not choice.zero),
        ({"amp": "TORCH"}, lambda choice: choice.layout.pipeline == 1),
        ({"amp": "APEX"}, lambda choice: choice.layout.pipeline == 1),
    ],
)
def test_layouts_that_features_exclude_are_left_out(values, allowed):
    without = {key: value for key, value in SIZE.items() if key != "fp16.initial_scale"}
    config = training.config_of(training.flags(**{**without, "amp": "NAIVE", **values}))
    choices = set(enumerate_layouts(config, 4, 64, "train_hybrid", vit.check_vit))
    everything = enumerate_layouts(training.config_of(argv_of()), 4, 64, "train_hybrid", vit.check_vit)
    assert choices == set(filter(allowed, everything))


def test_layouts_within_the_noise_are_equal_and_the_simplest_comes_first():
    one = Layout(2, 1, 1, None, 1)
    plain, accumulated = Choice(one, 32), Choice(one, 2, accumulation=16, zero=1)
    pipeline, larger = Choice(Layout(1, 2, 1, None, 1), 64, 1, 4), Choice(one, 64)
    seconds = {accumulated: 1.0, plain: 1.08, pipeline: 1.2, larger: 0.5}

    def plan(noise):
        predictor = SimpleNamespace(
            machine=SimpleNamespace(memory_gb=3, reserved_gb=1, noise=noise),
            lower=None,
            memory=lambda choice: 3e9 if choice is larger else 1e9,
            predict=lambda choice: Prediction(choice, seconds[choice], 1e9, 1, 0, 0),
        )
        found = search.search(predictor, seconds)
        assert (found.num_layouts, found.num_too_large, found.limit, found.smallest) == (4, 1, 2e9, 1e9)
        return [each.choice for each in found.best], found.num_equal

    assert plan(0.0) == ([accumulated, plain, pipeline], 1)
    assert plan(0.1) == ([plain, accumulated, pipeline], 2)
    assert plan(0.3) == ([plain, accumulated, pipeline], 3)


def test_collectives_and_products_on_gpus():
    """By hand: 1 GB in a ring of 4, at 80 % of 450 GB/s; between nodes all cards of a node carry it."""
    machine = MACHINES["h100"]
    on_node = machine.send(Message("all_reduce", 4, 1e9), 8)
    assert on_node == pytest.approx(2 * 3 / 4 * 1e9 / 360e9 + 2 * 10e-6)
    between = machine.send(Message("all_reduce", 16, 1e9), 4)
    assert between == pytest.approx(2 * 15 / 16 * 1e9 / (4 * 50e9 * 0.8) + 4 * 20e-6)
    assert machine.send(Message("all_reduce", 1, 1e9), 8) == 0


SCRIPTS = {  # those that train timm's model, with a config
    training.DATA_PARALLEL: "configs/config_data_parallel.py",
    training.CALTECH101: "config/config_AMP_torch.py",
    training.IMAGENET: "config.py",
}


def flags_of(script, **values):
    """The command line of a small model in half precision, with two batches in a step."""
    values["gradient_accumulation"] = 2
    if script == training.HYBRID:
        return argv_of(**values)
    sizes = {"MODEL": "vit_tiny_patch16_224", "IMG_SIZE": 32, "BATCH_SIZE": 8, "COMPILE": False}
    return training.flags(script=script, config=SCRIPTS[script], small=False, **{**sizes, **values})


def run_plan(script=training.HYBRID, world_size=4, machine="h100", **values):
    argv = [*flags_of(script, **values), "--plan", machine, "--world_size", str(world_size)]
    return fork_ranks.run(script, argv)


def test_the_best_layout_really_runs(tmp_path):
    """The flags that `--plan` prints make the layout that it names, with the same images in a step."""
    result = run_plan(BATCH_SIZE=8)
    assert result.codes == [0], str(result)
    said = result.stdout[0]
    assert "4 ranks, h100, 64 images per step: " in said
    best = said.splitlines()[-1]
    argv = [*argv_of(), *shlex.split(best), "--set", "NUM_EPOCHS=1", "--output", str(tmp_path), "--max-steps", "1"]
    result = fork_ranks.run(training.HYBRID, argv, 4)
    assert result.codes == [0] * 4, str(result)
    (row,) = [line for line in said.splitlines() if line.startswith("data") and "%" in line][:1]
    assert row.split(",")[0].split("  ")[0] in result.stdout[0]
    assert "global batch 64 = " in result.stdout[0]


def test_what_is_refused_does_not_fit():
    """With the memory of a GPU between that of two layouts, the larger one is left out; its dry run needs more."""
    argv = argv_of(**{"machine.memory_gb": RESERVED_GB + 0.2})

    def refused():
        request = request_for(argv, 2)
        plan, _ = command.make_plan(request)
        choices = request.choices()
        predictor = search.Predictor(request.config, MACHINES["h100"], request.trace)
        large = [choice for choice in choices if predictor.memory(choice) > 0.2e9]
        smallest = min(large, key=predictor.memory)
        peaks = peaks_of_dry_run([*argv, *shlex.split(smallest.flags(hybrid=True))], 2)
        return plan.num_too_large, len(large), [predictor.memory(best.choice) for best in plan.best], peaks

    num_refused, num_large, fitting, peaks = fork_ranks.call(refused, launched=False)[0]
    assert num_refused == num_large > 0
    assert max(fitting) <= 0.2e9
    assert max(peaks) > 0.2e9


IMAGENET_ON_3 = {"script": training.IMAGENET, "world_size": 3}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"machine": "h10"}, "--plan h10: no such machine; did you mean h100?"),
        (
            {"machine": "mine", "machine.memory_gb": 8},
            "(or describe it in a config block machine: half_tflops, single_tflops, ",
        ),
        ({"machine.memory_gb": -8}, "machine.memory_gb = -8, but it must be"),
        ({"parallel.pipeline": 3}, "world size 4 does not fit parallel.pipeline = 3"),
        ({"MLP_RATIO": 0.001}, "MLP_RATIO = 0.001 of HIDDEN_SIZE = 192 makes 0 hidden units"),
        (
            {"script": training.DATA_PARALLEL, "machine.memory_gb": 2},
            "layouts fits the memory of a rank, 2.0 GB less 2.0 GB for what is no tensor; the smallest takes 0.1 GB",
        ),
        ({**IMAGENET_ON_3, "GLOBAL_BATCH": 100, "mix": None}, "= 100 images per step: make them 99 or 102 (a multiple"),
        ({**IMAGENET_ON_3, "GLOBAL_BATCH": 9}, "make them 6 or 12 (a multiple of 6)"),
        ({**IMAGENET_ON_3, "MODEL": "vit_large"}, "MODEL = 'vit_large' is not a Vision Transformer of timm"),
        ({**IMAGENET_ON_3, "parallel.pipeline": 3}, "this script is data parallel only"),
        ({**IMAGENET_ON_3, "DEPTH": 1}, "DEPTH of at least 2"),
        ({"finetune.frozen_blocks": 3}, "trained as a whole, but finetune freezes a part: add --set finetune=None"),
        ({"finetune.linear_probe": True}, "trained as a whole, but finetune freezes a part"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(given, line):
    result = run_plan(**given)
    assert result.codes == [2], str(result)
    assert line in result.stderr[0]
    assert len(result.stderr[0].splitlines()) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_plan_of_each_script_names_layouts_that_it_runs(script):
    """timm's model has its depth from its name; the flags that are printed pass a dry run."""
    result = run_plan(script, **{"GLOBAL_BATCH": 64} if script == training.IMAGENET else {})
    assert result.codes == [0], str(result)
    said = result.stdout[0]
    assert "4 ranks, h100, 64 images per step: " in said
    rows = [line.split("  ")[0] for line in said.splitlines() if line.startswith("data")]
    assert len(rows) == 10
    assert all(row.startswith("data 4 × pipeline 1 × tensor 1") for row in rows)
    argv = [*flags_of(script), *shlex.split(said.splitlines()[-1]), "--dry-run", "--world_size", "4"]
    result = fork_ranks.run(script, argv)
    assert result.codes == [0], str(result)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_runs_on_real_tensors_up_to_what_is_observed(script):
    """As `--plan here` has it: with so many images, and one process of one."""

    def observed():
        argv = [*flags_of(script, DEPTH=2, HIDDEN_SIZE=48, NUM_HEADS=4), "--plan", "here", "--world_size", "1"]
        build = runpy.run_path(str(fork_ranks.ROOT / script))["build"]
        (name,) = (name for name, path in PATHS.items() if path == script)
        request = request_of(build, parse(argv, script=name))
        return request.model((None, 1, None), lambda _, batches: tuple(next(iter(batches))[0].shape), 4)()

    assert fork_ranks.call(observed, launched=False) == [(4, 3, 32, 32)]


def test_the_block_that_stands_for_all_of_timms_has_stochastic_depth():
    def num_operators(rate):
        argv = flags_of(training.DATA_PARALLEL, DEPTH=3, HIDDEN_SIZE=48, NUM_HEADS=4, DROP_PATH_RATE=rate)
        request = request_of(train_dp.build, training.arguments(train_dp.main, [*argv, "--plan", "h100"]))
        trace = request.trace((None, 1, None))
        return len(trace.part("block", "forward", 8).operations)

    def difference():
        return num_operators(0.1) - num_operators(0.0)

    assert fork_ranks.call(difference, launched=False)[0] >= 2 * 2  # a mask and a product for each branch


def test_blocks_of_a_hybrids_embedding_belong_to_the_embedding():
    def parameters():
        argv = flags_of(training.DATA_PARALLEL, MODEL="vit_small_r26_s32_224", IMG_SIZE=64)
        request = request_of(train_dp.build, training.arguments(train_dp.main, [*argv, "--plan", "h100"]))
        return request.trace((None, 1, None)).parameters

    found = fork_ranks.call(parameters, launched=False)[0]
    assert sorted(found["block"]) == sorted(found["last"])


def test_a_machine_of_ones_own():
    own = dict(half_tflops=100, single_tflops=10, memory_gb=24, memory_gb_s=900, link_gb_s=30, network_gb_s=3)
    values = {f"machine.{key}": value for key, value in own.items()}
    result = run_plan(training.DATA_PARALLEL, machine="mine", **values)
    assert result.codes == [0], str(result)
    assert re.search(r"^4 ranks, mine, 64 images per step: \d+ layouts; predicted, not measured", result.stdout[0])


def test_layouts_that_are_far_behind_eagerly_are_not_lowered():
    """Others are ranked as they are compiled."""
    seconds = {"first": (1.0, 0.9), "second": (1.9, 0.8), "third": (2.1, 0.1), "does not fit": (0.1, 0.1)}
    machine, asked = SimpleNamespace(memory_gb=3, reserved_gb=1, noise=0.0), []

    def predictor(lower, compiled):
        def predict(choice):
            asked.append((choice, compiled))
            return Prediction(choice, seconds[choice][compiled], 1e9, 1.0, 0.0, 0.0)

        return SimpleNamespace(
            machine=machine,
            lower=lower,
            memory=lambda choice: 5e9 if choice == "does not fit" else 1e9,
            predict=predict,
            eager=lambda: predictor(None, False),
        )

    found = search.search(predictor(lambda: None, True), seconds)
    assert [each.choice for each in found.best] == ["second", "first"]
    assert (found.num_layouts, found.num_too_large) == (4, 1)
    assert [choice for choice, compiled in asked if compiled] == ["first", "second"]


def test_uneven_pipelines_wait():
    """More micro-batches, less waiting; computing, communicating and waiting are the whole step."""

    def shares():
        request = request_for(argv_of(), 4)
        predictor = search.Predictor(request.config, Gpus(1e-3, 1e-3, 80, 1e3, 1e3, 1e3), request.trace)
        layout = Layout(1, 4, 1, None, 1)
        return [predictor.predict(Choice(layout, 64, 1, number)) for number in (4, 16, 64)]

    few, more, most = fork_ranks.call(shares, launched=False)[0]
    assert few.bubble > more.bubble > most.bubble > 0
    for each in (few, more, most):
        assert each.computing + each.communicating + each.bubble == pytest.approx(1)
