"""A dry run says, on one process, what really happens on many."""

from functools import partial

import pytest
import torch
from colossal_vit.data.batches import FakeLoader
from colossal_vit.dry_run import report
from colossal_vit.dry_run.meter import StepPlan, measure
from colossal_vit.engine import build_optimizer, initialize
from colossal_vit.parallel.layout import Layout
from colossalai.legacy import nn as col_nn
from colossalai.legacy.core import global_context as gpc
from torch.utils._python_dispatch import TorchDispatchMode

import fork_ranks
import train_dp
import train_hybrid
import training
import vit
from layouts import FOLDER, LAYOUTS, set_flags, tensor

PLAIN = (
    "DP 2",
    "PP 2, 4 micro-batches",
    "PP 2 interleaved × 2",
    "1D 2",
    "2D 4",
    "2.5D 8",
    "3D 8",
    "DP 2 × PP 2 × 1D 2",
)
CASES = {
    **{name: LAYOUTS[name] for name in PLAIN},
    "DP 2, NAIVE": (2, {**LAYOUTS["DP 2"][1], "amp": "NAIVE"}),
    "DP 2, split state": (2, {**LAYOUTS["DP 2"][1], "zero.stage": 1}),
    "DP 2 × PP 2, split state and gradients, NAIVE": (
        4,
        {**LAYOUTS["DP 2 × PP 2"][1], "gradient_accumulation": 2, "zero.stage": 2, "amp": "NAIVE"},
    ),
    "DP 2, split weights, NAIVE": (2, {**LAYOUTS["DP 2"][1], "zero.stage": 3, "amp": "NAIVE"}),
    "DP 2 × PP 2, split weights": (
        4,
        {**LAYOUTS["DP 2 × PP 2"][1], "gradient_accumulation": 2, "zero.stage": 3},
    ),
    "2D 4, TORCH, dropout": (4, {**LAYOUTS["2D 4"][1], "amp": "TORCH", "DROP_RATE": 0.1, "DROP_PATH_RATE": 0.1}),
    "2D 4, Muon": (4, {**LAYOUTS["2D 4"][1], "OPTIMIZER": "muon"}),
    "DP 2 × 1D 2, Muon, split state, NAIVE": (
        4,
        {"BATCH_SIZE": 16, **tensor("1d", 2), "OPTIMIZER": "muon", "zero.stage": 1, "amp": "NAIVE"},
    ),
    "PP 2 × 1D 2, NAIVE": (4, {**LAYOUTS["PP 2 × 1D 2"][1], "amp": "NAIVE"}),
    "PP 2 × 1D 2, NAIVE, half of it frozen": (
        4,
        {**LAYOUTS["PP 2 × 1D 2"][1], "amp": "NAIVE", "finetune.frozen_blocks": 2},
    ),
    "DP 2 × PP 2, accumulated, recomputed": (
        4,
        {**LAYOUTS["DP 2 × PP 2"][1], "gradient_accumulation": 2, "CHECKPOINT": True},
    ),
}


def planned(argv: list[str], world_size: int) -> dict[int, StepPlan]:
    """By rank: what a dry run says of the first rank of each stage, and where ranks differ, of two more."""

    def plan():
        args = training.arguments(train_hybrid.main, [*argv, "--dry-run", "--world_size", str(world_size)])
        build_rank = partial(train_hybrid.SCRIPT.build_fake, args)
        plans = report.plan_stages(build_rank)
        ranks = plans[0].stage_ranks
        if plans[0].layout.batch_parts > 1 and len(plans) == 1:
            ranks = [0, 1, plans[0].layout.tensor - 2]  # in 2.5D and 3D also one that owns no piece of a head
            plans += [report.plan_rank(build_rank, rank) for rank in ranks[1:]]
        return dict(zip(ranks, plans, strict=True))

    return fork_ranks.call(plan, launched=False)[0]


def really(argv: list[str], world_size: int) -> list[StepPlan]:
    """What every rank measures of a step with real tensors and peers."""

    def make_a_step():
        layout = Layout.of(gpc.config, world_size)
        model = vit.build_vit(gpc.config, layout)
        engine, *_ = initialize(model, build_optimizer(gpc.config, model), col_nn.CrossEntropyLoss(label_smoothing=0.1))
        size = gpc.config.IMG_SIZE
        batches = FakeLoader(4, (gpc.config.BATCH_SIZE, 3, size, size), torch.device("cpu"))
        return measure(engine, batches)

    return fork_ranks.call(make_a_step, world_size, **training.config_of(argv))


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_says_what_real_ranks_measure(case):
    world_size, values = CASES[case]
    depth = 2 if values.get("parallel.tensor.mode", "1d") != "1d" else 4
    argv = training.flags(**{"HIDDEN_SIZE": 64, "DEPTH": depth, **values})
    plans, measured = planned(argv, world_size), really(argv, world_size)
    peaks = [real.memory["peak"] for real in measured]
    for _ in range(4):  # gloo may let go of a message later than a collective returns, and never earlier
        if all(peaks[rank] == pytest.approx(said.memory["peak"], rel=0.05) for rank, said in plans.items()):
            break
        peaks = [min(peak, real.memory["peak"]) for peak, real in zip(peaks, really(argv, world_size), strict=True)]
    for rank, said in plans.items():
        real = measured[rank]
        assert (list(said.shards), said.parameters) == (list(real.shards), real.parameters), rank
        assert said.calls == real.calls, rank
        assert said.sent == real.sent, rank
        for part in ("weights", "gradients", "optimizer"):
            assert said.memory[part] == real.memory[part], (rank, part)
        assert said.memory["peak"] == pytest.approx(peaks[rank], rel=0.05), rank
    whole = {name for said in plans.values() for name in said.shards}
    some = {"cls_token", "pos_embed", "blocks.0.attn.qkv.weight", f"blocks.{depth - 1}.mlp.fc2.bias", "head.weight"}
    assert some <= whole


