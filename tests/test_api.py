"""docs/api.md: its script trains in every layout that its model has, and its names are where it says."""

import functools
import importlib
import re

import pytest

import fork_ranks
import training

PAGE = (fork_ranks.ROOT / "docs/api.md").read_text()
LAYOUTS = {"DP 2": {"BATCH_SIZE": 32}, "1D 2": {"parallel.tensor.mode": "1d", "parallel.tensor.size": 2}}


@pytest.fixture(scope="module")
def train(own, tmp_path_factory):
    """`training.train` with the page's script, in a user's folder."""
    folder = tmp_path_factory.mktemp("mine")
    for name, source in re.findall(r"`(my_\w+\.py)`[^`]*```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(source)
    (folder / "my_loader.py").write_text((own / "arrays.py").read_text())
    options = dict(script=str(folder / "my_train.py"), config="my_config.py", small=False, DATA=str(own))
    return functools.partial(training.train, **options)


def losses_of(run):
    return [record["loss"] for record in run.steps]


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return losses_of(train(tmp_path_factory.mktemp("alone") / "run", steps=None))


def test_a_script_of_ones_own_learns(alone):
    assert len(alone) == 4 * (1437 // 64)
    assert alone[-1] < 0.5 * alone[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_of_ones_own_computes_the_same_in_every_layout_and_resumes(layout, train, alone, tmp_path):
    train(tmp_path, 2, steps=4, **LAYOUTS[layout])
    run = train(tmp_path, 2, steps=24, **LAYOUTS[layout])
    assert "resuming from" in run.said
    assert losses_of(run) == pytest.approx(alone[:24], rel=1e-4)
    epochs = [line.split(",") for line in (tmp_path / "epochs.csv").read_text().splitlines()]
    assert [number for number, _ in epochs] == ["0", "0", "1"], "a part of an epoch, its rest, a part of the next"
    assert float(epochs[0][1]) == pytest.approx(sum(alone[:4]) / 4, rel=1e-4)
    assert "of 90 images" in train(tmp_path, 2, "--eval-only", steps=None, **LAYOUTS[layout]).said


def test_a_script_of_ones_own_refuses_what_its_model_cannot_do(train, tmp_path):
    run = train(tmp_path / "run", 2, code=2, **LAYOUTS["1D 2"], WIDTH=7)
    (line,) = "".join(run.stderr).splitlines()
    assert line.endswith("WIDTH = 7 is not a multiple of parallel.tensor.size = 2")


def test_the_names_are_where_the_page_says():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) >= 15
    for names, module in rows:
        found = importlib.import_module(f"colossal_vit.{module}")
        assert all(hasattr(found, name) for name in re.findall(r"\w+", names)), (names, module)
