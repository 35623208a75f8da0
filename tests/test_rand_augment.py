"""RandAugment in DALI's graph deviates from torchvision's by what the table says, and in no other way."""

import json

import pytest

import compare_rand_augment as script
import fork_ranks
from compare_rand_augment import SIZE, by_dali, by_torchvision, compare, get_rand_augment_suite, photographs

RESULT = fork_ranks.ROOT / "results" / "rand_augment" / "rand_augment.json"
ROUNDED = {"identity", "translate_x", "translate_y", "brightness", "color", "contrast", "posterize", "auto_contrast"}
M = 9


def test_each_operation_deviates_as_the_table_says():
    """In a process of its own, as all that runs DALI."""
    table = json.loads(RESULT.read_text())
    assert (
        {operation.name for operation in get_rand_augment_suite(use_shape=True)} == set(script.OPERATIONS) == set(table)
    )
    found = fork_ranks.call(lambda: {name: compare(name, M) for name in table}, launched=False)[0]
    for name, ways in found.items():
        for how, deviation in ways.items():
            said = table[name][str(M)][how]
            assert deviation.share == pytest.approx(said["share"], abs=2e-3), (name, how)
            assert deviation.mean == pytest.approx(said["mean"], abs=0.02), (name, how)
        if name in ROUNDED:
            assert ways["alike"].largest <= 1, name
        elif name != "equalize":  # a formula of its own
            assert ways["alike"].share < 0.01, f"{name}: only at edges, or at one value"


def test_sharpness_differs_at_the_outermost_pixels_only_and_solarization_at_one_value():
    def differ(name):
        (operation,) = (each for each in get_rand_augment_suite(use_shape=True) if each.name == name)
        ours, theirs = (
            by_dali(operation, photographs(), M, 1),
            by_torchvision(script.OPERATIONS[name][0], photographs(), M, 1),
        )
        return (ours.int() - theirs.int()).abs() > 1

    def values():
        return differ("sharpness").nonzero()[:, -2:].tolist(), photographs()[differ("solarize")].unique().tolist()

    places, solarized = fork_ranks.call(values, launched=False)[0]
    assert places
    assert all({0, SIZE - 1} & set(place) for place in places)
    assert solarized == [179], "the threshold is 179.2, in torchvision 178.5"
