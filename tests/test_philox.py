"""Random numbers by what they are for: Philox against its definition, masks in parts, and dropout's kernels."""

import itertools

import numpy as np
import pytest
import torch
from colossal_vit.rng import dropout, philox

import fork_ranks

WORD = 2**64 - 1


def textbook(counter, key):
    """Philox4x64-10 as section 3.3 of the paper defines it: 4 words from 4 words and 2."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = right >> 64 ^ c1 ^ k0, right & WORD, left >> 64 ^ c3 ^ k1, left & WORD
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & WORD, k1 + 0xBB67AE8584CAA73B & WORD
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the authors' distribution, Random123
        ([0] * 4, [0] * 2, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ([WORD] * 4, [WORD] * 2, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_textbook_gives_the_known_answers(counter, key, words):
    assert textbook(counter, key) == [int(text, 16) for text in words.split()]


SAMPLES = np.array([[0, 0], [7, 31], [7, 32], [8, 31], [2**40, 2**33]])  # optimizer steps and places
TOKENS, CHANNELS = 5, 80  # two and a half blocks
LAYER = philox.word("blocks.3.mlp.drop1")


def kept(seed, layer, rate, samples, tokens, channels, part):
    """Which elements of (B, tokens, channels of the part) dropout keeps, bool."""
    ones, key = torch.ones(len(samples), tokens, part.stop - part.start), torch.tensor([seed, layer, rate])
    samples = torch.from_numpy(np.ascontiguousarray(samples))
    return dropout.drop(ones, samples, key, part.start, channels, False).numpy() != 0


def masks(rows=slice(None), part=slice(0, CHANNELS), seed=1024, rate=1 << 15, tokens=TOKENS):
    return kept(seed, LAYER, rate, SAMPLES[rows], tokens, CHANNELS, part)


def block_of(place, token, channel):
    """The number of an element's block: a token has 3, and a sample an odd number of them."""
    return place * 15 + token * 3 + channel // 32


def limit(rate, block, seed, step):
    """Of a block's elements, for their 8 bits."""
    return (rate + 157 * (block + seed + LAYER + 55 * step) % 256) // 256


@pytest.mark.parametrize("seed", [0, 1024, 2**32 - 1, 2**63 - 1])
@pytest.mark.parametrize("rate", [0, 655, 1 << 15, philox.MOST])
def test_a_mask_is_what_the_textbook_says(seed, rate):
    expected = np.empty((len(SAMPLES), TOKENS, CHANNELS), bool)
    for row, token, channel in np.ndindex(expected.shape):
        step, place = map(int, SAMPLES[row])
        block = block_of(place, token, channel)
        words = textbook([block + 1, 0, LAYER, step], [seed, philox.word("dropout")])
        bits = words[channel % 32 // 8] >> channel % 8 * 8 & 255
        expected[row, token, channel] = bits >= limit(rate, block, seed, step)
    assert np.array_equal(masks(seed=seed, rate=rate), expected)


@pytest.mark.parametrize("rate", [1, 655, 6554, philox.MOST - 1])
@pytest.mark.parametrize("varied", [0, 1])
def test_an_element_is_dropped_at_the_rate_exactly(rate, varied):
    """Over 256 steps or places, if its bits have each of their 256 values as often as the others."""
    for token, channel in np.ndindex(TOKENS, CHANNELS):
        samples = np.full((256, 2), 3)
        samples[:, varied] = np.arange(256) + 1000
        limits = [limit(rate, block_of(place, token, channel), 1024, step) for step, place in samples.tolist()]
        assert sum(limits) == rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), [("Dropout", {}), ("Dropout", {"gelu": True}), ("DropPath", {})])
@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_what_is_kept_is_scaled_up_by_the_share_of_it(rate, kind, options, dtype):
    """In plain torch, as are the gradients: x / (1 - rate) where the mask keeps x."""
    layer = getattr(dropout, kind)(rate, **options)
    dropout.name_layers(torch.nn.ModuleDict({"layer": layer}), 1024)
    random, shape = torch.Generator().manual_seed(0), (8, TOKENS, CHANNELS)
    x, grad = (torch.randn(shape, generator=random, dtype=dtype) for _ in range(2))
    x.requires_grad_(True)
    with dropout.batch_of(torch.tensor([[3, place] for place in range(8)])):
        y = layer(x)
    mask = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0] != 0
    assert 0 < mask.double().mean() < 1
    expected = mask * (torch.nn.functional.gelu(x) if options else x) / (1 - rate)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(output, x, grad)[0] for output in (y, expected)))


def test_a_part_of_the_samples_or_channels_has_its_part_of_the_mask():
    whole = masks()
    assert 0.45 < whole.mean() < 0.55
    for bounds in ([0, 1, 5], [0, 2, 3, 5]):
        parts = [masks(rows=slice(*ends)) for ends in itertools.pairwise(bounds)]
        assert np.array_equal(np.concatenate(parts), whole)
    for bounds in ([0, 40, 80], [0, 32, 64, 80], [0, 20, 40, 60, 80], [0, 3, 80]):
        parts = [masks(part=slice(*ends)) for ends in itertools.pairwise(bounds)]
        assert np.array_equal(np.concatenate(parts, axis=2), whole)
    assert np.array_equal(masks(rows=slice(None, None, -1)), whole[::-1])


def test_masks_are_the_same_for_any_number_of_threads():
    def by_three_threads():
        torch.set_num_threads(3)
        return [masks(tokens=1000) for _ in range(30)][-1]

    [by_threads] = fork_ranks.call(by_three_threads, launched=False)
    assert np.array_equal(by_threads, masks(tokens=1000))


# ---- The kernel for GPUs ----


@pytest.mark.parametrize(("gelu", "others"), [(False, set()), (True, set()), (True, {"grad"})])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiled_for_a_gpu_draws_and_moves_nothing_twice(capability, gelu, others, tmp_path, monkeypatch):
    """In bf16 a thread has blocks of 64 bytes to load and to store."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled():
        import triton
        from colossal_vit.rng import kernels
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        shape = dict(TOKENS=197, CHANNELS=3072, FIRST=768, COUNT=768)
        unused = {"grad"} - others
        constants = dict(shape, GELU=gelu, LANES=kernels.LANES, **dict.fromkeys(unused))
        half = dict.fromkeys(("x", "grad", "y"), "*bf16")
        types = dict(half, samples="*i64", key="*i64", purpose="i64", rows="i32")
        types |= dict.fromkeys(constants, "constexpr")
        names = kernels.drop.arg_names
        even = [["tt.divisibility", 16]]  # what a launch finds of pointers
        source = ASTSource(
            kernels.drop,
            {name: types[name] for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): even for name in half if name not in constants},
        )
        assembly = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
        return assembly["ptx"], len(assembly["cubin"]), kernels.LANES // 128

    [(ptx, size, blocks)] = fork_ranks.call(compiled, launched=False)
    assert size > 4000
    assert ptx.count("ld.global.v4.b32") == 4 * blocks * (1 + len(others))
    assert ptx.count("st.global.v4.b32") == 4 * blocks
    assert 10 * blocks < ptx.count("mul.hi.u64") <= 2 * 10 * blocks  # in ten rounds, less what blocks have in common
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
