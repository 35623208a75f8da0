"""Peak memory of the ranks of a layout, from a `Trace`; the tests compare it with dry runs."""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from colossal_vit.engine.reduction import IN_FLIGHT_BYTES
from colossal_vit.parallel.partition import partition_blocks
from colossal_vit.plan.enumeration import Choice
from colossal_vit.plan.schedule import order
from colossal_vit.plan.trace import BLOCKS, Pass, Trace
from colossalai.context import Config


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
    """The chunks of each stage; of p stages, stage r has the parts r, r + p, ... of the model."""
    chunks = [Chunk(len(part), number == 0, number == len(blocks) - 1) for number, part in enumerate(blocks)]
    return [chunks[stage::num_stages] for stage in range(num_stages)]


def sizes_of(chunks: Sequence[Chunk], trace: Trace) -> list[int]:
    """Elements of each parameter of a stage."""
    return [size for chunk in chunks for part, count in chunk.parts() for size in trace.parameters[part] * count]


def owned_share(sizes: Sequence[int], num_ranks: int) -> float:
    """The share of elements that the fullest of the data-parallel ranks owns, see `engine.zero.assign_owners`."""
    loads = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads) / sum(sizes)


def stage_memory(choice: Choice, trace: Trace, chunks: Sequence[Chunk], stage: int, image_bytes: float) -> float:
    """Peak bytes of a rank of a stage in an optimizer step, as `--dry-run` has them: in PyTorch's tensors."""
    layout = choice.layout
    sizes = sizes_of(chunks, trace)
    elements = sum(sizes)
    share = owned_share(sizes, layout.data) if choice.zero else 1.0
    weights, kept = trace.weight_bytes * elements, trace.optimizer_bytes * elements * share
    boundary = trace.boundary * choice.images
    gradients = {number: trace.weight_bytes * sum(sizes_of([chunk], trace)) for number, chunk in enumerate(chunks)}
    ddp = layout.data > 1 and layout.pipeline == 1 and not choice.zero
    split = choice.zero == 2 and choice.passes > 1
    in_flight = min(IN_FLIGHT_BYTES, (1 - share) * sum(gradients.values())) if split else 0.0

    def walk(live: float, record: Pass) -> tuple[float, float]:
        return live + record.left, live + record.peak

    live = peak = weights + kept
    if chunks[0].first:
        live += choice.batch * image_bytes
    reduced: set[int] = set()  # chunks that have gradients
    if ddp:  # which has made its buckets at the start; of one pass, gradients are views of them from the beginning
        live += gradients[0]
        if choice.passes == 1:
            reduced.add(0)
    passes = min(choice.passes, 3 * layout.pipeline)  # the others are like these
    if layout.pipeline > 1:
        steps = order(stage, layout.pipeline, passes, choice.chunks)
    else:
        steps = [("forward", 0), ("backward", 0)] * min(choice.passes, 2)
    for kind, number in steps:
        chunk = chunks[number]
        if kind == "forward":
            live += 0 if chunk.first else boundary
            for part, count in chunk.parts():
                record = trace.part(part, "forward", choice.images)
                for _ in range(count):
                    after, highest = walk(live, record)
                    live = live + boundary if choice.checkpoint and part in BLOCKS else after
                    peak = max(peak, highest)
            continue
        again = number in reduced
        live += 0 if chunk.last else boundary  # the gradient of the output
        for part, count in reversed(chunk.parts()):
            record = trace.part(part, "accumulate" if again else "backward", choice.images)
            forward = trace.part(part, "forward", choice.images)
            for _ in range(count):
                if choice.checkpoint and part in BLOCKS:
                    live, highest = walk(live - boundary, forward)
                    peak = max(peak, highest)
                live, highest = walk(live, record)
                peak = max(peak, highest)
        live -= 0 if chunk.last else boundary
        if not chunk.first:  # the schedule keeps the input of the last part, and its gradient, for its list of outputs
            live += boundary if chunk.last else -boundary
        reduced.add(number)
        if split:
            live += in_flight - gradients[number] * (1 - share)
            in_flight = 0.0  # what the last pass left to be sent is there once
            reduced.discard(number)
    if layout.pipeline > 1 and chunks[-1].last:
        peak += 2 * boundary * (choice.passes - passes)
    updating = weights + (trace.update_peak - trace.weight_bytes) * elements * share
    if ddp and trace.copied:  # its buckets stay
        updating += gradients[0]
    return max(peak, updating)


def rank_memory(config: Config, choice: Choice, trace: Trace) -> float:
    """Peak bytes of the fullest rank: of the first stage, which has most micro-batches on their way; of the second,
    which may have more blocks; or of the last one, which has the head."""
    pipeline = choice.layout.pipeline
    stages = cut(partition_blocks(config, pipeline * choice.chunks), pipeline)
    some, image_bytes = sorted({0, min(1, pipeline - 1), pipeline - 1}), 3 * 4 * config.IMG_SIZE**2
    return max(stage_memory(choice, trace, stages[stage], stage, image_bytes) for stage in some)
