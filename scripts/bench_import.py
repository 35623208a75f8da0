"""CPU time of importing each train script, compared with importing timm alone.

    python scripts/bench_import.py [--runs 7] [--python PYTHON ...] [--output results/import_cpu]

Each run imports timm and every train script, each in a new process, in alternating order; ratios are of user plus
system seconds of these processes, within a run. `--python` adds environments to measure, for example one made from
requirements-cu12.txt. Packages are byte-compiled before.

Writes import.md (the table), import.json (every run), log.txt and provenance.json.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from colossal_vit.provenance import ResultFolder

from turns import in_turns, spread

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (
    "vit_cifar10_hybrid/train_hybrid.py",
    "vit_cifar10_hybrid/train_dp.py",
    "vit_imagenet_dali/train.py",
    "vit_caltech101_amp/train.py",
)
VERSIONS = """
from importlib import metadata
import platform
names = "torch", "torchvision", "timm", "colossalai"
print(f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in names), sep=", ")
"""


def cpu_seconds(python: str, module: str, folder: Path) -> float:
    """User plus system seconds of a process that imports `module` in `folder` and exits."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = spent()
    subprocess.run([python, "-c", f"import {module}"], cwd=folder, env=environment, check=True)
    return spent() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="how often each is imported (default %(default)s)")
    parser.add_argument("--python", nargs="+", default=[], help="interpreters of further environments")
    parser.add_argument("--output", type=Path, default=ROOT / "results/import_cpu", help="where the result goes")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)
    imports = {"timm": ("timm", ROOT)}
    imports |= {script: (Path(script).stem, (ROOT / script).parent) for script in SCRIPTS}
    table = ["| | CPU seconds, median | times timm's, median (lowest, highest) |", "| --- | ---: | ---: |"]
    seconds: dict[str, dict[str, list[float]]] = {}
    for python in (sys.executable, *args.python):
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
        benchmark.print(versions)
        measured = seconds[versions] = {name: [] for name in imports}
        for name in imports:  # once, so that files are in the page cache
            cpu_seconds(python, *imports[name])
        for number in range(args.runs):
            for name in in_turns(imports, number):
                measured[name].append(cpu_seconds(python, *imports[name]))
            times = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in measured.items())
            benchmark.print(f"run {number}: {times}")
        table.append(f"| **{versions}** | | |")
        for name, values in measured.items():
            ratios = [own / timm for own, timm in zip(values, measured["timm"], strict=True)]
            ratio = "{} ({}, {})".format(*spread(ratios, ".2f"))
            table.append(f"| `{name}` | {statistics.median(values):.2f} | {ratio} |")
    benchmark.finish("import", table, {"seconds": seconds})


if __name__ == "__main__":
    main()
