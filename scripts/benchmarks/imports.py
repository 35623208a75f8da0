"""CPU time of importing each train script, compared with importing timm alone.

Each is imported in a new process; CPU time is its user and system seconds. `--python` measures other environments, for
example one made from requirements-cu12.txt.
"""

import argparse
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Benchmark, Case, Side

SCRIPTS = (
    "vit_cifar10_hybrid/train_hybrid.py",
    "vit_cifar10_hybrid/train_dp.py",
    "vit_imagenet_dali/train.py",
    "vit_caltech101_amp/train.py",
)


def cpu_seconds(python: str, module: str, folder: Path, number: int) -> dict[str, float]:
    """User and system seconds of a process that imports `module` in `folder` and exits; `python` is seen from ROOT."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([ROOT / python, "-c", f"import {module}"], cwd=folder, env=environment, check=True)
    return {"CPU seconds": spent() - before}


def sides(python: str, args: argparse.Namespace) -> dict[str, Side]:
    imports = {"timm": ("timm", ROOT)}
    imports |= {script: (Path(script).stem, (ROOT / script).parent) for script in SCRIPTS}
    found = {name: partial(cpu_seconds, python, *what) for name, what in imports.items()}
    for side in found.values():  # once, so that bytecode is written and files are in the page cache
        side(-1)
    return found


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", nargs="+", default=[], help="interpreters of further environments, from the root")


def cases(args: argparse.Namespace) -> dict[str, Case]:
    own = str(Path(sys.executable).relative_to(ROOT)) if sys.executable.startswith(f"{ROOT}/") else sys.executable
    return {python: Case(partial(sides, python)) for python in (own, *args.python)}


BENCHMARK = Benchmark(cases, rounds=7, flags=flags)
