"""How often the host waits for the device in a training step."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from colossal_vit.engine import engine, loop
from colossalai.accelerator import get_accelerator
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


class WaitCounter(TorchDispatchMode):
    """Counts host-device waits inside a `with` block.

    A training step calls `engine.Scalars.read` once, which waits until the step before is done. Any other wait is
    counted too, also on a CPU, where waiting costs nothing. A CPU has no copies between host and device; they are seen
    on a fake GPU.

    Args:
        on_host: scalars that are on the host even if the model is on a GPU, such as an optimizer's step counts; reading
            them is no wait.
        device: the model's. If it is no CPU, reading a tensor on the CPU is no wait.

    Attributes:
        reads: calls of `Scalars.read`.
        others: number of other waits, by operator.
    """

    # Operators that need the values of a tensor, to return them or to know the shape of the result.
    OPERATORS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self, on_host: Iterable[Tensor] = (), device: torch.device = CPU):
        super().__init__()
        self.on_host, self.device = {id(scalar) for scalar in on_host}, device
        self.reads, self.others, self._reading = 0, {}, False

    def __enter__(self) -> "WaitCounter":
        self._patch, read = pytest.MonkeyPatch(), engine.Scalars.read
        self._patch.setattr(engine.Scalars, "read", lambda scalars: self._count(read, scalars))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def _count(self, read: Callable[[engine.Scalars], list[float]], scalars: engine.Scalars) -> list[float]:
        self.reads, self._reading = self.reads + 1, True
        try:
            return read(scalars)
        finally:
            self._reading = False

    def _needs(self, tensor: Tensor) -> bool:
        """Whether the host waits for the values of this tensor, if it needs them."""
        return tensor.device.type == self.device.type and id(tensor) not in self.on_host

    def _waits(self, name: str, args: tuple, kwargs: dict) -> bool:
        if name == "index":  # with a boolean mask, whose values determine the shape of the result
            masks = (mask for mask in args[1] if mask is not None and mask.dtype in (torch.bool, torch.uint8))
            return any(map(self._needs, masks))
        if name == "copy_":
            return _copy_waits(args[1], args[0].device, args[2] if len(args) > 2 else False, args[0])
        if name == "_to_copy":
            return _copy_waits(args[0], kwargs.get("device"), kwargs.get("non_blocking", False))
        return name in self.OPERATORS and self._needs(args[0])

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if not self._reading and self._waits(name, args, kwargs):
            self.others[name] = self.others.get(name, 0) + 1
        return function(*args, **kwargs)


def _copy_waits(source: Tensor, device: torch.device | None, non_blocking: bool, target: Tensor | None = None) -> bool:
    """Whether the host waits for a copy to `device`: one to or from the host, unless in the background.

    Only what is in pinned memory is copied in the background. PyTorch pins the memory of a `target` that it makes.
    """
    if device is None or (source.device.type == "cpu") == (device.type == "cpu"):
        return False
    on_host = source if source.device.type == "cpu" else target
    return not (non_blocking and (on_host is None or on_host.is_pinned()))


class WaitHook(BaseHook):
    """Counts the waits of the third optimizer step, its data and hooks included, and prints their number."""

    def __init__(self):
        super().__init__(priority=100)

    def after_train_iter(self, trainer: loop.Trainer, *outcome: Any) -> None:
        if trainer.engine.num_steps == 2:
            states = trainer.engine.optimizer.optim.state.values()
            step_counts = (state["step"] for state in states if "step" in state)
            self.waits = WaitCounter(step_counts, get_accelerator().get_current_device()).__enter__()
        elif trainer.engine.num_steps == 3:
            self.waits.__exit__(None, None, None)
            print(f"in a step: {self.waits.reads} results read, other waits {self.waits.others}")


ONE = "in a step: 1 results read, other waits {}\n"


def print_waits(patch: pytest.MonkeyPatch) -> None:
    """Have every training print what `WaitHook` counts; `ONE` is as it should be."""
    attach = loop.Trainer._attach
    patch.setattr(loop.Trainer, "_attach", lambda trainer, hooks: attach(trainer, [*hooks, WaitHook()]))
