"""Which process starts CUDA: no fork of a process that has started it can use a GPU."""

import json
import subprocess
import sys

import pytest

import launchers
import training
from fork_ranks import ROOT
from layouts import set_flags

IMAGENET = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=1, NUM_HEADS=4)
DRY_RUN = [training.HYBRID, *training.flags(**{"parallel.pipeline": 2}), "--dry-run", "--world_size", "2"]
PROGRAMS = {  # those that fork, and need CUDA in their forks
    "--dry-run": DRY_RUN,
    "--dry-run, with DALI imported": [
        "vit_imagenet_dali/train.py",
        *("--config", "config.py", *set_flags(IMAGENET), "--dry-run", "--world_size", "2"),
    ],
}
if (ROOT / "tools").exists():
    PROGRAMS["parity"] = ["tools/parity/__main__.py", str(ROOT / training.HYBRID), "DP 2"]
    PROGRAMS["parity"] += training.flags(DEPTH=2, IMG_SIZE=16)


SCRIPTS = ["vit_cifar10_hybrid/train_hybrid.py", "vit_cifar10_hybrid/train_dp.py", "vit_caltech101_amp/train.py"]
SCRIPTS += ["vit_imagenet_dali/train.py"]


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """By program: its process, and those that have started CUDA, on a machine whose driver is libcuda.c."""
    folder = tmp_path_factory.mktemp("starts")
    library = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(ROOT / "tests/libcuda.c")]
    done = subprocess.run(library, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = {name: [*argv, "--output", str(folder / "output")] for name, argv in PROGRAMS.items()}
    programs = {**output, **{path.replace("/", " "): [path, "--help"] for path in SCRIPTS}}
    code, said = launchers.run(
        [sys.executable, "tests/cuda_starts.py", json.dumps(programs), str(folder)],
        cwd=ROOT,
        gpus=True,
        PYTHONPATH=str(ROOT),
        LD_LIBRARY_PATH=str(folder),
        CUDA_STARTS=str(folder / "imports"),
        REHEARSE="1",
    )
    assert code == 0, said
    found = json.loads(said.splitlines()[-1])
    for code, stderr, *_ in found.values():
        assert code == 0, stderr
    return {name: processes for name, (_, _, *processes) in found.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_is_started_in_forks_only(name, starts):
    program, started = starts[name]
    assert started, "the driver is not in use"
    assert program not in started


def test_train_scripts_import_neither_dry_run_nor_matplotlib(starts):
    assert starts["modules"][1] == []


@pytest.mark.parametrize("name", ["imports", *(path.replace("/", " ") for path in SCRIPTS)])
def test_importing_a_script_starts_no_cuda(name, starts):
    """A process that has started it cannot fork, as `--dry-run` does; and each rank takes memory of the first GPU."""
    assert starts[name][1] == []
