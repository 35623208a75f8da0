"""The list of what is owed on a GPU: rehearsed on the CPU, and what becomes of checks that fail, hang or do not fit."""

import contextlib
import io
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fork_ranks
import gpu_check
import launchers
import test_gpu
import warm
from fork_ranks import ROOT
from gpu_check import CHECKS, Check


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the list that is given, as if with a number of GPUs; returns the exit code and the results."""

    def run(checks, *flags, gpus=1):
        monkeypatch.setattr(gpu_check, "CHECKS", checks)
        monkeypatch.setattr(gpu_check, "gpu_names", lambda: ["NVIDIA H200"] * gpus)
        monkeypatch.setattr(gpu_check, "SETTLE", 0.5)
        monkeypatch.setenv("REHEARSE", "1")  # so that uncommitted changes do not matter
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path), *flags])
        return gpu_check.main(), json.loads((tmp_path / "gpu_check.json").read_text())

    return run


def python(code, minutes=1.0, **more):
    return Check("something", ["-c", code], minutes, **more)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Programs that start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


def test_every_check_is_rehearsed(programs, tmp_path):
    """As one types it, but that pythons start at once; test_gpu.py is a part of this suite anyway."""
    names = [name for name, check in CHECKS.items() if "tests/test_gpu.py" not in check.command]
    command = [str(programs.bin / "python"), "scripts/gpu_check.py", "--rehearse", "--output", str(tmp_path)]
    environment = launchers.environment(PYTHONPATH=str(ROOT), **programs.environment)
    done = subprocess.run([*command, "--only", *names], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: r["result"] for name, r in results.items()} == dict.fromkeys(names, "rehearsed")
    table = (tmp_path / "gpu_check.md").read_text()
    assert all(f"| {name} | {CHECKS[name].shows} | rehearsed |" in table for name in names)


def test_gpu_tests_fail_where_torch_finds_other_gpus_than_gpu_check(programs):
    """The first of them fails at once, so that none can pass as a rehearsal by mistake."""
    command = [str(programs.bin / "python"), *CHECKS["waits"].command]
    code, said = launchers.run(command, cwd=ROOT, PYTHONPATH=str(ROOT), GPU_CHECK_GPUS="7")
    assert code == 1
    assert "gpu_check.py has found 7 GPUs, torch finds others" in said
    assert re.search(r"\d errors? in", said)
    assert "passed" not in said


def test_a_rehearsal_and_other_gpus_count_as_nothing(run):
    checks = {"check": python("print(1)")}
    assert run(checks, "--rehearse")[1]["check"]["result"] == "rehearsed"
    again = {"check": python("print(2)")}
    assert run(again, "--rehearse")[1]["check"]["said"] == "1"
    for gpus in (1, 2):
        result = run({"check": python(f"print('on {gpus}')")}, gpus=gpus)[1]["check"]
        assert (result["result"], result["said"], len(result["gpus"])) == ("passed", f"on {gpus}", gpus)


def test_a_benchmark_that_has_lost_its_gpu_has_failed(run):
    code = """if True:
        import json, pathlib, sys
        folder = pathlib.Path(sys.argv[1])
        folder.mkdir(parents=True)
        (folder / 'provenance.json').write_text(json.dumps({'hardware': {'gpus': []}}))"""
    exit_code, results = run({"lost": Check("something", ["-c", code, "{output}"], 1.0)})
    assert exit_code == 1
    assert (results["lost"]["result"], results["lost"]["said"]) == ("failed", "ran on other GPUs: none")


@pytest.mark.parametrize(
    ("memory", "batch_size"), [(8.2e9, 1), (12.6e9, 32), (16.9e9, 64), (25.3e9, 128), (34e9, 256), (85e9, 256)]
)
def test_the_imagenet_benchmark_takes_batches_that_fit_the_gpu(memory, batch_size):
    """By the dry runs that are on record, of ViT-B/16 and ViT-L/32 with 256 and 128 images."""

    def function():
        import bench_imagenet

        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=memory)
        sys.argv = ["bench_imagenet.py", "--help"]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            bench_imagenet.main()
        return said.getvalue()

    (said,) = fork_ranks.call(function, launched=False)
    assert f"here {batch_size} by default" in said
    plans = json.loads((ROOT / "results/memory_plan/memory.json").read_text())
    for plan in plans:
        if plan["config"] in ("vit_imagenet_dali/config", "vit_imagenet_dali/config_vit_l32"):
            per_image = (plan["peak"] - plan["peak_with_flags"]) / 128  # GB
            peak = plan["peak"] - (256 - batch_size) * per_image
            assert memory < 10e9 or peak + 2 < memory / 1e9


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
