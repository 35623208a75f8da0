"""Pipeline schedules: how long a step takes; who owns how much."""

from types import SimpleNamespace

import pytest
import torch
from colossal_vit.engine.zero import assign_owners

from tools.planner.schedule import step_seconds
from tools.planner.search import _Stage
from tools.planner.stages import owned_share


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(1, 3, 1), (2, 4, 1), (4, 8, 1), (2, 4, 2), (4, 4, 3), (8, 16, 4)]
)
def test_bubble_of_even_stages_is_the_known_one(stages, micro_batches, chunks):
    """(stages - 1) / (chunks × micro-batches) of the time spent computing: D. Narayanan et al., arXiv:2104.04473."""
    seconds = step_seconds([3.0] * stages, micro_batches, chunks)
    assert seconds / (3 * micro_batches) - 1 == pytest.approx((stages - 1) / (chunks * micro_batches))


def test_messages_and_an_uneven_stage_lengthen_a_step():
    """By hand, from the timetable of blocking messages: two stages that take 3 and 5, three micro-batches."""
    assert step_seconds([3, 5], 3) == 3 * 5 + 3
    assert step_seconds([3, 5], 3, transfer=0.5) == pytest.approx(20, rel=0.03)


def test_buckets_are_reduced_beside_the_backward_pass():
    """A backward pass of 2 in four buckets, each reduced in 0.25, or in 1: only the last one is exposed, or four."""
    choice = SimpleNamespace(passes=1, zero=0)
    quick, slow = (_Stage(1, 2, 0, seconds, 0, 4, 0) for seconds in (1, 4))
    assert (quick.exposed(choice, True), slow.exposed(choice, True), slow.exposed(choice, False)) == (0.25, 2.5, 4)


UNEVEN = [([4] * 4, 2, 8), ([6] * 3, 2, 12), ([30, 1, 1, 1], 3, 30), ([1, 5, 7, 3, 2], 3, 7), ([5, 4, 3, 3, 3], 2, 10)]


@pytest.mark.parametrize(("sizes", "num_ranks", "most"), UNEVEN)
def test_the_share_of_the_fullest_owner_is_that_of_the_engine(sizes, num_ranks, most):
    """Of parameters that no number of ranks divides evenly."""
    assert owned_share(sizes, num_ranks) == most / sum(sizes)
    owned = [0] * num_ranks
    for parameter, rank in assign_owners([torch.empty(size) for size in sizes], num_ranks).items():
        owned[rank] += parameter.numel()
    assert max(owned) == most
