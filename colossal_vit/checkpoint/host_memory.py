"""Memory of the host for tensors of a GPU that are saved."""

import torch
from torch import Tensor


class Host:
    """Brings tensors to the CPU; from a GPU in the background, to blocks of pinned memory that PyTorch reuses.

    A block has room for many tensors, since PyTorch pins powers of two only: room for each would be 1.6 times as much.
    """

    BLOCK, ALIGNMENT = 2**26, 64  # bytes

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)  # rest of the last block

    def copy(self, tensor: Tensor, needed: bool) -> Tensor:
        """Return a contiguous tensor on the CPU.

        Args:
            tensor: on any device.
            needed: whether it must be another one even if it is on the CPU.
        """
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=needed).contiguous()
        size, taken = tensor.nbytes, -(-tensor.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        if size > self._free.nbytes:
            self._free = torch.empty(max(size, self.BLOCK), dtype=torch.uint8, pin_memory=True)
        own, self._free = self._free[:size], self._free[taken:]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
