"""`zero = dict(stage=3)`: weights split over data-parallel ranks change nothing of what is learned.

test_zero.py compares it with DDP to the bit, test_pairs.py has it with each other feature, test_resume.py resumes it.
"""

import functools

import pytest
import torch
from colossal_vit.engine.fully_sharded import DataShard

import schemas
import training
from layouts import LAYOUTS, OPTIMIZERS, PIPELINE, RANDOM, errors, tensor
from test_dry_run import planned

pytestmark = pytest.mark.usefixtures("few_test_images", "random_weights")
SPLIT = {"zero.stage": 3}
EXACT = 1e-12  # relative, in float64
HALF = {"BATCH_SIZE": 16}
SPLITS = {
    "DP 2": (2, HALF),
    "DP 8": (8, {"BATCH_SIZE": 4}),  # of the head's bias of 10 classes, five ranks have 2 elements, and three none
    "DP 2 × PP 2": LAYOUTS["DP 2 × PP 2"],
    "DP 2 × PP 2 interleaved × 2": (4, {**PIPELINE, **HALF, "model.num_chunks": 2}),
    "DP 2 × 1D 2": (4, {**HALF, **tensor("1d", 2)}),
    "DP 4 × 1D 2": (8, {"BATCH_SIZE": 8, **tensor("1d", 2)}),  # from three replicas on, copies get one gradient
    "DP 2 × 2D 4": LAYOUTS["DP 2 × 2D 4"],
    "DP 2 × 2.5D 4": (8, {**HALF, **tensor("2.5d", 4, depth=1)}),
    "DP 2 × 3D 8": (16, {**HALF, **tensor("3d", 8)}),
    "DP 2 × PP 2 × 1D 2": LAYOUTS["DP 2 × PP 2 × 1D 2"],
}
CURVES = [(layout, "lamb") for layout in SPLITS] + [("DP 2", "adamw"), ("DP 8", "adamw"), ("DP 2 × 1D 2", "sgd")]
CURVES += [("DP 8", "muon"), ("DP 2 × 1D 2", "muon")]


@pytest.fixture(scope="module")
def in_float64(tmp_path_factory):
    """Trains three steps in float64; one process with the same values once only."""

    def run(output, world_size, **values):
        common = {**RANDOM, "DTYPE": "float64", "ema.decay": 0.5}
        return training.train(output, world_size, steps=3, **{**common, **values})

    @functools.cache
    def alone(**values):
        return run(tmp_path_factory.mktemp("reference"), 1, **values)

    run.alone = alone
    return run


def assert_exact(run, expected):
    assert max(errors(run.steps, expected.steps)) < EXACT
    assert max(errors(run.evaluations, expected.evaluations, ["eval_loss", "ema_loss"])) < EXACT


@pytest.mark.parametrize(("layout", "optimizer"), CURVES)
def test_layout_with_split_weights_has_the_curve_of_one_process(layout, optimizer, in_float64, tmp_path):
    """With clipping, averages that an evaluation swaps in and, with LAMB, trust ratios and accumulation."""
    world_size, values = SPLITS[layout]
    common = {"DEPTH": 4 if "interleaved" in layout else 2, **OPTIMIZERS[optimizer]}
    expected = in_float64.alone(**common)
    if optimizer == "lamb":
        values = {**values, "gradient_accumulation": 2, "BATCH_SIZE": values["BATCH_SIZE"] // 2}
    assert_exact(in_float64(tmp_path, world_size, **common, **values, **SPLIT), expected)


def test_model_of_timm_with_split_weights_has_the_curve_of_one_process(in_float64, tmp_path):
    """Three ranks do not divide its width."""
    values = {"script": schemas.DP, "DEPTH": 2}
    expected = in_float64.alone(**values, BATCH_SIZE=30)
    assert_exact(in_float64(tmp_path, 3, **values, BATCH_SIZE=10, **SPLIT), expected)


@pytest.mark.parametrize("shape", [(5, 3), (2, 2), (3, 4)])
def test_parts_are_those_of_fully_shard_and_make_the_whole_again(shape):
    """On four ranks 5 rows are 2, 2, 1 and none."""
    full = torch.arange(shape[0] * shape[1]).view(shape)
    dim = int(shape[0] == 3)  # the first dimension that four ranks divide, if there is one

    def function():
        shard = DataShard("name", dim=dim, length=shape[dim])
        piece = shard.split(full)
        return piece, shard.gather(piece), shard.full_shape(piece.shape)

    parts = torch.chunk(full, 4, dim)
    for rank, (piece, whole, whole_shape) in enumerate(training.call(function, 4, BATCH_SIZE=8)):
        assert torch.equal(piece, parts[rank] if rank < len(parts) else full.narrow(dim, 0, 0))
        assert torch.equal(whole, full)
        assert whole_shape == list(shape)


def test_memory_of_a_rank_with_split_weights_is_as_worked_out_by_hand():
    """Bytes a parameter at the peak of a step in NAIVE with AdamW, on 8 ranks.

    In the update a rank has 18 bytes of an eighth of the parameters: half-precision weights, and fp32 master weights,
    gradients and two moments. Before, it has 16 of these, and a block's weights and gradients on their way, which are
    2 bytes a copy of a twelfth of all.
    """
    values = dict(HIDDEN_SIZE=384, NUM_HEADS=6, DEPTH=12, PATCH_SIZE=16, BATCH_SIZE=1, NUM_MICRO_BATCHES=1)
    plan = planned(training.flags("NAIVE", **values, **SPLIT, **{"fp16.initial_scale": 1.0}), 8)[0]
    elements = plan.parameters * 8
    assert plan.memory["peak"] / elements == pytest.approx(18 / 8, rel=0.2)
    assert plan.memory["weights"] / elements == pytest.approx(2 / 8, rel=0.01)
    assert plan.sent["all_gather"] / elements == pytest.approx(2 * 2 * 7 / 8, rel=0.01), "for both passes"
    assert plan.sent["reduce_scatter"] / elements == pytest.approx(2 * 7 / 8, rel=0.01)


def test_norms_in_fp32_with_split_weights_are_refused(tmp_path):
    values = {**SPLIT, **HALF, "fp16.opt_level": "O2"}
    line = "zero.stage = 3 does not work with fp16.opt_level = 'O2', whose norms are of another type: use stage 1 or 2"
    assert line in training.refused(tmp_path, 2, amp="APEX", **values)
