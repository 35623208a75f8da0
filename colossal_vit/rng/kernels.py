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
def drop(x, y, samples, key, purpose, tokens, channels, first, count, LANES: tl.constexpr):
    """y = x · mask / (1 − rate) for some blocks of one sample; x and y are (B, tokens, count)."""
    blocks = (first + count + 15) // 16 - first // 16  # of a row, in this rank's channels
    programs = tl.cdiv(tokens * blocks, LANES)  # of a sample; the grid has one dimension, since others are limited
    sample = (tl.program_id(0) // programs).to(tl.int64)
    lane = tl.program_id(0) % programs * LANES + tl.arange(0, LANES)
    token = lane // blocks
    block = first // 16 + lane % blocks
    step, place = tl.load(samples + 2 * sample), tl.load(samples + 2 * sample + 1)
    seed, layer, threshold = tl.load(key), tl.load(key + 1), tl.load(key + 2).to(tl.int32)
    channel = block[:, None] * 16 + tl.arange(0, 16)[None, :] - first
    inside = (token < tokens)[:, None] & (channel >= 0) & (channel < count)
    at = (sample * tokens + token[:, None]) * count + channel
    values = tl.load(x + at, inside)  # early: it arrives while the numbers are drawn
    counter = token.to(tl.int64) * ((channels + 15) // 16) + block + 1  # numpy counts up before it draws
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
    values = values.to(wide) * tl.where(kept, scale, 0.0)  # inf · 0 is NaN, as on a CPU
    tl.store(y + at, values.to(y.dtype.element_ty), inside)


def launch(x: Tensor, samples: Tensor, key: Tensor, first: int, channels: int) -> Tensor:
    """See `dropout.drop`."""
    y = torch.empty_like(x)
    batch, count = len(x), x.shape[-1]
    tokens = x.numel() // (batch * count)
    blocks = -(-(first + count) // BLOCK) - first // BLOCK
    grid = (batch * triton.cdiv(tokens * blocks, LANES),)
    drop[grid](x, y, samples.contiguous(), key, word("dropout"), tokens, channels, first, count, LANES)
    return y
