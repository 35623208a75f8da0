"""Dropout for CPUs, compiled by Numba: as `kernels.py`, it reads and writes each element once and stores no mask."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from colossal_vit.jit import cached
from colossal_vit.rng.philox import BLOCK, ONE, word
from llvmlite import ir
from numba import carray, types, uint64
from numba.extending import intrinsic
from torch import Tensor

PART = 1 << 13  # elements that a thread computes at once, for its cache; whichever is free takes the next
GRAIN = 1 << 15  # elements that are worth another thread, as in torch's operators
PURPOSE = np.uint64(word("dropout"))
M0, M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
K0, K1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


class Arguments(NamedTuple):
    """Of `_work`, int64.

    Attributes:
        taken: how many parts threads have taken.
        x, residual, y, samples: addresses; 0 for no residual.
        rows, count: of x, as a matrix.
        tokens: rows of a sample.
        channels, first, seed, layer, rate: see `dropout.drop`.
    """

    taken: int
    x: int
    residual: int
    y: int
    samples: int
    rows: int
    count: int
    tokens: int
    channels: int
    first: int
    seed: int
    layer: int
    rate: int


@intrinsic
def product(context, a, b):
    """The upper and the lower 64 bits of a product of two uint64."""
    pair = types.UniTuple(types.uint64, 2)

    def generate(context, builder, signature, values):
        wide, narrow = ir.IntType(128), ir.IntType(64)
        bits = builder.mul(*(builder.zext(value, wide) for value in values))
        upper = builder.lshr(bits, ir.Constant(wide, 64))
        return context.make_tuple(builder, pair, [builder.trunc(upper, narrow), builder.trunc(bits, narrow)])

    return pair(types.uint64, types.uint64), generate


@intrinsic
def count_up(context, pointer):
    """The int64 at `pointer`, which is one more afterwards, also if several threads do this at once."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", *values, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(pointer), generate


def _pointer_to(kind: types.Type) -> Any:
    @intrinsic
    def pointer(context, address):
        def generate(context, builder, signature, values):
            return builder.inttoptr(*values, context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


float32_at, int64_at = _pointer_to(types.float32), _pointer_to(types.int64)


@numba.njit(inline="always")
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x64-10 of uint64."""
    for _ in range(10):
        high0, low0 = product(M0, c0)
        high1, low1 = product(M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += K0
        k1 += K1
    return c0, c1, c2, c3


def _work(pointer):
    """Of one thread: write parts of y until all are taken."""
    given = carray(pointer, 1)[0]
    rows, count, tokens, channels, first = given.rows, given.count, given.tokens, given.channels, given.first
    seed, layer, rate = given.seed, given.layer, given.rate
    x, y = carray(float32_at(given.x), (rows, count)), carray(float32_at(given.y), (rows, count))
    residual = carray(float32_at(given.residual), (rows, count))
    samples = carray(int64_at(given.samples), (rows // tokens, 2))
    left = first // BLOCK  # the first block of a row, in this rank's channels
    blocks = (first + count + BLOCK - 1) // BLOCK - left
    per_token = (channels + BLOCK - 1) // BLOCK
    per_sample = tokens * per_token | 1
    words = np.empty((blocks, 4), np.uint64)
    bits = words.view(np.uint8)
    offset = first - left * BLOCK  # of its first channel, in these blocks
    limits = np.empty((blocks, BLOCK), np.uint8)
    scale, zero = np.float32(ONE / (ONE - rate)), np.float32(0)
    height = max(1, PART // count)
    while True:
        start = count_up(pointer) * height
        if start >= rows:
            return
        for row in range(start, min(start + height, rows)):
            step, place = samples[row // tokens, 0], samples[row // tokens, 1]
            number = place * per_sample + row % tokens * per_token + left
            turn = number + seed + layer + 55 * step
            for block in range(blocks):
                counter = uint64(number + block + 1)  # as NumPy, which counts up before it draws
                words[block] = philox(counter, uint64(0), uint64(layer), uint64(step), uint64(seed), PURPOSE)
                limits[block, :] = rate + ((turn + block) * 157 & 255) >> 8
            drawn, limit = bits.reshape(-1)[offset:], limits.reshape(-1)[offset:]
            values, sums, written = x[row], residual[row], y[row]
            if given.residual:
                for i in range(count):
                    written[i] = values[i] * (scale if drawn[i] >= limit[i] else zero) + sums[i]
            else:
                for i in range(count):
                    written[i] = values[i] * (scale if drawn[i] >= limit[i] else zero)


@functools.cache
def compiled() -> Callable[[ctypes.Array], None]:
    """`_work`, which takes `Arguments`."""
    pointer = types.CPointer(numba.from_dtype(np.dtype([(name, np.int64) for name in Arguments._fields])))
    program = cached(numba.cfunc, types.void(pointer), _work, error_model="numpy")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(program.address)


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """What starts the threads of torch's operators, where they are those of GNU's OpenMP.

    After an operator they spin for a while, waiting for the next one, and threads of another pool find no free core.
    """
    try:
        return ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except OSError:
        return None


def drop(x: Tensor, residual: Tensor | None, samples: Tensor, key: Tensor, first: int, channels: int) -> Tensor:
    """As `dropout.drop` without GELU, in fp32 or fp64."""
    if x.dtype == torch.float64:  # in checks only, which may take longer
        kept = drop(torch.ones(x.shape, dtype=torch.float32), None, samples, key, first, channels) != 0
        y = x * kept * (ONE / (ONE - key[2].item()))
        return y if residual is None else y + residual
    x, residual = (each if each is None else each.float().contiguous() for each in (x, residual))
    samples = samples.contiguous()
    y = torch.empty_like(x)
    addresses = [0 if each is None else each.data_ptr() for each in (x, residual, y, samples)]
    count, tokens = x.shape[-1], x.shape[1:-1].numel()
    given = Arguments(0, *addresses, x.shape[0] * tokens, count, tokens, channels, first, *key.tolist())
    arguments = (ctypes.c_int64 * len(given))(*given)
    threads = min(torch.get_num_threads(), -(-x.numel() // GRAIN))
    if threads > 1 and (parallel := _parallel()):
        parallel(compiled(), arguments, threads, 0)
    else:
        compiled()(arguments)
    return y
