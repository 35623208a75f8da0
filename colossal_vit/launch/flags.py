"""The command line that all train scripts share."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import colossalai.legacy as colossalai
from colossal_vit.config.settings import Settings
from colossal_vit.config.types import PositiveInt, Text, expected, one_of, real, whole
from colossal_vit.errors import Interrupted, Parser, Preempted, TrainingError, UserError
from colossal_vit.launch.exits import Exits
from colossal_vit.launch.launchers import LAUNCHERS
from colossal_vit.typed_json import adapter
from pydantic import Field, ValidationError

DEFAULT_TIMEOUT = 300.0  # seconds that a rank waits for the others, at the start and in collective operations
MOST_RANKS = 2**20

CODES = set(range(256)) - {TrainingError.exit_code, UserError.exit_code, Interrupted.exit_code}

TYPES = {
    **dict.fromkeys(("config", "host", "output", "resume"), Text),  # a shell variable may be unset
    "port": whole(1, 65535),
    "world_size": whole(1, MOST_RANKS),
    "rank": whole(0, MOST_RANKS - 1),
    "local_rank": whole(0, MOST_RANKS - 1),
    "backend": one_of("nccl", "gloo"),
    "max_steps": PositiveInt,
    "timeout": real(0.001, 1e8),
    "exit_code_stopped": Annotated[
        Literal[*CODES], Field(description="from 0 to 255, and not 1, 2 or 130, which mean failures")
    ],
}


class Arguments(argparse.Namespace):
    """A parsed command line, each flag under its name; and the script that it is of.

    `set` includes what `--compile` stands for.

    Attributes:
        settings: config keys of the script, beside those that every config may have.
        check: raises `UserError` if config and layout do not fit the script's model.
        notes: makes lines that the script adds to a dry run's report, of config, run directory and data parallel size.
        loader: the script's own file that reads data, which a config's LOADER replaces; see `data.loaders`.
        exits: what is left to do when the process ends.
    """

    settings: Settings = MappingProxyType({})
    check: Callable[..., None] | None = None
    notes: Callable[..., list[str]] | None = None
    loader: Path | None = None

    def __init__(self, **values: Any):
        super().__init__(**{"exits": Exits(), **values})

    def replace(self, **changes: Any) -> "Arguments":
        """Return a copy with other values."""
        return Arguments(**{**vars(self), **changes})


class TrainParser(Parser):
    """Parses the command line of a train script, in which each flag has its type, and the last of several counts.

    Raises:
        UserError: naming flag and value.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> Arguments:
        return self.check(super().parse_args(args, Arguments()))

    def check(self, parsed: Arguments) -> Arguments:
        """Check each flag's value by its type, and settle what flags stand for.

        Raises:
            UserError: naming flag and value.
        """
        for name, kind in TYPES.items():
            value = getattr(parsed, name)
            try:
                adapter(kind | None).validate_python(value)
            except ValidationError:
                own = name in ("rank", "local_rank")  # those of the other ranks may be right
                wrong = f"{_flag(name)} {repr(value) if value == '' else value}"
                raise UserError(f"{wrong}: must be {expected(kind)}", own) from None
        parsed.output = parsed.output and Path(parsed.output)
        parsed.set = [*parsed.set, *["COMPILE=True"] * parsed.compile]
        return parsed


def _flag(name: str) -> str:
    """Return the flag of a value; Colossal-AI's have underscores."""
    return f"--{name}" if name in ("world_size", "local_rank") else f"--{name.replace('_', '-')}"


def parse(words: Sequence[str] | None = None, description: str | None = None, **of_script: Any) -> Arguments:
    """Return the arguments of a train script.

    Args:
        words: the command line, by default this process's.
        description: for `--help`; usually the script's docstring.
        of_script: `settings`, `check`, `notes` and `loader`, see `Arguments`.

    Raises:
        UserError: if a flag is wrong.
    """
    return get_parser(description).parse_args(words).replace(**of_script)


def get_parser(description: str | None = None) -> TrainParser:
    """Return the parser of every train script: Colossal-AI's flags and ours."""
    parser = TrainParser(
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
        help="override a value of the config with a Python literal, or a string without quotes; repeatable, nested "
        "keys with dots",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long a rank waits for another one, at the start and later (default %(default)g)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="run directory (default: runs/<example>/<script>/<config>, or <config>-<hash>)",
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
    instead = parser.add_mutually_exclusive_group()  # of training
    instead.add_argument("--eval-only", action="store_true", help="evaluate a checkpoint, and train nothing")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N optimizer steps, with a checkpoint")
    parser.add_argument(
        "--on-save-error",
        choices=("go-on", "stop"),
        default="go-on",
        help="what to do when a checkpoint cannot be written; the last one of a run always has to be",
    )
    parser.add_argument(
        "--exit-code-stopped",
        type=int,
        default=Preempted.exit_code,
        metavar="N",
        help="exit code after SIGTERM, SIGUSR1 or SIGHUP have stopped the run with a checkpoint (default %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="the same as --set COMPILE=True: use torch.compile")
    parser.add_argument(
        "--wandb", action="store_true", help="record in Weights & Biases too; offline with WANDB_MODE=offline"
    )
    parser.add_argument("--profile", action="store_true", help="time the parts of steps, and trace one")
    parser.add_argument("--debug-nan", action="store_true", help="name the first module whose output is not finite")
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print what each rank of the layout (on --world_size processes) would hold and send",
    )
    return parser
