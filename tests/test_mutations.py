"""Planted defects: each can still be planted, and `--parity` names some. The others are in results/mutations."""

import os
import re
import shutil
import subprocess
import sys

import fork_ranks

CAUGHT = {
    "messages swapped": "PP 2 × chunks 2 × micro-batches 4",  # by reading a patch of Colossal-AI
    "norm of local gradients": "PP 2",
    "order without a seed of its own": "PP 2",
}


def plant(root, *flags):
    """Run the command in a process of its own, since it imports the copies of modules that this one has imported."""
    command = [sys.executable, "scripts/mutations.py", *flags]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_each_defect_can_be_planted():
    result = plant(fork_ranks.ROOT, "--list")
    assert result.returncode == 0, result
    assert len(result.stdout.splitlines()) >= 60


def test_a_defect_that_no_longer_fits_the_code_is_refused(tmp_path):
    for name in ("colossal_vit", "vit_cifar10_hybrid", "scripts"):
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
