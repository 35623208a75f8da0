"""Dropout for CPUs, in NumPy, which has the generator of `philox.py`; as in `kernels.py`, no mask is stored."""

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from colossal_vit.rng.philox import BLOCK, ONE, generator
from torch import Tensor

GRAIN = 1 << 15  # elements that are worth another thread, as in torch's operators


def _kept(count: int, step: int, place: int, key: list[int], tokens: int, channels: int) -> np.ndarray:
    """Return which elements of `count` samples are kept, bool (count, tokens, channels rounded up to whole blocks).

    Their places in the global batch follow each other, so that their blocks do, too. All channels are drawn at once,
    also on a rank that has some of them only.

    Args:
        count: the number of samples.
        step, place: the optimizer step, and the first sample's place.
        key, channels: see `dropout.drop`.
        tokens: those of a sample.
    """
    seed, layer, rate = key
    per_token = -(-channels // BLOCK)
    per_sample = tokens * per_token | 1
    first = place * per_sample
    random = generator(seed, "dropout", 0, layer, step, start=first)
    words = random.integers(0, 2**64 - 1, (count * per_sample, BLOCK // 8), np.uint64, endpoint=True)
    turn = np.arange(len(words), dtype=np.uint32) + (first + seed + layer + 55 * step) % 256
    limits = (turn * 157 % 256 + rate >> 8).astype(np.uint8)
    kept = (words.view(np.uint8) >= limits[:, None]).reshape(count, per_sample, BLOCK)
    return kept[:, : tokens * per_token].reshape(count, tokens, -1)


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a fork of it has none of them, and starts its own."""
    return ThreadPoolExecutor(threads)


def drop(x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int) -> Tensor:
    """Compute `dropout.drop` without GELU, in fp32 or fp64, and return it in that type."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    result = torch.empty_like(x)
    shape = len(x), x.shape[1:-1].numel(), x.shape[-1]
    values, y = (each.numpy().reshape(shape) for each in (x, result))
    places, layer = samples.numpy(), key.tolist()
    scale = y.dtype.type(ONE / (ONE - layer[2]))

    @np.errstate(all="ignore")  # as torch's operators, which warn of no infinite value
    def write(start: int, stop: int) -> None:
        kept = _kept(stop - start, *places[start].tolist(), layer, shape[1], channels)
        part = y[start:stop]
        np.multiply(values[start:stop], kept[..., first : first + shape[2]], out=part)  # inf · 0 is NaN, as on a GPU
        part *= scale

    threads = min(torch.get_num_threads(), -(-x.numel() // GRAIN))
    jumps = np.flatnonzero((np.diff(places, axis=0) != [0, 1]).any(1)) + 1
    even = range(0, len(x), max(1, -(-len(x) // max(1, threads))))
    parts = list(itertools.pairwise(sorted({*jumps.tolist(), *even, len(x)})))
    if threads > 1 and len(parts) > 1:
        list(_pool(os.getpid(), threads).map(write, *zip(*parts, strict=True)))
    else:
        for part in parts:
            write(*part)
    return result
