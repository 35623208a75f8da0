"""Philox4x64-10, the counter-based generator of every random number in training.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A key and a counter of 4 words of 64 bits give
4 random words. The key is the seed and a purpose; the counter says what exactly is drawn, for example which epoch's
which image. `kernels.py` computes the same on GPUs.
"""

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.random import Generator, Philox

BLOCK = 32  # elements that share a counter: 4 words of 64 bits, and an element has 8 bits
ONE = 1 << 16  # a dropout rate of 1
MOST = ONE - (1 << 8)  # the highest rate that 8 bits can draw


@functools.cache
def word(name: str) -> int:
    """A word of a key or counter, below 2^56, that stands for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


def _philox(seed: int, purpose: str, counter: Sequence[int]) -> Philox:
    return Philox(key=np.array([seed, word(purpose)], np.uint64), counter=np.array(counter, np.uint64))


def generator(seed: int, purpose: str, *what: int) -> Generator:
    """Random numbers of one thing.

    Args:
        seed: of the run.
        purpose: what they are for; other purposes have other numbers.
        what: up to 3 numbers from 0 that name the thing, for example epoch and image.
    """
    return Generator(_philox(seed, purpose, [0, *what, *[0] * (3 - len(what))]))


def uniform(seed: int, purpose: str, *what: np.ndarray | int, count: int) -> np.ndarray:
    """The first `count` numbers, from 0 up to 1, of `generator(...).random()` for each of many things, but faster.

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


_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


_thread = threading.local()
_is_fork = threading.Event()  # its parent's threads are not there, and libgomp would wait for them
os.register_at_fork(after_in_child=_is_fork.set)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The library whose threads torch's operators use, where it is GNU's."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


def in_threads(work: Callable[[], None], number: int) -> None:
    """Call `work` in `number` threads at once, those that torch's operators use.

    After an operator these spin for a while, waiting for the next one, and threads of another pool find no free core.
    """
    if number == 1 or _is_fork.is_set() or _openmp() is None:
        return work()
    errors = []

    def guarded(_: None) -> None:
        if not hasattr(_thread, "state"):  # held for good: to make one in each call takes longer than a small mask
            _thread.state = ctypes.pythonapi.PyGILState_Ensure()
        try:
            work()
        except BaseException as error:  # which ctypes would print, and go on
            errors.append(error)

    _openmp().GOMP_parallel(_Work(guarded), None, number, 0)
    if errors:
        raise errors[0]


_idle: list[Philox] = []  # in no thread's use; kept, since making one takes as long as drawing 40,000 elements


LONGEST = 1 << 13  # blocks that a thread draws at once, of one sample at least: as many as its cache holds


@functools.lru_cache(maxsize=16)
def _limits(rate: int, blocks: int) -> np.ndarray:
    """The limits of so many blocks' elements, uint8, and of 255 blocks more; see `kept`."""
    turns = np.arange(blocks + 255) * 157 % 256  # 157/256 is near the golden ratio: neighbours are far apart
    return ((rate + turns) // 256).astype(np.uint8).repeat(BLOCK)


def _parts(samples: np.ndarray, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of samples (B, 2) that follow one another in the batch: step, first place, and bounds in `samples`."""
    for (step, offset), run in groupby(enumerate(samples.tolist()), lambda at: (at[1][0], at[1][1] - at[0])):
        rows = [row for row, _ in run]
        for start in rows[::most]:
            yield step, offset + start, start, min(start + most, rows[-1] + 1)


def kept(seed: int, layer: int, rate: int, samples: np.ndarray, tokens: int, channels: int, part: slice) -> np.ndarray:
    """Which elements a layer's dropout keeps: those whose 8 bits are not below a limit.

    The limit is the rate in units of 1/256, rounded up in some blocks and down in the others, as many as make up the
    rate. Which ones changes with the sample: over 256 steps, or 256 places, an element has the rate exactly. This
    correlates the elements of a block by at most 4e-6 / (rate · (1 - rate)), with the rate as a probability.

    A sample's (tokens, channels) are drawn row by row, each row in whole blocks, so that the GPU of a rank with some of
    the channels need not draw the others. Here they are drawn and cut off: numpy takes longer to start than to draw.
    For the same reason the blocks of one sample come after those of another, an odd number of them, so that each of 256
    places has other limits.

    Args:
        seed: of the run.
        layer: the layer's `word`.
        rate: the dropout rate in units of 2^-16, at most `MOST`.
        samples: (B, 2), each one's optimizer step and place in the global batch.
        tokens, channels: of a sample in the full model.
        part: this rank's channels.

    Returns:
        bool (B, tokens, channels of the part).
    """
    width = -(-channels // BLOCK) * BLOCK
    blocks = tokens * width // BLOCK | 1  # from one sample to the next
    threads = min(torch.get_num_threads(), len(samples))
    each = -(-len(samples) // threads)
    most = -(-each // -(-each // max(1, LONGEST // blocks)))  # as many parts for one thread as for another
    limits = _limits(rate, most * blocks)
    mask = np.empty((len(samples), blocks * BLOCK), bool)
    parts = iter(list(_parts(samples, most)))  # of all threads: whichever is free takes the next

    def draw() -> None:
        try:
            philox = _idle.pop()
        except IndexError:
            philox = Philox()
        state = philox.state
        state["state"]["key"][:] = seed, word("dropout")
        for step, place, start, end in parts:
            state["state"]["counter"][:] = place * blocks, 0, layer, step
            philox.state = state  # whose buffer is empty, since whole blocks are drawn
            bits = philox.random_raw((end - start) * blocks * (BLOCK // 8)).view(np.uint8)
            turn = (seed + layer + place * blocks + 55 * step) % 256
            np.greater_equal(bits, limits[turn * BLOCK :][: len(bits)], out=mask[start:end].reshape(-1))
        _idle.append(philox)

    in_threads(draw, threads)
    return mask[:, : tokens * width].reshape(len(samples), tokens, width)[..., part]