@pytest.mark.parametrize("amp", [None, "NAIVE"])
def test_a_moving_average_takes_four_bytes_a_parameter_of_its_owner(amp):
    """On two ranks with ZeRO, each of which owns about half of them."""
    values = {**LAYOUTS["DP 2"][1], "zero.stage": 1}
    plain, averaged = (planned(training.flags(amp, **values, ema=ema), 2)[0] for ema in (None, {}))
    more = {part: averaged.memory[part] - plain.memory[part] for part in plain.memory}
    assert more["optimizer"] == more["peak"] == pytest.approx(4 * plain.parameters / 2, rel=0.05)
    assert more["weights"] == more["gradients"] == more["activations"] == 0


def test_a_report_is_of_any_world_size(tmp_path):
    """As a user sees it, for a world that no test machine has."""
    values = {**LAYOUTS["DP 2 × PP 2 × 1D 2"][1], "checkpoint.every_minutes": 144}
    argv = [*training.flags(**values), "--output", str(tmp_path / "run")]
    result = fork_ranks.run(training.HYBRID, [*argv, "--dry-run", "--world_size", "1024"])
    assert result.codes == [0], str(result)
    said = result.stdout[0]
    assert "1024 process(es): data 256 × pipeline 2 × tensor 2 (1d)" in said
    assert "stage 1, rank(s) 2-3, 6-7, " in said
    assert "blocks 2-3, norm, head" in said
    assert "(2 - 1) / (1 × 2) = 50.0%" in said
    assert "a failure loses 72 minutes on average" in said
    assert "0.5% of the time with one in ten days, 5.0% of the time with one a day, 50.0% of" in said
    picture = tmp_path / "run/layout.png"
    assert f"picture: {picture}" in said
    assert list((tmp_path / "run").iterdir()) == [picture]


@pytest.mark.parametrize(
    ("layout", "flags", "said"),
    [
        ("3D 8", [], "8 process(es): data 1 × pipeline 1 × tensor 8 (3d)"),
        ("DP 2", ["--world_size", "4", "--rank", "3"], "4 process(es): data 4"),
    ],
    ids=["the fewest by default", "on a rank started by hand"],
)
def test_a_report_is_of_the_processes_that_are_asked_for(layout, flags, said):
    result = fork_ranks.run(training.HYBRID, [*training.flags(**LAYOUTS[layout][1]), "--dry-run", *flags])
    assert result.codes == [0], str(result)
    assert said in result.stdout[0]


def test_under_a_launcher_one_process_reports():
    result = fork_ranks.run(training.HYBRID, [*training.flags(**LAYOUTS["DP 2"][1]), "--dry-run"], world_size=2)
    assert result.codes == [0, 0], str(result)
    assert "2 process(es): data 2" in result.stdout[0]
    assert result.stdout[1] == ""


def test_help_is_printed_whatever_else_is_asked_for():
    result = fork_ranks.run(training.HYBRID, ["--dry-run", "--help"])
    assert result.codes == [0]
    assert "--max-steps N" in result.stdout[0]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--world_size", "3"], "start 2 or 4 processes"),
        (["--world_size", "-1"], "--world_size -1: must be a whole number from 1 to"),
        (["--world_size", "2", "--rank", "7"], "--rank 7 does not fit --world_size 2: it must be 0 to 1"),
        (["--world_size", "1000000"], "an epoch has no batch of BATCH_SIZE for each rank: start fewer processes"),
        (["--set", "HIDDEN_SIZE=33"], "HIDDEN_SIZE = 33"),
        # A linear schedule would divide by its number of steps.
        (
            ["--set", "gradient_accumulation=1000", "--set", "SCHEDULE='linear'", "--world_size", "4"],
            "gradient_accumulation = 1000, but an epoch has only ",
        ),
    ],
)
def test_a_dry_run_that_cannot_be_made_is_refused_in_one_line(more, expected):
    result = fork_ranks.run(training.HYBRID, [*training.flags(**LAYOUTS["1D 2"][1]), "--dry-run", *more])
    assert result.codes == [2], str(result)
    assert expected in result.stderr[0]
    assert result.stderr[0].count("\n") == 1


def test_a_report_of_the_data_parallel_script_names_all_its_layers():
    argv = ["--config", "configs/config_data_parallel.py", "--dry-run", "--set", "gradient_accumulation=1"]
    result = fork_ranks.run(training.DATA_PARALLEL, argv)
    assert result.codes == [0], str(result)
    assert "cls_token, pos_embed, patch_embed, blocks 0-11, norm, head; 85,806,346 parameters" in result.stdout[0]


@pytest.mark.parametrize(("rate", "draws"), [(0.0, 0), (0.1, 4)])
def test_timms_stochastic_depth_is_planned_with_its_own_rates(rate, draws):
    """Of three blocks the first one has rate 0, and the others draw for both of their branches."""

    class Draws(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.colossal_vit.drop.default
            return function(*args, **(kwargs or {}))

    def observe(engine, batches):
        engine.train()
        with Draws() as drawn:
            engine(next(iter(batches))[0])
        return drawn.count

    def plan():
        values = {"DEPTH": 3, "HIDDEN_SIZE": 48, "NUM_HEADS": 4, "DROP_PATH_RATE": rate, "DROP_RATE": 0.0}
        argv = ["--config", str(FOLDER / "configs/config_data_parallel.py"), *set_flags(values), "--set", "fp16=None"]
        built = train_dp.SCRIPT.build_fake(training.arguments(train_dp.main, argv))
        return observe(built.engine, built.train_dataloader)

    assert fork_ranks.call(plan, launched=False) == [draws]
