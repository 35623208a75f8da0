"""Curves of a run, drawn from its `metrics.jsonl`.

python -m colossal_vit.report RUN_DIRECTORY ...
"""

import json
import sys
from pathlib import Path


def read_metrics(directory: Path) -> tuple[list[dict], list[dict]]:
    """The records of a run's `metrics.jsonl`: those of steps, and those of evaluations."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def draw(directory: Path) -> None:
    """Write `loss.png` and `accuracy.png` into a run directory.

    Raises:
        OSError: if the directory has no `metrics.jsonl` or cannot be written.
    """
    from matplotlib.figure import Figure  # imports for a second; one rank needs it, at the end

    steps, evaluations = read_metrics(directory)
    curves = {
        "loss.png": ("loss", [("training", steps, "loss"), ("test", evaluations, "eval_loss")]),
        "accuracy.png": ("test accuracy", [("test", evaluations, "eval_accuracy")]),
    }
    for filename, (title, lines) in curves.items():
        figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
        axes = figure.add_subplot(xlabel="optimizer step", ylabel=title, title=f"{directory.name}: {title}")
        for label, records, key in lines:
            marker = "o" if records is evaluations else None
            axes.plot([r["step"] for r in records], [r[key] for r in records], label=label, marker=marker, markersize=3)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(directory / filename)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name))
