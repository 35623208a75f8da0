"""A lock that keeps two runs from writing to one run directory; the kernel releases it when its holder dies."""

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from colossal_vit.errors import UserError

NAME = ".lock"  # in a run directory
PATIENCE = 10.0  # seconds to wait for the lock: ranks whose launcher was killed take a moment to end
_CANNOT = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def _open(path: Path) -> tuple[int, bool]:
    """Return a lock file's descriptor, and whether it is a new one."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, flags), False


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


class DirectoryLock:
    """The lock of a run directory, or of none yet."""

    def __init__(self):
        # They stay open: closing any descriptor of a file releases the process's POSIX locks on it.
        self._files: list[int] = []
        self._made: list[Path] = []  # what `acquire` has created, directories before what is in them

    def acquire(self, directory: Path) -> str | None:
        """Lock a run directory until this process ends; creates the directory if it is missing.

        The lock is a POSIX record lock: forked children do not inherit it, and NFS supports it.

        Args:
            directory: the run directory.

        Returns:
            None if the directory is locked, or the reason why its file system has no locks.

        Raises:
            UserError: if another process still holds the lock after `PATIENCE` seconds, naming that process.
            OSError: if the lock file cannot be written.
        """
        paths = directory / NAME, directory, *directory.parents
        made: set[Path] = set()
        deadline = time.monotonic() + PATIENCE
        while True:
            made.update(path for path in paths if not path.exists())  # also after another's `remove_unused`
            if not directory.is_dir():
                directory.mkdir(parents=True, exist_ok=True)
                made.add(directory)
            try:
                file, is_new = _open(directory / NAME)
            except FileNotFoundError:  # removed in this moment
                continue
            made.update(paths[:1] if is_new else ())
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(directory / NAME, file):  # and not meanwhile removed by its holder's `remove_unused`
                    break
            except OSError as error:
                if error.errno in _CANNOT:
                    return error.strerror
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() >= deadline:
                holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another run"
                raise UserError(
                    f"{directory}: {holder} is writing here: wait until it has ended, or give another --output"
                )
            os.close(file)
            time.sleep(0.1)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T},\n".encode(), 0)
        self._files.append(file)
        self._made.extend(path for path in reversed(paths) if path in made)
        return None

    def release(self) -> None:
        """Unlock the directory, and remove what `acquire` has created there."""
        self.remove_unused()
        while self._files:
            os.close(self._files.pop())

    def keep(self) -> None:
        """Leave what `acquire` has created: something is about to be written beside it."""
        self._made.clear()

    def remove_unused(self) -> None:
        """Remove what `acquire` has created, unless `keep` was called or it is used."""
        while self._made:
            path = self._made.pop()
            with suppress(OSError):
                path.unlink() if path.name == NAME else path.rmdir()
