"""What one tensor-parallel rank computes and sends in each part of a model: the unit of the planner's sums.

Recorded from the unchanged model and engine, on fake tensors, at two batch sizes. All figures are linear in the batch,
with a constant part for weights.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from colossal_vit.dry_run.meter import StepMeter, copies_of_weights, count_bytes
from colossal_vit.engine.engine import Engine
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# A Vision Transformer's: the last block may compute the class token only, and the head includes the loss.
BLOCKS = ("block", "last")
PARTS = ("embed", *BLOCKS, "head")
KINDS = ("forward", "backward")  # passes
TensorParallel = tuple[str | None, int, int | None]  # mode, size, depth


class Message(NamedTuple):
    """A call of a tensor-parallel collective.

    Attributes:
        kind: see `meter.SENT_SHARE`.
        size: of the group.
        nbytes: of the message.
    """

    kind: str
    size: int
    nbytes: float


@dataclass
class Pass:
    """The forward or the backward pass of a part of the model.

    Attributes:
        operations: FLOPs and bytes read and written, by operator; (operators, 2).
        messages: in order.
    """

    operations: np.ndarray
    messages: list[Message]

    def at(self, other: "Pass", weight: float) -> "Pass":
        """On the line from this pass to the same one with another batch."""

        def mix(here: Any, there: Any) -> Any:
            return here + (there - here) * weight

        if len(self.operations) != len(other.operations) or len(self.messages) != len(other.messages):
            raise RuntimeError("the model makes other operations with another batch size")
        return Pass(
            mix(self.operations, other.operations),
            [a._replace(nbytes=mix(a.nbytes, b.nbytes)) for a, b in zip(self.messages, other.messages, strict=True)],
        )


@dataclass
class Trace:
    """A model on one tensor-parallel rank, without data parallelism and pipeline.

    Attributes:
        sizes: the two batch sizes, images of a micro-batch on all tensor-parallel ranks.
        passes: by part, pass ("forward" or "backward") and batch size.
        parameters: elements of each parameter, by part.
        weight_bytes: bytes of weights ÷ elements.
        optimizer_bytes: bytes of what the optimizer and the moving average keep ÷ elements.
        update_bytes: read and written in the update ÷ elements.
        boundary: bytes of activations between blocks ÷ images.
    """

    sizes: tuple[int, int]
    passes: dict[tuple[str, str, int], Pass]
    parameters: dict[str, list[int]]
    weight_bytes: float
    optimizer_bytes: float
    update_bytes: float
    boundary: float
    _parts: dict[tuple[str, str, int], Pass] = field(default_factory=dict, repr=False)

    def part(self, name: str, kind: str, batch: int) -> Pass:
        """Return a pass of a part with a micro-batch of so many images."""
        key = name, kind, batch
        if key not in self._parts:
            few, many = self.sizes
            first, second = (self.passes[name, kind, size] for size in self.sizes)
            self._parts[key] = first.at(second, (batch - few) / (many - few))
        return self._parts[key]


_NO_KERNELS = ("c10d", "prim", "profiler")  # messages, questions such as prim::device, marks for a profiler
_aten = torch.ops.aten
# Views that PyTorch does not mark as such, memory that nothing is written to, and a question about types.
_NOTHING_RUN = {_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_NOTHING_RUN |= {_aten.new_empty_strided, _aten.promote_types}


def launches(function: Any) -> bool:
    """Return whether an operator runs a kernel: views and allocations do not."""
    return not (function.is_view or function.overloadpacket in _NOTHING_RUN or function.namespace in _NO_KERNELS)


def flops_of(function: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """FLOPs of a call of an operator; 0 if it is no matrix product."""
    name = function._schema.name
    if name.endswith("flash_attention_for_cpu"):  # which PyTorch's registry lacks
        return sdpa_flop_count(*(arg.shape for arg in args[:3]))
    if name.endswith("flash_attention_for_cpu_backward"):
        return sdpa_backward_flop_count(*(arg.shape for arg in args[:4]))
    count = flop_registry.get(function._overloadpacket)
    return count(*args, **kwargs, out_val=result) if count else 0.0


class _Recorder(StepMeter):
    """Records operators and messages, in `passes` by the name of the current one."""

    def __init__(self, existing: Iterable[Tensor]):
        super().__init__(existing)
        self.passes: dict[Any, Pass] = {}
        self._key: Any = None

    def begin(self, key: Any) -> None:
        """End the current pass, and begin another one; None records nothing."""
        self.end()
        self._key, self._operations, self._messages = key, [], []

    def end(self) -> None:
        if self._key is not None:
            operations = np.array(self._operations, dtype=float).reshape(-1, 2)
            self.passes[self._key] = Pass(operations, self._messages)
        self._key = None

    def _record(self, kind: str, size: int, nbytes: int) -> None:
        super()._record(kind, size, nbytes)
        if self._key is not None:
            self._messages.append(Message(kind, size, nbytes))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self._key is not None and launches(function):
            flops = flops_of(function, args, kwargs or {}, result)
            self._operations.append((flops, count_bytes([args, kwargs, result])))
        return result


def mark_parts(model: nn.Module, begin: Callable[[str, str], None]) -> list[Any]:
    """Have `begin(part, "forward" or "backward")` called where a pass through a model comes to the next part.

    Where the second block begins, all that the first one does not keep has been freed. The caller begins the
    embedding's forward pass and the head's backward pass.

    Args:
        model: has two `blocks`, as timm's models do.
        begin: what to call.

    Returns:
        Handles, to remove the hooks.
    """

    def on_gradient(tensor: Tensor, part: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: begin(part, "backward"))

    def before(part: str, part_before: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple) -> None:
            begin(part, "forward")
            on_gradient(inputs[0], part_before)

        return hook

    def after(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        on_gradient(output, "last")
        begin("head", "forward")

    first, last = model.blocks.children()
    return [
        first.register_forward_pre_hook(before("block", "embed")),
        last.register_forward_pre_hook(before("last", "block")),
        last.register_forward_hook(after),
    ]


def _part_of(name: str) -> str:
    """Return the part that a parameter of a model of two blocks belongs to, by its name."""
    if name.startswith("blocks."):  # others' blocks are those of a hybrid's embedding
        return "block" if name.startswith("blocks.0.") else "last"
    return "embed" if any(word in name for word in ("patch_embed", "token", "pos_embed")) else "head"


def trace(engine: Engine, batches: Iterable) -> Trace:
    """Record a step of an engine without data parallelism and pipeline, at two batch sizes.

    Args:
        engine: on fake tensors; has made no step yet.
        batches: of images and labels; the first one is used, and the half of it.
    """
    model, optimizer = engine.bare_model, engine.optimizer.optim
    weights = list(model.parameters())
    copies = copies_of_weights(engine)
    images, labels = next(iter(batches))
    sizes = (len(images) // 2, len(images))
    engine.train()
    with _Recorder([*model.parameters(), *model.buffers(), *copies, images, labels]) as recorder:
        size = 0

        def begin(part: str, kind: str) -> None:  # with the current `size`
            recorder.begin((part, kind, size))

        handles = mark_parts(model, begin)
        for size in sizes:
            begin("embed", "forward")
            loss = engine.criterion(engine(images[:size]), labels[:size])
            recorder.end()
            begin("head", "backward")
            engine.backward(loss)
            recorder.end()
            del loss
            engine.optimizer.zero_grad()
        for handle in handles:
            handle.remove()

        seen: list[int] = []
        first, _ = model.blocks.children()
        handle = first.register_forward_hook(lambda m, i, o: seen.append(count_bytes(o)))
        engine.backward(engine.criterion(engine(images), labels))
        handle.remove()
        recorder.begin("update")
        engine.step()
        recorder.end()
    update = recorder.passes.pop("update")
    moments = count_bytes([list(state.values()) for state in optimizer.state.values()])
    elements = sum(p.numel() for p in weights)
    parameters: dict[str, list[int]] = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        parameters[_part_of(name)].append(parameter.numel())
    return Trace(
        sizes,
        {key: record for key, record in recorder.passes.items() if key[0] in PARTS},
        parameters,
        count_bytes(weights) / elements,
        (moments + count_bytes(copies)) / elements,
        update.operations[:, 1].sum() / elements,
        seen[0] / len(images),
    )
