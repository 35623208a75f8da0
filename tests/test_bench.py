"""Benchmarks: turns, ranks, tables, files, mistakes; and that all of them start."""

import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from colossal_vit.provenance import ResultFolder

import fork_ranks
import launchers
import warm
from fork_ranks import ROOT

FAKE = '''"""Numbers that are made up."""

import os

from benchmarks.harness import Benchmark, Case, Failed


def broken(number):
    raise Failed("out of memory")


def sides(args):
    slow = lambda number: {"images/s": 10.0 + number, "memory, GB": None, "mode": "plain"}
    return {"slow": slow, "fast": lambda number: {"images/s": 20.0 + number, "memory, GB": 1.5}, "broken": broken}


def on_ranks(args):
    if os.environ["GIVEN"] == "bad" and os.environ["RANK"] == "1":
        raise ValueError("on rank 1")
    return {"rank": lambda number: {"ranks": int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])}}


CASES = {
    "turns": Case(sides),
    "all fail": Case(lambda args: {"broken": broken}, by_default=False),
    "ranks": Case(on_ranks, 2, by_default=False, once=True, variables={"GIVEN": "good"}),
    "bad ranks": Case(on_ranks, 2, by_default=False, variables={"GIVEN": "bad"}),
}
BENCHMARK = Benchmark(lambda args: CASES, rounds=2, compared=1)
'''


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Pythons that start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


@pytest.fixture
def tree(tmp_path):
    """A copy of the benchmarks with one of made-up numbers."""
    shutil.copytree(ROOT / "scripts/benchmarks", tmp_path / "scripts/benchmarks")
    shutil.copy(ROOT / "scripts/bench.py", tmp_path / "scripts")
    (tmp_path / "scripts/benchmarks/fake.py").write_text(FAKE)
    return tmp_path


@pytest.fixture
def fake(tree, programs):
    """Run it; returns the exit code, what it said, and what it wrote."""

    def run(*flags):
        command = [str(programs.bin / "python"), "scripts/bench.py", "fake", *flags]
        code, said = launchers.run(command, cwd=tree, PYTHONPATH=str(ROOT), **programs.throughout)
        folder = tree / "runs/bench/fake"
        return code, said, {path.name: path for path in folder.iterdir()} if folder.exists() else {}

    return run


def test_sides_take_turns_and_are_compared_with_the_first(fake):
    code, said, files = fake("--rounds", "3")
    assert code == 0, said
    turns = re.findall(r"^round (\d) of 3, (\w+): ", said, re.MULTILINE)
    assert [name for _, name in turns] == ["slow", "fast", "broken", "fast", "slow", "slow", "fast"]
    assert set(files) == {"fake.md", "fake.json", "fake.png", "log.txt", "provenance.json"}
    assert files["fake.md"].read_text() in said
    assert files["fake.md"].read_text().splitlines() == [
        "|  | side | images/s | mode | memory, GB | images/s ÷ first side's: median (min, max) |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| turns | slow | 11 | plain |  | 1.000 (1.000, 1.000) |",
        "| turns | fast | 21 |  | 1.5 | 1.909 (1.833, 2.000) |",
        "| turns | broken | out of memory |  |  |  |",
    ]
    kept = json.loads(files["fake.json"].read_text())
    assert [values["images/s"] for values in kept["rounds"]["turns"]["fast"]] == [20, 21, 22]
    assert kept["failed"] == {"turns": {"broken": "out of memory"}}
    command = json.loads(files["provenance.json"].read_text())["command"]
    assert command == "python scripts/bench.py fake --rounds 3"


def test_a_case_without_a_side_that_works_is_a_failure(fake):
    code, said, _ = fake("--only", "turns", "all fail")
    assert code == 1
    assert "| all fail | broken | out of memory |" in said


def test_ranks_measure_and_the_first_reports(fake):
    code, said, _ = fake("--only", "ranks")
    assert code == 0, said
    assert said.count("round 1 of 1, rank: ranks 2\n") == 1
    assert "| ranks | rank | 2 | 1.000 |" in said


