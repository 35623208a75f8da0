"""`philox.kept` and the dropout it decides, as a Triton kernel.

It reads and writes each element once and stores no mask. No thread draws another one's blocks.
"""

import torch
import triton
import triton.language as tl
from colossal_vit.rng.philox import BLOCK, word
from torch import Tensor

# Blocks of a program, two for each thread of Triton's 4 warps, which takes an H200 10 % less time than one. With fewer
# than one, several threads would draw the same.
LANES = 256


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
def normal(x):
    """The density of the standard normal distribution at x, and the probability to be below.

    In fp32 the probability is that of M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.2.17, to
    1e-7: erf has so many instructions that a GPU would wait for them instead of its memory.
    """
    density = tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361595)  # logarithms to base 2 of e^-½ and √(2π)
    if x.dtype == tl.float64:
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:
        root = tl.rsqrt(1.0 + 0.2316419 * tl.abs(x))
        t = root * root
        tail = (((1.330274429 * t - 1.821255978) * t + 1.781477937) * t - 0.356563782) * t + 0.319381530
        below = tl.where(x < 0, density * tail * t, 1.0 - density * tail * t)
    return density, below


@triton.jit
def drop(
    x,
    grad,
    y,
    samples,
    key,
    purpose,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    GELU: tl.constexpr,
    LANES: tl.constexpr,
):
    """y = values · mask / (1 − rate) for some blocks of one sample; x, grad and y are (B, TOKENS, COUNT).

    The values are x; if GELU, GELU(x); if there is a grad, its product with GELU's derivative. Shapes are constants,
    since to divide by variables takes a quarter of all instructions.
    """
    BLOCKS: tl.constexpr = (FIRST + COUNT + 15) // 16 - FIRST // 16  # of a row, in this rank's channels
    PROGRAMS: tl.constexpr = (TOKENS * BLOCKS + LANES - 1) // LANES  # of a sample; other dimensions of a grid are small
    sample = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    lane = tl.program_id(0) % PROGRAMS * LANES + tl.arange(0, LANES)
    token, block = lane // BLOCKS, FIRST // 16 + lane % BLOCKS
    if FIRST % 16 == 0 and COUNT % 16 == 0:
        at = lane[:, None] * 16 + tl.arange(0, 16)[None, :]
        inside = (token < TOKENS)[:, None]
    else:
        channel = block[:, None] * 16 + tl.arange(0, 16)[None, :] - FIRST
        at = token[:, None] * COUNT + channel
        inside = (token < TOKENS)[:, None] & (channel >= 0) & (channel < COUNT)
    start = sample * (TOKENS * COUNT)
    values = tl.load(x + start + at, inside)  # early: it arrives while the numbers are drawn
    if grad is not None:
        above = tl.load(grad + start + at, inside)
    step, place = tl.load(samples + 2 * sample), tl.load(samples + 2 * sample + 1)
    seed, layer, threshold = tl.load(key), tl.load(key + 1), tl.load(key + 2).to(tl.int32)
    counter = token.to(tl.int64) * ((CHANNELS + 15) // 16) + block + 1  # numpy counts up before it draws
    zero = tl.zeros([LANES], tl.uint64)
    c0, c1, c2, c3 = philox(
        counter.to(tl.uint64),
        zero + place.to(tl.uint64),
        zero + layer.to(tl.uint64),
        zero + step.to(tl.uint64),
        zero + seed.to(tl.uint64),
        zero + purpose.to(tl.uint64),
    )
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(LANES, 4, 1)
    bits = (words >> (tl.arange(0, 4) * 16).to(tl.uint64)[None, None, :]).to(tl.uint16).to(tl.int32)
    kept = bits.reshape(LANES, 16) >= threshold
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    remain = (65536 - threshold).to(wide)
    # Rounded as on a CPU: div_rn is for fp32 only, where / is not.
    scale = 65536.0 / remain if wide == tl.float64 else tl.div_rn(65536.0, remain)
    factor = tl.where(kept, scale, 0.0)
    values = values.to(wide)
    if GELU:
        density, below = normal(values)
        values = values * below if grad is None else (below + values * density) * above.to(wide)
    tl.store(y + start + at, (values * factor).to(y.dtype.element_ty), inside)  # inf · 0 is NaN, as on a CPU


def launch(
    x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int, gelu: bool = False, grad: Tensor | None = None
) -> Tensor:
    """See `dropout.drop`."""
    y = torch.empty_like(x)
    batch, count = len(x), x.shape[-1]
    tokens = x.numel() // (batch * count)
    blocks = -(-(first + count) // BLOCK) - first // BLOCK
    grid = (batch * triton.cdiv(tokens * blocks, LANES),)
    drop[grid](x, grad, y, samples.contiguous(), key, word("dropout"), tokens, channels, first, count, gelu, LANES)
    return y
