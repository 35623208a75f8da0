"""The command that checks that dropout masks are random numbers: good masks pass, and broken ones fail."""

import pytest
import torch
from colossal_vit.rng import dropout

import fork_ranks

drop = dropout.drop


def of_a_simple_sum(x, samples, *others):
    """Step 1 of sample 2 has the mask of step 2 of sample 1."""
    return drop(x, samples.sum(1, keepdim=True) * torch.tensor([0, 1]), *others)


def of_one_layer(x, samples, key, *others):
    return drop(x, samples, key * torch.tensor([1, 0, 1]), *others)


def of_one_seed(x, samples, key, *others):
    return drop(x, samples, key * torch.tensor([0, 1, 1]), *others)


def with_blocks_of_pairs(x, *others):
    """Neighbouring channels share their bits."""
    return drop(x, *others).repeat_interleave(2, 2)[..., : x.shape[2]]


def with_one_bit_less(x, samples, key, *others):
    return drop(x, samples, key // torch.tensor([1, 1, 512]) * torch.tensor([1, 1, 512]), *others)


@pytest.mark.parametrize(
    "broken", [None, of_a_simple_sum, of_one_layer, of_one_seed, with_blocks_of_pairs, with_one_bit_less]
)
def test_masks_pass_the_statistics_that_broken_ones_fail(broken):
    def enter(rank):
        dropout.drop = broken or drop

    done = fork_ranks.start("tools/parity/mask_statistics.py", ["--small"], [{}], enter=enter).wait()
    assert "smallest p = " in done.stdout[0], str(done)
    assert done.codes == [int(broken is not None)], str(done)
