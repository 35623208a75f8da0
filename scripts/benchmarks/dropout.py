"""What DROP_RATE = 0.1 adds to a training step on a CPU: ours, timm's, and ours at an earlier commit.

About 15 minutes on 2 CPU cores. Each side is a process that waits for its turn: `Engine` with ViT-Ti/16, on one batch
of images of 224 pixels, and timm's own model, optimizer, loss and step, as its train.py has them; each without dropout
and with it. Those without must compute the same loss. `--before FOLDER` is a checkout of an earlier commit (`git
worktree add FOLDER COMMIT`). `--set` overrides values of vit_caltech101_amp/config/config_fp32.py. On a machine that
others use, as the load of the last minute says, CPU seconds are what counts.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Benchmark, Case, Failed, Rounds, Side, Values, ratios
from benchmarks.training import add_set, check_agreement

RATE = "0.1"
MODEL = ["MODEL='vit_tiny_patch16_224'", "BATCH_SIZE=8"]
SMALL = ["IMG_SIZE=32", "PATCH_SIZE=8", "HIDDEN_SIZE=32", "DEPTH=1", "NUM_HEADS=2"]


class Steps:
    """A process of dropout_steps.py, which ends with this one.

    Attributes:
        loss: of its first step.
    """

    def __init__(self, which: str, checkout: Path, rate: str, threads: int, values: list[str]):
        command = [sys.executable, str(Path(__file__).parent / "dropout_steps.py"), which, str(checkout), rate, *values]
        variables = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env={**os.environ, **variables}, cwd=checkout, **options)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{which} in {checkout} does not start, see above")
        self.loss = float(line)

    def measure(self, steps: int, number: int) -> Values:
        print(steps, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().split()
        if not answer:
            raise Failed(f"ended with exit code {self.process.wait()}")
        return {"s a step": float(answer[0]), "CPU s a step": float(answer[1]), "load": os.getloadavg()[0]}


def sides(threads: int, args: argparse.Namespace) -> dict[str, Side]:
    values = [*MODEL, *(SMALL if args.small else []), *args.set]
    kinds = {"ours": ("ours", ROOT), "timm": ("timm", ROOT)}
    if args.before:
        commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=args.before, text=True).strip()
        kinds[f"ours at {commit}"] = ("ours", args.before.resolve())
    processes = {
        f"{name}, {'dropout' if rate == RATE else 'none'}": Steps(*kind, rate, threads, values)
        for name, kind in kinds.items()
        for rate in ("0.0", RATE)
    }
    check_agreement({name: side.loss for name, side in processes.items() if "none" in name})
    return {name: partial(side.measure, args.steps) for name, side in processes.items()}


def summary(found: Mapping[str, Rounds]) -> list[str]:
    """What dropout adds to a step, in percent: the median of all rounds."""
    lines = []
    for case, rounds in found.items():
        for name in [side.removesuffix(", dropout") for side in rounds if side.endswith("dropout")]:
            pair = {side: rounds[side] for side in (f"{name}, none", f"{name}, dropout")}
            time, cpu = (
                100 * statistics.median(ratios(pair, f"{name}, dropout", quantity)) - 100
                for quantity in ("s a step", "CPU s a step")
            )
            lines.append(f"{case}, {name}: dropout makes a step {time:.1f} % longer, in CPU seconds {cpu:.1f} %.  ")
    return [*lines, ""]


def flags(parser: argparse.ArgumentParser) -> None:
    add_set(parser)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an earlier commit")


CASES = {"1 thread": Case(partial(sides, 1)), "2 threads": Case(partial(sides, 2))}
BENCHMARK = Benchmark(lambda args: CASES, rounds=11, steps=2, flags=flags, compared=2, summary=summary)
