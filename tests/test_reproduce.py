"""The command that makes a result again and compares it, on tiny results; and what results/ expects of itself."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from checkout import FILES
from fork_ranks import ROOT

EXPECTED = sorted(path for path in FILES if path.name == "expect.json" and path.is_relative_to(ROOT / "results"))
LOSS = {"quantity": "loss", "file": "log.txt", "pattern": r"^loss (\S+)$", "interval": [1.0, 1.5], "why": "a test"}


@pytest.fixture
def tree(tmp_path):
    """A copy of the command beside the folder of one result, whose old loss is 1,234.5e-3."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/reproduce.py", tmp_path / "scripts")
    folder = tmp_path / "results/tiny"
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text('{"command": "as then", "commit": "0123456789abcdef"}')
    (folder / "log.txt").write_text("loss 1,234.5e-3\n")
    return tmp_path


def expect(tree, command, *values):
    said = {"command": command, "minutes": 3, "needs": "a GPU", "values": [*values] or [LOSS]}
    (tree / "results/tiny/expect.json").write_text(json.dumps(said))


def reproduce(root, *arguments):
    command = [sys.executable, "scripts/reproduce.py", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("new", "code", "row"),
    [
        ("1.5", 0, "| loss | 1.2345 | 1.5 | 1 to 1.5 | yes |"),
        ("1.51", 1, "| loss | 1.2345 | 1.51 | 1 to 1.5 | no |"),
        ("0.99", 1, "| loss | 1.2345 | 0.99 | 1 to 1.5 | no |"),
        ("nan", 1, "| loss | 1.2345 | nan | 1 to 1.5 | no |"),
        ("low", 1, "| loss | 1.2345 | could not convert string to float: 'low' | 1 to 1.5 | no |"),
    ],
)
def test_reproduce_says_whether_the_new_value_is_in_the_interval(tree, new, code, row):
    expect(tree, f"echo loss {new} > {{output}}/log.txt")
    done = reproduce(tree, "tiny", "--output", tree / "new folder")
    assert done.returncode == code, done.stderr
    assert row in done.stdout.splitlines()
    assert (tree / "new folder/log.txt").read_text() == f"loss {new}\n"


def test_reproduce_with_a_command_that_fails_ends_with_1_although_the_value_is_within(tree):
    expect(tree, "echo loss 1.2 > {output}/log.txt; false | cat")
    done = reproduce(tree, "tiny", "--output", tree / "new")
    assert done.returncode == 1
    assert "| loss | 1.2345 | 1.2 | 1 to 1.5 | yes |" in done.stdout
    assert "exit code of the command: 1" in done.stdout


def test_reproduce_without_the_value_in_what_was_written_ends_with_1(tree):
    expect(tree, "echo accuracy 1 > {output}/log.txt")
    done = reproduce(tree, "tiny", "--output", tree / "new")
    assert done.returncode == 1
    assert re.search(r"^\| loss \| 1.2345 \| .*0 matches of .* \| no \|$", done.stdout, re.MULTILINE)


def test_reproduce_takes_of_several_matches_what_the_expectation_says(tree):
    (tree / "results/tiny/log.txt").write_text("loss 3\nloss 1\nloss 9\nloss 2\n")
    takes = {"first": 3, "last": 2, "min": 1, "max": 9, "median": 2.5, "count": 4}
    values = [{**LOSS, "quantity": take, "take": take, "interval": [n, n]} for take, n in takes.items()]
    expect(tree, "cp results/tiny/log.txt {output}", *values)
    done = reproduce(tree, "tiny", "--output", tree / "new")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {take} | {n} | {n} | {n} to {n} | yes |" in done.stdout for take, n in takes.items())


def test_reproduce_finds_an_old_value_in_the_format_of_then(tree):
    then = {"file": "log.txt", "pattern": r"loss (\S+)"}
    expect(
        tree,
        "echo '{\"loss\": 1.3}' > {output}/now.json",
        {**LOSS, "file": "now.json", "pattern": r'"loss": ([\d.]+)', "recorded": then},
    )
    done = reproduce(tree, "tiny", "--output", tree / "new")
    assert "| loss | 1.2345 | 1.3 | 1 to 1.5 | yes |" in done.stdout, done.stderr


def test_list_names_a_result_with_its_minutes_and_needs(tree):
    expect(tree, "true")
    assert reproduce(tree, "--list").stdout.split() == ["tiny", "3", "min", "a", "GPU"]


@pytest.mark.parametrize(
    ("values", "arguments", "words"),
    [
        ([LOSS], ["huge"], "huge: choose from tiny"),
        ([LOSS], [], "no name: choose from tiny"),
        ([LOSS], ["tiny", "--output", "scripts"], "scripts: is not empty"),
        ([LOSS], ["tiny", "--output", "results/tiny/log.txt"], "log.txt: File exists"),
        ([{**LOSS, "interval": [2, 3]}], ["--list"], "loss: 1.2345 is not in [2, 3]"),
        ([{**LOSS, "pattern": "los+"}], ["--list"], "ValueError"),
        ([{**LOSS, "pattern": "(o|s)"}], ["--list"], "log.txt: 3 matches of '(o|s)'"),
        ([{**LOSS, "file": "none.txt"}], ["--list"], "none.txt is missing"),
        ([{**LOSS, "interval": [1]}], ["--list"], "expect.json: ValueError"),
        ([{key: LOSS[key] for key in LOSS if key != "why"}], ["--list"], "expect.json: lacks why"),
        ([LOSS], ["tiny/.."], "tiny/..: choose from tiny"),
    ],
)
def test_reproduce_refuses_a_mistake_in_one_line(tree, values, arguments, words):
    expect(tree, "exit 77", *values)
    done = reproduce(tree, *arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"reproduce.py: error: .*{re.escape(words)}.*\n", done.stderr), done.stderr


def test_every_result_expects_the_values_that_it_has():
    done = reproduce(ROOT, "--list")
    assert done.returncode == 0, done.stderr
    origins = {path.parent for path in FILES if path.name == "provenance.json"}
    assert {path.parent for path in EXPECTED} == origins
    assert len(done.stdout.splitlines()) == len(origins)


CODE = [path for path in FILES if path.suffix in (".py", ".sh") and "tests" not in path.parts]
FLAGS = {flag for path in CODE for flag in re.findall(r"[\"' ](--[a-z][\w-]*)[\"' ]", path.read_text())}


@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: str(path.parent.relative_to(ROOT / "results")))
def test_the_command_of_a_result_names_what_is_here_today(path):
    """Its scripts, modules, tests and benchmark, and flags that some program here has."""
    command = json.loads(path.read_text())["command"]
    assert "{output}" in command
    folder = ROOT
    for part in re.split(r"&&|\||;", command):
        words = shlex.split(part)
        if words[0] == "cd":
            folder = ROOT / words[1]
        names = [word for word in words if re.fullmatch(r"[\w./]+\.(py|sh)", word)]
        assert {folder / name for name in names} <= {*FILES}
        if "-m" in words:
            assert importlib.util.find_spec(words[words.index("-m") + 1])
        if "scripts/bench.py" in words:
            assert ROOT / f"scripts/benchmarks/{words[words.index('scripts/bench.py') + 1]}.py" in FILES
        if "git" not in words:
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= FLAGS
