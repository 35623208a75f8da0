"""What all benchmarks share: sides that take turns, processes, table, result.

A benchmark has cases, and a case has sides: functions that measure once, and return a number for each quantity. The
sides of a case are measured in turns, round by round, so that other load on the machine affects all of them alike. They
are compared with the case's first side, in the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from colossal_vit.provenance import ResultFolder

ROOT = Path(__file__).resolve().parents[2]

Values = dict[str, float | str | None]  # by quantity, with its unit; words are not compared
Side = Callable[[int], Values]  # measures once, in the round of this number
Rounds = dict[str, list[Values]]  # by side


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders before those that are in it."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class Failed(Exception):
    """A side cannot be measured; the message says why."""


@dataclass(frozen=True)
class Case:
    """What is measured side by side.

    Attributes:
        sides: given the command line, returns the sides by name; the others are compared with the first.
        processes: how many processes the sides are measured in, as ranks under torchrun; each of them calls `sides`.
            None is for sides that start processes of their own, or need none.
        by_default: whether the case is measured without `--only`.
        once: whether one round is enough, since it measures no time.
        variables: of the environment of its processes.
    """

    sides: Callable[[argparse.Namespace], Mapping[str, Side]]
    processes: int | None = None
    by_default: bool = True
    once: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def measure(case: Case, args: argparse.Namespace, log: Callable[[str], None]) -> tuple[Rounds, dict[str, str]]:
    """Measure every side of a case in every round; the order is reversed from round to round.

    Returns:
        What each side measured, and why sides failed. A side that has failed is not measured again.
    """
    sides, num_rounds = case.sides(args), 1 if case.once else args.rounds
    found: Rounds = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for number in range(num_rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            if name in failed:
                continue
            try:
                found[name].append(sides[name](number))
                said = ", ".join(f"{key} {show(value)}" for key, value in found[name][-1].items())
            except Failed as error:
                said = failed[name] = str(error)
            log(f"round {number + 1} of {num_rounds}, {name}: {said}")
    return found, failed


def positive(text: str) -> int:
    """Convert a flag's value to an integer from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)


