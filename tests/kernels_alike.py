"""Says whether our kernels compute what `dropout` and `blocks` do on a CPU, for `test_gpu`.

python kernels_alike.py DEVICE     # cpu with TRITON_INTERPRET=1
"""

import sys

import torch
from colossal_vit import blocks, merge_kernel
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


def by_kernel(x, key, first, channels, gelu, grad=None, residual=None):
    """Result and sums."""
    x, grad, residual, samples, key = (t if t is None else t.to(DEVICE) for t in (x, grad, residual, SAMPLES, key))
    y, without_sums = (torch.full_like(x if residual is None else residual, torch.nan) for _ in range(2))
    count = x.shape[-1]
    parts, _ = kernels.tiles(x.numel() // count, first, count)
    sums = torch.full((parts, count), torch.nan, dtype=torch.promote_types(x.dtype, torch.float32), device=DEVICE)
    where = samples, key, first, channels, gelu, grad, residual
    kernels.launch(x, y, *where, sums)
    kernels.launch(x, without_sums, *where)
    assert without_sums.nan_to_num().equal(y.nan_to_num())
    return y.cpu(), sums.sum(0).cpu()


def near(here, there, eps, error):
    here, there = here.double(), there.double()
    return bool(((here - there).abs() <= eps * there.abs() + error).all())


for shape, first, channels in SHAPES:
    for dtype, rate in RATES.items():
        x, grad = (torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(2))
        key = torch.tensor([2**32 - 1, philox.word("blocks.3.mlp.drop1"), round(rate * philox.ONE)])
        eps, error = torch.finfo(dtype).eps, 1e-14 if dtype == torch.float64 else 1e-6
        where = SAMPLES, key, first, channels
        wide = torch.randn(shape, generator=GENERATOR).to(torch.promote_types(dtype, torch.float32))
        for residual in (None, grad, wide):
            y, _ = by_kernel(6 * x, key, first, channels, True, residual=residual)
            expected = dropout.drop(6 * x, residual, *where, True)
            added = 0.0 if residual is None else 2 * eps  # small sums may be of large numbers
            assert near(y, expected, 2 * eps, (error + added) * (1 + 6 * x.double().abs())), (shape, dtype)
        for before in (None, 6 * x):
            inputs = dict(x=grad) if before is None else dict(x=before, grad=grad)
            y, sums = by_kernel(**inputs, key=key, first=first, channels=channels, gelu=before is not None)
            expected, [expected_sums] = dropout.drop_gradient(grad, before, *where, dtype, True)
            assert near(y, expected, 2 * eps, error * (1 + 6 * x.double().abs())), (shape, dtype)
            assert near(sums, expected_sums, 0, (eps + error) * (1 + y.flatten(0, -2).double().abs().sum(0)))
        x.view(-1)[::7] = float("inf")
        y, _ = by_kernel(x, key, first, channels, False)
        expected = dropout.drop(x, None, *where, False)
        bits, expected_bits = (each.nan_to_num(nan=1.5).view(torch.uint8) for each in (y, expected))
        assert bits.equal(expected_bits), (shape, dtype)
        assert expected.isnan().any() or x.numel() < 100

for shape in ((3, 2, 50, 48), (2, 3, 5, 64), (1, 1, 130, 8)):  # less than a tile, whole tiles, and more
    for dtype in RATES:
        heads = [torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(3)]
        heads[1] = heads[1].mT.contiguous().mT  # as the gradient of attention that no fused kernel computes
        expected, [expected_sums] = blocks.merge_heads(*heads)
        rows = [each.transpose(1, 2).flatten(2).to(DEVICE) for each in heads]
        y = torch.full_like(expected, torch.nan, device=DEVICE)
        parts = -(-y.shape[:-1].numel() // merge_kernel.TILE)
        sums = torch.full((parts, y.shape[-1]), torch.nan, dtype=expected_sums.dtype, device=DEVICE)
        merge_kernel.launch(*rows, y, sums)
        assert y.cpu().equal(expected), (shape, dtype)
        torch.testing.assert_close(sums.sum(0).cpu(), expected_sums)
print("the same")
