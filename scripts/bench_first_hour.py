"""Time of the quickstart or of the whole test suite, at HEAD and at an earlier commit, in pairs.

    python scripts/bench_first_hour.py quickstart|suite BASE [--runs 1] [--side-by-side]
                                       [--output results/first_hour/quickstart]

Both commits are first cloned into empty folders and set up, which is not timed. Then HEAD and BASE alternate or, with
--side-by-side, run at the same time on one core each, so that changes of the machine's speed affect both alike. On one
core, the time limits in the tests of BASE are multiplied by ten, since a test that runs into its limit does not do its
work. CPU seconds are user and system time of a process and all children that it has waited for; processes started by
SLURM's daemons are not included.

Writes <what>.md (the table), <what>.json (every run), log.txt (all that was printed) and provenance.json.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colossal_vit.benchmark import Benchmark, in_turns

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {"quickstart": "scripts/quickstart.sh", "suite": "scripts/test.sh"}


def run(command: list[str], folder: Path) -> tuple[float, float, int, str]:
    """Wall seconds, CPU seconds and exit code of a command, and what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "DATA")}
    with tempfile.TemporaryFile("w+") as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - started
        said.seek(0)
        return wall, usage.ru_utime + usage.ru_stime, process.returncode, said.read()


def be_patient(tests: Path) -> None:
    """Multiply all time limits in the tests of a clone, and in its pytest settings, by 10."""
    for path in (*tests.glob("*.py"), tests.parent / "pyproject.toml"):
        text = path.read_text()
        text = text.replace("monotonic() + seconds", "monotonic() + 10 * seconds")
        path.write_text(re.sub(r"\b((?:timeout|seconds)(?:: float)?(?: = |=|\())(\d+)\b", r"\g<1>\g<2>0", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--runs", type=int, default=1, help="pairs (default %(default)s)")
    parser.add_argument("--side-by-side", action="store_true", help="both at the same time, on one core each")
    parser.add_argument("--output", type=Path, help="where the result goes (default results/first_hour/WHAT)")
    args = parser.parse_args()
    benchmark = Benchmark(args.output or ROOT / "results/first_hour" / args.what)
    commits = {
        name: subprocess.check_output(["git", "rev-parse", name], cwd=ROOT, text=True).strip()[:7]
        for name in ("HEAD", args.base)
    }
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {commit: Path(scratch) / commit for commit in commits.values()}
        for commit, folder in folders.items():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
            subprocess.run(["git", "checkout", "--quiet", commit], cwd=folder, check=True)
            subprocess.run(["bash", "-c", "source scripts/setup.sh"], cwd=folder, check=True)
        pins = [[], []]
        if args.side_by_side:
            be_patient(folders[commits[args.base]] / "tests")
            pins = [["taskset", "--cpu-list", str(core)] for core in sorted(os.sched_getaffinity(0))[:2]]
        for number in range(args.runs):
            commands = [[*pin, "bash", COMMANDS[args.what]] for pin in pins]
            order = in_turns(folders, number)
            with ThreadPoolExecutor(2 if args.side_by_side else 1) as pool:
                done = list(pool.map(run, commands, (folders[commit] for commit in order)))
            for commit, (wall, cpu, code, said) in zip(order, done, strict=True):
                runs.append({"commit": commit, "wall_s": wall, "cpu_s": cpu, "exit_code": code})
                benchmark.print(
                    f"===== run {number} of {commit}: {wall:.0f} s, {cpu:.0f} CPU s, exit code {code} ====="
                )
                benchmark.log += said.replace(scratch, "SCRATCH")
    table = ["| commit | wall seconds | CPU seconds | exit code |", "| --- | ---: | ---: | ---: |"]
    medians = {}
    for commit in folders:
        own = [r for r in runs if r["commit"] == commit]
        medians[commit] = [statistics.median(r[key] for r in own) for key in ("wall_s", "cpu_s")]
        codes = ", ".join(str(r["exit_code"]) for r in own)
        table.append(f"| {commit} | {medians[commit][0]:.0f} | {medians[commit][1]:.0f} | {codes} |")
    head, base = medians.values()
    table.append(f"| ratio | {head[0] / base[0]:.2f} | {head[1] / base[1]:.2f} | |")
    benchmark.finish(args.what, table, {"runs": runs})


if __name__ == "__main__":
    main()
