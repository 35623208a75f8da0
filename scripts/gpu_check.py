"""All checks that need a GPU, most important first, in parts: 12 minutes on one GPU, DALI, and the rest.

    bash scripts/gpu_check.sh [--dali | --rest | --only NAME ...] [--from N] [--rehearse] [--list] [--output DIR]

Each check is a separate process with a time limit and a log; one that fails or takes too long does not end the others.
`--from N` resumes at the Nth check of the part, or at a name: results of this commit on these GPUs are kept.
With `--rehearse` the same list runs on the CPU with small sizes, which tests every command of the list but nothing
about GPUs: its results are "rehearsed", never "passed". A check that ran on other GPUs than were found at the start, or
on the CPU, has failed.

Writes into results/<number and name of the GPUs>/: gpu_check.md (what passed, and what was measured beside what
gpu_check_predictions.json expects), gpu_check.json, clocks.csv (clock, power and temperature, four times a second),
log.txt, provenance.json, logs/, and a folder for each benchmark. Exit code 0 if all checks
passed or were skipped, 1 if one failed. In a copy of the repository without git, set COMMIT to its commit.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossal_vit.errors import UserError
from colossal_vit.provenance import ResultFolder, gpu_names

from reproduce import read_value

ROOT = Path(__file__).resolve().parents[1]
PREDICTIONS = Path(__file__).with_name("gpu_check_predictions.json")
PASSED, REHEARSED, FAILED, SKIPPED = "passed", "rehearsed", "failed", "skipped"
SETTLE = 15  # seconds from SIGTERM to SIGKILL
WORKERS = min(8, len(os.sched_getaffinity(0)))  # tests at a time, most of whose time is spent on starting processes
FIRST, DALI, REST = "first", "dali", "rest"  # parts
CLOCKS = "--query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu"


@dataclass(frozen=True)
class Check:
    """One entry of the list.

    Attributes:
        shows: what it proves if it passes.
        command: after `python`; {output} is the folder for its results, {run} one that is not kept.
        minutes: time limit.
        part: of the list.
        gpus: number of GPUs it needs.
        package: Python package it needs.
        small: arguments that a rehearsal appends.
        variables: of its environment.
    """

    shows: str
    command: list[str]
    minutes: float
    part: str = FIRST
    gpus: int = 1
    package: str | None = None
    small: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def tests(words: str, workers: int, *folders: str) -> list[str]:
    return ["-m", "pytest", "tests/test_gpu.py", *folders, "-k", words, "-p", "no:cacheprovider", "-n", str(workers)]


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


TINY = ("MODEL=vit_tiny_patch16_224", "IMG_SIZE=32", "DEPTH=1", "BATCH_SIZE=2", "gradient_accumulation=1")


def train(
    shows: str, minutes: float, steps: int, *values: str, config: str = "config.py", profile: bool = False, **more: Any
) -> Check:
    """Train a model of the ImageNet tutorial on random images, on a GPU or not at all."""
    command = ["vit_imagenet_dali/train.py", "--config", f"vit_imagenet_dali/{config}", "--output", "{run}"]
    command += ["--backend", "nccl", "--max-steps", str(steps), *(["--profile"] if profile else [])]
    command += [f"--set={value}" for value in ("SYNTHETIC=True", *values)]
    small = ["--backend", "gloo", "--max-steps", "4" if profile else "1", *(f"--set={value}" for value in TINY)]
    return Check(shows, command, minutes, small=small, **more)


AMP = [f"vit_caltech101_amp/config/config_{mode}.py" for mode in ("fp32", "AMP_torch", "AMP_bf16", "AMP_naive_bf16")]
COMPILED = ("compile-data", "compile-pipeline", "compile-1d")
STEPS = ("ViT-B/16, fp16, compiled", "ViT-B/16, 2 threads", "ViT-B/16, 2 threads, compiled")
PUBLISHED = ("BATCH_SIZE=256", "gradient_accumulation=32")  # the split of the published recipes
CHECKS = {
    "shipped": train("ViT-B/16 as shipped: speed, with clock and power", 1.6, 14),
    "one_micro_batch": train(
        "an update after each micro-batch of 256, which the host must not wait for",
        *(0.9, 40, PUBLISHED[0], "gradient_accumulation=1"),
    ),
    "profile": train(
        "the same, traced: kernels, and waits of the host",
        *(0.5, 6, PUBLISHED[0], "gradient_accumulation=1"),
        profile=True,
    ),
    "tests": Check(
        "losses as on the CPU in every mode of precision, dropout by element; resumes to the bit; no step waits",
        tests("losses or dropout or resumes_to or waits", WORKERS),
        2.2,
    ),
    "published_split": train("ViT-B/16 in micro-batches of 256", 0.6, 8, *PUBLISHED),
    "bf16": train("ViT-B/16 in bf16", 0.8, 8, "fp16.dtype='bf16'"),
    "b32": train("ViT-B/32 as shipped", 0.8, 14, config="config_vit_b32.py"),
    "b32_published_split": train(
        "ViT-B/32 in micro-batches of 256: what the host costs", 0.8, 14, *PUBLISHED, config="config_vit_b32.py"
    ),
    "amp": bench(
        "memory and speed of fp32, TF32 and three AMP modes",
        *(1.5, "--synthetic", "--steps", "60", "--configs", *AMP),
        script="vit_caltech101_amp/benchmark.py",
    ),
    "autotune": train(
        "what Inductor's search among matrix products gains",
        *(1.0, 8),
        variables={"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"},
    ),
    "checkpoint": bench(
        "how long a checkpoint of ViT-B/16 stops the training",
        *(0.6, "checkpoint", "--rounds", "2", "--only", "vit_base_patch16_224"),
        small=("--only", "vit_tiny_patch16_224"),
    ),
    "gloo": Check("two ranks share a GPU over gloo, with and without ZeRO", tests("share_a_gpu", 2), 0.7),
    "dali": Check(
        "DALI decodes and trains on the GPU",
        tests("dali and gpu", WORKERS, "vit_imagenet_dali/tests"),
        3,
        part=DALI,
        package="nvidia.dali",
    ),
    "imagenet": bench(
        "ViT-B/16 with DALI, which decodes on the CPU where it has the cores, beside random images",
        *(4, "imagenet", "--rounds", "1", "--accumulation", "8", "--steps", "4"),
        *("--models", "vit_base_patch16_224", "--precision", "fp16"),
        part=DALI,
        package="nvidia.dali",
    ),
    "imagenet_gpu": bench(
        "the same with DALI on the GPU",
        *(4, "imagenet", "--rounds", "1", "--accumulation", "8", "--steps", "4", "--set", "dali.gpu_aug=True"),
        *("--models", "vit_base_patch16_224", "--precision", "fp16"),
        part=DALI,
        package="nvidia.dali",
    ),
    "rank_0": bench(
        "rank 0 of PP 2, 1D 2, 2D 4 and 3D 8 without the others: time and memory beside the planner's",
        *(3, "ranks"),
        part=REST,
    ),
    "environment": Check("driver, GPUs and versions", ["-m", "torch.utils.collect_env"], 2, part=REST),
    "more_tests": Check(
        "in float64, layouts tensor by tensor; CUDA allocates what a dry run says, to 10 %",
        tests("tensor_by_tensor or memory", WORKERS),
        5,
        part=REST,
    ),
    "ranks": Check("with NCCL, a rank that hangs ends the others", tests("ranks_end", 0), 5, part=REST, gpus=2),
    "overlap": Check("replicas reduce during the backward pass", tests("overlaps", 0), 5, part=REST, gpus=2),
    "layouts": Check(
        "every layout that fits these GPUs trains as one process does",
        ["scripts/check_layouts.py"],
        20,
        part=REST,
        gpus=2,
        small=["--only", "DP 2", "--world", "2", "--steps", "2"],
    ),
    "engine": bench(
        "a step beside plain PyTorch's and timm's, with dropout and without, compiled and not, fp32 and fp16",
        *(10, "engine", "--steps", "10", "--only", *STEPS),
        small=("--only", "ViT-Ti/16, 2 threads"),  # compiling is slow on a CPU
        part=REST,
    ),
    "plan": bench(
        "steps of shipped configs, eager and compiled, beside those that the planner predicts for this GPU",
        *(12, "plan"),
        small=("--only", "Caltech101, NAIVE bf16"),
        part=REST,
    ),
    "parallel": bench("data, tensor and pipeline parallelism against PyTorch's", 15, "parallel", part=REST, gpus=2),
    "compile": bench(
        "what COMPILE gains under data, pipeline and tensor parallelism",
        15,
        *("parallel", "--only", *COMPILED),
        small=("--only", "data"),  # compiling is slow on a CPU
        part=REST,
        gpus=2,
    ),
    "lamb": bench("a step of LAMB against Colossal-AI's and timm's", 5, "lamb", part=REST),
}


def names_of(part: str) -> list[str]:
    return [name for name, check in CHECKS.items() if check.part == part]


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the command line, and the names of the checks that it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    for part, minutes in ((DALI, "11 minutes at most"), (REST, "long benchmarks, and what several GPUs show")):
        which.add_argument(f"--{part}", dest="part", action="store_const", const=part, default=FIRST, help=minutes)
    which.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--from", dest="start", default="1", metavar="N", help="resume at this number or name")
    parser.add_argument("--rehearse", action="store_true", help="the same list, small, on the CPU")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--output", type=Path, help="where the results go")
    args = parser.parse_args()
    names = args.only or names_of(args.part)
    numbers = {name: number for number, name in enumerate(names)} | {str(n + 1): n for n in range(len(names))}
    if args.start not in numbers:
        parser.error(f"--from {args.start}: choose from 1 to {len(names)}, or {', '.join(names)}")
    return args, names[numbers[args.start] :]


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


@contextlib.contextmanager
def record_clocks(path: Path) -> Iterator[None]:
    """Append clock, power and temperature of each GPU to a file, four times a second, where there is nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    with path.open("a") as file:
        command = ["nvidia-smi", CLOCKS, "--format=csv,nounits", "--loop-ms=250"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield
        finally:
            end(process)


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


def keep(run_directory: Path, logs: Path, name: str) -> None:
    """Copy what a run has measured to the logs: the metrics, and the trace of a profile."""
    for path in (run_directory / "metrics.jsonl", run_directory / "profile-rank0.json"):
        if path.exists():
            shutil.copy(path, logs / f"{name}-{path.name}")


def show(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def comparison(results: dict[str, dict], output: Path, gpus: list[str]) -> list[str]:
    """Return a table of what was measured beside what is predicted for this GPU, if it is."""
    lines = [
        "",
        "| check | quantity | predicted | measured | ratio | source |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in json.loads(PREDICTIONS.read_text()):
        if results.get(row["check"], {}).get("result") not in (PASSED, REHEARSED):
            continue
        predicted = next((value for key, value in row["predicted"].items() if gpus and key in gpus[0]), None)
        try:
            measured = read_value(output, row)
        except UserError:
            measured = None
        ratio = f"{measured / predicted:.3f}" if measured and predicted else ""
        cells = [row["check"], row["quantity"], show(predicted), show(measured), ratio, row["source"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def make_table(results: dict[str, dict]) -> list[str]:
    lines = ["| check | shows | result | seconds | last line of its log |", "| --- | --- | --- | ---: | --- |"]
    for name, check in CHECKS.items():
        if name in results:
            r = results[name]
            lines.append(f"| {name} | {check.shows} | {r['result']} | {r['seconds']:.0f} | {r['said']} |")
    return lines


def main() -> int:
    args, asked = parse()
    gpus = [] if args.rehearse else gpu_names()
    if not gpus and not args.rehearse and not args.list:
        sys.exit("gpu_check.py: error: no GPU here that this torch can use; --rehearse runs the list on the CPU")
    output = (args.output or (default_output(gpus) if gpus else ROOT / "runs" / "gpu_check_rehearsal")).resolve()
    logs = output / "logs"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    environment["GPU_CHECK_GPUS"] = str(len(gpus))  # tests/test_gpu.py fails if it finds others
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / "runs/inductor")  # what one check has compiled others find
    if args.rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "REHEARSE": "1", "OMP_NUM_THREADS": "1"}
    report = ResultFolder(output, changes_allowed=args.rehearse or args.list)
    commit = report.origin["commit"]
    state = output / "gpu_check.json"
    before = json.loads(state.read_text()) if state.exists() else {}
    results = {name: r for name, r in before.items() if (r["commit"], r["gpus"]) == (commit, gpus)}

    def table() -> list[str]:
        return [*make_table(results), *comparison(results, output, gpus)]

    def check_one(name: str, check: Check, command: list[str], run_directory: Path) -> dict[str, Any]:
        if reason := None if args.rehearse else reason_to_skip(check, len(gpus)):
            return {"result": SKIPPED, "seconds": 0.0, "said": reason}
        log, begun = logs / f"{name}.txt", time.monotonic()
        code = run(command, log, environment | check.variables, 60 * check.minutes * (10 if args.rehearse else 1))
        result = {"result": FAILED, "seconds": time.monotonic() - begun, "said": last_line(log)}
        keep(run_directory, logs, name)
        if code is None:
            result["said"] = f"took longer than {check.minutes:g} minutes"
        elif not code and "{output}" in check.command and gpus_of(output / name) != gpus:
            result["said"] = f"ran on other GPUs: {gpus_of(output / name) or 'none'}"
        elif not code:
            result["result"] = REHEARSED if args.rehearse else PASSED
        return result

    numbers = {name: number for number, name in enumerate(args.only or names_of(args.part), 1)}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not args.list:
            logs.mkdir(parents=True, exist_ok=True)
            stack.enter_context(record_clocks(output / "clocks.csv"))
        for name in asked:
            check, run_directory = CHECKS[name], scratch / name
            places = {"{output}": str(output / name), "{run}": str(run_directory)}
            arguments = [places.get(part, part) for part in check.command]
            command = [sys.executable, *arguments, *(check.small if args.rehearse else [])]
            typed = shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", "").replace(str(scratch), "SCRATCH")
            if args.list:
                print(f"{numbers[name]} {name}: {check.shows}, at most {check.minutes:g} minutes\n    {typed}")
                continue
            found = check_one(name, check, command, run_directory)
            results[name] = {"commit": commit, "gpus": gpus, "command": typed, **found}
            report.print(f"{name}: {found['result']} after {found['seconds']:.0f} s: {found['said']}")
            report.write("gpu_check", table(), results)
    if args.list:
        return 0
    report.finish("gpu_check", table(), results)
    return int(any(results[name]["result"] == FAILED for name in asked))


if __name__ == "__main__":
    sys.exit(main())
