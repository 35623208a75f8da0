"""What the repository says of itself holds: README against configs, requirements against the lock, the two commands."""

import itertools
import os
import re
import subprocess
import sys
import tomllib

import pytest
from colossal_vit import config as configs
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config

import schemas
from checkout import FILES, FOLDERS, pages
from fork_ranks import ROOT
from vit_settings import check_vit


def test_requirements_are_what_the_lock_says():
    checked = subprocess.run(["bash", "scripts/lock.sh", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cu12.txt"])
def test_torch_is_one_without_known_holes_in_load(name):
    version = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / name).read_text(), re.MULTILINE)
    assert tuple(map(int, version.groups())) >= (2, 10)


# Written by a command.
ELSEWHERE = {
    "classes.txt",
    "skipped.txt",
    "damaged.txt",
    ".../damaged.txt",
    "`wandb/`",
    "`val/`",
    "`evaluation/`",
    "`runs/bench/amp/`",
}


@pages
def test_file_named_on_a_page_exists(page):
    """Every config, script, module and folder, by its path from the root or the page's folder, or by its end."""
    text = page.read_text()
    if page.name == "CHANGELOG.md":
        text = re.sub(r"^\|.+?\|", "", text, flags=re.MULTILINE)  # the first column of its table has what is gone
    named = re.findall(r"[\w./-]+\.(?:py|sh|txt|lock|sbatch|toml|cff)\b|`(?:[a-z_]\w*/)+`", text)
    for name in set(named) - ELSEWHERE:
        if name.startswith("my_"):  # to be made by the reader
            continue
        end = "/" + name.strip("`").removeprefix("./").removeprefix("../")
        assert any(f"{path}".endswith(end) or end in f"{path.parent}/" for path in FILES), f"{page}: {name}"


CONFIGS = [
    path for path in FILES if path.name.startswith("config") and path.relative_to(ROOT).parts[0].startswith("vit")
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_docstring_of_a_config_has_the_command_that_runs_it(path):
    """The command names the file itself, and as many processes as its layout needs."""
    docstring = path.read_text().split('"""')[1]
    assert re.search(rf"--config \./(configs?/)?{path.name}$", docstring, re.MULTILINE)
    processes = int(re.search(r"--nproc_per_node (\d+)", docstring).group(1))
    config = configs.load(path, (), schemas.any_key())
    layout = Layout.of(config, processes)
    assert layout.data == 1 or layout.pipeline == layout.tensor == 1
    if "train_hybrid" in docstring:
        check_vit(Config({"CHECKPOINT": False, **config}), layout)
    for word in ("Processes:", "accuracy", "measured"):
        assert word in docstring


def test_examples_do_not_import_each_other():
    modules = {folder: {path.stem for path in FILES if path.parent == ROOT / folder} - {"train"} for folder in FOLDERS}
    for path in FILES:
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in FOLDERS:
            own = path.relative_to(ROOT).parts[0]
            others = {m for folder, names in modules.items() if folder != own for m in names} - modules[own]
            imported = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
            assert not imported & others, path


@pytest.mark.parametrize(
    ("page", "result"),
    [
        ("docs/zero.md", "zero_plan/zero.md"),
        ("docs/precision.md", "memory_plan/memory.md"),
        ("vit_caltech101_amp/README.md", "caltech101_amp_cpu/amp.md"),
        ("vit_caltech101_amp/README.md", "1x_NVIDIA_H200/amp/amp.md"),
    ],
)
def test_rows_on_pages_are_those_of_the_results(page, result):
    """Each table of the result is on the page, whole or some of its columns and rows."""
    shown = tables((ROOT / page).read_text())
    for table in tables((ROOT / "results" / result).read_text()):
        assert any(part_of(candidate, table) for candidate in shown), table[0]


def tables(text):
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in found]


def part_of(part, table):
    """Whether these rows are rows of the table, with the same heading over each number."""
    for columns in itertools.combinations(range(len(table[0])), len(part[0])):
        kept = [[row[column] for column in columns] for row in table]
        if part[0] == kept[0] and all(row in kept for row in part[1:]):
            return True
    return False


def test_a_row_with_another_number_or_under_another_heading_is_no_part():
    (table,) = tables("| a | b | c |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |\n")
    assert part_of([["a", "c"], ["---", "---"], ["4", "6"]], table)
    assert not part_of([["a", "c"], ["---", "---"], ["4", "5"]], table)
    assert not part_of([["a", "c"], ["---", "---"], ["1", "6"]], table)


def test_every_result_is_in_the_index():
    """docs/benchmarks.md has a row for each folder of results/."""
    index = (ROOT / "docs/benchmarks.md").read_text()
    folders = {path.relative_to(ROOT).parts[1] for path in FILES if path.relative_to(ROOT).parts[0] == "results"}
    assert set(re.findall(r"^\| \[(\w+)\]\(\.\./results/\1\)", index, re.MULTILINE)) == folders


@pytest.mark.parametrize(("folder", "other"), [("tests", "scripts"), ("scripts", "tests")])
def test_the_linter_keeps_every_module_of_scripts_and_tests_from_the_other_folder(folder, other):
    banned = tomllib.loads((ROOT / folder / "ruff.toml").read_text())["lint"]["flake8-tidy-imports"]["banned-api"]
    modules = {path.relative_to(ROOT / other).parts[0] for path in FILES if path.is_relative_to(ROOT / other)}
    modules = {name.removesuffix(".py") for name in modules if name.endswith(".py") or name == "benchmarks"}
    found = {name for name, entry in banned.items() if entry["msg"] == f"of {other}/"}
    assert found == {name for name in modules if not name.startswith("test_")} - {"layouts"}  # values, and no command


def test_the_diagram_of_the_modules_is_what_the_imports_say():
    """`python scripts/draw_imports.py --write` draws it."""
    drawn = subprocess.run([sys.executable, "scripts/draw_imports.py"], cwd=ROOT, capture_output=True, text=True)
    assert drawn.stdout, drawn.stderr
    assert drawn.stdout in (ROOT / "docs/architecture.md").read_text()


def test_test_script_passes_arguments_on():
    """Beside what --fast names; pytest fails if a test of these does not exist."""
    command = ["bash", "scripts/test.sh", "--fast", "--collect-only", "-q"]
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests collected" in done.stdout


def test_the_eight_files_of_the_reading_path_are_short():
    """They are one evening's reading."""
    page = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"^\d\. \[(\S+\.py)\]", page, re.MULTILINE)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in paths}
    assert len(lines) == 8
    assert max(lines.values()) <= 300
    assert sum(lines.values()) <= 1600
