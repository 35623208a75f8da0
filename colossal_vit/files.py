"""Files and folders that appear whole or not at all, and names that are free."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Have the disk hold what the kernel still keeps of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file that replaces the one of its name in one rename."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    scratch.replace(path)


def free_name(path: Path) -> Path:
    """`<name>.1`, or the next number that no file has."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` in one rename, unless another process makes it first: theirs is the same.

    Yields:
        The scratch folder, empty.
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
