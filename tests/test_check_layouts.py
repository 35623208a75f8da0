"""The command that compares layouts with one process: as a user runs it, and on curves that drift apart."""

import math
import re
import shutil
import subprocess

import pytest

import launchers
import warm
from fork_ranks import ROOT
from layouts import errors

# Losses of 1, but for the last one, which grows with the number of processes.
DRIFTING = """
import json, os, sys
from pathlib import Path

if os.environ.get("RANK", "0") == "0":
    output, steps = Path(sys.argv[sys.argv.index("--output") + 1]), int(sys.argv[sys.argv.index("--max-steps") + 1])
    output.mkdir()
    with open(output / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = 1.0 + 2e-4 * int(os.environ.get("WORLD_SIZE", "1")) * (step == steps)
            print(json.dumps(dict(step=step, epoch=0, loss=loss, grad_norm=1.0, images_per_s=1.0)), file=file)
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Run the command in a folder, for one layout that fits and one that does not; its pythons start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:

        def run(root, *flags):
            python, layouts = str(programs.bin / "python"), ["DP 2", "3D 8"]
            command = [python, "scripts/check_layouts.py", "--only", *layouts, "--world", "2"]
            variables = {"PYTHONPATH": str(ROOT), "REHEARSE": "1", **programs.throughout}
            environment = launchers.environment(**variables)
            return subprocess.run([*command, *flags], cwd=root, env=environment, capture_output=True, text=True)

        yield run


@pytest.fixture
def drifting(tmp_path):
    """The command beside a train script whose layouts drift apart."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "vit_cifar10_hybrid", tmp_path / "vit_cifar10_hybrid")
    (tmp_path / "vit_cifar10_hybrid/train_hybrid.py").write_text(DRIFTING)
    return tmp_path


def test_a_layout_that_trains_as_one_process_passes(check):
    done = check(ROOT, "--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"DP 2 +\d\.\de[-+]\d+ +\d\.\de[-+]\d+ +\d+$", done.stdout, re.MULTILINE), done.stdout
    assert "not checked, since they need more than 2 processes: 3D 8" in done.stdout
    assert re.search(
        r"^all 1 layouts agree: the error is at most \d\.\de[-+]\d+ \(allowed: ", done.stdout, re.MULTILINE
    )


def test_a_layout_that_drifts_within_20_steps_is_out(check, drifting):
    done = check(drifting, "--steps", "20")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^DP 2 .* OUT$", done.stdout, re.MULTILINE)
    limits = "1e-05 in the first step and 0.0001 in steps 1 to 20"
    picture = drifting / "runs/check_layouts/curve.png"
    assert done.stdout.splitlines()[-2:] == [f"OUT: DP 2 (allowed: {limits})", f"loss by step: {picture}"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_error_of_later_steps_is_put_on_record_only(check, drifting):
    done = check(drifting, "--steps", "21", "--result", str(drifting / "curve"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| DP 2 | 2 | 0.0e+00 | 0.0e+00 | 2.0e-04 |" in (drifting / "curve/one_curve.md").read_text()
    lines = (drifting / "curve/losses.csv").read_text().splitlines()
    assert (lines[0], lines[21], len(lines)) == ("step,one process,DP 2", "21,1.0002,1.0004", 22)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_one_run_only_is_an_error(value):
    """With a loss scale a run continues after such a norm. In both runs it is the same overflow."""
    finite, other = [{"loss": 1.0, "grad_norm": 2.0}], [{"loss": 1.0, "grad_norm": value}]
    assert errors(other, finite) == errors(finite, other) == [math.inf]
    assert errors(other, other) == [0.0]
