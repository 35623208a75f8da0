"""Atomic writes of files and folders, fsync, and unused file names."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing an existing one: to a temporary name, then rename."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    scratch.replace(path)


def free_name(path: Path) -> Path:
    """The first of `<name>.1`, `<name>.2`, ... that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: the block fills a temporary one, which is renamed to `folder` at its end.

    If another process creates `folder` first, that one is kept, as its contents are assumed to be the same.

    Yields:
        The temporary folder, empty.

    Raises:
        OSError: if it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
