"""Says whether the kernel of dropout computes what `dropout.drop` does on a CPU, for `test_gpu`.

python drop_alike.py DEVICE     # cpu with TRITON_INTERPRET=1
"""

import sys

import torch
from colossal_vit.rng import dropout, kernels, philox

DEVICE = sys.argv[1]
SAMPLES = torch.tensor([[0, 0], [7, 31], [2**40, 2**33]])
SHAPES = [  # of a rank's part, its first channel, and how many all ranks have
    ((3, 50, 96), 0, 96),
    ((3, 50, 64), 64, 192),
    ((3, 5, 40), 0, 40),
    ((3, 5, 10), 30, 40),
    ((3, 2, 3, 20), 20, 40),
    ((3, 24), 24, 48),
    ((3, 1, 1), 0, 1),
]
# Triton's interpreter does not round to bfloat16 as a GPU does, hence a rate there whose results need no rounding.
RATES = {torch.float32: 0.1, torch.float16: 0.1, torch.bfloat16: 0.5, torch.float64: 0.1}
GENERATOR = torch.Generator().manual_seed(0)


def both(x, key, first, channels, *options):
    """By the kernel and by the CPU."""
    there = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in options]
    by_kernel = kernels.launch(x.to(DEVICE), SAMPLES.to(DEVICE), key.to(DEVICE), first, channels, *there)
    return by_kernel.cpu(), dropout.drop(x, SAMPLES, key, first, channels, *options)


for shape, first, channels in SHAPES:
    for dtype, rate in RATES.items():
        x, grad = (torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(2))
        key = torch.tensor([2**32 - 1, philox.word("blocks.3.mlp.drop1"), round(rate * philox.ONE)])
        eps, error = torch.finfo(dtype).eps, 1e-14 if dtype == torch.float64 else 1e-6
        for options in ([True], [True, grad]):
            by_kernel, by_cpu = (y.double() for y in both(6 * x, key, first, channels, *options))
            near = (by_kernel - by_cpu).abs() <= 2 * eps * by_cpu.abs() + error * (1 + 6 * x.double().abs())
            assert near.all(), (shape, dtype, len(options))
        x.view(-1)[::7] = float("inf")
        by_kernel, by_cpu = both(x, key, first, channels)
        bits, expected = (y.nan_to_num(nan=1.5).view(torch.uint8) for y in (by_kernel, by_cpu))
        assert bits.equal(expected), (shape, dtype)
        assert by_cpu.isnan().any() or x.numel() < 100
print("the same")
