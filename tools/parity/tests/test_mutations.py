"""Planted defects: each can still be planted, parity names some, and tests notice some.

What parity says of the others is in results/mutations.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

import fork_ranks

CAUGHT = {
    "messages swapped": "PP 2 × chunks 2 × micro-batches 4",  # by reading a patch of Colossal-AI
    "norm of local gradients": "PP 2",
    "order without a seed of its own": "PP 2",
}


def plant(root, *flags):
    """Run the command in a process of its own, since it imports the copies of modules that this one has imported."""
    command = [sys.executable, "-m", "tools.parity.planted", *flags]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("judge", ["parity", "tests"])
def test_each_defect_can_be_planted(judge):
    result = plant(fork_ranks.ROOT, judge, "--list")
    assert result.returncode == 0, result
    assert len(result.stdout.splitlines()) >= 60


def test_a_defect_that_no_longer_fits_the_code_is_refused(tmp_path):
    for name in ("colossal_vit", "vit_cifar10_hybrid", "scripts", "tools"):
        shutil.copytree(fork_ranks.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "colossal_vit/data/samplers.py"
    path.write_text(path.read_text().replace("order[:, self.rank]", "order[:, self.rank + 0]"))
    result = plant(tmp_path, "--list")
    assert result.returncode == 2, result
    line = result.stderr.splitlines()[-1]
    assert line.endswith("error: replicas swapped: colossal_vit/data/samplers.py has its text 0 times")


def test_some_are_caught_and_named_and_without_them_layouts_agree(tmp_path):
    flags = ("--precision", "fp64", "--jobs", "2", "--log", str(tmp_path / "log.jsonl"), "--only", *CAUGHT)
    result = plant(fork_ranks.ROOT, *flags)
    assert result.returncode == 0, result
    found = re.findall(r"^fp64, (.+?), (.+?): (\w+): ", result.stdout, re.MULTILINE)
    controls = [(layout, "no defect", "escaped") for layout in sorted({*CAUGHT.values()})]
    assert sorted(found) == sorted([*controls, *((layout, name, "named") for name, layout in CAUGHT.items())])
    again = plant(fork_ranks.ROOT, *flags)
    assert sorted(again.stdout.splitlines()) == sorted(result.stdout.splitlines())
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == len(found)  # nothing has run twice


SLIPS = """
from tools.parity.planted.slips import Slip

TEST = "tests/test_optim.py::test_schedule_has_the_warm_up_in_epochs"
PATH = "colossal_vit/engine/schedules.py"
SLIPS = [
    Slip("warm-up from 0", PATH, "(step + 1) / warmup", "step / warmup", (TEST,)),
    Slip("another text", PATH, "does not fit total_steps", "differs from total_steps", (TEST,)),
    Slip("no such module", PATH, "import math\\n", "import maths\\n", (TEST,)),
]
"""


def test_slips_are_noticed_by_tests_that_fail_only(tmp_path):
    """Not by one that passes, nor by one that cannot run; and without a slip the tests pass."""
    for name in (
        "colossal_vit",
        "vit_cifar10_hybrid",
        "vit_imagenet_dali",
        "vit_caltech101_amp",
        "scripts",
        "tests",
        "tools",
    ):
        ignored = shutil.ignore_patterns("__pycache__", "old_checkpoints")
        shutil.copytree(fork_ranks.ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(fork_ranks.ROOT / name, tmp_path)
    (tmp_path / "tools/parity/planted/slips_engine.py").write_text(SLIPS)
    (tmp_path / "tools/parity/planted/slips_data.py").write_text("SLIPS = []\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    result = plant(tmp_path, "tests", "--jobs", "2", "--log", str(tmp_path / "log.jsonl"))
    assert result.returncode == 1, result
    found = dict(re.findall(r"^(?:engine|tests/test_optim.py), (.+?): (\w+: .+)", result.stdout, re.MULTILINE))
    assert found["no defect"] == found["another text"] == "escaped: 4 passed"
    assert found["warm-up from 0"].startswith("noticed: tests/test_optim.py::test_schedule_has_the_warm_up_in_epochs[")
    assert found["no such module"].startswith("error: ")
    assert result.stderr.endswith("not as it should be: another text; no such module\n")
    assert "| engine | 3 | 1 | 1 | 1 |\n" in result.stdout
