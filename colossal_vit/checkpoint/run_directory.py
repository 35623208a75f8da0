"""The run directory: its default name, and where a new run begins if it holds an earlier one."""

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit import config as configs
from colossal_vit.checkpoint import storage
from colossal_vit.results import CURVES, METRICS

MAX_NAME = 200  # bytes of a folder's name before its hash; file systems allow 255


def default(script: Path, config: Path, overrides: Iterable[str], resume: str) -> Path:
    """Return the run directory of a command without `--output`: `runs/<example>/<script>/<config>`, with overrides
    `<config>-<hash>`.

    The same command always gets the same directory, whatever the order of its overrides and the working directory;
    another script, config file, override or `--resume PATH` gets another one. A run that an earlier version began in
    `<config>,KEY=VALUE,...` stays there.

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
    path = config.relative_to(folder) if inside else config
    words = [part for part in path.parts[:-1] if inside and part not in ("config", "configs")]
    exact = [str(path), *(f"{key}={parts[key]!r}" for key in sorted(parts))]
    runs = folder.parent / "runs" / folder.name / script.stem
    name, values = "-".join([*words, config.stem]), [f"{key}={_plain(parts[key])}" for key in sorted(parts)]
    digest = hashlib.sha256(repr(exact).encode()).hexdigest()[:8]

    def in_runs(name: str, mark: str, unique: bool) -> Path:
        """Return the directory of a name, of which characters are left for a shell to read; with the hash if another
        command may have the same.
        """
        plain = re.sub(r"[^\w.,=+-]+", "_", re.sub(r"[\s()\[\]{}'\"]", "", name), flags=re.ASCII)
        unique = unique and inside and plain == name and len(plain) <= MAX_NAME
        return runs / (plain if unique else f"{plain[:MAX_NAME]}{mark}{digest}")

    older = in_runs(",".join([name, *values]), "~", unique=True)
    return older if older.exists() else in_runs(name, "-", unique=not values)


def _plain(value: Any) -> str:
    """Return an override's value as the directory name shows it: strings without quotes, AMP modes without prefix."""
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) else repr(value)


CONFIG = "config.json"
MARK = ".run"  # in each run directory: empty, or if the run had to take another one, the name that was asked for


def latest(asked: Path) -> Path:
    """Return the directory of the last run with this one as `--output`: itself, or `<name>.1`, `<name>.2`, ... beside
    it.
    """
    found, number = asked, 1
    while asked.name and (other := asked.with_name(f"{asked.name}.{number}")).exists():
        with suppress(OSError, UnicodeError):  # somebody else's
            found = other if (other / MARK).read_text() == asked.name else found
        number += 1
    return found


def is_taken(directory: Path) -> bool:
    """Return whether a new run in a directory would overwrite or continue what is there.

    A config.json alone is that of a run which ended before its first step, or another program's.
    """
    written = any((directory / name).exists() for name in (METRICS, *CURVES))
    foreign = (directory / CONFIG).exists() and not (directory / MARK).exists()
    return written or foreign or bool(storage.list_steps(directory / storage.FOLDER))
