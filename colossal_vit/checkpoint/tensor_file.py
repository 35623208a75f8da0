"""A safetensors file that several processes write, each tensor to its place, so that none needs to have them all."""

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# As safetensors orders and names the types that a checkpoint has: large ones first, for alignment.
NAMES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFile:
    """A file of the same bytes as those that `safetensors.torch.save_file` writes of the same tensors.

    Args:
        path: of the file.
        tensors: each one's name, shape and type, and whatever; the same in all processes.
    """

    def __init__(self, path: Path, tensors: Iterable[Sequence[Any]]):
        self.path = path
        self._descriptor: int | None = None
        order = list(NAMES)
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._ends = 0
        for key, shape, dtype, *_ in sorted(tensors, key=lambda tensor: (order.index(tensor[2]), tensor[0])):
            start, self._ends = self._ends, self._ends + math.prod(shape) * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, self._ends]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self._starts = {
            key: len(self._header) + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"
        }

    def create(self) -> None:
        """Create the file in its full size, with nothing in it but the names; by one process, before all others."""
        with open(self.path, "xb") as file:
            file.write(self._header)
            file.truncate(len(self._header) + self._ends)

    def write(self, key: str, tensor: Tensor, first: int = 0) -> None:
        """Write a tensor to its place, or a piece of it.

        Args:
            key: its name.
            tensor: it, or those of its elements that are side by side from `first` on.
            first: of these elements.

        Raises:
            OSError: if it cannot be written.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY)
        data = memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        start = self._starts[key] + first * tensor.itemsize
        while data:  # the kernel writes at most 2 GiB at once
            written = os.pwrite(self._descriptor, data, start)
            data, start = data[written:], start + written

    def close(self) -> None:
        """fsync and close the file, if this process has written to it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
