"""The planner names the fastest layouts that fit, and these run."""

import re
import shlex
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from colossal_vit.dry_run import report
from colossal_vit.parallel.layout import Layout

import fork_ranks
import train_dp
import train_hybrid
import training
from tools.planner import command, search, timing
from tools.planner.enumeration import Choice, enumerate_layouts
from tools.planner.machines import MACHINES, Machine, name_of, parse_specs
from tools.planner.request import request_of
from tools.planner.search import Prediction
from tools.planner.trace import Message, Pass
from vit_settings import check_vit

SIZE = dict(IMG_SIZE=64, PATCH_SIZE=8, HIDDEN_SIZE=96, DEPTH=4, NUM_HEADS=4, NUM_CLASSES=10, BATCH_SIZE=64)
SIZE |= {"NUM_MICRO_BATCHES": 1, "fp16.initial_scale": 1.0}


def argv_of(**values):
    return training.flags("NAIVE", **{**SIZE, **values})


def request_for(argv, world_size, script=train_hybrid):
    return request_of(script.SCRIPT, script.SCRIPT.parse([*argv, "--dry-run", "--world_size", str(world_size)]))


def run_planner(script, argv, world_size, machine="h100", *more):
    words = [str(fork_ranks.ROOT / script), *argv, "--world_size", str(world_size), "--machine", machine, *more]
    return fork_ranks.run("tools/planner/__main__.py", words)


def test_every_layout_is_one_that_the_scripts_accept():
    """And each comes once; on 8 ranks there are some of every kind."""
    config = training.config_of(argv_of())
    choices = enumerate_layouts(config, 8, 64, check_vit)
    assert len(set(choices)) == len(choices)
    assert {choice.tensor for choice in choices} == {
        *((None, 1, None), ("1d", 2, None), ("1d", 4, None)),
        *(("2d", 4, None), ("2.5d", 8, 2), ("3d", 8, None)),
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
        (training.MIXED_CIFAR10, lambda choice: choice.batch % 2 == 0),
        ({"torch_ddp.static_graph": True}, lambda choice: choice.accumulation == 1 and not choice.zero),
        ({"amp": "TORCH"}, lambda choice: choice.layout.pipeline == 1),
        ({"amp": "APEX"}, lambda choice: choice.layout.pipeline == 1),
    ],
)
def test_layouts_that_features_exclude_are_left_out(values, allowed):
    without = {key: value for key, value in SIZE.items() if key != "fp16.initial_scale"}
    config = training.config_of(training.flags(**{**without, "amp": "NAIVE", **values}))
    choices = set(enumerate_layouts(config, 4, 64, check_vit))
    everything = enumerate_layouts(training.config_of(argv_of()), 4, 64, check_vit)
    assert choices == set(filter(allowed, everything))


def test_search_takes_the_fastest_layouts_that_a_dry_run_finds_small_enough():
    """With 1 GB of 2 reserved. What has more images than a layout that is too large is not measured."""
    one, pipeline = Layout(2, 1, 1, None, 1), Layout(1, 2, 1, None, 1)
    large, larger, small = Choice(one, 16), Choice(one, 32), Choice(one, 2)
    heavy, second = Choice(pipeline, 64, micro_batches=4), Choice(pipeline, 64, micro_batches=8)
    seconds = {small: 5, large: 1, heavy: 3, second: 4, larger: 2}
    measured = {large: 1.5e9, small: 0.5e9, second: 1e9}
    asked = []

    def measure(choice):
        asked.append(choice)
        return measured[choice]

    predictor = SimpleNamespace(
        machine=SimpleNamespace(memory_gb=2, reserved_gb=1),
        predict=lambda choice: Prediction(choice, seconds[choice], 1, 0, 0),
        least_memory=lambda choice: 7e9 if choice is heavy else 1e8,
    )
    plan = search.search(predictor, seconds, measure)
    assert [(each.choice, each.memory) for each in plan.best] == [(second, 1e9), (small, 0.5e9)]
    assert asked == [large, second, small]
    assert (plan.num_layouts, plan.num_too_large, plan.limit, plan.smallest) == (5, 3, 1e9, 1.5e9)


def test_a_pass_takes_as_long_as_the_device_computes_or_the_host_starts_its_operators():
    """By hand: a product of 63 GFLOP at 63 % of 100 TFLOP/s, 0.6 GB at 60 % of 1,000 GB/s, and what takes no time."""
    machine = Machine(100, 10, 80, 1000, 1, 1, launch_us=50)
    operations = np.array([[63e9, 0], [0, 0.6e9], [0, 0]])
    assert machine.compute(Pass(operations, [])) == pytest.approx(1e-3 + 1e-3 + 5e-6)
    assert machine.compute(Pass(operations[[2] * 8], [])) == pytest.approx(8 * 50e-6)
    assert machine.compute(Pass(operations[[0, *[2] * 8]], [])) == pytest.approx(1e-3 + 8 * 5e-6)


