"""Measure memory, speed and loss of every mixed-precision mode on this machine.

    python benchmark.py [--configs ./config/*.py] [--nproc_per_node 1] [--steps 20] [--warm-up 5] [--synthetic]
                        [--batch-size N] [--find-batch-size] [--compile] [--tf32] [--set KEY=VALUE ...]
                        [--output DIRECTORY]

Each config is trained by `train.py` in separate processes, so that no mode affects another's memory. The warm-up steps
are not counted; it/s and images/s are those of the median step after them, on all processes together. Memory is the
peak of one process: allocated and reserved by torch on a GPU, resident (RSS) on a CPU, Python and libraries included. A
mode that fails is a row with its reason. With --find-batch-size, each mode runs with the largest BATCH_SIZE that fits,
found by doubling the config's (or --batch-size) until memory is exhausted or --max-batch-size is reached, and then by
bisection. --compile adds a row for each mode with torch.compile, --tf32 one for fp32 with TensorFloat-32; all rows are
compared with config_fp32 unchanged, eager and in strict fp32.

Writes amp.md (the table), amp.csv, amp.json, amp.png, log.txt and provenance.json.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import colossal_vit  # noqa: F401 silences the import of Colossal-AI
import torch
from colossal_vit import config as configs
from colossal_vit.engine import precision
from colossal_vit.errors import UserError
from colossal_vit.mfu import peak_of, training_flops
from colossal_vit.models import build_timm_vit
from colossal_vit.provenance import ResultFolder
from colossal_vit.results import read_metrics
from colossalai.context import Config

FOLDER = Path(__file__).resolve().parent
OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|MemoryError|SIGKILL|exitcode *: *-9", re.IGNORECASE)
COLUMNS = {
    "mode": "mode",
    "BATCH_SIZE": "batch size",
    "memory_gb": "peak memory, GB",
    "reserved_gb": "reserved, GB",
    "it_per_s": "it/s",
    "images_per_s": "images/s",
    "relative_memory": "memory, to fp32's",
    "relative_throughput": "images/s, to fp32's",
    "data_share": "waiting for data",
    "loss": "final loss",
    "mfu": "MFU",
}
FORMATS = {
    "memory_gb": "{:.2f}",
    "reserved_gb": "{:.2f}",
    "it_per_s": "{:.3g}",
    "images_per_s": "{:.1f}",
    "relative_memory": "{:+.1%}",
    "relative_throughput": "{:+.1%}",
    "data_share": "{:.1%}",
    "loss": "{:.4f}",
    "mfu": "{:.1%}",
}


class Mode(NamedTuple):
    """A row of the table: its name, its config file, and the overrides of it."""

    name: str
    config: Path
    overrides: list[str]


class Failed(Exception):
    """A run failed; the message is its error."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = FOLDER.parent / "runs" / FOLDER.name / "benchmark"
    shipped = sorted((FOLDER / "config").glob("config_*.py"), key=lambda path: (path.stem != "config_fp32", path.stem))
    parser.add_argument("--configs", nargs="+", type=Path, default=shipped, help="default: all in config/")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="that count (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="one random batch instead of the data set")
    parser.add_argument("--batch-size", type=int, help="instead of the configs' BATCH_SIZE")
    parser.add_argument("--find-batch-size", action="store_true", help="the largest that fits, for each mode")
    parser.add_argument("--max-batch-size", type=int, default=4096, help="where the search ends (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="each mode with torch.compile too")
    parser.add_argument("--tf32", action="store_true", help="fp32 with TensorFloat-32 too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train.py")
    parser.add_argument("--output", type=Path, default=output, help="default %(default)s")
    args = parser.parse_args()
    for name in ("nproc_per_node", "steps", "batch_size", "max_batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.tf32 and not torch.cuda.is_available():
        print("benchmark.py: no NVIDIA GPU here, so TensorFloat-32 (--tf32) is left out", file=sys.stderr)
        args.tf32 = False
    return args


def modes(args: argparse.Namespace) -> list[Mode]:
    """The rows of the table; their overrides do not include `args.set`."""
    rows = [Mode(config.stem, config, []) for config in args.configs]
    if args.tf32:
        rows += [Mode(f"{row.name}, TF32", row.config, ["TF32=True"]) for row in rows if row.name == "config_fp32"]
    if args.compile:
        rows += [Mode(f"{row.name}, compiled", row.config, [*row.overrides, "COMPILE=True"]) for row in rows]
    return rows


def overrides(mode: Mode, args: argparse.Namespace, batch_size: int | None) -> list[str]:
    """All overrides of the mode's config, as `KEY=VALUE`."""
    more = [f"BATCH_SIZE={batch_size}"] if batch_size else []
    return [*mode.overrides, *args.set, *more, *(["SYNTHETIC=True"] if args.synthetic else [])]


def train(mode: Mode, args: argparse.Namespace, batch_size: int | None) -> tuple[list[dict], list[dict], str]:
    """Train in one mode; returns the records of steps, the records of evaluations, and the log.

    Raises:
        Failed: if the run fails, with its error.
    """
    command = [sys.executable, "train.py"]
    if args.nproc_per_node > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc_per_node}"]
        command = [sys.executable, *torchrun, "train.py"]
    command += ["--config", str(mode.config.resolve()), "--max-steps", str(args.warm_up + args.steps)]
    for override in overrides(mode, args, batch_size):
        command += ["--set", override]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "run"
        done = subprocess.run([*command, "--output", str(output)], cwd=FOLDER, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode:
            if OUT_OF_MEMORY.search(said) or done.returncode == -9:
                raise Failed("out of memory")
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            own = [line for line in lines if "error: " in line or re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
            raise Failed((own or lines)[0].strip())
        return (*read_metrics(output), said)


def measure(mode: Mode, args: argparse.Namespace, batch_size: int | None) -> dict[str, Any]:
    """Train in one mode, and summarise its steps as a row of the table.

    Raises:
        Failed: if the run fails, with its error.
    """
    steps, _, _ = train(mode, args, batch_size)
    counted = steps[args.warm_up :]
    if not counted:
        raise Failed(f"only {len(steps)} steps an epoch: lower BATCH_SIZE, --warm-up or raise NUM_EPOCHS")
    seconds = statistics.median(record["step_s"] for record in counted)
    images = counted[0]["images_per_s"] * counted[0]["step_s"]  # of a step
    return {
        "memory_gb": max(record["memory_gb"] for record in counted),
        "reserved_gb": max(record.get("reserved_gb", 0.0) for record in counted) or None,
        "it_per_s": 1 / seconds,
        "images_per_s": images / seconds,
        "data_share": sum(record["data_s"] for record in counted) / sum(record["step_s"] for record in counted),
        "loss": counted[-1]["loss"],
    }


def find_batch_size(mode: Mode, args: argparse.Namespace, start: int) -> int:
    """The largest batch size per process that fits into memory, to within an eighth.

    Raises:
        Failed: if not even 1 fits, or a run fails for another reason.
    """

    def fits(batch_size: int) -> bool:
        try:
            short = argparse.Namespace(**{**vars(args), "steps": 1, "warm_up": 1})
            train(mode, short, batch_size)
        except Failed as error:
            if str(error) != "out of memory":
                raise
            return False
        return True

    most = args.max_batch_size
    good, bad = 0, most + 1
    size = min(start, most)
    while bad - good > max(1, good // 8):
        good, bad = (size, bad) if fits(size) else (good, size)
        size = min(2 * good, most) if bad > most else (good + bad) // 2
        if size <= good:
            break
    if not good:
        raise Failed("out of memory with BATCH_SIZE = 1")
    return good


def describe(mode: Mode, args: argparse.Namespace) -> tuple[Config, str, float | None]:
    """The resolved config, its precision in words, and seconds per image at the device's peak, or None if unknown."""
    changed = overrides(mode, args, args.batch_size)
    resolved = configs.load(mode.config, changed, "caltech101")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_of(device, precision.compute_dtype(resolved.fp16, device), resolved.get("TF32", False))
    with torch.device("meta"):
        flops = training_flops(build_timm_vit(resolved), resolved.IMG_SIZE)
    return resolved, precision.describe(resolved.fp16, device), peak and flops / peak


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table, without columns that are empty in all rows."""
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = ["| " + " | ".join(["config", *(COLUMNS[key] for key in columns)]) + " |"]
    lines.append("| --- | --- |" + " ---: |" * (len(columns) - 1))
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['config']} | {row['mode']} | {row['failed']} |" + " |" * (len(columns) - 2))
            continue
        cells = [FORMATS.get(key, "{}").format(row[key]) if row.get(key) is not None else "" for key in columns]
        lines.append("| " + " | ".join([row["config"], *cells]) + " |")
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar chart of memory and images/s."""
    from matplotlib.figure import Figure

    good = [row for row in rows if "failed" not in row]
    names = [row["config"].removeprefix("config_") for row in good]
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("memory_gb", "images_per_s"), strict=True):
        bars = axes.barh(names, [row[key] for row in good])
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.set_xlabel(COLUMNS[key])
        axes.invert_yaxis()
        axes.margins(x=0.15)
    figure.savefig(path)


def main() -> int:
    args = parse()
    benchmark = ResultFolder(args.output, changes_allowed=True)
    rows = []
    for mode in modes(args):
        row: dict[str, Any] = {"config": mode.name, "mode": ""}
        try:
            resolved, row["mode"], flops_share = describe(mode, args)
            batch_size = args.batch_size
            if args.find_batch_size:
                batch_size = find_batch_size(mode, args, resolved.BATCH_SIZE)
            row["BATCH_SIZE"] = batch_size or resolved.BATCH_SIZE
            row |= measure(mode, args, batch_size)
            row["mfu"] = flops_share and row["images_per_s"] / args.nproc_per_node * flops_share
        except (UserError, Failed) as error:
            row["failed"] = str(error)
        rows.append(row)
        benchmark.print(json.dumps(row))
    (base,) = [row for row in rows if row["config"] == "config_fp32" and "failed" not in row] or [None]
    for row in rows:
        if base and "failed" not in row:
            row["relative_memory"] = row["memory_gb"] / base["memory_gb"] - 1
            row["relative_throughput"] = row["images_per_s"] / base["images_per_s"] - 1
    settings = {"processes": args.nproc_per_node, "steps": args.steps, "warm_up": args.warm_up}
    settings |= {"data": "one random batch" if args.synthetic else os.environ.get("DATA") or "the sample"}
    settings |= {"memory": "allocated by torch" if torch.cuda.is_available() else "resident (RSS)", "set": args.set}
    benchmark.finish("amp", table(rows), {**settings, "rows": rows})
    with open(args.output / "amp.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["config", *COLUMNS, "failed"])
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.output / "amp.png")
    return int(all("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
