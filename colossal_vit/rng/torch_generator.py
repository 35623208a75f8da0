"""PyTorch's generator, for code that takes random numbers from no other: initial weights, torchvision's transforms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_seed(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU generator inside the block, and restore its state afterwards.

    What is drawn is float32 also where DTYPE is float64: the numbers for which PyTorch's generator draws others.
    `torch.manual_seed` would also reseed the GPU's generator.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
