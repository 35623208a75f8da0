"""The list of what is owed on a GPU: rehearsed on the CPU, and what becomes of checks that fail, hang or do not fit."""

import json
import os
import re
import shlex
import subprocess

import pytest

import fork_ranks
import launchers
import test_gpu
import warm
from fork_ranks import ROOT

PREDICTIONS = ROOT / "scripts/gpu_check_predictions.json"
# The program with another list, on a machine of so many GPUs and in the repository of this folder, as far as it knows.
OTHER_LIST = """
from pathlib import Path
import gpu_check
from colossal_vit import provenance
from gpu_check import Check
gpu_check.ROOT = provenance.ROOT = Path({root!r})
gpu_check.CHECKS, gpu_check.SETTLE = {checks}, 0.5
gpu_check.PREDICTIONS = Path({predictions!r})
gpu_check.gpu_names = lambda: ["NVIDIA H200"] * {gpus}
raise SystemExit(gpu_check.main())
"""

# A benchmark in the repository of the current folder, on a machine with that GPU, as far as it knows.
BENCHMARK = """
import sys
from pathlib import Path
from colossal_vit import provenance
provenance.ROOT, provenance.gpu_names = Path.cwd(), lambda: ["NVIDIA H200"]
provenance.ResultFolder(Path(sys.argv[1])).finish("speed", ["a table"], [])
"""


PARTS = ([], ["--dali"], ["--rest"])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Programs that start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


@pytest.fixture
def run(programs, tmp_path):
    """Run a list of checks, as Python says them; returns the exit code and the results."""

    def run(checks, *flags, gpus=1, predictions=PREDICTIONS, **variables):
        values = dict(gpus=gpus, root=str(ROOT), predictions=str(predictions))
        program = OTHER_LIST.format(checks=f"dict({', '.join(checks)})", **values)
        path = f"{ROOT}:{ROOT / 'scripts'}"
        # Where something is rehearsed, uncommitted changes do not matter.
        command = [str(programs.bin / "python"), "-c", program, "--output", str(tmp_path), *flags]
        code, said = launchers.run(command, PYTHONPATH=path, REHEARSE="1", **{**programs.environment, **variables})
        assert code in (0, 1, 75), said
        return code, json.loads((tmp_path / "gpu_check.json").read_text())

    return run


def check(name, code, minutes=1.0, arguments=(), **needs):
    """A check that runs Python code."""
    more = "".join(f", {key}={value!r}" for key, value in needs.items())
    return f"{name}=Check('something', {['-c', code, *arguments]!r}, {minutes}{more})"


@pytest.fixture(scope="module")
def listed():
    """The commands of the list as it is, by name."""
    parts = [fork_ranks.run("scripts/gpu_check.py", ["--rehearse", "--list", *part]) for part in PARTS]
    assert all(done.codes == [0] for done in parts), str(parts)
    return dict(re.findall(r"^\d+ (\w+): .*\n    python (.*)$", "".join(p.stdout[0] for p in parts), re.MULTILINE))


def test_every_check_is_rehearsed(programs, listed, tmp_path):
    """As one types it, but that pythons start at once; test_gpu.py is a part of this suite anyway."""
    names = [name for name, command in listed.items() if "tests/test_gpu.py" not in command]
    command = [str(programs.bin / "python"), "scripts/gpu_check.py", "--rehearse", "--output", str(tmp_path)]
    environment = launchers.environment(PYTHONPATH=str(ROOT), **programs.throughout)
    done = subprocess.run([*command, "--only", *names], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: r["result"] for name, r in results.items()} == dict.fromkeys(names, "rehearsed")
    table = (tmp_path / "gpu_check.md").read_text()
    assert all(re.search(rf"^\| {name} \| .* \| rehearsed \| ", table, re.MULTILINE) for name in names)
    # What is predicted of a GPU is not compared with this CPU, but each value is found where it will be.
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|  \| ([^|]*) \|  \| [^|]+ \|$", table, re.MULTILINE)
    predictions = json.loads((ROOT / "scripts/gpu_check_predictions.json").read_text())
    assert [(check, quantity) for check, quantity, _ in rows] == [(p["check"], p["quantity"]) for p in predictions]
    absent = {quantity for _, quantity, value in rows if not value}
    assert {quantity for quantity in absent if not re.match("waits of|TF32|TORCH|NAIVE", quantity)} == set()
    assert len((tmp_path / "logs/profile-profile-rank0.json").read_text()) > 1000


