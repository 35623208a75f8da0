"""The timetable of an optimizer step: Colossal-AI's pipeline schedules with blocking messages, reduction and update.

Stages that share processor cores slow each other down; see `simulate`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """Something that a stage does, or waits for, in a step.

    Attributes:
        stage: of the pipeline.
        start, end: seconds from the beginning of the step.
        kind: "forward", "backward", "communication" (messages between stages, and waiting for them), "reduce" or
            "update".
        micro_batch, chunk: of forward and backward, else None.
    """

    stage: int
    start: float
    end: float
    kind: str
    micro_batch: int | None = None
    chunk: int | None = None


class Cost(NamedTuple):
    """Seconds that a model chunk takes for a micro-batch, tensor-parallel communication included."""

    forward: float
    backward: float


class Compute(NamedTuple):
    kind: str
    micro_batch: int
    chunk: int


class Exchange(NamedTuple):
    """Messages that a stage sends and receives together; it waits for all of them.

    Each is (kind, the other stage); activations are of kind "forward", their gradients of kind "backward".
    """

    sends: tuple[tuple[str, int], ...]
    receives: tuple[tuple[str, int], ...]


def _1f1b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Compute | Exchange]:
    """`PipelineSchedule.forward_backward_step`."""
    first, last = stage == 0, stage == num_stages - 1
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    rest = num_micro_batches - warm_up
    activations_in = () if first else (("forward", stage - 1),)
    activations_out = () if last else (("forward", stage + 1),)
    gradients_in = () if last else (("backward", stage + 1),)
    gradients_out = () if first else (("backward", stage - 1),)
    for number in range(warm_up):
        yield Exchange((), activations_in)
        yield Compute("forward", number, 0)
        yield Exchange(activations_out, ())
    if rest:
        yield Exchange((), activations_in)
    for number in range(rest):
        yield Compute("forward", warm_up + number, 0)
        yield Exchange(activations_out, gradients_in)
        yield Compute("backward", number, 0)
        yield Exchange(gradients_out, activations_in if number < rest - 1 else ())
    for number in range(rest, num_micro_batches):
        yield Exchange((), gradients_in)
        yield Compute("backward", number, 0)
        yield Exchange(gradients_out, ())


def _interleaved(stage: int, num_stages: int, num_micro_batches: int, chunks: int) -> Iterator[Compute | Exchange]:
    """`InterleavedPipelineSchedule.forward_backward_step`. Here, the last stage is followed by the first one."""
    first, last = stage == 0, stage == num_stages - 1
    before, after = (stage - 1) % num_stages, (stage + 1) % num_stages
    total = num_micro_batches * chunks
    if num_micro_batches == num_stages:
        warm_up = total
    else:
        warm_up = min((num_stages - stage - 1) * 2 + (chunks - 1) * num_stages, total)

    def compute(kind: str, number: int) -> Compute:
        group, place = divmod(number, num_stages * chunks)
        chunk = place // num_stages
        micro_batch = group * num_stages + place % num_stages
        return Compute(kind, micro_batch, chunk if kind == "forward" else chunks - 1 - chunk)

    def chunk_of(kind: str, number: int) -> int:
        return compute(kind, number).chunk

    def message(kind: str, other: int, wanted: bool) -> tuple[tuple[str, int], ...]:
        return ((kind, other),) if wanted else ()

    yield Exchange((), message("forward", before, not first))
    for number in range(warm_up):
        yield compute("forward", number)
        sends = message("forward", after, not (last and chunk_of("forward", number) == chunks - 1))
        receives = not (first and chunk_of("forward", number + 1) == 0) and number < total - 1
        gradients = number == warm_up - 1 and warm_up < total and not last
        yield Exchange(sends, message("forward", before, receives) + message("backward", after, gradients))
    for number in range(total - warm_up):
        ahead = number + warm_up
        yield compute("forward", ahead)
        yield compute("backward", number)
        sends = message("forward", after, not (last and chunk_of("forward", ahead) == chunks - 1))
        sends += message("backward", before, not (first and chunk_of("backward", number) == 0))
        receives = number < total - warm_up - 1
        if first:  # a batch comes from the last stage, which has had it for some time
            receives = receives and chunk_of("forward", ahead - (num_stages - 1)) != chunks - 1
        gradients = not last or chunk_of("backward", number - (num_stages - 1)) != 0
        yield Exchange(sends, message("forward", before, receives) + message("backward", after, gradients))
    if warm_up == total:
        yield Exchange((), message("backward", after, not last))
    for number in range(total - warm_up, total):
        yield compute("backward", number)
        sends = message("backward", before, not (first and chunk_of("backward", number) == 0))
        gradients = not (last and chunk_of("backward", number + 1) == chunks - 1) and number < total - 1
        yield Exchange(sends, message("backward", after, gradients))


def program(stage: int, num_stages: int, num_micro_batches: int, chunks: int = 1) -> list[Compute | Exchange]:
    """What a pipeline stage does in a step, in order. With one stage, micro-batches are those of accumulation."""
    if chunks > 1:
        steps = _interleaved(stage, num_stages, num_micro_batches, chunks)
    else:
        steps = _1f1b(stage, num_stages, num_micro_batches)
    return [step for step in steps if isinstance(step, Compute) or step.sends or step.receives]


def _alone(num_active: int) -> float:
    return 1.0


def simulate(
    costs: Sequence[Sequence[Cost]],
    num_micro_batches: int,
    transfer: float = 0.0,
    speed: Callable[[int], float] = _alone,
) -> list[Event]:
    """The forward and backward passes of a step, and the messages between stages.

    A message starts when both sides are ready for it, as with NCCL and gloo. All stages that compute at a time do so
    at the same relative speed.

    Args:
        costs: by stage, by chunk.
        num_micro_batches: that go through the stages.
        transfer: seconds that a message takes.
        speed: of a computing stage, relative to one that computes alone, when so many do. Messages are computing too
            if this is not constant.

    Returns:
        Events in the order of their ends.

    Raises:
        RuntimeError: if the schedule is stuck, a bug.
    """
    num_stages, chunks = len(costs), len(costs[0])
    programs = [program(stage, num_stages, num_micro_batches, chunks) for stage in range(num_stages)]
    place = [0] * num_stages  # in its program
    began = [0.0] * num_stages  # this part of the program
    missing = [0] * num_stages  # messages of the current exchange
    posted: dict[tuple[str, int, int], tuple[deque[int], deque[int]]] = {}  # senders, receivers without counterpart
    events: list[Event] = []
    # All that is computing advances together, so one clock of work done serves everybody; it runs at `speed`.
    now = work_done = 0.0
    shared = speed is not _alone
    computing: list[tuple[float, int, tuple[int, ...]]] = []  # end of the work, order, stages
    order = 0

    def begin(stage: int) -> None:
        nonlocal order
        if place[stage] == len(programs[stage]):
            return
        began[stage] = now
        step = programs[stage][place[stage]]
        if isinstance(step, Compute):
            order += 1
            heapq.heappush(computing, (work_done + getattr(costs[stage][step.chunk], step.kind), order, (stage,)))
            return
        missing[stage] = len(step.sends) + len(step.receives)
        for messages, side in ((step.sends, 0), (step.receives, 1)):
            for kind, other in messages:
                channel = (kind, stage, other) if side == 0 else (kind, other, stage)
                waiting = posted.setdefault(channel, (deque(), deque()))
                if waiting[1 - side]:
                    order += 1
                    heapq.heappush(computing, (work_done + transfer, order, (stage, waiting[1 - side].popleft())))
                else:
                    waiting[side].append(stage)

    for stage in range(num_stages):
        begin(stage)
    while computing:
        rate = speed(len(computing)) if shared else 1.0
        end, _, stages = heapq.heappop(computing)
        now += (end - work_done) / rate
        work_done = end
        for stage in stages:
            step = programs[stage][place[stage]]
            if isinstance(step, Compute):
                events.append(Event(stage, began[stage], now, step.kind, step.micro_batch, step.chunk))
            else:
                missing[stage] -= 1
                if missing[stage]:
                    continue
                if now > began[stage]:
                    events.append(Event(stage, began[stage], now, "communication"))
            place[stage] += 1
            begin(stage)
    if any(done < len(steps) for done, steps in zip(place, programs, strict=True)):
        raise RuntimeError(f"the schedule of {num_stages} stages and {num_micro_batches} micro-batches is stuck")
    return events


def finish(
    events: list[Event],
    reduction: Sequence[float],
    num_buckets: Sequence[int],
    update: Sequence[float],
    overlap: bool = True,
) -> list[Event]:
    """The step's events with the reduction of gradients over data-parallel ranks, and the update.

    Buckets are reduced one after the other, each as soon as its part of the last backward pass is done. All stages
    begin the update together, since they need the norm of the whole gradient.

    Args:
        events: of `simulate`.
        reduction: seconds to reduce all gradients, by stage.
        num_buckets: into which they are divided, by stage.
        update: seconds, by stage.
        overlap: whether gradients are reduced while others are computed.
    """
    ends = []
    events = list(events)
    for stage, (seconds, buckets) in enumerate(zip(reduction, num_buckets, strict=True)):
        own = [event for event in events if event.stage == stage]
        last = max(event.micro_batch for event in own if event.kind == "backward")
        passes = [event for event in own if event.kind == "backward" and event.micro_batch == last]
        end = own[-1].end  # of the last message
        if seconds and buckets:
            computed = sum(event.end - event.start for event in passes)
            done, begins, reduced = 0.0, 0.0, 0.0
            for bucket in range(buckets):
                left = computed * (bucket + 1) / buckets
                done = end
                for event in passes:  # in the order of the backward pass
                    if left <= event.end - event.start + 1e-12:
                        done = event.start + left
                        break
                    left -= event.end - event.start
                start = max(reduced, done if overlap else end)
                begins = begins if bucket else start
                reduced = start + seconds / buckets
            events.append(Event(stage, begins, reduced, "reduce"))
            end = max(end, reduced)
        ends.append(end)
    together = max(ends)
    return events + [
        Event(stage, together, together + seconds, "update") for stage, seconds in enumerate(update) if seconds
    ]
