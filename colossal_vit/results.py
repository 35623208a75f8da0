"""Read a run's `metrics.jsonl`, and draw its curves.

python -m colossal_vit.results RUN_DIRECTORY ...
"""

import os
import sys
from pathlib import Path
from typing import NotRequired

from colossal_vit import typed_json
from colossal_vit.errors import Parser, UserError, oserror_as_user_error, run_command
from colossal_vit.typed_json import RECORD, Count, Number, Positive
from typing_extensions import TypedDict

METRICS, CURVES = "metrics.jsonl", ("loss.png", "accuracy.png")  # in a run directory


class Step(TypedDict):
    """What is recorded of an optimizer step, see `hooks.metrics`; a norm that overflowed is no finite number."""

    __pydantic_config__ = RECORD
    step: Count
    epoch: Count
    loss: Number
    step_s: NotRequired[Positive]


class Evaluation(TypedDict):
    """What is recorded of an evaluation."""

    __pydantic_config__ = RECORD
    step: Count
    epoch: Count
    eval_loss: Number
    eval_accuracy: Number
    ema_loss: NotRequired[Number]
    ema_accuracy: NotRequired[Number]


def format_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return lines of a text table, with the first column aligned left and all others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (header, *rows)
    ]


def read_records(path: Path) -> tuple[list[tuple[bytes, Step | Evaluation]], list[str]]:
    """Return the records of a `metrics.jsonl`, each with its line, and what is wrong with each line that is none.

    Raises:
        OSError: if it cannot be read.
    """
    records, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            kind = Evaluation if b'"eval_loss"' in line else Step
            records.append((line, typed_json.parse(line, kind, f"{path}, line {number}")))
        except UserError as error:
            if line.endswith(b"\n"):  # else the run was killed while it wrote the line
                faults.append(str(error))
    return records, faults


def read_metrics(directory: Path) -> tuple[list[Step], list[Evaluation]]:
    """Return the records of a run's `metrics.jsonl`: those of steps, and those of evaluations; damaged lines are left
    out.

    Raises:
        OSError: if it cannot be read.
    """
    records = [record for _, record in read_records(directory / METRICS)[0]]
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def draw(directory: Path) -> None:
    """Write `loss.png` and `accuracy.png` into a run directory.

    Raises:
        OSError: if the directory has no `metrics.jsonl` or cannot be written.
    """
    from colossal_vit.drawing import as_text, styled  # takes a second to import; only one rank needs it, at the end
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    name = as_text(os.path.basename(os.path.abspath(directory)))  # that of "." is empty
    steps, evaluations = read_metrics(directory)
    curves = {
        "loss.png": ("loss", [("training", steps, "loss"), ("test", evaluations, "eval_loss")]),
        "accuracy.png": ("test accuracy", [("test", evaluations, "eval_accuracy")]),
    }
    if averaged := [record for record in evaluations if "ema_loss" in record]:
        for filename, key in (("loss.png", "ema_loss"), ("accuracy.png", "ema_accuracy")):
            curves[filename][1].append(("test, EMA", averaged, key))
    looks = {"training": "C0-", "test": "C1o-", "test, EMA": "C2o-"}
    for filename, (title, lines) in curves.items():
        with styled():
            figure = Figure(figsize=(6.4, 3.6))
            axes = figure.add_subplot(xlabel="optimizer step", ylabel=title, title=name)
            for label, records, key in lines:
                axes.plot([r["step"] for r in records], [r[key] for r in records], looks[label], label=label)
            if "accuracy" in title:
                axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.legend()
            figure.savefig(directory / filename)


def main() -> int:
    """Draw the curves of the runs that this process's command line names; returns the exit code."""
    parser = Parser(prog="python -m colossal_vit.results", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)

    def draw_all() -> int:
        for run in parser.parse_args().runs:
            with oserror_as_user_error(run):
                for fault in read_records(run / METRICS)[1]:
                    print(f"left out: {fault}", file=sys.stderr)
                draw(run)
        return 0

    return run_command("results", draw_all)


if __name__ == "__main__":
    sys.exit(main())
