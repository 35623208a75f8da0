"""The command line that all train scripts share."""

import argparse
from pathlib import Path

import colossalai.legacy as colossalai
from colossal_vit.errors import Parser
from colossal_vit.launch.launchers import LAUNCHERS

DEFAULT_TIMEOUT = 300.0  # seconds that a rank waits for the others, at the start and in collective operations


def get_parser(description: str | None = None) -> argparse.ArgumentParser:
    """The parser of every train script: Colossal-AI's flags and ours."""
    parser = Parser(
        description=description,
        parents=[colossalai.get_default_parser()],
        add_help=False,
    )
    parser.set_defaults(backend=None)
    parser.add_argument("--local-rank", dest="local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--launcher",
        choices=("auto", *LAUNCHERS),
        default="auto",
        help="who started the processes; none: by hand, with --rank --world_size --host --port, or a single one",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the config with a Python literal; repeatable, nested keys with dots",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long a rank waits for another one, at the start and later (default %(default)g)",
    )
    parser.add_argument(
        "--output", type=Path, help="run directory (default: runs/<example>/<script>/<config>,KEY=VALUE,...)"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="resume the newest valid checkpoint in the run directory (the default), start from scratch, or start "
        "from this checkpoint",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume a checkpoint with other data, or other values that change what is learned; it is put on record",
    )
    parser.add_argument("--eval-only", action="store_true", help="evaluate a checkpoint, and train nothing")
    parser.add_argument(
        "--eval-knn",
        action="store_true",
        help="evaluate the features of a checkpoint: classify test images by their nearest training images",
    )
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N optimizer steps, with a checkpoint")
    parser.add_argument(
        "--on-save-error",
        choices=("go-on", "stop"),
        default="go-on",
        help="what to do when a checkpoint cannot be written; the last one of a run always has to be",
    )
    parser.add_argument("--compile", action="store_true", help="the same as --set COMPILE=True: use torch.compile")
    parser.add_argument(
        "--wandb", action="store_true", help="record in Weights & Biases too; offline with WANDB_MODE=offline"
    )
    parser.add_argument("--profile", action="store_true", help="time the parts of steps, and trace one")
    parser.add_argument("--debug-nan", action="store_true", help="name the first module whose output is not finite")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print what each rank of the layout (on --world_size processes) would hold and send",
    )
    parser.add_argument(
        "--plan",
        metavar="MACHINE",
        help="train nothing: predict the fastest layouts for --world_size processes of a machine such as h100, of this "
        "one with `here`, or of the one in a calibration.json that `here` has written",
    )
    return parser
