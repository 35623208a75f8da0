"""Host-device synchronisation: reading values in one copy, and counting every wait.

A GPU executes its queue asynchronously until the host needs a value; the queue then runs empty while the host waits.

A training step waits once, in `read`. `WaitCounter` counts any other wait, also on a CPU, where waiting costs nothing,
so that tests can check it without a GPU. A CPU has no copies between host and device; tests see them on a fake GPU.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
_reading = False
_reads = 0  # so far


def read(scalars: Iterable[Tensor]) -> list[float]:
    """The values of scalar tensors on one device, in one copy to the host."""
    global _reading, _reads
    _reading, _reads = True, _reads + 1
    try:
        return [value.item() for value in torch.stack([scalar.double() for scalar in scalars]).cpu().unbind()]
    finally:
        _reading = False


class WaitCounter(TorchDispatchMode):
    """Counts host-device waits inside a `with` block.

    Args:
        on_host: scalars that are on the host even if the model is on a GPU, such as an optimizer's step counts; reading
            them is no wait.
        device: the model's. If it is no CPU, reading a tensor on the CPU is no wait.

    Attributes:
        reads: calls of `read`, each a wait.
        others: number of other waits, by operator.
    """

    # Operators that need the values of a tensor, to return them or to know the shape of the result.
    OPERATORS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self, on_host: Iterable[Tensor] = (), device: torch.device = CPU):
        super().__init__()
        self.on_host, self.device = {id(scalar) for scalar in on_host}, device
        self.reads, self.others = 0, {}

    def __enter__(self) -> "WaitCounter":
        self._reads_before = _reads
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reads = _reads - self._reads_before

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
        if not _reading and self._waits(name, args, kwargs):
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