def test_time_of_collectives_on_gpus_is_as_worked_out_by_hand():
    """By hand: 1 GB in a ring of 4, at 80 % of 450 GB/s; between nodes all cards of a node carry it."""
    machine = MACHINES["h100"]
    on_node = machine.send(Message("all_reduce", 4, 1e9), 8)
    assert on_node == pytest.approx(2 * 3 / 4 * 1e9 / 360e9 + 2 * 10e-6)
    between = machine.send(Message("all_reduce", 16, 1e9), 4)
    assert between == pytest.approx(2 * 15 / 16 * 1e9 / (4 * 50e9 * 0.8) + 4 * 20e-6)
    assert machine.send(Message("all_reduce", 1, 1e9), 8) == 0


@pytest.mark.parametrize(
    ("zero", "reduction", "broadcast", "overlap", "exposed"),
    [
        (0, 8, 0, True, 8 / 4),  # all but the last of 4 buckets beside a backward pass of 20 s
        (0, 40, 0, True, 40 - 20 * 3 / 4),  # from the first bucket on, the network is what is slow
        (1, 8, 8, True, 8 / 4 + 8 / 4),  # the first weights are waited for
        (1, 8, 40, True, 8 / 4 + 40 - 10 * 3 / 4),
        (2, 8, 8, True, 8 / 4 + 8 / 4),
        (2, 24, 8, True, 8 / 4 + 2 * (24 - 20) + 24 - 20 * 3 / 4),  # of 3 passes
        (2, 8, 9, False, 9 + 3 * 8),
    ],
)
def test_time_in_which_gradients_or_weights_are_sent_alone_is_as_worked_out_by_hand(
    zero, reduction, broadcast, overlap, exposed
):
    stage = search._Stage(10.0, 20.0, 0.0, reduction, broadcast, num_buckets=4, update=1.0)
    choice = Choice(Layout(2, 1, 1, None, 1), 8, accumulation=3, zero=zero)
    assert choice.passes == 3
    assert stage.exposed(choice, overlap) == pytest.approx(exposed)


def test_pipeline_with_more_micro_batches_waits_less():
    """More micro-batches, less waiting; computing, communicating and waiting are the whole step."""

    def shares():
        request = request_for(argv_of(), 4)
        predictor = search.Predictor(request.config, Machine(1e-3, 1e-3, 80, 1e3, 1e3, 1e3), request.trace)
        layout = Layout(1, 4, 1, None, 1)
        return [predictor.predict(Choice(layout, 64, 1, number)) for number in (4, 16, 64)]

    few, more, most = fork_ranks.call(shares, launched=False)[0]
    assert few.bubble > more.bubble > most.bubble > 0
    for each in (few, more, most):
        assert each.computing + each.communicating + each.bubble == pytest.approx(1)


def test_the_best_layout_really_runs(monkeypatch, tmp_path):
    """The flags that are printed make the layout that they name, with the memory and the images that are printed."""
    monkeypatch.setattr(search, "SHOWN", 2)
    result = run_planner(training.HYBRID, argv_of(BATCH_SIZE=16), 2, "h100", "--output", str(tmp_path / "plan"))
    assert result.codes == [0], str(result)
    said = result.stdout[0]
    assert "2 ranks, h100, 32 images per step: " in said
    assert (tmp_path / "plan/plan.png").stat().st_size > 0
    row, *_ = (line for line in said.splitlines() if line.startswith("data") and "%" in line)
    layout, _, memory, *_ = re.split("  +", row)
    flags = [*argv_of(), *shlex.split(said.splitlines()[-1])]

    def peak():
        args = train_hybrid.SCRIPT.parse([*flags, "--dry-run", "--world_size", "2"])
        return max(each.memory["peak"] for each in report.plan_stages(partial(train_hybrid.SCRIPT.build_fake, args)))

    assert f"{fork_ranks.call(peak, launched=False)[0] / 1e9:.1f}" == memory
    result = fork_ranks.run(training.HYBRID, [*flags, "--output", str(tmp_path / "run"), "--max-steps", "1"], 2)
    assert result.codes == [0] * 2, str(result)
    assert layout.split(",")[0] in result.stdout[0]
    assert "global batch 32 = " in result.stdout[0]


TIMM = {"MODEL": "vit_tiny_patch16_224", "IMG_SIZE": 32, "BATCH_SIZE": 8, "COMPILE": False}
OWN = dict(half_tflops=100, single_tflops=10, memory_gb=24, memory_gb_s=900, link_gb_s=30, network_gb_s=3)


def test_a_plan_for_timms_model_and_a_machine_of_ones_own_is_data_parallel(monkeypatch):
    monkeypatch.setattr(search, "SHOWN", 3)
    argv = training.flags(script=training.DATA_PARALLEL, small=False, **TIMM, DEPTH=2, gradient_accumulation=1)
    specs = [word for key, value in OWN.items() for word in ("--spec", f"{key}={value}")]
    result = run_planner(training.DATA_PARALLEL, argv, 4, "mine", *specs)
    assert result.codes == [0], str(result)
    said = result.stdout[0]
    assert re.search(r"^4 ranks, mine, 32 images per step: \d+ layouts; predicted, not measured", said)
    rows = [line for line in said.splitlines() if line.startswith("data")]
    assert len(rows) == 3
    assert all(row.startswith("data 4 × pipeline 1 × tensor 1") for row in rows)
    assert "parallel" not in said.splitlines()[-1]


