"""Draw the pictures of docs/pictures from results/ and from dry runs.

    python scripts/pictures.py [NAME ...]

They have no background and mid-tone colours, so that they can be read on light and on dark pages. The docstring of each
function in PICTURES suggests the alternative text of its picture.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from colossal_vit import launch
from colossal_vit.plan import report
from colossal_vit.plan.meter import StepPlan
from colossal_vit.plan.pictures import (
    COLORS,
    TEXT,
    draw_pieces,
    save,
    style,
)
from colossal_vit.results import read_metrics
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "vit_cifar10_hybrid"))

import train_hybrid  # noqa: E402
from layouts import CONFIG, FOLDER, set_flags, tensor  # noqa: E402

ONE = "one process"  # as in check_layouts.py
SHOWN = ("DP 4", "PP 4", "1D 4", "2D 4", "3D 8")  # as points on its curve
RESULTS, OUTPUT = ROOT / "results", ROOT / "docs/pictures"


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text())


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def draw_bars(axes: Axes, values: dict[str, float], title: str, form: str) -> None:
    """Horizontal bars from top to bottom, each with its value."""
    bars = axes.barh(list(values), list(values.values()), color=COLORS[: len(values)], height=0.7)
    axes.bar_label(bars, fmt=form, padding=3, color=TEXT, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(title, fontsize=10)
    style(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelbottom=False)


# ---- From results ----------------------------------------------------------------------------------------------------


def one_curve() -> Figure:
    """The losses of one process as a line, and on it those of five parallel layouts as points, over 300 steps; beside
    it the largest relative deviation of 19 layouts so far. Dropout, drop path, Mixup and CutMix are on.
    """
    with open(RESULTS / "one_curve/losses.csv") as file:
        header, *rows = csv.reader(file)
    values = np.array(rows, float)
    steps, losses = values[:, 0], dict(zip(header[1:], values[:, 1:].T, strict=True))
    figure = new_figure(8, 2.8)
    left, right = figure.subplots(1, 2, width_ratios=(5, 3))
    left.plot(steps, losses[ONE], color=TEXT, linewidth=3, alpha=0.5, label=ONE)
    for number, (name, color) in enumerate(zip(SHOWN, COLORS, strict=False)):
        some = slice(4 + 8 * number, None, 8 * len(SHOWN))
        left.plot(steps[some], losses[name][some], "o", color=color, markersize=4, label=name)
    left.set(xlabel="optimizer step", ylabel="loss")
    left.legend(frameon=False, labelcolor=TEXT, fontsize=8, ncols=2)
    deviations = [np.abs(losses[name] / losses[ONE] - 1) for name in losses if name != ONE]
    largest = np.maximum.accumulate(np.max(deviations, axis=0))
    right.semilogy(steps, largest, color=COLORS[0], linewidth=1.5)
    right.annotate(
        f"{largest[-1]:.1e}", (steps[-1], largest[-1]), (0, 6), textcoords="offset points", color=TEXT, ha="right"
    )
    right.set(xlabel="optimizer step", title=f"{len(deviations)} layouts: largest\nrelative deviation so far")
    right.title.set_fontsize(9)
    right.set_ylim(1e-7, 1e-5)
    for axes in (left, right):
        style(axes)
    return figure


def fashion_mnist() -> Figure:
    """The test accuracy on Fashion-MNIST after each epoch: five seeds, three parallel layouts, and the three scripts
    that train models of timm.
    """
    figure = new_figure(6.4, 2.8)
    axes = figure.subplots()
    accuracies = read("fashion_mnist/fashion_mnist.json")
    kinds = {"5 seeds": "seed", "DP 2, PP 2, 1D 2": " 2", "train_dp.py and the other examples": ""}
    for color, (kind, words) in zip(COLORS, kinds.items(), strict=False):
        names = [name for name in accuracies if words in name]
        for number, curve in enumerate(accuracies.pop(name) for name in names):
            epochs, percent = range(1, len(curve) + 1), [100 * accuracy for accuracy in curve]
            axes.plot(epochs, percent, "-", color=color, linewidth=1, label=None if number else kind)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=8)
    style(axes).grid(color=TEXT, alpha=0.2)
    return figure


def quickstart() -> Figure:
    """The training and test loss, and the test accuracy, of the quickstart's run."""
    steps, evaluations = read_metrics(RESULTS / "quickstart")
    figure = new_figure(8, 3)
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], color=COLORS[0], linewidth=1, label="training")
    at = [r["step"] for r in evaluations]
    left.plot(at, [r["eval_loss"] for r in evaluations], "o-", color=COLORS[1], markersize=3, label="test")
    left.set(xlabel="optimizer step", ylabel="loss")
    left.legend(frameon=False, labelcolor=TEXT)
    accuracy = [100 * r["eval_accuracy"] for r in evaluations]
    right.plot(at, accuracy, "o-", color=COLORS[1], markersize=3)
    right.annotate(
        f"{accuracy[-1]:.1f} %", (at[-1], accuracy[-1]), (0, -16), textcoords="offset points", color=TEXT, ha="right"
    )
    right.set(xlabel="optimizer step", ylabel="test accuracy, %")
    for axes in (left, right):
        style(axes).grid(color=TEXT, alpha=0.2)
    return figure


