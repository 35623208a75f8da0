"""Weights split over data-parallel ranks change nothing of what is learned: `zero = dict(stage=3)`."""

import functools

import pytest

import training
from layouts import LAYOUTS, OPTIMIZERS, PIPELINE, errors, tensor

pytestmark = pytest.mark.usefixtures("few_test_images", "random_weights")
SHARDED = {"zero.stage": 3}
DOUBLE = {"DTYPE": "float64"}
EXACT = 1e-12  # relative, in float64
HALF = {"BATCH_SIZE": 16}
SPLITS = {
    "DP 2": (2, HALF),
    "DP 4": (4, {"BATCH_SIZE": 8}),  # 10 classes on 4 ranks: 3, 3, 3 and 1
    "DP 2 × PP 2": LAYOUTS["DP 2 × PP 2"],
    "DP 2 × PP 2 interleaved × 2": (4, {**PIPELINE, **HALF, "model.num_chunks": 2}),
    "DP 2 × 1D 2": (4, {**HALF, **tensor("1d", 2)}),
    "DP 2 × 2D 4": LAYOUTS["DP 2 × 2D 4"],
    "DP 2 × 2.5D 4": (8, {**HALF, **tensor("2.5d", 4, depth=1)}),
    "DP 2 × 3D 8": (16, {**HALF, **tensor("3d", 8)}),
    "DP 2 × PP 2 × 1D 2": LAYOUTS["DP 2 × PP 2 × 1D 2"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of one process, by its values."""

    @functools.cache
    def run(**values):
        return training.train(tmp_path_factory.mktemp("reference"), steps=3, **DOUBLE, **training.RANDOM, **values)

    return run


@pytest.mark.parametrize(("layout", "optimizer"), [(layout, o) for layout in SPLITS for o in OPTIMIZERS])
def test_layout_with_split_weights_has_the_curve_of_one_process(layout, optimizer, reference, tmp_path):
    world_size, values = SPLITS[layout]
    common = {"DEPTH": 4 if "interleaved" in layout else 2, **OPTIMIZERS[optimizer]}
    run = training.train(tmp_path, world_size, steps=3, **training.RANDOM, **common, **DOUBLE, **values, **SHARDED)
    expected = reference(**common)
    assert max(errors(run.steps, expected.steps)) < EXACT
    assert max(errors(run.evaluations, expected.evaluations, ["eval_loss"])) < EXACT
