"""All layouts for a model and a number of ranks."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from colossal_vit.config.load import num_model_chunks
from colossal_vit.config.schema import TENSOR_MODES
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout, arrange
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE

MOST_TENSOR_RANKS = 64  # larger groups are left out: their pieces of a Vision Transformer's matrices are tiny
Check = Callable[[Config, Layout], None]


@dataclass(frozen=True)
class Choice:
    """A layout, and what else decides how it is run.

    Attributes:
        layout: data × pipeline × tensor.
        batch: BATCH_SIZE, images that a data-parallel rank takes at a time.
        accumulation: batches in an optimizer step.
        micro_batches: into which a pipeline divides a batch; 1 without one.
        chunks: of the model on each stage.
        checkpoint: whether activations are computed again.
        zero: stage of split optimizer state; 0 is none.
    """

    layout: Layout
    batch: int
    accumulation: int = 1
    micro_batches: int = 1
    chunks: int = 1
    checkpoint: bool = False
    zero: int = 0

    @property
    def passes(self) -> int:
        """Forward passes of a block in an optimizer step."""
        return self.accumulation * self.micro_batches

    @property
    def images(self) -> int:
        """Images of a micro-batch."""
        return self.batch // self.micro_batches

    @property
    def tensor(self) -> tuple[str | None, int, int | None]:
        """Mode and size of tensor parallelism, and the depth of 2.5D, which others do not have."""
        return self.layout.tensor_mode, self.layout.tensor, self.layout.depth

    def settings(self, hybrid: bool) -> dict[str, Any]:
        """Return the config values that make it; `hybrid` is whether the script can do more than data parallelism."""
        values: dict[str, Any] = {"BATCH_SIZE": self.batch, "gradient_accumulation": self.accumulation}
        if hybrid:
            mode, size, depth = self.tensor
            tensor = {"mode": mode, "size": size, **({"depth": depth} if depth else {})}
            values["parallel"] = {"pipeline": self.layout.pipeline, "tensor": tensor}
            values["NUM_MICRO_BATCHES"] = self.micro_batches
            values["model"] = {"num_chunks": self.chunks}
            values["CHECKPOINT"] = self.checkpoint
        values["zero"] = {"stage": self.zero} if self.zero else None
        return values

    def flags(self, hybrid: bool) -> str:
        """Return the same for the command line, quoted for a shell: values have single quotes only."""
        values = self.settings(hybrid)
        if hybrid:
            values["model.num_chunks"] = values.pop("model")["num_chunks"]
        return " ".join(f'--set "{key}={value!r}"' for key, value in values.items())

    def _options(self) -> list[str]:
        words = []
        if depth := self.tensor[2]:
            words.append(f"depth {depth}")
        if self.layout.pipeline > 1:
            words.append(f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}")
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks")
        if self.accumulation > 1:
            words.append(f"accumulation {self.accumulation}")
        if self.checkpoint:
            words.append("recomputed")
        if self.zero:
            words.append(f"zero {self.zero}")
        return words

    def __str__(self) -> str:
        return ", ".join([str(self.layout), *self._options()])


def is_hybrid(config: Config) -> bool:
    """Tell whether the script of a config splits models, too: those for models of timm are data parallel only."""
    return "MODEL" not in config


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _tensor_options(world_size: int) -> Iterator[tuple[str | None, int, int]]:
    """Mode, size and side of tensor parallelism."""
    yield None, 1, 1
    for size in divisors(world_size):
        if size <= MOST_TENSOR_RANKS:
            for mode in TENSOR_MODES:
                yield from ((mode, size, side) for side in arrange(mode, size) if (mode, size) != ("2.5d", side**2))


def enumerate_layouts(config: Config, world_size: int, images: int, check: Check | None) -> list[Choice]:
    """Return every layout in which a step has `images` images, and that the config's checks allow.

    Without a pipeline, micro-batches are those of gradient accumulation; with one, the schedule makes them, since more
    of them fill the bubble. The chunks of a stage have as many blocks each, but for the rest of the division.

    Args:
        config: of the run; all but the layout is kept.
        world_size: number of ranks.
        images: of an optimizer step.
        check: raises `UserError` for a config and layout that do not fit the model.
    """
    hybrid = is_hybrid(config)
    mode, ddp = config.fp16 and config.fp16.mode, config.torch_ddp
    pipelines = hybrid and mode in (None, AMP_TYPE.NAIVE)
    found: list[Choice] = []

    def allowed(choice: Choice) -> bool:
        if config.get("mix") and choice.batch % 2:  # images are mixed in pairs
            return False
        if choice.accumulation > 1 and ddp.get("static_graph"):
            return False
        changed = Config({**config, **choice.settings(hybrid)})
        changed.pop("TENSOR_SHAPE", None)
        try:
            if check:
                check(changed, Layout.of(changed, world_size))
        except UserError:
            return False
        return True

    for tensor_mode, size, side in _tensor_options(world_size) if hybrid else [(None, 1, 1)]:
        for stages in divisors(world_size // size) if pipelines else [1]:
            data = world_size // size // stages
            if images % data or stages > config.get("DEPTH", stages):
                continue
            layout = Layout(data, stages, size, tensor_mode, side)
            for parts in divisors(images // data):
                if stages == 1:
                    schedules = [Choice(layout, images // data // parts, accumulation=parts)]
                else:
                    chunks = divisors(config.DEPTH // stages) if parts % stages == 0 else [1]
                    schedules = [Choice(layout, images // data, 1, parts, number) for number in chunks]
                for choice in filter(allowed, schedules):
                    most_zero = 0 if data == 1 or ddp else min(choice.passes, 2)
                    for zero in range(most_zero + 1):
                        for checkpoint in (False, True)[: 1 + hybrid]:
                            found.append(dataclasses.replace(choice, zero=zero, checkpoint=checkpoint))
    return found


def own_layout(config: Config, world_size: int) -> Choice:
    """Return the layout that the config itself asks for."""
    layout = Layout.of(config, world_size)
    return Choice(
        layout,
        config.BATCH_SIZE,
        config.gradient_accumulation,
        config.get("NUM_MICRO_BATCHES", 1) if layout.pipeline > 1 else 1,
        num_model_chunks(config),
        config.get("CHECKPOINT", False),
        config.zero.stage if config.zero else 0,
    )
