"""All checks that need a GPU, most important first: correctness, then speed, then those that need several GPUs.

    bash scripts/gpu_check.sh [--minutes N] [--only NAME ...] [--again] [--rehearse] [--list] [--output DIR]

Each check is a separate process with a time limit and a log. Checks that have passed at this commit are not run again,
so that an interrupted command resumes where it stopped; failed ones are. With `--rehearse` the same list runs on the
CPU with small sizes, which tests every command of the list but nothing about GPUs: its results are "rehearsed", never
"passed". A check that ran on other GPUs than were found at the start, or on the CPU, has failed.

Writes into results/<number and name of the GPUs>/: gpu_check.md (the table), gpu_check.json, log.txt, provenance.json,
logs/, and a folder for each benchmark. Exit code 0 if all checks passed or were skipped, 1 if one failed, 75 if the
time was too short. In a copy of the repository without git, set COMMIT to its commit.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossal_vit.provenance import ResultFolder, gpu_names

ROOT = Path(__file__).resolve().parents[1]
PASSED, REHEARSED, FAILED, SKIPPED, UNFINISHED = "passed", "rehearsed", "failed", "skipped", "unfinished"
SETTLE = 15  # seconds from SIGTERM to SIGKILL
WORKERS = min(8, len(os.sched_getaffinity(0)))  # tests at a time, most of whose time is spent on starting processes


@dataclass(frozen=True)
class Check:
    """One entry of the list.

    Attributes:
        shows: what it proves if it passes.
        command: after `python`; {output} is the folder for its results.
        minutes: time limit.
        gpus: number of GPUs it needs.
        package: Python package it needs.
        small: arguments that a rehearsal appends.
    """

    shows: str
    command: list[str]
    minutes: float
    gpus: int = 1
    package: str | None = None
    small: list[str] = field(default_factory=list)


def tests(words: str, workers: int) -> list[str]:
    return ["-m", "pytest", "tests/test_gpu.py", "-k", words, "-p", "no:cacheprovider", "-n", str(workers)]


def bench(
    shows: str,
    minutes: float,
    *arguments: str,
    script: str = "scripts/bench.py",
    small: tuple[str, ...] = (),
    **needs: Any,
) -> Check:
    command = [script, *arguments, "--output", "{output}"]
    return Check(shows, command, minutes, small=["--small", *small], **needs)


COMPILED = ("compile-data", "compile-pipeline", "compile-1d")
STEPS = ("ViT-B/16, fp16, compiled", "ViT-B/16, 2 threads", "ViT-B/16, 2 threads, compiled")
CHECKS = {
    "environment": Check("driver, GPUs and versions", ["-m", "torch.utils.collect_env"], 2),
    "tests": Check(
        "losses as on the CPU in every mode of precision, dropout by element; in float64, layouts tensor by tensor; "
        "resumes to the bit; CUDA allocates what a dry run says, to 10 %; one wait for the device per step",
        tests("losses or dropout or tensor_by_tensor or resumes_to or memory or waits", WORKERS),
        15,
    ),
    "dali": Check("DALI decodes and trains on the GPU", tests("dali", WORKERS), 6, package="nvidia.dali"),
    "ranks": Check("with NCCL, a rank that hangs ends the others", tests("ranks", 0), 5, gpus=2),
    "overlap": Check("replicas reduce during the backward pass", tests("overlaps", 0), 5, gpus=2),
    "layouts": Check(
        "every layout that fits these GPUs trains as one process does",
        ["scripts/check_layouts.py"],
        20,
        gpus=2,
        small=["--only", "DP 2", "--world", "2", "--steps", "2"],
    ),
    "amp": bench(
        "memory and speed of the AMP modes, compiled and with TF32 too",
        *(15, "--synthetic", "--compile", "--tf32"),
        script="vit_caltech101_amp/benchmark.py",
    ),
    "imagenet": bench(
        "images/s of the ImageNet models, with and without DALI", 15, "imagenet", "--rounds", "1", package="nvidia.dali"
    ),
    "engine": bench(
        "a step beside plain PyTorch's and timm's, with dropout and without, compiled and not, fp32 and fp16",
        *(10, "engine", "--steps", "10", "--only", *STEPS),
        small=("--only", "ViT-Ti/16, 2 threads"),  # compiling is slow on a CPU
    ),
    "plan": bench(
        "steps of shipped configs, eager and compiled, beside those that the planner predicts for this GPU",
        *(12, "plan"),
        small=("--only", "Caltech101, NAIVE bf16"),
    ),
    "parallel": bench("data, tensor and pipeline parallelism against PyTorch's", 15, "parallel", gpus=2),
    "compile": bench(
        "what COMPILE gains under data, pipeline and tensor parallelism",
        15,
        *("parallel", "--only", *COMPILED),
        gpus=2,
        small=("--only", "data"),  # compiling is slow on a CPU
    ),
    "lamb": bench("a step of LAMB against Colossal-AI's and timm's", 5, "lamb"),
    "checkpoint": bench("how long a checkpoint stops the training", 10, "checkpoint"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many (default: no limit)")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("--rehearse", action="store_true", help="the same list, small, on the CPU")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--output", type=Path, help="where the results go")
    return parser.parse_args()


def default_output(names: list[str]) -> Path:
    """Return the results folder named after the GPUs, for example `4x_NVIDIA_A100-SXM4-80GB`."""
    return ROOT / "results" / "_and_".join(f"{names.count(n)}x_{n.replace(' ', '_')}" for n in dict.fromkeys(names))


def gpus_of(folder: Path) -> list[str]:
    """Return the GPUs of the process that wrote the benchmark in a folder."""
    return json.loads((folder / "provenance.json").read_text())["hardware"]["gpus"]


def reason_to_skip(check: Check, num_gpus: int) -> str | None:
    if num_gpus < check.gpus:
        return f"needs {check.gpus} GPUs"
    try:
        found = check.package is None or importlib.util.find_spec(check.package)
    except ModuleNotFoundError:  # its parent package is missing
        found = None
    return None if found else f"needs {check.package}"


def end(process: subprocess.Popen) -> None:
    """End a process and the rest of its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(SETTLE)
        except subprocess.TimeoutExpired:
            continue


