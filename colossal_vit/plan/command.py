"""What a train script does with `--dry-run` and `--plan`."""

from collections.abc import Callable
from typing import Any

from colossal_vit.launch.flags import Arguments
from colossal_vit.plan import report, search


def run(main: Callable[[Arguments], Any], args: Arguments) -> None:
    """Print what a script's command line asks for; its `main` is called in forks."""
    (report.report if args.plan is None else search.report_plan)(main, args)
