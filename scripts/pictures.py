"""Draw the pictures of docs/pictures from results/ and from dry runs.

    python scripts/pictures.py [NAME ...]

Pages show 100 pixels for each inch. The docstring of each function in PICTURES says what its picture shows.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from colossal_vit.drawing import COLORS, NEUTRAL, TEXT, styled
from colossal_vit.dry_run import report
from colossal_vit.dry_run.meter import StepPlan
from colossal_vit.dry_run.pictures import draw_pieces
from colossal_vit.results import read_metrics
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "vit_cifar10_hybrid"))

import train_hybrid  # noqa: E402
from layouts import CONFIG, FOLDER, set_flags, tensor  # noqa: E402

ONE = "one process"  # as in check_layouts.py
SHOWN = ("DP 4", "PP 4", "1D 4", "2D 4", "2.5D 4")  # as points on its curve
RESULTS, OUTPUT = ROOT / "results", ROOT / "docs/pictures"


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text())


def new_figure(width: float, height: float, title: str, result: str = "") -> Figure:
    """Return a figure of so many inches; its title ends with the hardware on which the result was measured."""
    if result:
        hardware = read(f"{result}/provenance.json")["hardware"]
        title += f"; {hardware['cores']} cores, {hardware['cpu'].replace('(R)', '').removesuffix(' Processor')}"
    figure = Figure(figsize=(width, height))
    figure.suptitle(title, x=0.08 / width, ha="left")
    return figure


# ---- From results ----------------------------------------------------------------------------------------------------


def one_curve() -> Figure:
    """Draw the losses of one process as a line, and on it those of five parallel layouts as points, over 440 steps of
    SGD; beside it the largest relative difference of 11 layouts from one process so far. Dropout and drop path are on.
    """
    with open(RESULTS / "one_curve/losses.csv") as file:
        header, *rows = csv.reader(file)
    values = np.array(rows, float)
    steps, losses = values[:, 0], dict(zip(header[1:], values[:, 1:].T, strict=True))
    figure = new_figure(6.4, 2.4, "small ViT, fp32, digits", "one_curve")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.plot(steps, losses[ONE], color=NEUTRAL, linewidth=2, label=ONE)
    for number, name in enumerate(SHOWN):
        some = slice(4 + 8 * number, None, 8 * len(SHOWN))
        left.plot(steps[some], losses[name][some], "o", label=name)
    left.set(xlabel="optimizer step", ylabel="training loss", ylim=(0, 3))
    left.legend(ncols=2, handlelength=1, columnspacing=1, loc="upper right")
    differences = [np.abs(losses[name] / losses[ONE] - 1) for name in losses if name != ONE]
    largest = np.maximum.accumulate(np.max(differences, axis=0))
    right.semilogy(steps, largest, color=TEXT)
    words = f"{len(differences)} layouts: at most {largest[-1]:.1e}"
    right.annotate(words, (steps[-1], largest[-1]), (0, 3), textcoords="offset points", ha="right")
    right.set(xlabel="optimizer step", ylabel="largest difference so far", ylim=(1e-7, 2e-5))
    right.set_yticks([1e-7, 1e-6, 1e-5], ["1e-7", "1e-6", "1e-5"])
    return figure


def fashion_mnist() -> Figure:
    """Draw the test accuracy on Fashion-MNIST after each epoch: five seeds, three parallel layouts, and the three
    scripts that train models of timm.
    """
    figure = new_figure(6.4, 2.8, "Fashion-MNIST, 10,000 test images", "fashion_mnist")
    axes = figure.subplots()
    accuracies = read("fashion_mnist/fashion_mnist.json")
    kinds = {
        "train_hybrid.py, one process, 5 seeds": "seed",
        "train_hybrid.py, DP 2, PP 2, 1D 2": " 2",
        "the 3 scripts that train timm's ViT": "",
    }
    for color, (kind, words) in zip(COLORS, kinds.items(), strict=False):
        names = [name for name in accuracies if words in name]
        for number, curve in enumerate(accuracies.pop(name) for name in names):
            epochs, percent = range(1, len(curve) + 1), [100 * accuracy for accuracy in curve]
            axes.plot(epochs, percent, color=color, linewidth=1, label=None if number else kind)
    axes.set(xlabel="epoch", ylabel="test accuracy, %", xticks=epochs)
    axes.legend()
    return figure


def draw_run(result: str, title: str) -> Figure:
    """Draw the training and test loss, and the test accuracy, of a run."""
    steps, evaluations = read_metrics(RESULTS / result)
    figure = new_figure(6.4, 2.6, title, result)
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], linewidth=1, label="training")
    at = [r["step"] for r in evaluations]
    left.plot(at, [r["eval_loss"] for r in evaluations], "o-", label="test")
    left.set(xlabel="optimizer step", ylabel="loss", ylim=0)
    left.legend()
    accuracy = [100 * r["eval_accuracy"] for r in evaluations]
    right.plot(at, accuracy, "o-", color=COLORS[1])
    last = at[-1], accuracy[-1]
    right.annotate(f"{accuracy[-1]:.2f} %", last, (0, -16), textcoords="offset points", ha="right")
    right.set(xlabel="optimizer step", ylabel="test accuracy, %", ylim=(0, 104))
    return figure


def quickstart() -> Figure:
    """Draw the loss and accuracy of the quickstart's run."""
    return draw_run("quickstart", "1,437 digits, two pipeline stages")


