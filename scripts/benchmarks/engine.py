"""A training step of ours beside a bare PyTorch loop and timm's train.py, and what DROP_RATE = 0.1 adds to each.

20 minutes on 2 CPU cores. Each side is a process that waits for its turn, and trains on one batch of images: with
engine, loop and hooks of the train scripts, in a process that keeps freed memory as theirs do on a CPU; in a loop in
plain PyTorch; and with model, optimizer, loss and step of timm's train.py. One more process only repeats the matrix
products and the attention of our step. Sides without dropout must compute the same loss. `--before FOLDER` adds ours at
an earlier commit (`git worktree add FOLDER COMMIT`). `--set` overrides values of
vit_caltech101_amp/config/config_fp32.py. On a machine that others use, as the load of the last minute says, CPU seconds
are what counts. On a GPU, a batch has 128 images, or as many as its memory takes while the processes of all sides wait
there.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path

import torch

from benchmarks.harness import ROOT, Benchmark, Case, Failed, Rounds, Side, Values, python_path, ratios
from benchmarks.training import TOLERANCE, add_set, check_agreement

RATES = {"no dropout": "0.0", "dropout": "0.1"}
OURS, PRODUCTS = "ours, no dropout", "products of ours, no dropout"
ON_GPU = torch.cuda.is_available()
MODELS = {"tiny": ("Ti", 8), "small": ("S", 4), "base": ("B", 2)}  # what it is called, and the batch on a CPU
FP16 = ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='fp16'"]
SMALL = ["IMG_SIZE=32", "PATCH_SIZE=8", "HIDDEN_SIZE=32", "DEPTH=1", "NUM_HEADS=2"]


class Steps:
    """A process of engine_steps.py, which ends with this object: those of all cases would not fit in memory."""

    def __init__(self, which: str, checkout: Path, threads: int, values: list[str]):
        command = [sys.executable, str(Path(__file__).parent / "engine_steps.py"), which, str(checkout), *values]
        variables = {
            "PYTHONPATH": python_path(checkout, checkout / "vit_caltech101_amp"),
            "OMP_NUM_THREADS": str(threads),
        }
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # without worker processes, which stay in memory
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env={**os.environ, **variables}, cwd=checkout, **options)
        self.name = f"{which} in {checkout}"

    @cached_property
    def loss(self) -> float:
        """Loss of its first step, at the end of which it is ready."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} does not start, see above")
        return float(line)

    def __del__(self):
        self.process.communicate()  # at the end of its input it ends

    def measure(self, steps: int, number: int) -> Values:
        print(steps, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().split()
        if not answer:
            raise Failed(f"ended with exit code {self.process.wait()}")
        return {"s a step": float(answer[0]), "CPU s a step": float(answer[1]), "load": os.getloadavg()[0]}


def batch_size_for(memory: float, num_processes: int) -> int:
    """Return the largest power of two, up to 128, of images that so many processes train on, all in a GPU with so many
    bytes.

    A waiting process keeps the memory of its largest step. By a dry run of ViT-B/16 in fp32 an image takes 0.12 GB;
    0.13 has room for the masks of dropout. Weights, gradients, moments, CUDA's context and gaps get 2.5 GB.
    """
    return 2 ** min(7, int(math.log2(max((memory / 1e9 / num_processes - 2.5) / 0.13, 1))))


def sides(model: str, threads: int, compiled: bool, fp16: bool, args: argparse.Namespace) -> dict[str, Side]:
    values = [f"MODEL='vit_{model}_patch16_224'", f"COMPILE={compiled}", *(FP16 if fp16 else [])]
    kinds = {"ours": ("ours", ROOT), "bare PyTorch": ("bare", ROOT), "timm": ("timm", ROOT)}
    if args.before:
        commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], cwd=args.before, text=True).strip()
        kinds[f"ours at {commit}"] = ("ours", args.before.resolve())
    batch_size = MODELS[model][1]
    if ON_GPU:
        batch_size = batch_size_for(torch.cuda.get_device_properties(0).total_memory, len(kinds) * len(RATES) + 1)
    values += [f"BATCH_SIZE={batch_size}", *(SMALL if args.small else []), *args.set]
    processes = {
        f"{name}, {said}": Steps(*kind, threads, [*values, f"DROP_RATE={rate}"])
        for name, kind in kinds.items()
        for said, rate in RATES.items()
    }
    processes[PRODUCTS] = Steps("products", ROOT, threads, [*values, "DROP_RATE=0.0", "COMPILE=False"])
    losses = {name: side.loss for name, side in processes.items()}  # waits for all of them, which start at once
    without = {name: loss for name, loss in losses.items() if name.endswith("no dropout")}
    check_agreement(without, 5e-3 if fp16 else TOLERANCE)
    return {name: partial(side.measure, args.steps) for name, side in processes.items()}


def summary(found: Mapping[str, Rounds], args: argparse.Namespace) -> list[str]:
    """Return what ours takes of the others' time, and what dropout adds to each: medians of all rounds.

    Also what the products of ours take of its time.
    """

    def in_percent(rounds: Rounds, name: str, other: str) -> str:
        pair = {side: rounds[side] for side in (other, name)}
        quantities = ("s a step", "CPU s a step")
        time, cpu = (100 * statistics.median(ratios(pair, name, quantity)) for quantity in quantities)
        return f"{time:.1f} % of the time ({cpu:.1f} % in CPU seconds)"

    lines = []
    for case, rounds in found.items():
        names = list(dict.fromkeys(side.rsplit(", ", 1)[0] for side in rounds if side != PRODUCTS))
        for rate in RATES:
            lines += [
                f"{case}, {rate}: ours takes {in_percent(rounds, f'ours, {rate}', f'{name}, {rate}')} of {name}.  "
                for name in names[1:]
            ]
        lines += [
            f"{case}: with dropout {name} takes "
            f"{in_percent(rounds, f'{name}, dropout', f'{name}, no dropout')} without.  "
            for name in names
        ]
        lines.append(f"{case}: matrix products and attention take {in_percent(rounds, PRODUCTS, OURS)} of ours.  ")
    return [*lines, ""]


def flags(parser: argparse.ArgumentParser) -> None:
    add_set(parser)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an earlier commit")


CASES = {
    f"ViT-{name}/16, {threads} thread{'s'[: threads > 1]}{', compiled' if compiled else ''}": Case(
        partial(sides, model, threads, compiled, False)
    )
    for model, (name, _) in MODELS.items()
    for threads, compiled in ((1, False), (2, False), (2, True))
    if threads > 1 or model == "tiny"
}
CASES["ViT-B/16, fp16, compiled"] = Case(partial(sides, "base", 2, True, True), by_default=ON_GPU)
BENCHMARK = Benchmark(lambda args: CASES, rounds=7, steps=2, flags=flags, compared=2, summary=summary)
