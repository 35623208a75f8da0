"""Atomic writes of files and folders, fsync, unused file names, and standard streams that never end a run."""

import ctypes
import fcntl
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH = ".colossal_vit-"  # what the names of scratch folders begin with
LOCK = ".lock"  # in a scratch folder


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing an existing one: to a temporary name, then rename."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(content)
    scratch.replace(path)


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step, if the file system can: a process that is killed leaves one under each name."""
    at_cwd, exchanged = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    ctypes.CDLL(None).renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchanged)


def free_name(path: Path) -> Path:
    """Return the first of `<name>.1`, `<name>.2`, ... that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def _lock(path: Path) -> int:
    """Open and lock a file, without waiting; returns its descriptor, whose closing releases the lock.

    Raises:
        OSError: if it does not exist, is locked, or its file system has no locks.
    """
    # Not a POSIX lock, which a process does not have against itself.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale(parent: Path) -> None:
    """Remove the scratch folders of processes that were killed: their lock files are there, but not locked."""
    for scratch in parent.glob(f"{SCRATCH}*"):
        with suppress(OSError):
            descriptor = _lock(scratch / LOCK)
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(descriptor)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder in `parent`, which is created if missing; removed at the end.

    If the process is killed, the next one that makes a scratch folder there removes it.

    Yields:
        The folder. A hidden file in it is locked for as long as the block runs.

    Raises:
        OSError: if it cannot be created.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent)
    descriptor = None
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
        (scratch / LOCK).touch()
        try:
            descriptor = _lock(scratch / LOCK)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for a stale one before it was locked
        except OSError:
            break  # some network file systems have no locks; nobody removes what cannot be locked
        if (scratch / LOCK).exists():
            break
        os.close(descriptor)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: the block fills a temporary one, which is renamed to `folder` at its end.

    If another process creates `folder` first, that one is kept, as its contents are assumed to be the same.

    Yields:
        The temporary folder, empty.

    Raises:
        OSError: if it cannot be written.
    """
    with scratch_folder(folder.parent) as scratch:
        made = scratch / folder.name
        try:
            made.mkdir()
            yield made
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


class _UnfailingFile(io.FileIO):
    """A file whose writes succeed, whatever becomes of the data, so that nothing waits in a buffer to fail later."""

    def write(self, data) -> int:
        written = None
        with suppress(OSError):
            written = super().write(data)  # None where a non-blocking pipe is full
        return len(data) if written is None else written


def open_missing_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr where the process was started without it.

    Otherwise the next file that is opened gets its number, a checkpoint for example, and C++ libraries write their
    warnings into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one


def protect_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` never fail: what cannot be written is lost, and training continues.

    The disk under a log may be full, its reader gone, its terminal closed, its encoding ASCII; and the process may have
    been started without them. Streams that replace them, as in tests and notebooks, stay.
    """
    open_missing_streams()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:
            try:
                replaced = stream.fileno() != number
            except (OSError, ValueError):
                replaced = True
            if replaced:
                continue
            with suppress(OSError):
                stream.flush()
        raw = _UnfailingFile(number, "w", closefd=False)
        encoding = "utf-8" if stream is None else stream.encoding
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True))
