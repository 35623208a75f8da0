"""What every script that measures something does: provenance, sides in turns, a log, a table, a result."""

import json
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colossal_vit.parallel.ranks import say
from colossal_vit.results import provenance, write_origin


class Benchmark:
    """The result of a script: its provenance, which is that of the start, what it says and what it has measured.

    Args:
        folder: where the result is kept, made if need be; nothing is kept without one.
        changes_allowed: see `provenance`.

    Attributes:
        origin: what `provenance` says of the command line; None without a folder.
        log: what log.txt will hold.

    Raises:
        SystemExit: with one line, if the result is kept and the working tree differs from its commit.
    """

    def __init__(self, folder: Path | None, changes_allowed: bool = False):
        self.folder = folder
        self.origin = provenance(shlex.join(["python", *sys.argv]), changes_allowed) if folder else None
        self.log = ""

    def say(self, line: str) -> None:
        """Print a line and keep it for log.txt."""
        say(line, sys.stdout)
        self.log += line + "\n"

    def write(self, name: str, table: list[str], details: Any) -> None:
        """Keep `<name>.md`, `<name>.json`, `provenance.json` and, if anything was said, `log.txt`.

        Args:
            name: of the table and of the details.
            table: lines of Markdown.
            details: what was measured, in full; goes into JSON.
        """
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.md").write_text("\n".join(table) + "\n")
            (self.folder / f"{name}.json").write_text(json.dumps(details, indent=2) + "\n")
            write_origin(self.folder, self.origin, self.log)

    def finish(self, name: str, table: list[str], details: Any) -> None:
        """Print the table and `write`."""
        say("\n".join(table), sys.stdout)
        self.write(name, table, details)


def in_turns(sides: Iterable[str], number: int) -> list[str]:
    """The sides in the order of a round: as they are in even rounds, the last one first in odd ones."""
    return list(sides)[:: -1 if number % 2 else 1]


def spread(values: Iterable[float], form: str) -> list[str]:
    """Median, minimum and maximum, each formatted as `form` says, for example `.2f`."""
    values = list(values)
    return [format(value, form) for value in (statistics.median(values), min(values), max(values))]
