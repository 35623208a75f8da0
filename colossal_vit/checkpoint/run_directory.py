"""The run directory: its default name, the checkpoint to resume in it, and its preparation for a run."""

import argparse
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit import config as configs
from colossal_vit.checkpoint import earlier_run, lock, storage
from colossal_vit.errors import UserError
from colossal_vit.files import write_text
from colossal_vit.parallel.ranks import RankLogger
from colossalai.context import Config

MAX_NAME = 200  # bytes of a folder's name; file systems allow 255


def default(script: Path, config: Path, overrides: Iterable[str], resume: str = "auto") -> Path:
    """The run directory of a command without `--output`: `runs/<example>/<script>/<config>,KEY=VALUE,...`.

    The same command always gets the same directory, whatever the order of its overrides and the working directory;
    another script, config file, override or `--resume PATH` gets another one.

    Args:
        script: the train script, in its example's folder.
        config: the config file.
        overrides: the `KEY=VALUE` strings of `--set`.
        resume: the value of `--resume`; a path becomes part of the name.

    Raises:
        UserError: if an override is malformed.
    """
    folder, config = script.resolve().parent, config.resolve()
    parts = {".".join(path): value for path, value in map(configs.parse_override, overrides)}
    if resume not in ("auto", "never"):
        parts["resume"] = str(Path(resume).resolve())
    inside = config.is_relative_to(folder)
    named = config.relative_to(folder) if inside else config
    words = [part for part in named.parts[:-1] if inside and part not in ("config", "configs")]
    exact = [str(named), *(f"{key}={parts[key]!r}" for key in sorted(parts))]
    name = ",".join(["-".join([*words, config.stem]), *(f"{key}={_plain(parts[key])}" for key in sorted(parts))])
    readable = re.sub(r"[^\w.,=+-]+", "_", re.sub(r"[\s()\[\]{}'\"]", "", name), flags=re.ASCII)
    if readable != name or not inside or len(readable) > MAX_NAME:  # another command may have the same readable name
        readable = f"{readable[:MAX_NAME]}~{hashlib.sha256(repr(exact).encode()).hexdigest()[:8]}"
    return folder.parent / "runs" / folder.name / script.stem / readable


def _plain(value: Any) -> str:
    """An override's value as the directory name shows it: strings without quotes, AMP modes without prefix."""
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) else repr(value)


def _is_own(path: Path | None, own: Path) -> bool:
    """Whether a checkpoint is one of those in the folder `own`."""
    return path is not None and path.resolve().parent == own.resolve()


def _newer_than(path: Path, own: Path) -> list[Path]:
    """The checkpoints in `own` that are newer than `path`, if that is one of them."""
    steps = storage.list_steps(own)
    names = [step.name for step in steps]
    return steps[: names.index(path.name)] if _is_own(path, own) and path.name in names else []


def _find_checkpoint(args: argparse.Namespace, own: Path, log: RankLogger) -> Path | None:
    """The checkpoint that `--resume` selects, or None; `own` is the folder of the run's own checkpoints.

    Raises:
        UserError: if the checkpoint at `--resume PATH` is not valid, or `own` has newer ones.
    """
    restarts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    restarted = any(count.isdigit() and int(count) for count in restarts)  # by torchrun or SLURM, with the same command
    if args.resume == "never" and not restarted:
        return None
    newest, skipped = storage.newest(own, held=True)
    if args.resume == "auto" or restarted or (newest and _has_same_start(args, newest)):
        for reason in skipped:
            log.info(f"skipped: {reason}")
        if newest or args.resume == "auto":
            return newest
    if args.resume == "never":
        return None
    path = Path(args.resume)
    if (path / storage.FOLDER).is_dir():
        path, skipped = storage.newest(named := path / storage.FOLDER, held=True)
        if path is None:
            raise UserError(f"--resume {args.resume}: {skipped[0] if skipped else f'{named} is empty'}")
    else:
        try:
            storage.verify(path, held=True)
        except UserError as error:
            raise UserError(f"--resume {args.resume}: {error}") from None
    if (newer := _newer_than(path, own)) and not args.eval_only:
        raise UserError(
            f"--resume {args.resume}: {own} has newer ones, up to {newer[0].name}: give another --output, or move them "
            f"away"
        )
    return path


def _has_same_start(args: argparse.Namespace, newest: Path) -> bool:
    """Whether the run in the directory began with the same `--resume PATH`; False for evaluations, which take PATH."""
    return not args.eval_only and started_from(newest) == _resume_path(args.resume)


def _resume_path(resume: str) -> str | None:
    """The absolute path that `--resume` names, or None."""
    return None if resume in ("auto", "never") else str(Path(resume).resolve())


def started_from(path: Path) -> str | None:
    """The `--resume PATH` that the run of a checkpoint was last started with."""
    return storage.read_state(path).get("started_from")


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None


def prepare(
    args: argparse.Namespace, output: Path, weights: str | None, log: RankLogger
) -> tuple[Path | None, str | None]:
    """Lock the run directory and find the checkpoint to resume, which is held. Writes nothing but the lock.

    Args:
        args: the command line.
        output: the run directory.
        weights: what a run without checkpoint starts from, `finetune.weights`, or None.
        log: where skipped checkpoints are reported.

    Returns:
        The checkpoint, or None; and the value of `started_from` for this run's checkpoints.

    Raises:
        UserError: if the checkpoint is missing or not valid, the directory is not writable, another run holds it, or it
            holds what a run there would overwrite or move.
    """
    own = output / storage.FOLDER
    if not args.eval_only:
        with _writing(output):
            if reason := lock.acquire(output):
                log.info(f"{output}: cannot be locked ({reason}): see to it that no other run writes there")
            tempfile.TemporaryFile(dir=output).close()
    path = _find_checkpoint(args, own, log)
    if args.eval_only and path is None and weights is None:
        flag = "--eval-knn" if args.eval_knn else "--eval-only"
        raise UserError(f"{flag}: no checkpoint in {own}; name one with --resume PATH, or its --output")
    continues = _is_own(path, own)
    if not continues and not args.eval_only:
        with _writing(output):
            earlier_run.is_there(output)  # refuses before minutes of preparations what `begin` would refuse after them
    inherited = started_from(path) if continues else None
    return path, _resume_path(args.resume) or inherited


def begin(output: Path, path: Path | None, config: Config, log: RankLogger, complete: bool = False) -> None:
    """Prepare the run directory for the steps after checkpoint `path`: write config.json, set aside what conflicts.

    That is, an earlier run of which `path` is no part, or else the damaged checkpoints after `path`. Called once all
    checks have passed.

    Args:
        output: the run directory.
        path: the checkpoint that was loaded, or None.
        config: the resolved config.
        log: where renames are reported.
        complete: whether no step is left; config.json then stays that of the steps made.

    Raises:
        UserError: if it cannot be written, or see `earlier_run.is_there`.
    """
    own = output / storage.FOLDER
    with _writing(output):
        if _is_own(path, own):
            storage.clean(own)
            for newer in _newer_than(path, own):
                log.info(f"{newer} is {storage.rename_damaged(newer).name} now")
        elif earlier_run.is_there(output):
            log.info(f"an earlier run was in {output}; it is in {earlier_run.set_aside(output)} now")
        lock.keep()
        own.mkdir(exist_ok=True)
        if not complete or not (output / earlier_run.CONFIG).exists():
            write_text(output / earlier_run.CONFIG, configs.to_json(config) + "\n")