def test_a_failed_rank_ends_the_benchmark_with_what_it_said(fake):
    code, said, files = fake("--only", "bad ranks")
    assert code == 1
    assert "ValueError: on rank 1" in said
    assert said.endswith("bad ranks on 2 processes failed, see above\n")
    assert not files


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["nothing"],
            "bench.py: error: there is no benchmark 'nothing': choose from checkpoint, checkpoint_ranks, engine, ",
        ),
        (
            ["fake", "--only", "turn"],
            "bench.py fake: error: --only turn: choose from turns, all fail, ranks, ",
        ),
        (["fake", "--rounds", "0"], "bench.py fake: error: argument --rounds: 0 is no number from 1 on"),
    ],
)
def test_benchmark_with_a_mistaken_command_line_ends_in_one_line(tree, flags, line):
    code, said = launchers.run([sys.executable, "scripts/bench.py", *flags], cwd=tree, PYTHONPATH=str(ROOT))
    assert code == 2
    assert line in said


def test_a_result_is_kept_when_nobody_reads_what_is_said(monkeypatch, tmp_path):
    """As after `| head -1`. Without a folder nothing is kept."""

    def measure():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 as a new process has it
        for folder in (None, tmp_path / "kept"):
            result = ResultFolder(folder, changes_allowed=True)
            result.print(f"first line, in {ROOT}/runs")
            result.print("second line")
            result.finish("speed", ["| a |", "| --- |"], {"a": 1})

    monkeypatch.setattr("sys.argv", ["bench.py", "--set", "a b"])
    fork_ranks.call(measure, launched=False)
    kept = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    assert json.loads(kept.pop("provenance.json"))["command"] == "python bench.py --set 'a b'"
    assert kept == {
        "speed.md": "| a |\n| --- |\n",
        "speed.json": '{\n  "a": 1\n}\n',
        "log.txt": "first line, in ./runs\nsecond line\n",
    }


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks
# ---------------------------------------------------------------------------------------------------------------------


def forked(root, *argv, prepare=lambda: None):
    """Run `bench.py` of a folder in a fork, which has imported everything."""

    def enter(rank):
        sys.path.insert(0, str(root / "scripts"))
        prepare()

    return fork_ranks.start(root / "scripts/bench.py", argv, [{}], cwd=root, enter=enter).wait()


LIST_ALL = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = ["scripts/bench.py", name, "--list"]
    try:
        runpy.run_path("scripts/bench.py", run_name="__main__")
    except SystemExit as error:
        print(f"=== {name}: exit code {error.code}")
"""


def test_every_benchmark_lists_its_cases(programs):
    """With nothing on the path but what a typed command has there; in one process, which imports once."""
    names = re.findall(r"^(\w+)  +\S", forked(ROOT).stdout[0], re.MULTILINE)
    command = [str(programs.bin / "python"), "-c", LIST_ALL, *names]
    code, said = launchers.run(command, cwd=ROOT, PYTHONPATH=str(ROOT / "scripts"), **programs.environment)
    assert code == 0, said
    cases = re.split(r"^=== (\w+): exit code 0\n", said, flags=re.MULTILINE)
    assert cases[1::2] == names, said
    assert all(cases[:-1:2]), "each names its cases"


@pytest.mark.parametrize(
    ("memory", "batch_size"), [(8.2e9, 1), (12.6e9, 32), (16.9e9, 64), (25.3e9, 128), (34e9, 256), (85e9, 256)]
)
def test_the_imagenet_benchmark_takes_batches_that_fit_the_gpu(memory, batch_size):
    """By the dry runs that are on record, of ViT-B/16 and ViT-L/32 with 512 images."""

    def prepare():
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=memory)

    said = forked(ROOT, "imagenet", "--help", prepare=prepare).stdout[0]
    assert f"here {batch_size} by default" in " ".join(said.split())
    parameters = {"vit_imagenet_dali/config.py": 86.6e6, "vit_imagenet_dali/config_vit_l32.py": 306.5e6}
    for plan in json.loads((ROOT / "results/memory_plan/memory.json").read_text()):
        if plan["config"] in parameters:
            state = 16 * parameters.pop(plan["config"]) / 1e9  # GB in fp32; only the rest grows with the batch
            peak = state + (plan["peaks"][0] - state) * batch_size / 512  # the configs' BATCH_SIZE
            assert peak + 2 < memory / 1e9
    assert not parameters


ENGINE_STEPS = """
import sys
print(*sys.argv[3:], sep="\\n", file=open("values.txt", "a"))
print(1.0, flush=True)
for line in sys.stdin:
    print(1.0, 1.0, flush=True)
