"""What a newcomer types first, here and at an earlier commit: the quickstart, or the whole test suite, paired.

    python scripts/bench_first_hour.py quickstart|suite BASE [--runs 1] [--output results/first_hour/quickstart]

Both commits are cloned into empty folders and set up first, which does not count. Then HEAD and BASE take turns. CPU
seconds are user and system time of the whole run, as the kernel counts it for a process and all that it has waited for;
what SLURM's daemons start is in neither.

Writes <what>.md (the table), <what>.json (every run), log.txt (all that was printed) and provenance.json.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from colossal_vit.report import provenance, write_benchmark

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--runs", type=int, default=1, help="pairs (default %(default)s)")
    parser.add_argument("--output", type=Path, help="where the result goes (default results/first_hour/WHAT)")
    args = parser.parse_args()
    output = args.output or ROOT / "results/first_hour" / args.what
    origin = provenance(shlex.join(["python", *sys.argv]))
    commits = {
        name: subprocess.check_output(["git", "rev-parse", name], cwd=ROOT, text=True).strip()[:7]
        for name in ("HEAD", args.base)
    }
    log, runs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {commit: Path(scratch) / commit for commit in commits.values()}
        for commit, folder in folders.items():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
            subprocess.run(["git", "checkout", "--quiet", commit], cwd=folder, check=True)
            subprocess.run(["bash", "-c", "source scripts/setup.sh"], cwd=folder, check=True)
        for number in range(args.runs):
            for commit, folder in folders.items():
                wall, cpu, code, said = run(["bash", COMMANDS[args.what]], folder)
                runs.append({"commit": commit, "wall_s": wall, "cpu_s": cpu, "exit_code": code})
                log.append(
                    f"===== run {number} of {commit}: {wall:.0f} s, {cpu:.0f} CPU s, exit code {code} =====\n{said}"
                )
                print(log[-1].splitlines()[0], flush=True)
    table = ["| commit | wall seconds | CPU seconds | exit code |", "| --- | ---: | ---: | ---: |"]
    medians = {}
    for commit in folders:
        own = [r for r in runs if r["commit"] == commit]
        medians[commit] = [statistics.median(r[key] for r in own) for key in ("wall_s", "cpu_s")]
        codes = ", ".join(str(r["exit_code"]) for r in own)
        table.append(f"| {commit} | {medians[commit][0]:.0f} | {medians[commit][1]:.0f} | {codes} |")
    head, base = medians.values()
    table.append(f"| ratio | {head[0] / base[0]:.2f} | {head[1] / base[1]:.2f} | |")
    print("\n".join(table))
    write_benchmark(output, args.what, table, {"runs": runs}, origin, "\n".join(log).replace(scratch, "SCRATCH"))


if __name__ == "__main__":
    main()
