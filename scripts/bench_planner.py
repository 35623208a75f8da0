"""Predicted and measured step times on this machine, for two models in all layouts of check_layouts.py.

    python scripts/bench_planner.py [--steps N] [--rounds N] [--only MODEL ...] [--output results/planner_cpu]

About 35 minutes on 2 CPU cores. On 1, 2, 4 and 8 processes, the machine is calibrated for the model as `--plan here`
does it, each layout is predicted, and then trained: the median of its steps counts. Calibration and training take turns
in rounds, since the speed of a machine changes; the medians over the rounds are compared. Nothing is fitted to the
measured layouts.

Writes planner.md (the tables), planner.json (every number), log.txt and provenance.json.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "vit_cifar10_hybrid")]

from colossal_vit import launch  # noqa: E402
from colossal_vit.plan import search  # noqa: E402
from colossal_vit.plan.enumeration import own_layout  # noqa: E402
from colossal_vit.plan.search import Predictor  # noqa: E402
from colossal_vit.provenance import ResultFolder  # noqa: E402
from colossal_vit.results import read_metrics  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

import conftest  # noqa: E402, F401 one thread and no GPU, which forks could not share; unsets DATA
import fork_ranks  # noqa: E402
import train_hybrid  # noqa: E402
from check_layouts import LAYOUTS, MODEL, set_flags  # noqa: E402

SCRIPT = "vit_cifar10_hybrid/train_hybrid.py"
CONFIG = str(ROOT / "vit_cifar10_hybrid/configs/config_pipeline_parallel.py")
SIZES: dict[str, dict[str, Any]] = {
    "65 tokens, width 256, 8 blocks": dict(PATCH_SIZE=4, HIDDEN_SIZE=256, DEPTH=8, NUM_HEADS=4),
    "17 tokens, width 512, 4 blocks": dict(PATCH_SIZE=8, HIDDEN_SIZE=512, DEPTH=4, NUM_HEADS=8),
}
ALL_LAYOUTS = {"one process": (1, {}), **LAYOUTS}
UNCOUNTED = 2  # first steps


def flags(model: str, layout: str) -> list[str]:
    values = {"parallel.pipeline": 1, **MODEL, **SIZES[model], **ALL_LAYOUTS[layout][1], "zero": None}
    return ["--config", CONFIG, *set_flags(values)]


def predict(model: str, layouts: list[str], num_ranks: int, traces: dict) -> dict[str, float]:
    """Seconds of a step of each layout, with this machine calibrated again; `traces` keeps those of the model."""
    requests = {}
    for layout in layouts:
        argv = [*flags(model, layout), "--plan", "here", "--world_size", str(num_ranks)]
        args = launch.parse(argv, script="train_hybrid", check=train_hybrid.check_vit)
        requests[layout] = search.request_of(train_hybrid.main, args)
    choices = {layout: own_layout(request.config, num_ranks) for layout, request in requests.items()}
    request = requests[layouts[0]]
    for choice in choices.values():
        if choice.tensor not in traces:
            traces[choice.tensor] = search.record(request, choice.tensor)
    with tempfile.TemporaryDirectory() as folder:
        request = request._replace(args=request.args.replace(output=Path(folder)))
        here = search.measured(request, choices.values())
    predictor = Predictor(request.config, here, traces)
    return {layout: predictor.predict(choice).seconds for layout, choice in choices.items()}


def measure(model: str, layout: str, steps: int) -> float:
    """The median of the seconds of a step, without the wait for data.

    Raises:
        SystemExit: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [*flags(model, layout), "--output", folder, "--max-steps", str(UNCOUNTED + steps)]
        done = fork_ranks.run(SCRIPT, argv, ALL_LAYOUTS[layout][0])
        if any(done.codes):
            sys.exit(f"{layout} failed:\n{done}")
        records = read_metrics(Path(folder))[0][UNCOUNTED:]
    return statistics.median(record["step_s"] - record["data_s"] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a layout in a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of calibration and training (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), help="these models")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="these numbers of processes")
    parser.add_argument("--output", type=Path, default=ROOT / "results/planner_cpu", help="where the result goes")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in args.only:
        traces: dict = {}
        for num_ranks in args.ranks:
            layouts = [name for name, (size, _) in ALL_LAYOUTS.items() if size == num_ranks]
            of_model = found.setdefault(model, {})
            for number in range(args.rounds):
                predicted = predict(model, layouts, num_ranks, traces)
                for layout in layouts:
                    seconds = of_model.setdefault(layout, {"predicted": [], "measured": []})
                    seconds["predicted"].append(predicted[layout])
                    seconds["measured"].append(measure(model, layout, args.steps))
                    benchmark.print(
                        f"{model}, {layout}, round {number + 1}: predicted {predicted[layout]:.3f} s, "
                        f"measured {seconds['measured'][-1]:.3f} s"
                    )

    # ---- Tables ----------------------------------------------------------------------------------------------------
    table = [
        "| model | processes | layout | predicted, s | measured, s | error |",
        "| --- | ---: | --- |" + " ---: |" * 3,
    ]
    summary = ["| model | median error | largest | rank correlation | winner ÷ fastest measured |"]
    summary += ["| --- | ---: | ---: | ---: | ---: |"]
    for model, layouts in found.items():
        medians = {name: [statistics.median(each) for each in of.values()] for name, of in layouts.items()}
        errors = {name: predicted / measured - 1 for name, (predicted, measured) in medians.items()}
        for name, (predicted, measured) in medians.items():
            cells = f"{predicted:.3f} | {measured:.3f} | {errors[name]:+.0%}"
            table.append(f"| {model} | {ALL_LAYOUTS[name][0]} | {name} | {cells} |")
        winners = []
        for num_ranks in args.ranks:
            names = [name for name in medians if ALL_LAYOUTS[name][0] == num_ranks]
            winner = min(names, key=lambda name: medians[name][0])
            winners.append(medians[winner][1] / min(medians[name][1] for name in names))
        sizes = [abs(error) for error in errors.values()]
        correlation = spearmanr(*zip(*medians.values(), strict=True)).statistic if len(medians) > 1 else float("nan")
        summary.append(
            f"| {model} | {statistics.median(sizes):.1%} | {max(sizes):.1%} | {correlation:.3f} | "
            f"{', '.join(f'{ratio:.2f}' for ratio in winners)} |"
        )
    benchmark.finish("planner", [*summary, "", *table], {"seconds": found, "sizes": SIZES, "steps": args.steps})


if __name__ == "__main__":
    main()