def test_layouts_are_timed_here(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "SHOWN", 1)
    monkeypatch.setattr(timing, "COUNTED", 1)
    argv = training.flags(DEPTH=2, BATCH_SIZE=4)
    result = run_planner(training.HYBRID, argv, 1, "here", "--output", str(tmp_path))
    assert result.codes == [0], str(result)
    first, _, header, row, _, _, flags = result.stdout[0].splitlines()
    assert first == "1 ranks, here, 4 images per step: 1 layouts, each timed for 1 steps"
    assert re.split("  +", header) == ["layout", "images/s, measured", "GB per rank"]
    assert float(re.split("  +", row)[1].replace(",", "")) > 0
    assert flags.startswith('--set "BATCH_SIZE=')


IMAGENET_ON_3 = {"script": training.IMAGENET, "world_size": 3}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"machine": "h10"}, "--machine h10: no such machine; did you mean h100?"),
        ({"machine": "mine"}, "(or describe it with --spec: half_tflops, single_tflops, "),
        ({"parallel.pipeline": 3}, "world size 4 does not fit parallel.pipeline = 3"),
        ({"MLP_RATIO": 0.001}, "MLP_RATIO = 0.001 of HIDDEN_SIZE = 96 makes 0 hidden units"),
        (
            {"script": training.DATA_PARALLEL, "specs": ["--spec", "memory_gb=2.001"]},
            "layouts fits the memory of a rank, 2.0 GB less 2.0 GB for what is no tensor; the smallest takes at least ",
        ),
        ({**IMAGENET_ON_3, "GLOBAL_BATCH": 100, "mix": None}, "= 100 images per step: make them 99 or 102 (a multiple"),
        ({**IMAGENET_ON_3, "GLOBAL_BATCH": 9}, "make them 6 or 12 (a multiple of 6)"),
        ({**IMAGENET_ON_3, "parallel.pipeline": 3}, "this script is data parallel only"),
        ({**IMAGENET_ON_3, "DEPTH": 1}, "DEPTH of at least 2"),
        ({"zero.stage": 3}, "the planner does not know zero.stage = 3"),
        ({"finetune.frozen_blocks": 3}, "trained as a whole, but finetune freezes a part: add --set finetune=None"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(given, line):
    values = dict(given)
    script, world_size = values.pop("script", training.HYBRID), values.pop("world_size", 4)
    machine, specs = values.pop("machine", "h100"), values.pop("specs", [])
    if script == training.HYBRID:
        argv = argv_of(**values)
    else:
        config = "config.py" if script == training.IMAGENET else None
        argv = training.flags(script=script, config=config, small=False, **{**TIMM, **values})
    result = run_planner(script, argv, world_size, machine, *specs)
    assert result.codes == [2], str(result)
    assert line in result.stderr[0]
    assert len(result.stderr[0].splitlines()) == 1
    assert result.stderr[0].startswith("planner: error: ")


@pytest.mark.parametrize("word", ["memory=8", "memory_gb=-8", "memory_gb=x", "memory_gb", "matmul_share=1.5"])
def test_a_spec_that_is_no_positive_number_is_refused(word):
    with pytest.raises(command.UserError, match=f"--spec {word}: "):
        parse_specs([word])


def test_gpus_are_known_by_the_names_that_drivers_give_them():
    """Not a smaller or faster GPU whose name has the same words."""
    assert name_of("NVIDIA H200") == "h200"
    assert name_of("NVIDIA A100-SXM4-40GB") == "a100-40gb"
    assert name_of("NVIDIA H100 PCIe") is None


def test_the_block_that_stands_for_all_of_timms_has_stochastic_depth():
    def num_operators(rate):
        values = {**TIMM, "DEPTH": 3, "HIDDEN_SIZE": 48, "NUM_HEADS": 4, "DROP_PATH_RATE": rate}
        argv = training.flags(script=training.DATA_PARALLEL, small=False, **values)
        return len(request_for(argv, 1, train_dp).trace((None, 1, None)).part("block", "forward", 8).operations)

    def difference():
        return num_operators(0.1) - num_operators(0.0)

    assert fork_ranks.call(difference, launched=False)[0] >= 2 * 2  # a mask and a product for each branch


def test_blocks_of_a_hybrids_embedding_belong_to_the_embedding():
    def parameters():
        values = {**TIMM, "MODEL": "vit_small_r26_s32_224", "IMG_SIZE": 64}
        argv = training.flags(script=training.DATA_PARALLEL, small=False, **values)
        return request_for(argv, 1, train_dp).trace((None, 1, None)).parameters

    found = fork_ranks.call(parameters, launched=False)[0]
    assert sorted(found["block"]) == sorted(found["last"])
