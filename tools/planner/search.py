"""Step time of layouts, predicted, and the best ones that fit the memory."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from colossal_vit.engine.reduction import BUCKET_BYTES
from colossal_vit.parallel.partition import partition_blocks
from colossalai.context import Config

from tools.planner.enumeration import Choice
from tools.planner.machines import Machine
from tools.planner.schedule import num_exchanges, step_seconds
from tools.planner.stages import Chunk, cut, owned_share, sizes_of
from tools.planner.trace import BLOCKS, KINDS, Message, TensorParallel, Trace

SHOWN = 10  # layouts in the table


class Prediction(NamedTuple):
    """What is predicted of a layout.

    Attributes:
        choice: the layout.
        seconds: of an optimizer step.
        computing, communicating, bubble: shares of the step, on average over the stages. Communicating is what nothing
            is computed beside; the bubble is waiting for other stages.
        memory: bytes of the fullest rank, in PyTorch's tensors, as a dry run measures them; 0 before it has.
    """

    choice: Choice
    seconds: float
    computing: float
    communicating: float
    bubble: float
    memory: float = 0.0


class _Stage(NamedTuple):
    """Seconds of a stage.

    Attributes:
        forward, backward: of all its chunks, for a micro-batch; tensor-parallel messages included.
        messages: what these take of it.
        reduction, broadcast: of gradients, and of the weights that ranks own.
        num_buckets: that gradients are reduced in.
        update: of the optimizer.
    """

    forward: float
    backward: float
    messages: float
    reduction: float
    broadcast: float
    num_buckets: int
    update: float

    def exposed(self, choice: Choice, overlap: bool) -> float:
        """Return seconds in which gradients or weights are sent, and nothing is computed.

        A bucket is reduced as soon as its part of the last backward pass is done, after the bucket before it, and a
        part of the first forward pass begins as soon as its weights are there. So the last bucket of gradients and the
        first one of weights are always alone. With zero 2, the gradients of earlier passes are reduced, too, beside the
        next passes.
        """
        earlier = choice.passes - 1 if choice.zero == 2 else 0
        if not (overlap and self.num_buckets):
            return self.broadcast + (1 + earlier) * self.reduction
        beside = 1 - 1 / self.num_buckets  # the share of a pass, and of what is sent, that the other can be beside

        def alone(sending: float, computing: float) -> float:
            return sending - beside * min(sending, computing)

        earlier *= max(self.reduction - self.backward, 0.0)
        return alone(self.broadcast, self.forward) + earlier + alone(self.reduction, self.backward)


class Predictor:
    """Predicts layouts of one model on one machine.

    Args:
        config: of the run.
        machine: that it is to run on.
        trace: records the model with some tensor parallelism; called once for each.
    """

    def __init__(self, config: Config, machine: Machine, trace: Callable[[TensorParallel], Trace]):
        self.config, self.machine, self.trace = config, machine, cache(trace)
        self._part = cache(self._part)
        self._chunks = cache(self._chunks)

    def _part(self, tensor: TensorParallel, part: str, kind: str, images: int) -> tuple[float, float]:
        """Return seconds of computing and of messages of a part's pass."""
        record = self.trace(tensor).part(part, kind, images)
        on_node = self.machine.gpus_per_node if tensor[1] <= self.machine.gpus_per_node else 1
        return self.machine.compute(record), sum(self.machine.send(message, on_node) for message in record.messages)

    def _chunks(self, num_stages: int, num_chunks: int) -> list[list[Chunk]]:
        return cut(partition_blocks(self.config, num_stages * num_chunks), num_stages)

    def _stage(self, choice: Choice, chunks: tuple[Chunk, ...]) -> _Stage:
        layout, machine, traced = choice.layout, self.machine, self.trace(choice.tensor)
        seconds, messages = dict.fromkeys(KINDS, 0.0), 0.0
        for part, count in (each for chunk in chunks for each in chunk.parts()):
            for kind in KINDS:
                again = ["forward"] if kind == "backward" and choice.checkpoint and part in BLOCKS else []
                for each in (kind, *again):
                    computing, sent = self._part(choice.tensor, part, each, choice.images)
                    seconds[kind] += count * (computing + sent)
                    messages += count * sent
        sizes = sizes_of(chunks, traced)
        elements = sum(sizes) * (owned_share(sizes, layout.data) if choice.zero else 1.0)
        num_bytes = traced.weight_bytes * sum(sizes)
        on_node = max(machine.gpus_per_node // (layout.pipeline * layout.tensor), 1)
        num_buckets = -(-num_bytes // BUCKET_BYTES) if layout.data > 1 else 0

        def send(kind: str) -> float:
            if not num_buckets:
                return 0.0
            return num_buckets * machine.send(Message(kind, layout.data, num_bytes / num_buckets), on_node)

        norm = machine.send(Message("all_reduce", layout.world_size, 4), machine.gpus_per_node)
        update = machine.update(traced.update_bytes * elements) + norm
        reduction, broadcast = (send("reduce"), send("broadcast")) if choice.zero else (send("all_reduce"), 0.0)
        return _Stage(*seconds.values(), messages, reduction, broadcast, int(num_buckets), update)

    def _stages(self, choice: Choice) -> list[_Stage]:
        stages = list(map(tuple, self._chunks(choice.layout.pipeline, choice.chunks)))
        done = {chunks: self._stage(choice, chunks) for chunks in set(stages)}  # most stages are alike
        return [done[chunks] for chunks in stages]

    def least_memory(self, choice: Choice) -> float:
        """Bytes that the fullest rank has at least: weights, and what the optimizer keeps of them."""
        traced, most = self.trace(choice.tensor), 0.0
        for chunks in set(map(tuple, self._chunks(choice.layout.pipeline, choice.chunks))):
            sizes = sizes_of(chunks, traced)
            share = owned_share(sizes, choice.layout.data) if choice.zero else 1.0
            most = max(most, (traced.weight_bytes + traced.optimizer_bytes * share) * sum(sizes))
        return most

    def predict(self, choice: Choice) -> Prediction:
        """Return what a step of a layout takes."""
        layout, machine, passes = choice.layout, self.machine, choice.passes
        stages = self._stages(choice)
        on_node = machine.gpus_per_node if layout.pipeline * layout.tensor <= machine.gpus_per_node else 1
        boundary = self.trace(choice.tensor).boundary * choice.images
        transfer = machine.send(Message("send", 2, boundary), on_node)

        costs = [stage.forward + stage.backward for stage in stages]
        exposed = max(stage.exposed(choice, machine.overlap) for stage in stages)
        update = max(stage.update for stage in stages)
        seconds = step_seconds(costs, passes, choice.chunks, transfer) + exposed + update

        computing = communicating = 0.0
        for number, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
            exchanges = num_exchanges(number, layout.pipeline, passes, choice.chunks)
            computing += passes * (cost - stage.messages) + stage.update
            communicating += passes * stage.messages + exchanges * transfer
            communicating += stage.exposed(choice, machine.overlap)
        shares = [each / len(stages) / seconds for each in (computing, communicating)]
        return Prediction(choice, seconds, *shares, max(1 - sum(shares), 0.0))


class Plan(NamedTuple):
    """The best layouts, and what was left out.

    Attributes:
        best: the fastest first; of those that are as fast, the simplest.
        num_layouts: all.
        num_too_large: those before the last one of `best` that do not fit the memory.
        limit, smallest: bytes that a rank has for its tensors, and the fewest that one of these needs.
    """

    best: list[Prediction]
    num_layouts: int
    num_too_large: int
    limit: float
    smallest: float


def search(predictor: Predictor, choices: Iterable[Choice], measure: Callable[[Choice], float]) -> Plan:
    """Return the fastest layouts that fit.

    Args:
        predictor: of the model, on the machine.
        choices: all layouts, simpler ones first.
        measure: bytes of the fullest rank of a layout, by a dry run, which takes seconds: asked from the fastest layout
            on, until enough fit.
    """
    machine = predictor.machine
    limit = (machine.memory_gb - machine.reserved_gb) * 1e9
    predictions = sorted(map(predictor.predict, choices), key=lambda each: each.seconds)
    best, too_large, smallest, num_too_large = [], {}, float("inf"), 0
    for prediction in predictions:
        choice = prediction.choice
        memory, alike = predictor.least_memory(choice), _alike(choice)
        # With as many images at a time, or more, than in a layout that is too large, this one is, too.
        known = any(batch <= choice.batch and images <= choice.images for batch, images in too_large.get(alike, ()))
        if memory <= limit and not known:
            memory = measure(choice)
            if memory <= limit:
                best.append(prediction._replace(memory=memory))
                if len(best) == SHOWN:
                    break
                continue
            too_large.setdefault(alike, []).append((choice.batch, choice.images))
        num_too_large += 1
        if memory > limit:
            smallest = min(smallest, memory)
    return Plan(best, len(predictions), num_too_large, limit, smallest)


def _alike(choice: Choice) -> tuple:
    """Return what layouts have in common whose memory depends on the number of images only."""
    return choice.layout, choice.chunks, choice.checkpoint, choice.zero, choice.passes > 1