def amp() -> Figure:
    """Peak memory and images per second of each mixed-precision mode on a CPU, in bfloat16, beside fp32."""
    rows = {
        row["config"].removeprefix("config_").removeprefix("AMP_"): row
        for row in read("caltech101_amp_cpu/amp.json")["rows"]
    }
    figure = new_figure(8, 2.6)
    left, right = figure.subplots(1, 2)
    draw_bars(left, {name: row["memory_gb"] for name, row in rows.items()}, "peak memory, GB", "%.2f")
    draw_bars(right, {name: row["images_per_s"] for name, row in rows.items()}, "images/s", "%.1f")
    return figure


def checkpoint() -> Figure:
    """For ViT-B and ViT-L, how long training stops for a checkpoint, and how long writing it in the background, its
    verification and a restart's loading take.
    """
    models = read("checkpoint/checkpoint.json")["models"]
    parts = {"training stops": "take", "write, in the background": "write", "verify": "verify", "load": "resume"}
    figure = new_figure(8, 2.4)
    for axes, (name, model) in zip(figure.subplots(1, len(models)), models.items(), strict=True):
        size = sum(model["bytes"].values()) / 1e9
        seconds = {part: statistics.median(model["seconds"][key]) for part, key in parts.items()}
        draw_bars(axes, seconds, f"{name}\n{size:.1f} GB, seconds", "%.2f")
    return figure


def predicted_and_measured() -> Figure:
    """Predicted against measured seconds of a step, for two models in 20 layouts on up to 8 processes of a CPU."""
    figure = new_figure(4.6, 4.2)
    axes = figure.subplots()
    ends = np.array([np.inf, 0.0])
    for color, (model, layouts) in zip(COLORS, read("planner_cpu/planner.json")["seconds"].items(), strict=False):
        measured, predicted = (
            np.array([statistics.median(seconds[side]) for seconds in layouts.values()])
            for side in ("measured", "predicted")
        )
        axes.plot(measured, predicted, "o", color=color, markersize=5, alpha=0.8, label=model)
        ends = np.array([min(ends[0], measured.min()), max(ends[1], measured.max())])
    ends *= (0.8, 1.25)
    axes.plot(ends, ends, color=TEXT, linewidth=1)
    for factor in (0.75, 1.25):
        axes.plot(ends, factor * ends, ":", color=TEXT, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    ticks = (0.3, 0.5, 1, 2, 3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_title("one point per layout; dotted: ± 25 %", fontsize=9)
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=8)
    style(axes)
    return figure


# ---- From dry runs and schedules -------------------------------------------------------------------------------------


def dry_run(processes: int, values: dict[str, Any], config: str = CONFIG) -> list[StepPlan]:
    """The plans of a layout of train_hybrid.py, by stage."""
    flags = ["--dry-run", "--world_size", str(processes), *set_flags(values)]
    argv = ["--config", str(FOLDER / config), "--output", tempfile.gettempdir(), *flags]
    return report.plan(train_hybrid.main, launch.parse(argv, script="train_hybrid", check=train_hybrid.check_vit))


def layout_example() -> Figure:
    """Eight ranks as two replicas of two pipeline stages, each split over two ranks by 1D tensor parallelism: the
    ranks of each stage, and the pieces of weights that each rank holds.
    """
    return report.draw_layout(dry_run(8, {}, "configs/config_hybrid_parallel.py"))


def tensor_modes() -> Figure:
    """What 1D, 2D, 2.5D and 3D tensor parallelism do to two weight matrices and to an activation: which rank holds
    which piece.
    """
    modes = {
        "1D, 4 ranks": tensor("1d", 4),
        "2D, 4 ranks": tensor("2d", 4),
        "2.5D, 8 ranks": tensor("2.5d", 8, depth=2),
        "3D, 8 ranks": tensor("3d", 8),
    }
    figure = new_figure(8.4, 10.6)
    for number, (row, (name, values)) in enumerate(zip(figure.subplots(4, 3), modes.items(), strict=True)):
        processes = values["parallel.tensor.size"]
        plan = dry_run(processes, {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "DEPTH": 1, "fp16": None, **values})[
            0
        ]
        for axes, (title, pieces) in zip(row, report.tensor_pieces(plan).items(), strict=True):
            draw_pieces(axes, pieces, range(processes), title if number == 0 else "")
        row[0].set_ylabel(name, color=TEXT, fontsize=12)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    function.__name__: function
    for function in (
        *(one_curve, quickstart, fashion_mnist, amp, checkpoint, predicted_and_measured),
        *(layout_example, tensor_modes),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: docs/pictures)")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same picture on every machine
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.names or PICTURES:
        save(PICTURES[name](), args.output / f"{name}.png")


if __name__ == "__main__":
    main()
