"""Host-device synchronisation: reading values in one copy, and counting every wait.

A GPU executes its queue asynchronously until the host needs a value; the queue then runs empty while the host waits.

A training step waits once, in `read`. `WaitCounter` counts any other wait, also on a CPU, where waiting costs nothing,
so that tests can check it without a GPU.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

    Attributes:
        reads: calls of `read`, each a wait.
        others: number of other waits, by operator.
    """

    # Operators that need the values of a tensor, to return them or to know the shape of the result.
    OPERATORS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self, on_host: Iterable[Tensor] = ()):
        super().__init__()
        self.on_host = {id(scalar) for scalar in on_host}
        self.reads, self.others = 0, {}

    def __enter__(self) -> "WaitCounter":
        self._reads_before = _reads
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reads = _reads - self._reads_before

    def _waits(self, name: str, args: tuple) -> bool:
        if name == "index":  # with a boolean mask, whose values determine the shape of the result
            return any(mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in args[1])
        return name in self.OPERATORS and id(args[0]) not in self.on_host

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if not _reading and self._waits(name, args):
            self.others[name] = self.others.get(name, 0) + 1
        return function(*args, **(kwargs or {}))
