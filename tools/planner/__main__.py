"""Find the fastest layouts of a training.

    python -m tools.planner SCRIPT --config FILE [--machine NAME] [--world_size N] [--set KEY=VALUE ...]

SCRIPT is the path of a train script, and what follows its own command line. For a GPU of the table, steps are predicted
from its data sheet; with `--machine here` this machine trains in the ten layouts that look best, a few steps in each.
Nothing is predicted of torch.compile.
"""

import argparse
import sys
from pathlib import Path

from colossal_vit.errors import Parser, run_command

from tools.planner import command
from tools.planner.machines import HERE, MACHINES, SPECS, parse_specs


def main() -> int:
    parser = Parser(prog="python -m tools.planner", description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="path of the train script")
    parser.add_argument(
        "--machine",
        default="h100",
        metavar="NAME",
        help=f"whose speed to predict: {', '.join(MACHINES)}, or any other name with --spec; or {HERE}, to train and "
        "measure (default %(default)s)",
    )
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="KEY=NUMBER",
        help=f"another value for the machine, or one of a machine that is not in the table: {', '.join(SPECS)}",
    )
    args, words = parser.parse_known_args()
    command.run(args.script, args.machine, parse_specs(args.spec), words)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("planner", main))
