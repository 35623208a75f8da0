"""Check on this machine that every layout computes the same training: 20 steps of each, compared with one process.

    python scripts/check_layouts.py [--world N] [--optimizer adamw|sgd|lamb] [--only NAME ...]
    python scripts/check_layouts.py --forks --steps 300 --result results/one_curve \\
        --set LEARNING_RATE=5e-4 --set CROP_PADDING=0 --set FLIP=False

Prints a table: layout, relative error (the larger of `loss` and `grad_norm`) in the first step and in the worst one,
images/s. The model is small, in fp32, without dropout, on the digits sample; gradients are clipped. Exit code 1 if a
layout fails to run, or its error exceeds 1e-5 in the first step or 1e-4 in any of the first 20. In later steps, of
which there are some with `--steps`, rounding grows with every step, and the error is reported only.

With `--result` also writes losses.csv (a row per step, a column per layout), one_curve.md (the table), one_curve.json
(the settings), log.txt and provenance.json. scripts/draw_pictures.py draws the curves.
"""

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import colossal_vit  # noqa: F401 silences the import of Colossal-AI
import torch
from colossal_vit.provenance import ResultFolder
from colossal_vit.results import read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"))
from layouts import (  # noqa: F401 other scripts take some of these from here
    ANY_STEP,
    CONFIG,
    FIRST_STEP,
    FOLDER,
    LAYOUTS,
    MODEL,
    OPTIMIZERS,
    PIPELINE,
    STEPS_PER_EPOCH,
    errors,
    set_flags,
    tensor,
)

NUM_STEPS = 20
ONE = "one process"
LONGEST = 3600.0  # seconds that a run on forks may take


def train(
    processes: int, overrides: dict[str, Any], output: Path, steps: int, more: list[str], forks: bool = False
) -> list[dict]:
    """Train `steps` steps in a layout and return their records; `more` are flags for train_hybrid.py.

    Raises:
        RuntimeError: if the run fails, with the first line that it said on stderr.
    """
    epochs = {"NUM_EPOCHS": math.ceil(steps / STEPS_PER_EPOCH)}
    flags = ["--config", CONFIG, "--output", str(output), "--max-steps", str(steps)]
    flags += set_flags({"parallel.pipeline": 1, **MODEL, **epochs, **overrides}) + more
    if forks:
        import fork_ranks

        environments = fork_ranks.by_torchrun(processes) if processes > 1 else [{}]
        result = fork_ranks.start(FOLDER / "train_hybrid.py", flags + fork_ranks.FOREVER, environments).wait(LONGEST)
        failed, said = any(result.codes), "".join(result.stderr)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        environment.pop("DATA", None)
        options = dict(cwd=FOLDER, env=environment, capture_output=True, text=True)
        done = subprocess.run([*command, "train_hybrid.py", *flags], **options)
        failed, said = done.returncode, done.stderr
    if failed:
        raise RuntimeError(next(iter(said.strip().splitlines()), "without a word"))
    return read_metrics(output)[0]


def furthest(curves: dict[str, list[dict]], name: str) -> dict[str, dict[str, float]]:
    """The largest relative errors of a layout's loss and gradient norm: in step 1, steps 1 to 20, and all steps."""
    ends = {"step 1": 1, f"steps 1 to {NUM_STEPS}": NUM_STEPS, f"steps 1 to {len(curves[ONE])}": None}
    return {
        key: {steps: max(errors(curves[name], curves[ONE], [key])[:end]) for steps, end in ends.items()}
        for key in ("loss", "grad_norm")
    }


def make_table(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The errors of each layout as a Markdown table."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 8
    parser.add_argument("--world", type=int, default=available, help="most processes to start (default %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, metavar="NAME", help="check only these layouts")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps (default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train_hybrid.py")
    parser.add_argument("--forks", action="store_true", help="on the CPU, ranks that need not import everything")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2")
    if args.forks:
        sys.path.append(str(FOLDER.parent / "tests"))
        import conftest  # noqa: F401 prepares this process for forks
    optimizer = OPTIMIZERS[args.optimizer]
    chosen = {name: LAYOUTS[name] for name in args.only or LAYOUTS if LAYOUTS[name][0] <= args.world}
    left_out = [name for name in args.only or LAYOUTS if name not in chosen]
    result = ResultFolder(args.result)
    how = dict(steps=args.steps, more=[f"--set={value}" for value in args.set], forks=args.forks)

    result.print(f"{'layout':<40}{'first step':>12}{'worst step':>12}{'images/s':>10}")
    curves: dict[str, list[dict]] = {}
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (processes, overrides) in {ONE: (1, {}), **chosen}.items():
            try:
                steps = train(processes, {**optimizer, **overrides}, Path(scratch) / name, **how)
            except RuntimeError as error:
                if name == ONE:
                    raise
                wrong.append(name)
                result.print(f"{name:<40}does not run: {error}")
                continue
            curves[name] = steps
            error = errors(steps, curves[ONE])
            rate = statistics.median(record["images_per_s"] for record in steps)
            good = error[0] <= FIRST_STEP and max(error[:NUM_STEPS]) <= ANY_STEP
            line = f"{name:<40}{error[0]:>12.1e}{max(error):>12.1e}{rate:>10.0f}"
            result.print(line + ("" if good else "  OUT"))
            if not good:
                wrong.append(name)
    if left_out:
        result.print(f"not checked, since they need more than {args.world} processes: {', '.join(left_out)}")
    if wrong:
        print(f"out: {', '.join(wrong)}", file=sys.stderr)
    if args.result:
        runs = {name: {"processes": (LAYOUTS.get(name) or (1,))[0], **furthest(curves, name)} for name in curves}
        settings = {**MODEL, **optimizer, "--set": args.set, "steps": args.steps}
        result.write("one_curve", make_table(runs), {"settings": settings, "layouts": runs})
        write_losses(args.result / "losses.csv", curves)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
