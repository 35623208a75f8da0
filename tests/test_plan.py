"""The planner: timetables, layouts, memory, and the time of a step."""

import pytest
from colossal_vit.plan.simulation import Cost, Event, finish, simulate


def timetable(events: list[Event]) -> dict[int, str]:
    """By stage: what it computes, as F or B with the micro-batch (and chunk, a or b), at its start."""
    rows: dict[int, list[str]] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.kind != "communication":
            name = f"{event.kind[0].upper()}{event.micro_batch}{'ab'[event.chunk]}@{event.start:g}"
            rows.setdefault(event.stage, []).append(name)
    return {stage: " ".join(row) for stage, row in sorted(rows.items())}


def test_1f1b_by_hand():
    """Two stages of unequal cost, three micro-batches, forward 1 and 2, backward 2 and 3, messages that take 0.5."""
    events = simulate([[Cost(1, 2)], [Cost(2, 3)]], 3, transfer=0.5)
    assert timetable(events) == {
        0: "F0a@0 F1a@1.5 B0a@7 F2a@9 B1a@12.5 B2a@18",
        1: "F0a@1.5 B0a@3.5 F1a@7 B1a@9 F2a@12.5 B2a@14.5",
    }


def test_interleaved_by_hand():
    """Two stages with two chunks each. Each forward pass takes 1, each backward pass 2."""
    two = [[Cost(1, 2)] * 2] * 2
    assert timetable(simulate(two, 2)) == {
        0: "F0a@0 F1a@1 F0b@2 F1b@3 B0b@7 B1b@9 B0a@11 B1a@13",
        1: "F0a@1 F1a@2 F0b@3 F1b@4 B0b@5 B1b@7 B0a@9 B1a@11",
    }
    assert timetable(simulate(two, 4)) == {
        0: "F0a@0 F1a@1 F0b@2 F1b@3 F2a@6 B0b@7 F3a@9 B1b@10 F2b@12 B0a@13 F3b@15 B1a@16 B2b@18 B3b@21 B2a@23 B3a@25",
        1: "F0a@1 F1a@2 F0b@3 B0b@4 F1b@6 B1b@7 F2a@9 B0a@10 F3a@12 B1a@13 F2b@15 B2b@16 F3b@18 B3b@19 B2a@21 B3a@23",
    }


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(1, 3, 1), (2, 4, 1), (4, 8, 1), (2, 4, 2), (4, 4, 3), (8, 16, 4)]
)
def test_bubble_of_even_stages_is_the_known_one(stages, micro_batches, chunks):
    """(stages - 1) / (chunks × micro-batches) of the time spent computing: D. Narayanan et al., arXiv:2104.04473."""
    events = simulate([[Cost(1, 2)] * chunks] * stages, micro_batches)
    computing = 3 * micro_batches * chunks
    assert events[-1].end / computing - 1 == pytest.approx((stages - 1) / (chunks * micro_batches))


def test_cores_that_stages_share_slow_them_down():
    """Two stages on one core take as long as their work, whatever the order."""
    assert simulate([[Cost(1, 2)]] * 2, 4, speed=lambda active: 1 / active)[-1].end == pytest.approx(2 * 4 * 3)


def test_buckets_are_reduced_beside_the_backward_pass():
    """A backward pass of 2 in four buckets, each reduced in 0.25, or in 1: only the last one is exposed, or four."""
    events = simulate([[Cost(1, 2)]], 1)
    quick, slow, apart = (finish(events, [s], [4], [0.5], overlap)[-1].end for s, overlap in ((1, 1), (4, 1), (4, 0)))
    assert (quick, slow, apart) == (3 + 0.25 + 0.5, 1.5 + 4 + 0.5, 3 + 4 + 0.5)
