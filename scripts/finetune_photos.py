"""Fine-tune a ViT on a few photographs with five seeds, beside the same training from scratch and nearest neighbours.

    python scripts/sample_data.py tuxpaint DATA
    python scripts/sample_data.py dinov2 WEIGHTS
    python scripts/finetune_photos.py DATA WEIGHTS RUNS [--result results/finetune_photos]

Minutes for each of the ten trainings on 2 free CPU cores. A seed is also that of its split: a fifth of each class is
for testing. Each training has a run directory in RUNS, so that a second call resumes where the first was stopped. They
are those of vit_caltech101_amp/config/config_finetune_photos.py; from scratch nothing is frozen, and LayerScale begins
with 1, as without it. The nearest neighbours are the five with the most similar pixels, at 32 x 32, by scikit-learn.

Writes finetune.md (the table), finetune.json (the accuracy of each run after each epoch), finetune.png (their mean),
each run's log, and provenance.json.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from colossal_vit.data.decoding import read_rgb
from colossal_vit.drawing import styled
from colossal_vit.provenance import ResultFolder
from matplotlib.figure import Figure
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from benchmarks.harness import ROOT
from train_fashion_mnist import train

SCRIPT, CONFIG = "vit_caltech101_amp/train.py", "vit_caltech101_amp/config/config_finetune_photos.py"
SEEDS = range(5)
SIDE = 32  # pixels, of what nearest neighbours compare


def split(data: Path, folder: Path, seed: int) -> None:
    """Link the images of class folders into `train` and `val`, a fifth of each class, but for links that are there."""
    paths = sorted(data.glob("[!.]*/*.png"))
    parts = train_test_split(paths, test_size=0.2, random_state=seed, stratify=[path.parent.name for path in paths])
    for part, chosen in zip(("train", "val"), parts, strict=True):
        for path in chosen:
            link = folder / part / path.parent.name / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(path.resolve())


def neighbours_accuracy(folder: Path) -> float:
    """Return which share of the images in `val` the nearest neighbours in `train` tell the class of."""

    def read(part: str) -> tuple[np.ndarray, list[str]]:
        paths = sorted((folder / part).glob("*/*.png"))
        pixels = [np.asarray(read_rgb(path).resize((SIDE, SIDE)), np.float32).ravel() for path in paths]
        return np.stack(pixels), [path.parent.name for path in paths]

    return float(KNeighborsClassifier(n_neighbors=5).fit(*read("train")).score(*read("val")))


def make_table(accuracies: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Return mean, deviation and each seed of the last accuracies, as Markdown.

    Args:
        accuracies: for each kind of training, of each seed, after each epoch.
    """
    lines = ["| test accuracy | mean ± standard deviation | of each seed |", "| --- | ---: | --- |"]
    for kind, curves in accuracies.items():
        last = [curve[-1] for curve in curves]
        spread = f" ± {statistics.stdev(last):.1%}" if len(last) > 1 else ""
        each = ", ".join(f"{accuracy:.1%}" for accuracy in last)
        lines.append(f"| {kind} | {statistics.mean(last):.1%}{spread} | {each} |")
    return lines


def draw(accuracies: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Draw the mean over the seeds after each epoch, and lines where there are no epochs."""
    with styled():
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.subplots()
        for kind, curves in accuracies.items():
            mean = 100 * np.mean(curves, axis=0)
            if len(mean) > 1:
                axes.plot(range(1, len(mean) + 1), mean, "o-", label=kind)
            else:
                axes.axhline(mean[0], linestyle="--", color="black", linewidth=1, label=kind)
        epochs = max(len(curves[0]) for curves in accuracies.values())
        axes.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100), xticks=range(1, epochs + 1, 2))
        figure.legend(loc="outside right center")
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the class folders that sample_data.py tuxpaint has written")
    parser.add_argument("weights", type=Path, help="the folder that sample_data.py dinov2 has written")
    parser.add_argument("runs", type=Path, help="folder of the run directories")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    result = ResultFolder(args.result)
    data, weights, runs = (path.resolve() for path in (args.data, args.weights, args.runs))
    kinds = {"fine-tuned": {"finetune.weights": str(weights)}, "from scratch": {"finetune": None, "LAYER_SCALE": 1.0}}
    accuracies: dict[str, list[list[float]]] = {}
    for seed in SEEDS:
        folder = runs / f"split_{seed}"
        split(data, folder, seed)
        found = {"5 nearest neighbours in pixels": [neighbours_accuracy(folder)]}
        for kind, values in kinds.items():
            output = runs / f"{kind.replace(' ', '_')}_{seed}"
            found[kind] = train(folder, output, SCRIPT, CONFIG, "", 1, values | {"SEED": seed})
            if args.result:
                log = output.with_suffix(".log").read_text()
                for path, said in ((ROOT, "."), (runs, "RUNS"), (data, "DATA"), (weights, "WEIGHTS")):
                    log = log.replace(str(path), said)
                args.result.mkdir(parents=True, exist_ok=True)
                (args.result / output.with_suffix(".log").name).write_text(log)
        for kind, curve in found.items():
            accuracies.setdefault(kind, []).append(curve)
            result.print(f"seed {seed}, {kind}: {curve[-1]:.1%}")
    result.finish("finetune", make_table(accuracies), accuracies)
    if args.result:
        draw(accuracies, args.result / "finetune.png")


if __name__ == "__main__":
    main()