def show(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_ratio(values: list[float]) -> str:
    spread = f" ({min(values):.3f}, {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3f}{spread}" if values else ""


def median(rounds: list[Values], quantity: str) -> float | str | None:
    values = [values[quantity] for values in rounds if values.get(quantity) is not None]
    return statistics.median(values) if values and not isinstance(values[0], str) else next(iter(values), None)


def ratios(found: Rounds, name: str, quantity: str) -> list[float]:
    """Return what a side measured divided by what the first side did, by round."""
    pairs = [
        (own.get(quantity), other.get(quantity))
        for own, other in zip(found[name], next(iter(found.values())), strict=False)
    ]
    return [own / other for own, other in pairs if own is not None and other]


def make_table(found: Mapping[str, Rounds], failed: Mapping[str, Mapping[str, str]], compared: int) -> list[str]:
    """Return the medians of all rounds as a Markdown table, with a row for each side.

    Args:
        found, failed: what `measure` has returned, by case.
        compared: how many of the quantities are compared with those of the first side.
    """
    measured = [values for rounds in found.values() for of_side in rounds.values() for values in of_side]
    quantities = list(dict.fromkeys(key for values in measured for key, value in values.items() if value is not None))
    header = ["", "side", *quantities]
    header += [f"{quantity} ÷ first side's: median (min, max)" for quantity in quantities[:compared]]
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for case, rounds in found.items():
        for name in rounds:
            cells = [show(median(rounds[name], quantity)) for quantity in quantities]
            cells += [show_ratio(ratios(rounds, name, quantity)) for quantity in quantities[:compared]]
            if name in failed[case]:
                cells = [failed[case][name], *[""] * (len(cells) - 1)]
            lines.append([case, name, *cells])
    return [f"| {' | '.join(line)} |" for line in lines]


def draw(found: Mapping[str, Rounds], num_quantities: int, path: Path) -> None:
    """Draw the medians of the first quantities as bars, a panel for each."""
    from colossal_vit.drawing import styled  # no rank needs it
    from matplotlib.figure import Figure

    sides = {f"{case}: {name}": rounds for case, of_case in found.items() for name, rounds in of_case.items() if rounds}
    quantities = list(dict.fromkeys(key for rounds in sides.values() for key in rounds[0]))[:num_quantities]
    with styled():
        figure = Figure(figsize=(2.4 + 2 * num_quantities, 0.8 + 0.2 * len(sides)))
        panels = figure.subplots(1, num_quantities, squeeze=False, sharey=True)[0]
        for axes, quantity in zip(panels, quantities, strict=False):
            bars = axes.barh(list(sides), [median(rounds, quantity) or 0 for rounds in sides.values()])
            axes.bar_label(bars, fmt="%.3g", padding=3)
            axes.set_xlabel(quantity)
            axes.margins(x=0.2)
            axes.grid(axis="y", visible=False)
        panels[0].invert_yaxis()
        figure.savefig(path)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its cases, and what its command line has by default.

    Attributes:
        cases: given the command line, returns the cases by name.
        rounds: how many, by default.
        steps: how many optimizer steps a side makes in a round, by default; None if that is not its unit.
        flags: adds flags of its own to the parser.
        compared: how many of the quantities are compared between sides.
        summary: given what was found and the command line, returns lines of Markdown that go before the table.
    """

    cases: Callable[[argparse.Namespace], Mapping[str, Case]]
    rounds: int
    steps: int | None = None
    flags: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    compared: int = 1
    summary: Callable[[Mapping[str, Rounds], argparse.Namespace], list[str]] = lambda found, args: []

    def parser(self, name: str, description: str | None) -> argparse.ArgumentParser:
        program = Path(sys.argv[0]).name
        parser = argparse.ArgumentParser(
            f"{program} {name}" if program == "bench.py" else program,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--rounds", type=positive, default=self.rounds, help="default %(default)s")
        if self.steps:
            help_text = "optimizer steps of a side in a round (default %(default)s)"
            parser.add_argument("--steps", type=positive, default=self.steps, help=help_text)
        parser.add_argument("--only", nargs="+", metavar="CASE", help="measure only these cases")
        parser.add_argument("--list", action="store_true", help="name the cases, and measure nothing")
        parser.add_argument("--small", action="store_true", help="at the smallest size, to see that it works")
        parser.add_argument("--output", type=Path, default=ROOT / "runs/bench" / name, help="default %(default)s")
        parser.add_argument("--on-ranks", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
        self.flags(parser)
        return parser

    def run(self, name: str, description: str | None, argv: list[str]) -> int:
        """Measure as the command line says; returns the exit code: 1 if all sides of a case have failed."""
        parser = self.parser(name, description)
        args = parser.parse_args(argv)
        if args.small:
            args.rounds = args.steps = 1
        cases = self.cases(args)
        if args.on_ranks:
            return measure_as_rank(cases[args.on_ranks[0]], args)
        if unknown := set(args.only or ()) - cases.keys():
            parser.error(f"--only {' '.join(unknown)}: choose from {', '.join(cases)}")
        chosen = args.only or [name for name, case in cases.items() if case.by_default]
        if args.list:
            print("\n".join(cases))
            return 0
        output = args.output.resolve()
        result = ResultFolder(output, changes_allowed=not output.is_relative_to(ROOT / "results"))
        found, failed = {}, {}
        for case in chosen:
            result.print(f"===== {case}")
            if cases[case].processes is None:
                found[case], failed[case] = measure(cases[case], args, result.print)
            else:
                found[case], failed[case] = start_ranks(case, cases[case], result)
        table = [*self.summary(found, args), *make_table(found, failed, self.compared)]
        arguments = {key: str(value) for key, value in vars(args).items() if key not in ("output", "on_ranks", "list")}
        result.finish(name, table, {"arguments": arguments, "rounds": found, "failed": failed})
        draw(found, self.compared or 1, output / f"{name}.png")
        return int(any(not any(rounds.values()) for rounds in found.values()))


def start_ranks(name: str, case: Case, result: ResultFolder) -> tuple[Rounds, dict[str, str]]:
    """Start this program again as the ranks that measure a case; `result` logs what they print.

    Raises:
        SystemExit: if they fail.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
        command += [*sys.argv, "--on-ranks", name, scratch]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, env={**os.environ, **case.variables}, **options) as ranks:
            for line in ranks.stdout:
                result.print(line.rstrip("\n").replace(scratch, "SCRATCH"))
        if ranks.returncode:
            sys.exit(f"{name} on {case.processes} processes failed, see above")
        return tuple(json.loads((Path(scratch) / "found.json").read_text()))


def measure_as_rank(case: Case, args: argparse.Namespace) -> int:
    """Measure a case as one of the ranks of `start_ranks`, to which rank 0 reports."""
    from colossal_vit.launch.exits import Exits  # only ranks need it

    first = os.environ["RANK"] == "0"

    def report() -> None:
        found = measure(case, args, partial(print, flush=True) if first else lambda line: None)
        if first:
            (Path(args.on_ranks[1]) / "found.json").write_text(json.dumps(found))

    Exits().call(report)
    return 0
