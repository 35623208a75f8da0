"""The run directory: which one a command writes to, what of an earlier run it finds there, and making it ready."""

import argparse
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit import checkpoint
from colossal_vit import config as configs
from colossal_vit.errors import UserError
from colossal_vit.ranks import RankLogger
from colossalai.context import Config

MAX_NAME = 200  # bytes of a folder's name; file systems allow 255


def default(script: Path, config: Path, overrides: Iterable[str]) -> Path:
    """The run directory of a command that names none: `runs/<example>/<script>/<config>,KEY=VALUE,...`.

    The same command always gets the same directory, in whatever order it gives its overrides and wherever it is typed;
    a command with another script, config file or override gets another one.

    Args:
        script: the train script, in its example's folder.
        config: the config file.
        overrides: the `KEY=VALUE` strings of `--set`.

    Raises:
        UserError: if an override is malformed.
    """
    folder, config = script.resolve().parent, config.resolve()
    parts = {".".join(path): value for path, value in map(configs.parse_override, overrides)}
    inside = config.is_relative_to(folder)
    named = config.relative_to(folder) if inside else config
    words = [part for part in named.parts[:-1] if inside and part not in ("config", "configs")]
    exact = [str(named), *(f"{key}={parts[key]!r}" for key in sorted(parts))]
    name = ",".join(["-".join([*words, config.stem]), *(f"{key}={_plain(parts[key])}" for key in sorted(parts))])
    readable = re.sub(r"[^\w.,=+-]+", "_", re.sub(r"[\s()\[\]{}'\"]", "", name), flags=re.ASCII)
    if readable != name or not inside or len(readable) > MAX_NAME:  # the name alone may fit another command too
        readable = f"{readable[:MAX_NAME]}~{hashlib.sha256(repr(exact).encode()).hexdigest()[:8]}"
    return folder.parent / "runs" / folder.name / script.stem / readable


def _plain(value: Any) -> str:
    """A value of an override as a name shows it: strings and AMP modes without quotes and prefix."""
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) else repr(value)


def _set_aside(directory: Path) -> Path | None:
    """Rename a directory that holds an earlier run to `<name>.1`, `<name>.2`, ...; returns the new name."""
    folder = directory / checkpoint.FOLDER
    if not (directory / "metrics.jsonl").exists() and not (folder.is_dir() and any(folder.iterdir())):
        return None
    number = 1
    while (older := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    directory.rename(older)
    return older


def _newer_than(path: Path, own: Path) -> list[Path]:
    """The checkpoints in `own` that are newer than `path`, if that is one of them."""
    steps = checkpoint.list_steps(own)
    names = [step.name for step in steps]
    return steps[: names.index(path.name)] if path.resolve().parent == own.resolve() and path.name in names else []


def _find_checkpoint(args: argparse.Namespace, own: Path, log: RankLogger) -> Path | None:
    """What `--resume` means, with `own` the folder of the run's own checkpoints.

    Raises:
        UserError: if a checkpoint that was named does not hold, or going on from it would lose newer ones.
    """
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    restarted = any(count.isdigit() and int(count) for count in restarts)  # the same command, which has begun before
    if args.resume == "auto" or restarted:
        path, passed_over = checkpoint.newest(own)
        for reason in passed_over:
            log.info(f"passed over: {reason}")
        if path or args.resume == "auto":
            return path
    if args.resume == "never":
        return None
    path = Path(args.resume)
    if (path / checkpoint.FOLDER).is_dir():
        path, passed_over = checkpoint.newest(named := path / checkpoint.FOLDER)
        if path is None:
            raise UserError(f"--resume {args.resume}: {passed_over[0] if passed_over else f'{named} is empty'}")
    else:
        try:
            checkpoint.verify(path)
        except UserError as error:
            raise UserError(f"--resume {args.resume}: {error}") from None
    if (newer := _newer_than(path, own)) and not args.eval_only:
        raise UserError(
            f"--resume {args.resume}: {own} has newer ones, up to {newer[0].name}: give another --output, or move them "
            f"away"
        )
    return path


def prepare(args: argparse.Namespace, output: Path, config: Config, log: RankLogger) -> Path | None:
    """Find the checkpoint to go on from, and make the run directory ready for writing; returns the checkpoint.

    Raises:
        UserError: if the one cannot be found, or the other not be made.
    """
    own = output / checkpoint.FOLDER
    path = _find_checkpoint(args, own, log)
    if args.eval_only:
        if path is None:
            raise UserError(f"--eval-only: no checkpoint in {own}; name one with --resume PATH, or its --output")
        return path
    try:
        if path and path.resolve().parent == own.resolve():
            checkpoint.clean(own)
            for newer in _newer_than(path, own):
                log.info(f"{newer} is {checkpoint.set_aside(newer).name} now")
        elif older := _set_aside(output):
            log.info(f"an earlier run was in {output}; it is in {older} now")
        own.mkdir(parents=True, exist_ok=True)
        (output / "config.json").write_text(configs.to_json(config) + "\n")
        tempfile.TemporaryFile(dir=own).close()
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None
    return path
