"""Check on this machine that every layout computes the same training: 20 steps of each, compared with one process.

    python scripts/check_layouts.py [--world N] [--optimizer adamw|sgd|lamb|muon] [--only NAME ...]
                                    [--accumulation N ...]
    python scripts/check_layouts.py --steps 440 --result results/one_curve --optimizer sgd \\
        --set LEARNING_RATE=0.05 --set HIDDEN_SIZE=64 --set LABEL_SMOOTHING=0.0 --set DROP_RATE=0.05 \\
        --set DROP_PATH_RATE=0.05 --set WARMUP_EPOCHS=1 --set CROP_PADDING=0 --set FLIP=False

Prints a table: layout, relative error (the larger of `loss` and `grad_norm`) in the first step and in the worst one,
images/s; then whether all agree. curve.png has the losses by step, in the folder of the result or runs/check_layouts.

The model is small, in fp32, on the digits sample; gradients are clipped. All that is random is on: dropout, drop path,
crops and mirror images. Exit code 1 if a layout fails to run, or its error exceeds 1e-5 in the first step or 1e-4 in
any of the first 20. In later steps, of which there are some with `--steps`, rounding grows with every step, and the
error is reported only.

`--accumulation 1 2 4` makes three rows of each layout, whose global batch, that of one process, is cut into so many.

With `--result` also writes, after each layout, losses.csv (a row per step, a column per layout), one_curve.md (the
table), one_curve.json (the settings), log.txt and provenance.json. scripts/pictures.py draws the curves.
"""

import argparse
import csv
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from colossal_vit.drawing import NEUTRAL, styled
from colossal_vit.provenance import ResultFolder
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.harness import Failed
from benchmarks.training import train
from layouts import (
    ANY_STEP,
    CONFIG,
    FIRST_STEP,
    FOLDER,
    LAYOUTS,
    MODEL,
    OPTIMIZERS,
    RANDOM,
    STEPS_PER_EPOCH,
    errors,
    set_flags,
)

NUM_STEPS = 20
ONE = "one process"


def cut(layout: tuple[int, dict[str, Any]], accumulation: int) -> tuple[int, dict[str, Any]]:
    """Return a layout that takes its part of the global batch in `accumulation` pieces."""
    processes, values = layout
    batch = values.get("BATCH_SIZE", MODEL["BATCH_SIZE"]) // accumulation
    return processes, {**values, "BATCH_SIZE": batch, "gradient_accumulation": accumulation}


def furthest(curves: dict[str, list[dict]], name: str) -> dict[str, dict[str, float]]:
    """Return the largest relative errors of loss and gradient norm: in step 1, steps 1 to 20, and all steps."""
    ends = {"step 1": 1, f"steps 1 to {NUM_STEPS}": NUM_STEPS, f"steps 1 to {len(curves[ONE])}": None}
    return {
        key: {steps: max(errors(curves[name], curves[ONE], [key])[:end]) for steps, end in ends.items()}
        for key in ("loss", "grad_norm")
    }


