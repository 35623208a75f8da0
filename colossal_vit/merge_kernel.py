"""`blocks.merge_heads` as a Triton kernel: each gradient is read once, to be stored and to be summed."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # rows and columns of a program


@triton.jit
def merge(q, k, v, y, sums, rows, COUNT: tl.constexpr, TILE: tl.constexpr):
    """y (rows, 3 · COUNT) = q, k, v (rows, COUNT) side by side; the columns' sums are (tiles over rows, 3 · COUNT)."""
    TILES: tl.constexpr = (COUNT + TILE - 1) // TILE
    part, tile = tl.program_id(0) % (3 * TILES) // TILES, tl.program_id(0) // (3 * TILES)
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < COUNT)[None, :]
    at = row.to(tl.int64)[:, None] * COUNT + column[None, :]
    if part == 0:
        values = tl.load(q + at, inside, 0.0)
    elif part == 1:
        values = tl.load(k + at, inside, 0.0)
    else:
        values = tl.load(v + at, inside, 0.0)
    tl.store(y + row.to(tl.int64)[:, None] * (3 * COUNT) + part * COUNT + column[None, :], values, inside)
    sums += tile * (3 * COUNT) + part * COUNT
    tl.store(sums + column, tl.sum(values.to(sums.dtype.element_ty), 0), column < COUNT)


def launch(q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> None:
    """See `merge`; q, k and v are (B, N, COUNT)."""
    q, k, v = (each.contiguous() for each in (q, k, v))  # CUDA's attention without a fused kernel transposes some
    rows, count = q.shape[:-1].numel(), q.shape[-1]
    merge[(len(sums) * 3 * triton.cdiv(count, TILE),)](q, k, v, y, sums, rows, count, TILE)
