"""What the stages of a pipeline hold, in elements of parameters."""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tools.planner.trace import Trace


class Chunk(NamedTuple):
    """A part of the model that a stage computes at a time: some blocks, the first one behind the embedding."""

    blocks: int
    first: bool
    last: bool

    @lru_cache  # noqa: B019 there are few different ones
    def parts(self) -> list[tuple[str, int]]:
        """Parts of the model, and how often they come, in forward order."""
        counts = [("embed", self.first), ("block", self.blocks - self.last), ("last", self.last), ("head", self.last)]
        return [(part, count) for part, count in counts if count]


def cut(blocks: Sequence[range], num_stages: int) -> list[list[Chunk]]:
    """Return the chunks of each stage; of p stages, stage r has the parts r, r + p, ... of the model."""
    chunks = [Chunk(len(part), number == 0, number == len(blocks) - 1) for number, part in enumerate(blocks)]
    return [chunks[stage::num_stages] for stage in range(num_stages)]


def sizes_of(chunks: Sequence[Chunk], trace: Trace) -> list[int]:
    """Elements of each parameter of a stage."""
    return [size for chunk in chunks for part, count in chunk.parts() for size in trace.parameters[part] * count]


def owned_share(sizes: Sequence[int], num_ranks: int) -> float:
    """Return the share of elements that the fullest data-parallel rank owns, see `engine.zero.assign_owners`."""
    loads = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads) / sum(sizes)
