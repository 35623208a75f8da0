"""Predicted and measured step times on this machine, for two models in all layouts of check_layouts.py.

About an hour on 2 CPU cores. On 1, 2, 4 and 8 processes, in each round the machine is calibrated for the model as
`--plan here` does it, each layout is predicted, and then trained: the median of its steps counts, without the wait for
data. Nothing is fitted to the measured layouts. The first table has the errors of the medians over the rounds, and how
much slower than the fastest layout the predicted winner is, for each number of processes.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from colossal_vit.plan import calibration
from colossal_vit.plan.enumeration import own_layout
from colossal_vit.plan.request import request_of
from colossal_vit.plan.search import Predictor
from scipy.stats import spearmanr

import train_hybrid
from benchmarks.harness import Benchmark, Case, Rounds, Side, Values, median
from benchmarks.training import HYBRID, train
from layouts import CONFIG, LAYOUTS, MODEL, set_flags

SIZES: dict[str, dict[str, Any]] = {
    "65 tokens, width 256, 8 blocks": dict(PATCH_SIZE=4, HIDDEN_SIZE=256, DEPTH=8, NUM_HEADS=4),
    "17 tokens, width 512, 4 blocks": dict(PATCH_SIZE=8, HIDDEN_SIZE=512, DEPTH=4, NUM_HEADS=8),
}
ALL_LAYOUTS = {"one process": (1, {}), **LAYOUTS}
UNCOUNTED = 2  # first steps
PREDICTED, MEASURED = "predicted, s", "measured, s"


def flags_of(model: str, layout: str) -> list[str]:
    values = {"parallel.pipeline": 1, **MODEL, **SIZES[model], **ALL_LAYOUTS[layout][1], "zero": None}
    return ["--config", str(HYBRID / CONFIG), *set_flags(values)]


@cache
def predict(model: str, num_ranks: int, number: int) -> dict[str, float]:
    """Seconds of a step of each layout of so many processes, with this machine calibrated once for the round."""
    requests = {}
    for layout, (size, _) in ALL_LAYOUTS.items():
        if size == num_ranks:
            argv = [*flags_of(model, layout), "--plan", "here", "--world_size", str(num_ranks)]
            args = train_hybrid.SCRIPT.parse(argv)
            requests[layout] = request_of(train_hybrid.build, args)
    choices = {layout: own_layout(request.config, num_ranks) for layout, request in requests.items()}
    request = next(iter(requests.values()))
    with tempfile.TemporaryDirectory() as folder:
        request = request._replace(args=request.args.replace(output=Path(folder)))
        trace = cache(request.trace)
        here = calibration.measured(request, choices.values(), trace)
    predictor = Predictor(request.config, here, trace)
    return {layout: predictor.predict(choice).seconds for layout, choice in choices.items()}


def compare(model: str, layout: str, num_ranks: int, steps: int, number: int) -> Values:
    predicted = predict(model, num_ranks, number)[layout]
    flags = [*flags_of(model, layout), "--max-steps", str(UNCOUNTED + steps)]
    records = train("vit_cifar10_hybrid/train_hybrid.py", flags, ranks=num_ranks, OMP_NUM_THREADS="1")
    measured = statistics.median(record["step_s"] - record["data_s"] for record in records[UNCOUNTED:])
    return {PREDICTED: predicted, MEASURED: measured}


def sides(model: str, num_ranks: int, args: argparse.Namespace) -> dict[str, Side]:
    layouts = [layout for layout, (size, _) in ALL_LAYOUTS.items() if size == num_ranks]
    return {layout: partial(compare, model, layout, num_ranks, args.steps) for layout in layouts}


def errors(found: Mapping[str, Rounds]) -> list[str]:
    """The errors of each model, over all numbers of processes."""
    lines = ["| model | median error | largest | rank correlation | winner ÷ fastest measured |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for model in SIZES:
        groups = [rounds for case, rounds in found.items() if case.startswith(model)]
        pairs = [[(median(of, PREDICTED), median(of, MEASURED)) for of in rounds.values()] for rounds in groups]
        every = [pair for group in pairs for pair in group]
        if len(every) > 1:
            sizes = [abs(predicted / measured - 1) for predicted, measured in every]
            winners = [min(group)[1] / min(measured for _, measured in group) for group in pairs]
            lines.append(
                f"| {model} | {statistics.median(sizes):.1%} | {max(sizes):.1%} | "
                f"{spearmanr(*zip(*every, strict=True)).statistic:.3f} | "
                f"{', '.join(f'{ratio:.2f}' for ratio in winners)} |"
            )
    return [*lines, ""]


def cases(args: argparse.Namespace) -> dict[str, Case]:
    models, numbers = (list(SIZES)[1:], (1, 2)) if args.small else (SIZES, (1, 2, 4, 8))
    pairs = [(model, number) for model in models for number in numbers]
    return {f"{model}; on {number}": Case(partial(sides, model, number)) for model, number in pairs}


BENCHMARK = Benchmark(cases, rounds=2, steps=6, compared=0, summary=errors)
