"""The list of what is owed on a GPU: rehearsed on the CPU, and what becomes of checks that fail, hang or do not fit."""

import json
import subprocess
import sys

import pytest

import gpu_check
import launchers
import test_gpu
import warm
from fork_ranks import ROOT
from gpu_check import CHECKS, Check


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the list that is given, as if with a number of GPUs; returns the exit code and the results."""

    def run(checks, *flags, gpus=1, rehearse=True):
        monkeypatch.setattr(gpu_check, "CHECKS", checks)
        monkeypatch.setattr(gpu_check, "gpu_names", lambda: ["NVIDIA H200"] * gpus)
        monkeypatch.setattr(gpu_check, "SETTLE", 0.5)
        monkeypatch.setenv("REHEARSE", "1")  # so that uncommitted changes do not matter
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path), *flags])
        return gpu_check.main(), json.loads((tmp_path / "gpu_check.json").read_text())

    return run


def python(code, minutes=1.0, **more):
    return Check("something", ["-c", code], minutes, **more)


def test_every_check_is_rehearsed(tmp_path):
    """As one types it, but that pythons start at once; test_gpu.py is a part of this suite anyway."""
    names = [name for name, check in CHECKS.items() if "tests/test_gpu.py" not in check.command]
    with warm.Warm(tmp_path / "warm") as programs:
        command = [str(programs.bin / "python"), "scripts/gpu_check.py", "--rehearse", "--output", str(tmp_path)]
        environment = launchers.environment(PYTHONPATH=str(ROOT), **programs.environment)
        done = subprocess.run([*command, "--only", *names], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: r["result"] for name, r in results.items()} == dict.fromkeys(names, "passed")
    table = (tmp_path / "gpu_check.md").read_text()
    assert all(f"| {name} | {CHECKS[name].shows} | passed |" in table for name in names)


def test_the_words_of_each_check_name_tests_of_it():
    tests = {name for name in vars(test_gpu) if name.startswith("test_")}
    words = [check.command[4] for check in CHECKS.values() if "tests/test_gpu.py" in check.command]
    for test in tests:
        assert sum(word in test for word in words) == 1, test
    assert all(any(word in test for test in tests) for word in words)


def test_the_list_goes_on_after_a_failure_and_where_it_stopped(run):
    checks = {"good": python("print('fine')"), "bad": python("raise SystemExit('a | b')")}
    code, results = run(checks)
    assert code == 1
    assert (results["good"]["result"], results["good"]["said"]) == ("passed", "fine")
    assert (results["bad"]["result"], results["bad"]["said"]) == ("failed", "a / b")
    code, results = run({"good": python("raise SystemExit('must not run again')"), "bad": python("")})
    assert code == 0
    assert [r["result"] for r in results.values()] == ["passed", "passed"]
    assert run({"good": python("raise SystemExit(3)")}, "--again", "--only", "good")[0] == 1


def test_a_check_that_hangs_is_ended_with_what_it_started(run, tmp_path):
    code = f"""if True:
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
        open({str(tmp_path / "child")!r}, 'w').write(str(child.pid))
        time.sleep(1000)"""
    exit_code, results = run({"hanging": python(code, 0.05), "next": python("")})
    assert exit_code == 1
    assert results["hanging"]["said"] == "took longer than 0.05 minutes"
    assert results["next"]["result"] == "passed"
    child = (tmp_path / "child").read_text()
    launchers.wait_until(lambda: launchers.has_ended(child), "the child keeps running")


def test_what_does_not_fit_is_skipped_and_what_has_no_time_is_left_for_later(run):
    checks = {"many": python("", gpus=2), "missing": python("", package="no_such.package"), "slow": python("")}
    checks["part missing"] = python("", package="torch.no_such")
    code, results = run(checks, "--minutes", "0.001")
    assert code == 75
    said = {name: (r["result"], r["said"]) for name, r in results.items()}
    assert said == {
        "many": ("skipped", "needs 2 GPUs"),
        "missing": ("skipped", "needs no_such.package"),
        "slow": ("unfinished", ""),
        "part missing": ("skipped", "needs torch.no_such"),
    }
    assert run(checks, gpus=2)[0] == 0


def test_without_a_gpu_it_says_so():
    code, said = launchers.run([sys.executable, "scripts/gpu_check.py"], cwd=ROOT, PYTHONPATH=str(ROOT))
    assert code == 1
    assert "no GPU here that this torch can use; --rehearse runs the list on the CPU" in said