def imagenet_sample() -> Figure:
    """Draw the loss and accuracy of the run of scripts/imagenet_sample.sh."""
    return draw_run("imagenet_sample", "1,437 digits as TFRecords, DALI, two data-parallel ranks")


def checkpoint() -> Figure:
    """Draw for ViT-B and ViT-L how long training stops for a checkpoint, and how long writing it in the background, its
    verification and a restart's loading take.
    """
    parts = {"training stops": "training stops", "write, in the background": "write", "verify": "verify"}
    parts |= {"load": "restore"}
    figure = new_figure(6.4, 2.6, "one checkpoint, median of 5", "checkpoint")
    axes = figure.subplots()
    for number, (name, sides) in enumerate(read("checkpoint/checkpoint.json")["rounds"].items()):
        (rounds,) = sides.values()
        seconds = [statistics.median(each[f"{part}, s"] for each in rounds) for part in parts.values()]
        label = f"{name}, {sum(size for part, size in rounds[0].items() if part.endswith('MB')) / 1e3:.1f} GB"
        bars = axes.barh(np.arange(len(parts)) + 0.4 * number, seconds, 0.38, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_yticks(np.arange(len(parts)) + 0.2, list(parts))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.legend()
    return figure


# ---- From dry runs ---------------------------------------------------------------------------------------------------


def dry_run(processes: int, values: dict[str, Any], config: str = CONFIG) -> list[StepPlan]:
    """Return the plans of a layout of train_hybrid.py, by stage."""
    flags = ["--dry-run", "--world_size", str(processes), *set_flags(values)]
    argv = ["--config", str(FOLDER / config), "--output", tempfile.gettempdir(), *flags]
    return report.plan_stages(partial(train_hybrid.SCRIPT.build_fake, train_hybrid.SCRIPT.parse(argv)))


def layout_example() -> Figure:
    """Eight ranks as two replicas of two pipeline stages, each split over two ranks by 1D tensor parallelism: the
    ranks of each stage, and the pieces of weights that each rank holds.
    """
    return report.draw_layout(dry_run(8, {}, "configs/config_hybrid_parallel.py"))


def tensor_modes() -> Figure:
    """Draw what 1D, 2D, 2.5D and 3D tensor parallelism do to two weight matrices and to an activation: which rank
    holds which piece.
    """
    modes = {
        "1D, 4 ranks": tensor("1d", 4),
        "2D, 4 ranks": tensor("2d", 4),
        "2.5D, 8 ranks": tensor("2.5d", 8, depth=2),
        "3D, 8 ranks": tensor("3d", 8),
    }
    titles = ("fc1 weight", "fc2 weight", "activation")
    figure = new_figure(
        6.4, 3.4, "numbers: ranks that hold a piece; weights: outputs × inputs; activation: images × width"
    )
    for part, (name, values) in zip(figure.subfigures(2, 2).flat, modes.items(), strict=True):
        ranks = range(values["parallel.tensor.size"])
        (found,) = dry_run(
            len(ranks), {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "DEPTH": 1, "fp16": None, **values}
        )
        part.suptitle(name, fontweight="bold", x=0.025, ha="left")
        for axes, title, pieces in zip(part.subplots(1, 3), titles, report.tensor_pieces(found).values(), strict=True):
            draw_pieces(axes, pieces, ranks, title)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    function.__name__: function
    for function in (
        *(one_curve, quickstart, imagenet_sample, fashion_mnist, checkpoint, layout_example, tensor_modes),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: docs/pictures)")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same picture on every machine
    args.output.mkdir(parents=True, exist_ok=True)
    with styled():
        for name in args.names or PICTURES:
            PICTURES[name]().savefig(args.output / f"{name}.png")


if __name__ == "__main__":
    main()
