"""scripts/finetune_photos.py: its splits, nearest neighbours and table; not its trainings."""

import runpy

import numpy as np
import pytest
from PIL import Image

import fork_ranks


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(fork_ranks.ROOT / "scripts/finetune_photos.py"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten dark and twenty bright pictures; one of the dark class is bright."""
    root, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, count, lowest in (("bright", 20, 200), ("dark", 10, 0)):
        (root / name).mkdir()
        for number in range(count):
            low = 200 if (name, number) == ("dark", 0) else lowest
            pixels = generator.integers(low, low + 50, (4, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    (root / ".decoded").mkdir()
    return root


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.glob("*/*.png")}


def test_split_links_a_fifth_of_each_class_and_others_with_another_seed(program, data, tmp_path):
    for seed in (0, 0, 1):
        program["split"](data, tmp_path / str(seed), seed)
    tested = [names(tmp_path / seed / "val") for seed in "01"]
    for seed, chosen in zip("01", tested, strict=True):
        assert sorted(name.split("/")[0] for name in chosen) == ["bright"] * 4 + ["dark"] * 2
        assert names(tmp_path / seed / "train") == names(data) - chosen
    assert tested[0] != tested[1]


def test_neighbours_accuracy_counts_what_looks_like_the_other_class(program, data, tmp_path):
    for part, numbers in (("train", range(1, 8)), ("val", (0, 8, 9))):
        for name in ("bright", "dark"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in numbers:
                (tmp_path / part / name / f"{number}.png").symlink_to(data / name / f"{number}.png")
    assert program["neighbours_accuracy"](tmp_path) == pytest.approx(5 / 6)


def test_make_table_has_mean_and_deviation_of_the_last_epochs(program):
    table = program["make_table"]({"fine-tuned": [[0.1, 0.5], [0.2, 0.7]], "neighbours": [[0.25]]})
    assert table[2:] == ["| fine-tuned | 60.0% ± 14.1% | 50.0%, 70.0% |", "| neighbours | 25.0% | 25.0% |"]
