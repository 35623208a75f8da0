"""Rooms that can be removed: without `tools/` and the other tutorials a tutorial trains, and its tests pass."""

import subprocess
import sys

import pytest

import checkout
import fork_ranks
import launchers
import training
import warm

SCRIPTS = [training.IMAGENET, training.HYBRID, training.DATA_PARALLEL, training.CALTECH101]


@pytest.fixture(scope="module", params=checkout.FOLDERS)
def room(request, tmp_path_factory):
    """A copy of the repository with one tutorial, without `tools/`; and the name of the tutorial's folder."""
    root = tmp_path_factory.mktemp("rooms")
    checkout.copy(root, "tools", *({*checkout.FOLDERS} - {request.param}))
    return root, request.param


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A Python that starts at once, and imports this repository's modules again, from the copy."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:
        yield programs.bin / "python"


def python(root, *words, cwd=".", program=sys.executable):
    """Run Python with the modules of a copy."""
    variables = launchers.environment(PYTHONPATH=str(root))
    command = [program, *words]
    return subprocess.run(command, cwd=root / cwd, env=variables, capture_output=True, text=True)


def test_a_tutorial_trains_alone(room, started):
    root, folder = room
    for script in [script for script in SCRIPTS if script.startswith(folder)]:
        _, config, *values = training.flags(script=script)
        config = config.replace(str(fork_ranks.ROOT), str(root))
        output = root / "runs" / script
        argv = ["--config", config, *values, "--output", output, "--max-steps", "2"]
        done = python(root, root / script, *argv, program=started)
        assert done.returncode == 0, done.stderr
        assert [step["step"] for step in training.lines_of(output / "metrics.jsonl") if "loss" in step] == [1, 2]


def test_every_module_of_a_tutorial_can_be_imported_alone(room, started):
    root, folder = room
    modules = sorted(path.stem for path in (root / folder).glob("*.py") if not path.stem.startswith("config"))
    done = python(root, "-c", f"import {', '.join(modules)}", cwd=folder, program=started)
    assert done.returncode == 0, done.stderr


def test_a_test_of_each_file_of_a_tutorial_passes_alone(room):
    """All are collected, which imports what they need."""
    root, folder = room
    listed = python(root, "-m", "pytest", "-q", "--collect-only", f"{folder}/tests")
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    assert len(tests) > 5, listed.stdout
    first = {test.partition("::")[0]: test for test in reversed(tests)}
    done = python(root, "-m", "pytest", "-q", "-x", *first.values())
    assert done.returncode == 0, done.stdout[-6000:]


WORDS = ("parity", "planner", "imagenet", "cifar", "caltech")  # tools and examples
LIBRARY = fork_ranks.ROOT / "colossal_vit"
ALLOWED = {
    "data/folders.py",  # says of folders that were downloaded, and are no class folders, which loader reads them
    "checkpoint/timm_model.py",  # how the images of earlier checkpoints are cropped
}


def test_the_library_names_no_tool_and_no_example():
    library = [path for path in checkout.FILES if path.is_relative_to(LIBRARY)]
    named = {str(path.relative_to(LIBRARY)) for path in library if any(w in path.read_text().lower() for w in WORDS)}
    assert named == ALLOWED
