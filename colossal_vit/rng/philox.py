"""Philox4x64-10, the counter-based generator of every random number in training.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A key and a counter of 4 words of 64 bits give
4 random words. The key is the seed and a purpose; the counter says what exactly is drawn, for example which epoch's
which image. NumPy has it; the kernels of dropout compute the same.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, Philox

BLOCK = 32  # elements that share a counter: 4 words of 64 bits, and an element has 8 bits
ONE = 1 << 16  # a dropout rate of 1
MOST = ONE - (1 << 8)  # the highest rate that 8 bits can draw


@functools.cache
def word(name: str) -> int:
    """Return a word of a key or counter, below 2^56, that stands for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def _philox(seed: int, purpose: str, counter: Sequence[int]) -> Philox:
    return Philox(key=np.array([seed, word(purpose)], np.uint64), counter=np.array(counter, np.uint64))


def generator(seed: int, purpose: str, *what: int, start: int = 0) -> Generator:
    """Return random numbers of one thing.

    Args:
        seed: of the run.
        purpose: what they are for; other purposes have other numbers.
        what: up to 3 numbers from 0 that name the thing, for example epoch and image.
        start: how many times 4 words of 64 bits it passes over.
    """
    return Generator(_philox(seed, purpose, [start, *what, *[0] * (3 - len(what))]))


def uniform(seed: int, purpose: str, *what: np.ndarray | int, count: int) -> np.ndarray:
    """Return the first `count` numbers, from 0 up to 1, of `generator(...).random()` for each of many things, but
    faster.

    Args:
        seed, purpose, what: see `generator`; arrays (N,) have a number for each thing.
        count: how many numbers a thing gets.

    Returns:
        float64 (N, count).
    """
    counters = np.stack(np.broadcast_arrays(*what), axis=1)
    philox = _philox(seed, purpose, [0] * 4)
    state, words = philox.state, np.empty((len(counters), -(-count // 4) * 4), np.uint64)
    for row, counter in zip(words, counters, strict=True):
        state["state"]["counter"][1 : 1 + len(counter)] = counter
        philox.state = state  # its buffer is empty, as at the start
        row[:] = philox.random_raw(len(row))
    return (words[:, :count] >> np.uint64(11)) * 2.0**-53