def run(command: list[str], log: Path, environment: dict[str, str], limit: float) -> int | None:
    """Run a command to its end, or to the limit in seconds; returns its exit code, None at the limit."""
    with log.open("w") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def last_line(log: Path) -> str:
    """Return the last line of a log, for a Markdown table; also replaces the repository's path in the log by `.`."""
    text = log.read_text(errors="replace").replace(str(ROOT), ".")
    log.write_text(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].strip("= ").replace("|", "/") if lines else ""


def make_table(results: dict[str, dict]) -> list[str]:
    lines = ["| check | shows | result | seconds | last line of its log |", "| --- | --- | --- | ---: | --- |"]
    for name, check in CHECKS.items():
        if name in results:
            r = results[name]
            lines.append(f"| {name} | {check.shows} | {r['result']} | {r['seconds']:.0f} | {r['said']} |")
    return lines


def main() -> int:
    args = parse()
    started = time.monotonic()
    names = [] if args.rehearse else gpu_names()
    if not names and not args.rehearse and not args.list:
        sys.exit("gpu_check.py: error: no GPU here that this torch can use; --rehearse runs the list on the CPU")
    output = (args.output or (default_output(names) if names else ROOT / "runs" / "gpu_check_rehearsal")).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    environment["GPU_CHECK_GPUS"] = str(len(names))  # tests/test_gpu.py fails if it finds others
    if args.rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "REHEARSE": "1", "OMP_NUM_THREADS": "1"}
    good = REHEARSED if args.rehearse else PASSED
    report = ResultFolder(output, changes_allowed=args.rehearse or args.list)
    commit = report.origin["commit"]
    state = output / "gpu_check.json"
    results = json.loads(state.read_text()) if state.exists() else {}
    cut_short = False

    for name in args.only or CHECKS:
        check = CHECKS[name]
        arguments = [part.replace("{output}", str(output / name)) for part in check.command]
        command = [sys.executable, *arguments, *(check.small if args.rehearse else [])]
        typed = shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", "")
        if args.list:
            print(f"{name}: {check.shows}, at most {check.minutes:g} minutes\n    {typed}")
            continue
        before = results.get(name, {})
        result = {"result": good, "commit": commit, "gpus": names}
        if {**before, **result} == before and not args.again:
            report.print(f"{name}: {good} at this commit before")
            continue
        left = 60 * args.minutes - (time.monotonic() - started)
        result |= {"result": UNFINISHED, "seconds": 0.0, "said": "", "command": typed}
        if reason := None if args.rehearse else reason_to_skip(check, len(names)):
            result |= {"result": SKIPPED, "said": reason}
        elif left > SETTLE:
            log, begun = output / "logs" / f"{name}.txt", time.monotonic()
            log.parent.mkdir(parents=True, exist_ok=True)
            code = run(command, log, environment, min(60 * check.minutes, left))
            result |= {"seconds": time.monotonic() - begun, "said": last_line(log)}
            if code is not None:
                result["result"] = FAILED if code else good
                if not code and "{output}" in check.command and gpus_of(output / name) != names:
                    result |= {"result": FAILED, "said": f"ran on other GPUs: {gpus_of(output / name) or 'none'}"}
            elif left > 60 * check.minutes:
                result |= {"result": FAILED, "said": f"took longer than {check.minutes:g} minutes"}
        cut_short |= result["result"] == UNFINISHED
        results[name] = result
        report.print(f"{name}: {result['result']} after {result['seconds']:.0f} s: {result['said']}")
        report.write("gpu_check", make_table(results), results)
    if args.list:
        return 0
    report.finish("gpu_check", make_table(results), results)
    failed = any(r["result"] == FAILED for r in results.values())
    return 1 if failed else 75 if cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