def make_table(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the errors of each layout as a Markdown table."""
    spans = {key: runs[ONE][key] for key in ("loss", "grad_norm")}
    columns = [f"{key}, {steps}" for key in spans for steps in spans[key]]
    rows = [["layout", "processes", *columns], ["---", *["---:"] * (1 + len(columns))]]
    for name, run in runs.items():
        rows.append([name, run["processes"], *(f"{run[key][steps]:.1e}" for key in spans for steps in spans[key])])
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def write_losses(path: Path, curves: dict[str, list[dict]]) -> None:
    """Write the losses as CSV: a row per step, and a column per layout."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *curves])
        for records in zip(*curves.values(), strict=True):
            rows.writerow([records[0]["step"], *(f"{record['loss']:.9g}" for record in records)])


def draw_losses(path: Path, curves: dict[str, list[dict]]) -> None:
    """Draw the losses by step: of one process as a line, and on it those of each layout as points, in turn."""
    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="training loss")
    for number, (name, records) in enumerate(curves.items()):
        some = slice(None) if name == ONE else slice((number - 1) % len(records), None, max(len(curves) - 1, 1))
        steps, losses = zip(*((record["step"], record["loss"]) for record in records[some]), strict=True)
        look = dict(color=NEUTRAL, linewidth=2) if name == ONE else dict(marker="ovs^D"[number % 5], linestyle="")
        axes.plot(steps, losses, label=name, **look)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(ncols=3, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 8
    parser.add_argument("--world", type=int, default=available, help="most processes to start (default %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, metavar="NAME", help="check only these layouts")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], choices=(1, 2, 4), help="default 1")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train_hybrid.py")
    parser.add_argument("--result", type=Path, help="folder for the result (default: none but the picture)")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2")
    os.environ.pop("DATA", None)
    optimizer = OPTIMIZERS[args.optimizer]
    values = {
        "parallel.pipeline": 1,
        **MODEL,
        **RANDOM,
        **optimizer,
        "NUM_EPOCHS": math.ceil(args.steps / STEPS_PER_EPOCH),
    }
    fitting = [name for name in args.only or LAYOUTS if LAYOUTS[name][0] <= args.world]
    left_out = [name for name in args.only or LAYOUTS if name not in fitting]
    chosen = {ONE: (1, {})} | {
        name + (f", accumulation {accumulation}" if accumulation > 1 else ""): cut(LAYOUTS[name], accumulation)
        for accumulation in args.accumulation
        for name in fitting
    }
    width = max(map(len, chosen)) + 2
    result = ResultFolder(args.result)

    if left_out:
        result.print(f"not checked, since they need more than {args.world} processes: {', '.join(left_out)}")
    result.print(
        f"training {len(chosen)} times for {args.steps} steps; relative error of loss and gradient norm, whichever is "
        f"larger, against one process:"
    )
    result.print(f"{'layout':<{width}}{'first step':>12}{'worst step':>12}{'images/s':>10}")
    curves: dict[str, list[dict]] = {}
    wrong, largest = [], 0.0
    for name, (processes, overrides) in (bar := tqdm(chosen.items(), unit="layout", leave=False, disable=None)):
        bar.set_description(name)  # at a terminal
        flags = ["--config", CONFIG, "--max-steps", str(args.steps), *set_flags({**values, **overrides})]
        flags += [f"--set={override}" for override in args.set]
        try:
            steps = train("vit_cifar10_hybrid/train_hybrid.py", flags, ranks=processes, OMP_NUM_THREADS="1")
        except Failed as error:
            if name == ONE:
                sys.exit(f"{name} does not run: {error}")
            wrong.append(name)
            with tqdm.external_write_mode():
                result.print(f"{name:<{width}}does not run: {error}")
            continue
        curves[name] = steps
        error = errors(steps, curves[ONE])
        rate = statistics.median(record["images_per_s"] for record in steps)
        worst = max(error[:NUM_STEPS])
        good, largest = error[0] <= FIRST_STEP and worst <= ANY_STEP, max(largest, worst)
        with tqdm.external_write_mode():
            said = f"{name:<{width}}{error[0]:>12.1e}{max(error):>12.1e}{rate:>10.0f}"
            result.print(said + ("" if good else "  OUT"))
        if not good:
            wrong.append(name)
        if args.result:
            runs = {name: {"processes": chosen[name][0], **furthest(curves, name)} for name in curves}
            settings = {**MODEL, **RANDOM, **optimizer, "--set": args.set, "steps": args.steps}
            result.write("one_curve", make_table(runs), {"settings": settings, "layouts": runs})
            write_losses(args.result / "losses.csv", curves)
    limits = f"{FIRST_STEP:g} in the first step and {ANY_STEP:g} in steps 1 to {min(args.steps, NUM_STEPS)}"
    if wrong:
        result.print(f"OUT: {', '.join(wrong)} (allowed: {limits})")
    else:
        result.print(f"all {len(chosen) - 1} layouts agree: the error is at most {largest:.1e} (allowed: {limits})")
    picture = (args.result or FOLDER.parent / "runs/check_layouts") / "curve.png"
    with styled():
        draw_losses(picture, curves)
    print(f"loss by step: {picture}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
