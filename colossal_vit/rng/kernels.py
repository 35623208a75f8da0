"""Dropout for GPUs, as a Triton kernel.

It reads and writes each element once and stores no mask. No thread draws another one's blocks.
"""

import triton
import triton.language as tl
from colossal_vit.rng.philox import BLOCK, word
from torch import Tensor

LANES = 128  # blocks of a program, one for each thread of Triton's 4 warps: of fewer, several threads would draw each


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x64-10 of tensors of uint64."""
    m0 = tl.full(c0.shape, 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full(c0.shape, 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def tail(x):
    """The density of the standard normal distribution at x, and the probability to be above |x|.

    In fp32 the probability is that of M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.2.17, to
    1e-7: erf has so many instructions that a GPU would wait for them instead of its memory.
    """
    density = tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361595)  # logarithms to base 2 of e^-½ and √(2π)
    if x.dtype == tl.float64:
        above = 0.5 - 0.5 * tl.erf(tl.abs(x) * 0.7071067811865476)
    else:
        root = tl.rsqrt(1.0 + 0.2316419 * tl.abs(x))
        t = root * root
        above = (((1.330274429 * t - 1.821255978) * t + 1.781477937) * t - 0.356563782) * t + 0.319381530
        above = density * above * t
    return density, above


@triton.jit
def apply(x, grad, word0, word1, limit, scale, GELU: tl.constexpr):
    """What `drop` makes of x (LANES, 16), whose bits are two words (LANES,), in the type of `scale`."""
    wide: tl.constexpr = scale.dtype
    values = x.to(wide)
    if GELU:
        density, above = tail(values)
        if grad is None:
            values = tl.maximum(values, 0.0) - tl.abs(values) * above  # NaN of inf
        else:
            below = tl.where(values < 0, above, 1.0 - above)
            values = (below + values * density) * grad.to(wide)
    bits = tl.join(word0, word1)[:, :, None] >> (tl.arange(0, 8) * 8).to(tl.uint64)[None, None, :]
    kept = bits.to(tl.uint8).to(tl.int32).reshape(x.shape) >= limit[:, None]
    return values * tl.where(kept, scale, 0.0)  # inf · 0 is NaN, as on a CPU


@triton.jit
def drop(
    x,
    grad,
    y,
    samples,
    key,
    purpose,
    rows,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    GELU: tl.constexpr,
    LANES: tl.constexpr,
):
    """y = values · mask / (1 − rate), a tile of rows and blocks in a program; all are (B · TOKENS, COUNT).

    The values are x; if GELU, GELU(x); if there is a grad, its product with GELU's derivative. Shapes are constants,
    since to divide by variables takes a quarter of all instructions. A block is computed in two halves: for a whole one
    a thread needs so many registers that too few threads run at once.
    """
    BLOCKS: tl.constexpr = (FIRST + COUNT + 31) // 32 - FIRST // 32  # of a row, in this rank's channels
    WIDTH: tl.constexpr = 2 - BLOCKS % 2  # blocks of a tile; two are a line of the cache, in half precision
    tile = tl.program_id(0) // (BLOCKS // WIDTH)
    left = FIRST // 32 + tl.program_id(0) % (BLOCKS // WIDTH) * WIDTH  # the tile's first block
    lane = tl.arange(0, LANES)
    row, block = tile * (LANES // WIDTH) + lane // WIDTH, left + lane % WIDTH
    sample, token = row // TOKENS, row % TOKENS
    channel = block[:, None] * 32 - FIRST + tl.arange(0, 16)[None, :]
    at = row.to(tl.int64)[:, None] * COUNT + channel
    inside0 = (row < rows)[:, None]
    inside1 = inside0
    if FIRST % 32 != 0 or COUNT % 32 != 0:
        inside0 = inside0 & (channel >= 0) & (channel < COUNT)
        inside1 = inside1 & (channel >= -16) & (channel < COUNT - 16)
    x0, x1 = tl.load(x + at, inside0), tl.load(x + at + 16, inside1)  # arrive while bits are drawn
    if grad is None:
        grad0, grad1 = None, None
    else:
        grad0, grad1 = tl.load(grad + at, inside0), tl.load(grad + at + 16, inside1)
    step = tl.load(samples + 2 * sample, row < rows)
    place = tl.load(samples + 2 * sample + 1, row < rows)
    seed, layer, rate = tl.load(key), tl.load(key + 1), tl.load(key + 2).to(tl.int32)
    PER_TOKEN: tl.constexpr = (CHANNELS + 31) // 32
    number = place * (TOKENS * PER_TOKEN | 1) + token * PER_TOKEN + block
    zero = tl.zeros([LANES], tl.uint64)
    c0, c1, c2, c3 = philox(
        (number + 1).to(tl.uint64),  # numpy counts up before it draws
        zero,
        zero + layer.to(tl.uint64),
        zero + step.to(tl.uint64),
        zero + seed.to(tl.uint64),
        zero + purpose.to(tl.uint64),
    )
    turn = (number + seed + layer + 55 * step).to(tl.int32) * 157 & 255
    limit = rate + turn >> 8
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    remain = (65536 - rate).to(wide)
    # Rounded as on a CPU: div_rn is for fp32 only, where / is not.
    scale = 65536.0 / remain if wide == tl.float64 else tl.div_rn(65536.0, remain)
    y0 = apply(x0, grad0, c0, c1, limit, scale, GELU)
    tl.store(y + at, y0, inside0)
    y1 = apply(x1, grad1, c2, c3, limit, scale, GELU)
    tl.store(y + at + 16, y1, inside1)


def launch(
    x: Tensor,
    y: Tensor,
    samples: Tensor,
    key: Tensor,
    first: int,
    channels: int,
    gelu: bool,
    grad: Tensor | None = None,
) -> None:
    """Write y, of the shape of x, as `drop` does. The others: see `dropout.drop`."""
    tokens, count = x.shape[1:-1].numel(), x.shape[-1]
    rows = len(x) * tokens
    blocks = -(-(first + count) // BLOCK) - first // BLOCK  # of a row
    width = 2 - blocks % 2  # of a tile, see `drop`
    tiles = -(-rows // (LANES // width)) * (blocks // width)
    tensors = x, grad, y, samples.contiguous(), key
    drop[(tiles,)](*tensors, word("dropout"), rows, tokens, channels, first, count, gelu, LANES)