def test_the_first_part_takes_twelve_minutes_at_most():
    done = fork_ranks.run("scripts/gpu_check.py", ["--list"])
    limits = [float(minutes) for minutes in re.findall(r"at most ([\d.]+) minutes$", done.stdout[0], re.MULTILINE)]
    assert 10 < sum(limits) <= 12 + 1e-9


def test_gpu_tests_fail_where_torch_finds_other_gpus_than_gpu_check(programs, listed):
    """The first of them fails at once, so that none can pass as a rehearsal by mistake."""
    command = [str(programs.bin / "python"), *shlex.split(listed["ranks"])]
    code, said = launchers.run(command, cwd=ROOT, PYTHONPATH=str(ROOT), GPU_CHECK_GPUS="7")
    assert code == 1
    assert "gpu_check.py has found 7 GPUs, torch finds others" in said
    assert re.search(r"\d errors? in", said)
    assert "passed" not in said


def test_every_test_of_a_gpu_belongs_to_one_check(listed):
    """By the words that the checks give to pytest."""
    tests = {name for name in vars(test_gpu) if name.startswith("test_")}
    commands = [shlex.split(command) for command in listed.values() if "tests/test_gpu.py" in command]
    words = [word.split(" and ") for command in commands for word in command[command.index("-k") + 1].split(" or ")]

    def chosen(test, both):  # pytest looks for them in the name of the file, too
        return all(word in f"test_gpu.py {test}" for word in both)

    for test in tests:
        assert sum(chosen(test, both) for both in words) == 1, test
    assert all(any(chosen(test, both) for test in tests) for both in words)


def test_results_of_a_rehearsal_and_of_other_gpus_are_not_kept(run):
    checks = [check("one", "print(1)"), check("two", "print(2)")]
    assert run(checks, "--rehearse")[1]["one"]["result"] == "rehearsed"
    for gpus in (1, 2):
        code, results = run(checks, "--from", "two", gpus=gpus)
        assert code == 0
        assert {name: (r["result"], len(r["gpus"])) for name, r in results.items()} == {"two": ("passed", gpus)}


def test_a_benchmark_that_has_lost_its_gpu_has_failed(run):
    code = """if True:
        import json, pathlib, sys
        folder = pathlib.Path(sys.argv[1])
        folder.mkdir(parents=True)
        (folder / 'provenance.json').write_text(json.dumps({'hardware': {'gpus': []}}))"""
    exit_code, results = run([check("lost", code, arguments=["{output}"])])
    assert exit_code == 1
    assert (results["lost"]["result"], results["lost"]["said"]) == ("failed", "ran on other GPUs: none")


