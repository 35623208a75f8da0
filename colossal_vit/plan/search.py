"""Step time and memory of layouts, predicted, and the best ones of all."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import numpy as np
from colossal_vit.engine.reduction import BUCKET_BYTES
from colossal_vit.parallel.partition import partition_blocks
from colossal_vit.plan.enumeration import Choice
from colossal_vit.plan.lowering import Kernel, Lowering
from colossal_vit.plan.machines import Machine
from colossal_vit.plan.memory import Chunk, cut, owned_share, rank_memory, sizes_of
from colossal_vit.plan.schedule import num_exchanges, step_seconds
from colossal_vit.plan.trace import BLOCKS, KINDS, PARTS, Message, Pass, TensorParallel, Trace
from colossalai.context import Config

SHOWN = 10  # layouts in the table
# Compiling takes minutes to look into, and gains no layout so much over another one: up to 1.7 in results/lean_step.
LOWERED_WITHIN = 2.0


class Prediction(NamedTuple):
    """What is predicted of a layout.

    Attributes:
        choice: the layout.
        seconds: of an optimizer step.
        memory: bytes of the fullest rank, in PyTorch's tensors.
        computing, communicating, bubble: shares of the step, on average over the stages. Communicating is what nothing
            is computed beside; the bubble is waiting for other stages.
    """

    choice: Choice
    seconds: float
    memory: float
    computing: float
    communicating: float
    bubble: float


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
        """Seconds in which gradients or weights are sent, and nothing is computed.

        A bucket is reduced as soon as its part of the last backward pass is done, after the bucket before it. With
        zero 2, the gradients of earlier passes are reduced, too, beside the next passes.
        """
        earlier = choice.passes - 1 if choice.zero == 2 else 0
        if not (overlap and self.num_buckets):
            return self.broadcast + (1 + earlier) * self.reduction
        last = self.reduction / self.num_buckets
        reduction = max(last, self.reduction - self.backward * (1 - 1 / self.num_buckets))
        return max(self.broadcast - self.forward, 0.0) + earlier * max(self.reduction - self.backward, 0.0) + reduction


class Predictor:
    """Predicts layouts of one model on one machine.

    Args:
        config: of the run.
        machine: that it is to run on.
        trace: records the model with some tensor parallelism; called once for each.
        lower: of a model that is compiled, lowers it with some tensor parallelism, as a whole or block by block.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        trace: Callable[[TensorParallel], Trace],
        lower: Callable[[TensorParallel, bool], Lowering] | None = None,
    ):
        self.config, self.machine, self.trace, self.lower = config, machine, cache(trace), lower and cache(lower)
        self._part = cache(self._part)
        self._chunks = cache(self._chunks)
        self.memory = cache(self.memory)  # asked for before a layout is predicted, and by its prediction

    def _part(self, tensor: TensorParallel, part: str, kind: str, images: int, by_block: bool) -> tuple[float, float]:
        """Seconds of computing and of messages of a part's pass."""
        record = self.trace(tensor).part(part, kind, images)
        on_node = self.machine.ranks_per_node if tensor[1] <= self.machine.ranks_per_node else 1
        sent = sum(self.machine.send(message, on_node) for message in record.messages)
        if self.lower:
            return self._compiled(tensor, part, kind, images, by_block), sent
        return self._eager(tensor, part, kind, images), sent

    def _eager(self, tensor: TensorParallel, part: str, kind: str, images: int) -> float:
        return self.machine.compute((tensor, part, kind, images), self.trace(tensor).part(part, kind, images))

    def _compiled(self, tensor: TensorParallel, part: str, kind: str, images: int, by_block: bool) -> float:
        lowering = self.lower(tensor, by_block)

        def seconds(kernels: list[Kernel]) -> float:
            record = Pass(lowering.operations(kernels, images), np.zeros(1), [])
            return self.machine.compute((tensor, part, kind, images), record)

        if part == "block":
            return lowering.of_block(kind, seconds)
        # Fused kernels belong to several parts: what is not these blocks' is divided as it is in eager steps.
        eager = {each: self._eager(tensor, each, kind, images) for each in PARTS if each != "block"}
        return lowering.of_rest(kind, seconds) * eager[part] / sum(eager.values())

    def _chunks(self, num_stages: int, num_chunks: int) -> list[list[Chunk]]:
        return cut(partition_blocks(self.config, num_stages * num_chunks), num_stages)

    def _stage(self, choice: Choice, chunks: tuple[Chunk, ...], all_busy: float) -> _Stage:
        """A stage; `all_busy` is the speed of ranks that all compute, as they do around messages and in updates."""
        layout, traced = choice.layout, self.trace(choice.tensor)
        seconds, messages = dict.fromkeys(KINDS, 0.0), 0.0
        for part, count in (each for chunk in chunks for each in chunk.parts()):
            for kind in KINDS:
                again = ["forward"] if kind == "backward" and choice.checkpoint and part in BLOCKS else []
                for each in (kind, *again):
                    computing, sent = self._part(choice.tensor, part, each, choice.images, choice.by_block)
                    seconds[kind] += count * (computing + sent * all_busy)
                    messages += count * sent * all_busy
        sizes = sizes_of(chunks, traced)
        elements = sum(sizes) * (owned_share(sizes, layout.data) if choice.zero else 1.0)
        num_bytes = traced.weight_bytes * sum(sizes)
        on_node = max(self.machine.ranks_per_node // (layout.pipeline * layout.tensor), 1)
        num_buckets = -(-num_bytes // BUCKET_BYTES) if layout.data > 1 else 0

        def send(kind: str) -> float:
            if not num_buckets:
                return 0.0
            return num_buckets * self.machine.send(Message(kind, layout.data, num_bytes / num_buckets), on_node)

        update = self.machine.update(choice.tensor, traced.update_bytes * elements, elements)
        norm = Message("all_reduce", layout.world_size, 4)
        update += self.machine.send(norm, self.machine.ranks_per_node)
        reduction, broadcast = (send("reduce"), send("broadcast")) if choice.zero else (send("all_reduce"), 0.0)
        return _Stage(*seconds.values(), messages, reduction, broadcast, int(num_buckets), update / all_busy)

    def _stages(self, choice: Choice, all_busy: float) -> list[_Stage]:
        stages = list(map(tuple, self._chunks(choice.layout.pipeline, choice.chunks)))
        done = {chunks: self._stage(choice, chunks, all_busy) for chunks in set(stages)}  # most stages are alike
        return [done[chunks] for chunks in stages]

    def eager(self) -> "Predictor":
        """Predicts eager steps."""
        return Predictor(self.config, self.machine, self.trace)

    def memory(self, choice: Choice) -> float:
        """Bytes of the fullest rank at the peak of a step."""
        return rank_memory(self.config, choice, self.trace(choice.tensor))

    def predict(self, choice: Choice) -> Prediction:
        """What a step of a layout takes. Stages that share cores with others slow each other down."""
        layout, machine, passes = choice.layout, self.machine, choice.passes
        stage_ranks = layout.data * layout.tensor  # they compute together
        ranks_on_node = min(stage_ranks * layout.pipeline, machine.ranks_per_node)
        all_busy = machine.speed(ranks_on_node)
        stages = self._stages(choice, all_busy)
        on_node = machine.ranks_per_node if layout.pipeline * layout.tensor <= machine.ranks_per_node else 1
        boundary = self.trace(choice.tensor).boundary * choice.images
        transfer = all_busy * machine.send(Message("send", 2, boundary), on_node)

        costs = [stage.forward + stage.backward for stage in stages]
        alone = step_seconds(costs, passes, choice.chunks, transfer)
        num_active = passes * sum(costs) / alone  # stages, on average
        speed = machine.speed(min(max(num_active, 1.0) * stage_ranks, ranks_on_node))
        exposed = max(stage.exposed(choice, machine.overlap) for stage in stages)
        update = max(stage.update for stage in stages)
        seconds = alone / speed + exposed + update

        computing = communicating = 0.0
        for number, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
            exchanges = num_exchanges(number, layout.pipeline, passes, choice.chunks)
            computing += passes * (cost - stage.messages) / speed + stage.update
            communicating += (passes * stage.messages + exchanges * transfer) / speed
            communicating += stage.exposed(choice, machine.overlap)
        shares = [each / len(stages) / seconds for each in (computing, communicating)]
        return Prediction(choice, seconds, self.memory(choice), *shares, max(1 - sum(shares), 0.0))


class Plan(NamedTuple):
    """The best layouts, and what was left out.

    Attributes:
        best: the fastest first; but those that are as fast as the fastest one, within the noise, by simplicity.
        num_equal: so many are as fast as the fastest one, itself included.
        num_layouts, num_too_large: all, and those that do not fit the memory.
        limit, smallest: bytes that a rank has for its tensors, and that the smallest layout takes.
        compiled: whether compiled steps are predicted.
    """

    best: list[Prediction]
    num_equal: int
    num_layouts: int
    num_too_large: int
    limit: float
    smallest: float
    compiled: bool


def search(predictor: Predictor, choices: Iterable[Choice]) -> Plan:
    """The fastest layouts that fit.

    Compiled steps are predicted only of layouts whose eager ones take up to `LOWERED_WITHIN` times as long as the best.
    """
    machine = predictor.machine
    limit = (machine.memory_gb - machine.reserved_gb) * 1e9
    eager = predictor.eager() if predictor.lower else predictor
    sizes = {choice: predictor.memory(choice) for choice in choices}
    fitting = [eager.predict(choice) for choice, size in sizes.items() if size <= limit]
    num_too_large = len(sizes) - len(fitting)
    if predictor.lower and fitting:
        slowest = LOWERED_WITHIN * min(p.seconds for p in fitting)
        fitting = [predictor.predict(p.choice) for p in fitting if p.seconds <= slowest]
    fitting.sort(key=lambda p: (p.seconds, p.memory))
    ties = [each for each in fitting if each.seconds <= fitting[0].seconds * (1 + machine.noise)]
    if machine.noise:
        fitting[: len(ties)] = sorted(ties, key=lambda p: p.choice.complexity)
    smallest = min(sizes.values(), default=float("inf"))
    compiled = predictor.lower is not None
    return Plan(fitting[:SHOWN], len(ties), len(sizes), num_too_large, limit, smallest, compiled)