"""


def test_command_of_a_module_is_recorded_without_a_path(tmp_path):
    """`python -m` puts the path of the file that it runs into sys.argv."""
    package = tmp_path / "made/up"
    package.mkdir(parents=True)
    line = "from pathlib import Path; from colossal_vit.provenance import ResultFolder; "
    (package / "__main__.py").write_text(line + "ResultFolder(Path('result'), changes_allowed=True).write_origin()\n")
    code, said = launchers.run([sys.executable, "-m", "made.up", "--jobs", "2"], cwd=tmp_path)
    assert code == 0, said
    assert json.loads((tmp_path / "result/provenance.json").read_text())["command"] == "python -m made.up --jobs 2"


def test_a_result_does_not_say_where_the_repository_is(tmp_path):
    result = ResultFolder(tmp_path, changes_allowed=True, command="true")
    result.write("made", [], {"configs": [str(ROOT / "config.py")]})
    assert json.loads((tmp_path / "made.json").read_text()) == {"configs": ["./config.py"]}


@pytest.mark.parametrize(("memory", "batch_size"), [(16.9e9, 1), (25.3e9, 8), (42.4e9, 16), (85e9, 64), (150e9, 128)])
def test_the_processes_of_the_engine_benchmark_fit_the_gpu_together(tree, memory, batch_size):
    """By a dry run of config_fp32.py with ViT-B/16: 16.55 GB with 128 images, and beside it CUDA's context."""
    (tree / "scripts/benchmarks/engine_steps.py").write_text(ENGINE_STEPS)

    def prepare():
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=memory)

    command = ["engine", "--only", "ViT-B/16, 2 threads", "--rounds", "1", "--output", str(tree / "engine")]
    done = forked(tree, *command, prepare=prepare)
    assert done.codes == [0], str(done)
    values = (tree / "values.txt").read_text().split()
    assert [value for value in values if value.startswith("BATCH_SIZE=")] == [f"BATCH_SIZE={batch_size}"] * 7
    state = 16 * 86e6 / 1e9  # GB in fp32; only the rest grows with the batch
    assert 7 * (0.5 + state + (16.55 - state) * batch_size / 128) < memory / 1e9


PLANNED_FOR = """
import sys
from benchmarks import plan
records = [dict(step_s=1.0, data_s=0.0, images_per_s=1.0, memory_gb=1.0)]
plan.train = lambda *_: records * (plan.UNCOUNTED + 1)
plan.predict = lambda machine, *_: machine and 1.0
for name in sys.argv[1:]:
    plan.gpu_names = lambda: [name] if name else []
    values = plan.compare("imagenet", "config.py", {"COMPILE": False}, 1, 0)
    print(name, values["planned for"], values["predicted, s"], sep=": ")
"""


def test_steps_are_predicted_for_the_gpu_that_is_there_or_not_at_all(programs):
    """By name: not for a smaller or faster GPU whose name has the same words. Without a GPU for an H100."""
    planned = {
        "": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": None,
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA RTX A6000": None,
        "NVIDIA A30": None,
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 3090 Ti": None,
        "NVIDIA GeForce RTX 3080": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    }
    command = [str(programs.bin / "python"), "-c", PLANNED_FOR, *planned]
    code, said = launchers.run(command, PYTHONPATH=f"{ROOT}:{ROOT / 'scripts'}", **programs.environment)
    assert code == 0, said
    assert said.splitlines() == [f"{name}: {entry}: {entry and 1.0}" for name, entry in planned.items()]
