"""Colossal-AI's pipeline schedules: how long a step takes.

Without chunks, that is 1F1B (`PipelineSchedule`), with chunks the interleaved schedule of D. Narayanan et al.,
arXiv:2104.04473 (`InterleavedPipelineSchedule`). Messages between stages block both sides until they are there.
"""

from collections.abc import Sequence


def warm_up(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many forward passes a stage is ahead of its backward passes."""
    total = num_micro_batches * num_chunks
    if num_chunks == 1:
        return min(num_stages - stage - 1, total)
    if num_micro_batches == num_stages:
        return total
    return min(2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages, total)


def num_exchanges(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how often a stage waits for messages in a step; those that it sends and receives together count once."""
    if num_stages == 1:
        return 0
    if num_chunks == 1:  # a stage has something to say after its forward pass, after its backward pass, or after both
        return num_micro_batches * (2 if 0 < stage < num_stages - 1 else 1)
    return num_micro_batches * num_chunks + warm_up(stage, num_stages, num_micro_batches, num_chunks)


def step_seconds(costs: Sequence[float], num_micro_batches: int, num_chunks: int = 1, transfer: float = 0.0) -> float:
    """Return seconds of the forward and backward passes of a step.

    The slowest stage computes without a pause, once its first micro-batch has come through the stages before it, and
    the gradients of its last one have to go back through them: that is the known bubble, (stages - 1) / (chunks ×
    micro-batches) of the time spent computing, if all stages are alike.

    Args:
        costs: by stage, seconds that all its chunks take for a micro-batch, forward and backward.
        num_micro_batches: that go through the stages.
        num_chunks: of a stage.
        transfer: seconds that a message between stages takes.
    """
    num_stages = len(costs)
    shape = num_stages, num_micro_batches, num_chunks
    steady = max(num_micro_batches * cost + num_exchanges(stage, *shape) * transfer for stage, cost in enumerate(costs))
    filling = (sum(costs) - max(costs)) / num_chunks
    if num_chunks == 1 or num_micro_batches == num_stages:  # else they are among the exchanges of the warm-up
        filling += 2 * (num_stages - 1) * transfer
    return steady + filling