def test_changed_results_that_are_in_git_keep_no_benchmark_from_running(programs, tmp_path):
    """In the folder named after the GPU, which the program rewrites after each check; and when it is started again."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    checks = ", ".join(check(name, BENCHMARK, arguments=["{output}"]) for name in ("one", "two"))
    values = dict(gpus=1, root=str(tmp_path), predictions=str(PREDICTIONS))
    program = OTHER_LIST.format(checks=f"dict({checks})", **values)
    command = [str(programs.bin / "python"), "-c", program]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", **programs.throughout}

    folder, code = tmp_path / "results/1x_NVIDIA_H200", tmp_path / "code.py"
    folder.mkdir(parents=True)
    (folder / "gpu_check.md").touch()
    code.touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "a result")
    for _ in range(2):
        exit_code, said = launchers.run(command, **environment)
        assert exit_code == 0, said
        assert [r["result"] for r in json.loads((folder / "gpu_check.json").read_text()).values()] == ["passed"] * 2
    code.write_text("changed")
    exit_code, said = launchers.run(command, **environment)
    assert exit_code == 1
    assert "error: commit first" in said


def test_the_list_goes_on_after_a_failure_and_where_it_is_told_to(run):
    checks = [check("good", "print('fine')"), check("bad", "raise SystemExit('a | b')"), check("last", "print(3)")]
    code, results = run(checks)
    assert code == 1
    assert [(r["result"], r["said"]) for r in results.values()] == [
        ("passed", "fine"),
        ("failed", "a / b"),
        ("passed", "3"),
    ]
    checks = [check("good", "raise SystemExit('must not run again')"), check("bad", ""), check("last", "print(4)")]
    for start in ("2", "bad"):
        code, results = run(checks, "--from", start)
        assert code == 0
        assert [(r["result"], r["said"]) for r in results.values()] == [
            ("passed", "fine"),
            ("passed", ""),
            ("passed", "4"),
        ]
    assert run(checks, "--only", "good")[0] == 1


def test_from_a_check_that_is_not_in_the_list_is_refused():
    done = fork_ranks.run("scripts/gpu_check.py", ["--rehearse", "--dali", "--from", "shipped"])
    assert done.codes == [2]
    assert "error: --from shipped: choose from 1 to 3, or dali, imagenet, imagenet_gpu" in done.stderr[0]


def test_measured_values_are_compared_with_those_predicted_for_the_gpu(run, tmp_path):
    """And clocks are recorded meanwhile, where there is nvidia-smi; it is ended, though it never ends by itself."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 1605, 699.5, 61\nexec sleep 1000\n")
    smi.chmod(0o755)
    predicted = dict(
        check="speed", quantity="images/s", file="logs/speed.txt", pattern=r"^(\d+) images/s$", source="us"
    )
    rows = [{**predicted, "predicted": {"H100": 9, "H200": 2000}}, {**predicted, "predicted": {"H100": 9}}]
    rows += [{**predicted, "check": "bad", "predicted": {"H200": 1}}]
    (tmp_path / "predictions.json").write_text(json.dumps(rows))
    checks = [check("speed", "import time; time.sleep(0.5); print('1500 images/s')"), check("bad", "print(1); exit(1)")]
    assert run(checks, predictions=tmp_path / "predictions.json", PATH=f"{tmp_path}:{os.environ['PATH']}")[0] == 1
    assert (tmp_path / "gpu_check.md").read_text().splitlines()[-2:] == [
        "| speed | images/s | 2,000 | 1,500 | 0.750 | us |",
        "| speed | images/s |  | 1,500 |  | us |",
    ]
    assert (tmp_path / "clocks.csv").read_text() == "1605, 699.5, 61\n"


def test_a_check_that_hangs_is_ended_with_what_it_started(run, tmp_path):
    code = f"""if True:
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
        open({str(tmp_path / "child")!r}, 'w').write(str(child.pid))
        time.sleep(1000)"""
    exit_code, results = run([check("hanging", code, 0.05), check("next", "")])
    assert exit_code == 1
    assert results["hanging"]["said"] == "took longer than 0.05 minutes"
    assert results["next"]["result"] == "passed"
    child = (tmp_path / "child").read_text()
    launchers.wait_until(lambda: launchers.has_ended(child), "the child keeps running")


def test_what_does_not_fit_is_skipped(run):
    checks = [check("many", "", gpus=2), check("missing", "", package="no_such.package")]
    checks += [check("part", "", package="torch.no_such")]
    code, results = run(checks)
    assert code == 0
    assert {name: (r["result"], r["said"]) for name, r in results.items()} == {
        "many": ("skipped", "needs 2 GPUs"),
        "missing": ("skipped", "needs no_such.package"),
        "part": ("skipped", "needs torch.no_such"),
    }
    assert run(checks, gpus=2)[1]["many"]["result"] == "passed"


def test_without_a_gpu_it_says_so():
    done = fork_ranks.run("scripts/gpu_check.py", [])
    assert done.codes == [1]
    assert "no GPU here that this torch can use; --rehearse runs the list on the CPU" in done.stderr[0]
