"""What the benchmark scripts share: provenance, alternating order, log, table, result files."""

import json
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colossal_vit import streams
from colossal_vit.parallel.ranks import write_line
from colossal_vit.results import provenance, write_origin


class Benchmark:
    """Collects a benchmark's log and writes its result files, with the provenance taken at the start.

    Args:
        folder: where to write the result, created if missing; None writes nothing.
        changes_allowed: see `provenance`.

    Attributes:
        origin: the `provenance` of this command line; None without a folder.
        log: the contents of log.txt so far.

    Raises:
        SystemExit: with one line, if there is a folder and the working tree differs from its commit.
    """

    def __init__(self, folder: Path | None, changes_allowed: bool = False):
        streams.protect()
        self.folder = folder
        self.origin = provenance(shlex.join(["python", *sys.argv]), changes_allowed) if folder else None
        self.log = ""

    def print(self, line: str) -> None:
        """Print a line and append it to the log."""
        write_line(line, sys.stdout)
        self.log += line + "\n"

    def write(self, name: str, table: list[str], details: Any) -> None:
        """Write `<name>.md`, `<name>.json`, `provenance.json` and, unless the log is empty, `log.txt`.

        Args:
            name: the stem of both file names.
            table: lines of Markdown.
            details: all measurements, JSON-serialisable.
        """
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.md").write_text("\n".join(table) + "\n")
            (self.folder / f"{name}.json").write_text(json.dumps(details, indent=2) + "\n")
            write_origin(self.folder, self.origin, self.log)

    def finish(self, name: str, table: list[str], details: Any) -> None:
        """Print the table, then `write`."""
        write_line("\n".join(table), sys.stdout)
        self.write(name, table, details)


def in_turns(sides: Iterable[str], number: int) -> list[str]:
    """The order of the contenders in round `number`: as given in even rounds, reversed in odd ones."""
    return list(sides)[:: -1 if number % 2 else 1]


def spread(values: Iterable[float], form: str) -> list[str]:
    """Median, minimum and maximum, each formatted with the format specification `form`, for example `.2f`."""
    values = list(values)
    return [format(value, form) for value in (statistics.median(values), min(values), max(values))]
