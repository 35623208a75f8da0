"""The list of what is owed on a GPU: rehearsed on the CPU, and what becomes of checks that fail, hang or do not fit."""

import json
import re
import shlex
import subprocess

import pytest

import fork_ranks
import launchers
import test_gpu
import warm
from fork_ranks import ROOT

# The program with another list, on a machine of so many GPUs and in the repository of this folder, as far as it knows.
OTHER_LIST = """
from pathlib import Path
import gpu_check
from colossal_vit import provenance
from gpu_check import Check
gpu_check.ROOT = provenance.ROOT = Path({root!r})
gpu_check.CHECKS, gpu_check.SETTLE = {checks}, 0.5
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Programs that start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


@pytest.fixture
def run(programs, tmp_path):
    """Run a list of checks, as Python says them; returns the exit code and the results."""

    def run(checks, *flags, gpus=1):
        program = OTHER_LIST.format(checks=f"dict({', '.join(checks)})", gpus=gpus, root=str(ROOT))
        path = f"{ROOT}:{ROOT / 'scripts'}"
        # Where something is rehearsed, uncommitted changes do not matter.
        command = [str(programs.bin / "python"), "-c", program, "--output", str(tmp_path), *flags]
        code, said = launchers.run(command, PYTHONPATH=path, REHEARSE="1", **programs.environment)
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
    done = fork_ranks.run("scripts/gpu_check.py", ["--rehearse", "--list"])
    assert done.codes == [0], str(done)
    return dict(re.findall(r"^(\w+): .*\n    python (.*)$", done.stdout[0], re.MULTILINE))


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
    words = [word for command in commands for word in command[command.index("-k") + 1].split(" or ")]
    for test in tests:
        assert sum(word in test for word in words) == 1, test
    assert all(any(word in test for test in tests) for word in words)


def test_a_rehearsal_and_other_gpus_count_as_nothing(run):
    assert run([check("check", "print(1)")], "--rehearse")[1]["check"]["result"] == "rehearsed"
    assert run([check("check", "print(2)")], "--rehearse")[1]["check"]["said"] == "1"
    for gpus in (1, 2):
        result = run([check("check", f"print('on {gpus}')")], gpus=gpus)[1]["check"]
        assert (result["result"], result["said"], len(result["gpus"])) == ("passed", f"on {gpus}", gpus)


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
    program = OTHER_LIST.format(checks=f"dict({checks})", gpus=1, root=str(tmp_path))
    command = [str(programs.bin / "python"), "-c", program]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", **programs.throughout}

    folder, code = tmp_path / "results/1x_NVIDIA_H200", tmp_path / "code.py"
    folder.mkdir(parents=True)
    (folder / "gpu_check.md").touch()
    code.touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "a result")
    for again in ([], ["--again"]):
        exit_code, said = launchers.run([*command, *again], **environment)
        assert exit_code == 0, said
        assert [r["result"] for r in json.loads((folder / "gpu_check.json").read_text()).values()] == ["passed"] * 2
    code.write_text("changed")
    exit_code, said = launchers.run(command, **environment)
    assert exit_code == 1
    assert "error: commit first" in said


def test_the_list_goes_on_after_a_failure_and_where_it_stopped(run):
    code, results = run([check("good", "print('fine')"), check("bad", "raise SystemExit('a | b')")])
    assert code == 1
    assert (results["good"]["result"], results["good"]["said"]) == ("passed", "fine")
    assert (results["bad"]["result"], results["bad"]["said"]) == ("failed", "a / b")
    code, results = run([check("good", "raise SystemExit('must not run again')"), check("bad", "")])
    assert code == 0
    assert [r["result"] for r in results.values()] == ["passed", "passed"]
    assert run([check("good", "raise SystemExit(3)")], "--again", "--only", "good")[0] == 1


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


def test_what_does_not_fit_is_skipped_and_what_has_no_time_is_left_for_later(run):
    checks = [check("many", "", gpus=2), check("missing", "", package="no_such.package")]
    checks += [check("part", "", package="torch.no_such"), check("slow", "")]
    code, results = run(checks, "--minutes", "0.001")
    assert code == 75
    assert {name: (r["result"], r["said"]) for name, r in results.items()} == {
        "many": ("skipped", "needs 2 GPUs"),
        "missing": ("skipped", "needs no_such.package"),
        "part": ("skipped", "needs torch.no_such"),
        "slow": ("unfinished", ""),
    }
    assert run(checks, gpus=2)[0] == 0


def test_without_a_gpu_it_says_so():
    done = fork_ranks.run("scripts/gpu_check.py", [])
    assert done.codes == [1]
    assert "no GPU here that this torch can use; --rehearse runs the list on the CPU" in done.stderr[0]
