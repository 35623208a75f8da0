"""Says whether our kernels compute what `dropout` does on a CPU, for `test_gpu`.

python kernels_alike.py DEVICE     # cpu with TRITON_INTERPRET=1
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


def by_kernel(x, key, first, channels, gelu, grad=None):
    x, grad, samples, key = (t if t is None else t.to(DEVICE) for t in (x, grad, SAMPLES, key))
    y = torch.full_like(x, torch.nan)
    kernels.launch(x, y, samples, key, first, channels, gelu, grad)
    return y.cpu()


def near(here, there, eps, error):
    here, there = here.double(), there.double()
    return bool(((here - there).abs() <= eps * there.abs() + error).all())


for shape, first, channels in SHAPES:
    for dtype, rate in RATES.items():
        x, grad = (torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(2))
        key = torch.tensor([2**32 - 1, philox.word("blocks.3.mlp.drop1"), round(rate * philox.ONE)])
        eps, error = torch.finfo(dtype).eps, 1e-14 if dtype == torch.float64 else 1e-6
        where = SAMPLES, key, first, channels
        y = by_kernel(6 * x, key, first, channels, True)
        expected = dropout.drop(6 * x, *where, True)
        assert near(y, expected, 2 * eps, error * (1 + 6 * x.double().abs())), (shape, dtype)
        for before in (None, 6 * x):
            inputs = dict(x=grad) if before is None else dict(x=before, grad=grad)
            y = by_kernel(**inputs, key=key, first=first, channels=channels, gelu=before is not None)
            expected = dropout.drop_gradient(grad, before, *where, dtype)
            assert near(y, expected, 2 * eps, error * (1 + 6 * x.double().abs())), (shape, dtype)
        x.view(-1)[::7] = float("inf")
        y = by_kernel(x, key, first, channels, False)
        expected = dropout.drop(x, *where, False)
        bits, expected_bits = (each.nan_to_num(nan=1.5).view(torch.uint8) for each in (y, expected))
        assert bits.equal(expected_bits), (shape, dtype)
        assert expected.isnan().any() or x.numel() < 100
print("the same")
