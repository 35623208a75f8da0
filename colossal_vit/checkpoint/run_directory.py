"""The run directory: its default name, and what it holds before a run begins in it.

That is nothing, an earlier run, or what nobody asked to touch.
"""

import hashlib
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit import config as configs
from colossal_vit import typed_json
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.lock import NAME as LOCK
from colossal_vit.checkpoint.lock import DirectoryLock
from colossal_vit.data.folders import INDEX_FILES
from colossal_vit.errors import UserError
from colossal_vit.files import free_name
from colossal_vit.results import CURVES, METRICS

MAX_NAME = 200  # bytes of a folder's name; file systems allow 255


def default(script: Path, config: Path, overrides: Iterable[str], resume: str) -> Path:
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


CONFIG = "config.json"
# What a run writes into its directory, where a file of the same name would be overwritten or appended to.
_WRITTEN = (CONFIG, METRICS, *CURVES)
# All that may be in it besides: what runs add, and --dry-run, --plan and kills leave.
_OF_A_RUN = re.compile(
    rf"{re.escape(LOCK)}|{storage.FOLDER}|{INDEX_FILES}|wandb|events\.out\.tfevents\..*|profile-rank\d+\.json|"
    rf"calibration\.json|members\.jsonl|evaluation|layout\.png|plan\.png|\.?({'|'.join(map(re.escape, _WRITTEN))})"
)
_OF_CHECKPOINTS = re.compile(r"(damaged-)?step-\d{8,}(\.\d+)?|\.step-\d{8,}-.*")


def _is_ours(config: Path) -> bool:
    """Whether a config.json has two of the keys that it has in every run, and that of another program has not."""
    try:
        return typed_json.read(config, dict).keys() >= {"SEED", "gradient_accumulation"}
    except UserError:
        return False


def _foreign(directory: Path) -> list[str]:
    """Names of what is in a directory, or in its folder of checkpoints, and is no part of a run."""
    folder = directory / storage.FOLDER
    inside = folder.iterdir() if folder.is_dir() else ()
    found = [path.name for path in directory.iterdir() if not _OF_A_RUN.fullmatch(path.name)]
    return sorted(found + [f"{folder.name}/{path.name}" for path in inside if not _OF_CHECKPOINTS.fullmatch(path.name)])


def has_earlier_run(directory: Path) -> bool:
    """Whether a directory, which need not exist, holds an earlier run, to be set aside by `set_aside`.

    Raises:
        UserError: if a new run cannot begin there: it would overwrite what is no run's, or what is no run's would be
            renamed with the earlier run, or the working directory would.
    """
    if not directory.is_dir():
        return False
    ours = _is_ours(directory / CONFIG)
    written = [name for name in _WRITTEN if (directory / name).exists()]
    if not storage.list_steps(directory / storage.FOLDER):
        if written and not ours:
            raise UserError(
                f"--output {directory}: has a {written[0]} that is no run's, and that a run would overwrite: give "
                f"another --output"
            )
        if METRICS not in written:
            return False
    if foreign := _foreign(directory):
        raise UserError(
            f"--output {directory}: has an earlier run, and {foreign[0]}, which is no part of it: give another "
            f"--output, or move one of them away"
        )
    if Path.cwd().is_relative_to(directory):
        raise UserError(
            f"--output {directory}: has an earlier run, and cannot be renamed, since the working directory is in it: "
            f"give another --output"
        )
    return True


def set_aside(directory: Path, lock: DirectoryLock) -> Path:
    """Rename the directory of an earlier run to `<name>.1`, `<name>.2`, ..., and create an empty one.

    This run's index files move to the new directory.

    Args:
        directory: of the earlier run.
        lock: that this process holds of it, and then of the empty one.

    Returns:
        The earlier run's new directory.
    """
    older = directory.rename(free_name(directory))
    directory.mkdir()
    lock.acquire(directory)
    (older / LOCK).unlink(missing_ok=True)  # which this process holds, and writes nothing there
    if (older / INDEX_FILES).exists():
        (older / INDEX_FILES).rename(directory / INDEX_FILES)
    return older
