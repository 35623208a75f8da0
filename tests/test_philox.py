"""Random numbers by what they are for: Philox against its definition, masks in parts, and the kernel for GPUs."""

import itertools
import multiprocessing

import numpy as np
import pytest
import torch
from colossal_vit.rng import philox

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


def masks(rows=slice(None), part=slice(0, CHANNELS), seed=1024, rate=1 << 15, tokens=TOKENS):
    return philox.kept(seed, LAYER, rate, SAMPLES[rows], tokens, CHANNELS, part)


@pytest.mark.parametrize("seed", [0, 1024, 2**32 - 1, 2**63 - 1])
@pytest.mark.parametrize("rate", [0, 655, 1 << 15, philox.MOST])
def test_a_mask_is_what_the_textbook_says(seed, rate):
    expected = np.empty((len(SAMPLES), TOKENS, CHANNELS), bool)
    for row, token, channel in np.ndindex(expected.shape):
        step, place = map(int, SAMPLES[row])
        number = place * 15 + token * 3 + channel // 32  # of a block: a token has 3
        words = textbook([number + 1, 0, LAYER, step], [seed, philox.word("dropout")])
        limit = (rate + 157 * (number + seed + LAYER + 55 * step) % 256) // 256
        expected[row, token, channel] = (words[channel % 32 // 8] >> channel % 8 * 8 & 255) >= limit
    assert np.array_equal(masks(seed=seed, rate=rate), expected)


@pytest.mark.parametrize("rate", [1, 655, 6554, philox.MOST - 1])
@pytest.mark.parametrize("varied", [0, 1])
def test_an_element_is_dropped_at_the_rate_exactly(rate, varied, monkeypatch):
    """Over 256 steps or places, of each of the 256 values that its bits may have as often as of the others."""

    class AllValues:
        """Draws the next value of all elements at each call."""

        value, state = 0, {"state": {"key": np.empty(2), "counter": np.empty(4)}}

        def random_raw(self, count):
            return np.full(8 * count, self.value, np.uint8).view(np.uint64)

    generator = AllValues()
    monkeypatch.setattr(philox, "Philox", lambda: generator)
    monkeypatch.setattr(philox, "_idle", [])
    monkeypatch.setattr(philox, "in_threads", lambda work, number: work())
    samples = np.full((256, 2), 3)
    samples[:, varied] = np.arange(256) + 1000
    kept = np.zeros((2, CHANNELS), int)
    for generator.value in range(256):
        kept += philox.kept(1024, LAYER, rate, samples, 2, CHANNELS, slice(0, CHANNELS)).sum(0)
    assert (kept == philox.ONE - rate).all()


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


def by_three_threads():
    torch.set_num_threads(3)
    return [masks(tokens=1000) for _ in range(30)][-1]  # a thread starts only while all others are busy


def test_masks_are_the_same_for_any_number_of_threads_and_in_forks():
    """A fork of a process whose threads have drawn has none of them."""

    def in_a_process_of_its_own():
        drawn = by_three_threads()
        with multiprocessing.get_context("fork").Pool(1) as fork:
            return drawn, fork.apply(by_three_threads)

    [(by_threads, in_a_fork)] = fork_ranks.call(in_a_process_of_its_own, launched=False)
    assert np.array_equal(by_threads, masks(tokens=1000))
    assert np.array_equal(in_a_fork, by_threads)


# ---- The kernel for GPUs ----


@pytest.mark.parametrize(
    ("gelu", "others"),
    [(False, set()), (False, {"residual"}), (False, {"sums"}), (True, set()), (True, {"grad", "sums"})],
)
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
        unused = {"grad", "residual", "sums"} - others
        constants = dict(shape, GELU=gelu, LANES=kernels.LANES, **dict.fromkeys(unused))
        half = dict.fromkeys(("x", "grad", "residual", "y"), "*bf16")
        types = dict(half, sums="*fp32", samples="*i64", key="*i64", purpose="i64", rows="i32")
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
    assert ptx.count("ld.global.v4.b32") == 4 * blocks * (1 + len(others - {"sums"}))
    assert ptx.count("st.global.v4.b32") == 4 * blocks
    assert 10 * blocks < ptx.count("mul.hi.u64") <= 2 * 10 * blocks  # in ten rounds, less what blocks have in common
    assert "cvt.rn.bf16x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx


# ---- The masks are random ----


kept = philox.kept


def of_a_simple_sum(seed, layer, rate, samples, *shape):
    """Step 1 of sample 2 has the mask of step 2 of sample 1."""
    return kept(seed, layer, rate, samples.sum(1, keepdims=True) * [0, 1], *shape)


def of_one_layer(seed, layer, *others):
    return kept(seed, 0, *others)


def of_one_seed(seed, *others):
    return kept(0, *others)


def with_blocks_of_pairs(seed, layer, rate, samples, tokens, channels, part):
    """Neighbouring channels share their bits."""
    return kept(seed, layer, rate, samples, tokens, channels, slice(0, channels)).repeat(2, 2)[..., part]


def with_one_bit_less(seed, layer, rate, *others):
    return kept(seed, layer, rate // 512 * 512, *others)


@pytest.mark.parametrize(
    "broken", [None, of_a_simple_sum, of_one_layer, of_one_seed, with_blocks_of_pairs, with_one_bit_less]
)
def test_masks_pass_the_statistics_that_broken_ones_fail(broken):
    def enter(rank):
        philox.kept = broken or kept

    done = fork_ranks.start("scripts/mask_statistics.py", ["--small"], [{}], enter=enter).wait()
    assert "smallest p = " in done.stdout[0], str(done)
    assert done.codes == [int(broken is not None)], str(done)
