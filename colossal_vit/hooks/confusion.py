"""What a model predicts for each test image: accuracy by class, the confusion matrix, the most confident mistakes."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from colossal_vit.compat.norms import at_least_fp32
from colossal_vit.data.batches import IGNORED, Loader, SampledLoader
from colossal_vit.data.samplers import own_outputs
from colossal_vit.engine.loop import Trainer
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.collectives import gather_object
from colossal_vit.run import Run
from colossalai.legacy.trainer.hooks import BaseHook
from colossalai.legacy.utils import is_no_pp_or_last_stage
from torch import Tensor

FOLDER = "evaluation"  # in the run directory
SHOWN, COLUMNS = 24, 6  # mistakes in the picture
MOST_NAMES = 40  # classes whose names fit beside the confusion matrix
MOST_COUNTS = 20  # classes whose counts fit into its cells


class Predictions(NamedTuple):
    """Predictions for images, each tensor of shape (N,).

    Attributes:
        rows: places of the images in the data set.
        labels: their classes.
        predicted: the most probable classes.
        confidence: their probabilities.
    """

    rows: Tensor
    labels: Tensor
    predicted: Tensor
    confidence: Tensor


def _name(loader: Loader, row: int) -> str:
    """Return what a test image is called: its path, or its place in the data set."""
    return loader.name_of(row) if isinstance(loader, SampledLoader) else f"image {row}"


def _write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


class ConfusionHook(BaseHook):
    """Writes what an evaluation has found into `evaluation` in the run directory, if there is one.

    These are `predictions.csv` (a row per test image), `classes.csv`, `confusion.csv`, `confusion.png` and
    `mistakes.png`.

    Args:
        run: from `main.start`.
    """

    def __init__(self, run: Run):
        super().__init__(Priority.READER)
        self.run = run

    def before_test(self, trainer: Trainer) -> None:
        self.parts: list[Predictions] = []
        self.number = 0

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        if is_no_pp_or_last_stage() and not trainer.evaluating_ema:
            micro_batches = getattr(trainer.engine.schedule, "num_microbatches", 1)
            own, rows = own_outputs(self.number, len(label), micro_batches)
            confidence, predicted = at_least_fp32(output).softmax(-1).max(-1)
            self.parts.append(Predictions(rows, label.cpu()[own], predicted.cpu(), confidence.cpu()))
        self.number += 1

    def after_test(self, trainer: Trainer) -> None:
        if trainer.evaluating_ema:
            return
        everyone = gather_object(self.parts)
        if not everyone or not self.run.output.exists():
            return
        rows, labels, predicted, confidence = map(
            torch.cat, zip(*(part for own in everyone for part in own), strict=True)
        )
        first = {row: place for place, row in enumerate(rows.tolist())}  # some ranks see the same images
        places = torch.tensor([first[row] for row in sorted(first) if labels[first[row]] != IGNORED])
        predictions = Predictions(*(part[places] for part in (rows, labels, predicted, confidence)))
        try:
            self._write(predictions, trainer.test_dataloader)
        except OSError as error:
            self.run.log.info(f"{self.run.output / FOLDER}: cannot be written: {error.strerror or error}")

    def _write(self, predictions: Predictions, loader: Loader) -> None:
        from colossal_vit.drawing import styled  # takes a second to import

        classes = self.run.data["classes"]
        names = list(map(str, range(classes))) if isinstance(classes, int) else classes
        count = max(len(names), int(predictions.predicted.max()) + 1)  # the model may have more classes than the data
        names = [*names, *map(str, range(len(names), count))]
        counts = torch.zeros(count, count, dtype=torch.int64)  # true, predicted
        counts.index_put_(
            (predictions.labels, predictions.predicted), torch.ones_like(predictions.predicted), accumulate=True
        )
        folder = self.run.output / FOLDER
        folder.mkdir(exist_ok=True)
        _write_table(
            folder / "predictions.csv",
            ["image", "true label", "predicted label", "probability"],
            (
                [_name(loader, row), names[label], names[predicted], f"{confidence:.6f}"]
                for row, label, predicted, confidence in zip(*(part.tolist() for part in predictions), strict=True)
            ),
        )
        classes = []
        for name, own, label in zip(names, counts, range(count), strict=True):
            images, right = int(own.sum()), int(own[label])
            wrong = own.index_fill(0, torch.tensor(label), 0)
            other = names[int(wrong.argmax())] if wrong.any() else ""
            classes.append([name, images, right, f"{right / images:.4f}" if images else "", other])
        _write_table(folder / "classes.csv", ["class", "images", "right", "accuracy", "mostly mistaken for"], classes)
        rows = ([name, *own.tolist()] for name, own in zip(names, counts, strict=True))
        _write_table(folder / "confusion.csv", ["true label / predicted label", *names], rows)
        with styled():
            self._draw_confusion(counts, names).savefig(folder / "confusion.png")
        wrong = torch.where(predictions.labels == predictions.predicted, -1.0, predictions.confidence)
        worst = wrong.argsort(descending=True)[: min(SHOWN, int((wrong >= 0).sum()))]
        (folder / "mistakes.png").unlink(missing_ok=True)  # of an earlier evaluation
        if len(worst) and isinstance(loader, SampledLoader):
            surest = Predictions(*(part[worst] for part in predictions))
            with styled():
                self._draw_mistakes(surest, loader, names).savefig(folder / "mistakes.png")
        self.run.log.info(f"predictions, accuracy by class, confusion and the most confident mistakes are in {folder}")

    def _draw_confusion(self, counts: Tensor, names: list[str]):
        from colossal_vit.drawing import as_text
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 7))
        title = as_text(self.run.output.name)
        axes = figure.add_subplot(xlabel="predicted label", ylabel="true label", title=title)
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        axes.grid(visible=False)
        colors = axes.imshow(shares.numpy(), cmap="viridis", vmin=0, vmax=1)
        figure.colorbar(colors, label="share of the true label's images")
        if len(names) <= MOST_COUNTS:
            for (label, predicted), images in np.ndenumerate(counts.numpy()):
                color = "black" if shares[label, predicted] > 0.6 else "white"  # viridis ends pale
                axes.text(predicted, label, f"{images:,}", ha="center", va="center", color=color)
        if len(names) <= MOST_NAMES:
            labels = list(map(as_text, names))
            axes.set_xticks(range(len(names)), labels, rotation=90)
            axes.set_yticks(range(len(names)), labels)
        return figure

    def _draw_mistakes(self, worst: Predictions, loader: SampledLoader, names: list[str]):
        from colossal_vit.drawing import as_text
        from matplotlib.figure import Figure

        rows = -(-len(worst.rows) // COLUMNS)
        figure = Figure(figsize=(12, 2.3 * rows))
        images, _ = loader.pick(worst.rows)
        mean, std = (value.cpu() / 255 for value in (loader.mean, loader.std))
        images = (images.float().cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
        grid = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for axes in grid:
            axes.axis("off")
        for axes, image, row, label, predicted, confidence in zip(grid, images, *worst, strict=False):
            axes.imshow(image.numpy())
            text = f"{names[predicted]} {confidence:.0%}, is {names[label]}"
            axes.set_title(as_text(f"{_name(loader, int(row))[-24:]}\n{text}"), fontsize=7)
        return figure
