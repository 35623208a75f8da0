"""A run directory has one writer: a lock that the kernel drops when its holder dies, whatever killed it."""

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
PATIENCE = 10.0  # seconds to wait for another holder: ranks whose launcher was killed take a moment to end
_CANNOT = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}

# The descriptors of this process's locks, and whether it made the directory. A POSIX lock goes with the first
# descriptor of its file that the process closes.
_held: dict[Path, tuple[int, bool]] = {}


def hold(directory: Path) -> str | None:
    """Lock a run directory, which is made if it is missing, until this process ends.

    The lock is a POSIX record lock: a forked child does not inherit it, and NFS knows it too.

    Args:
        directory: the run directory.

    Returns:
        None, or why this file system cannot lock.

    Raises:
        UserError: if another process holds it, saying which.
        OSError: if the lock file cannot be written.
    """
    made = not directory.exists()
    deadline = time.monotonic() + PATIENCE
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(directory / NAME, file):  # and not removed by a holder that had nothing to leave behind
                break
        except OSError as error:
            if error.errno in _CANNOT:
                return error.strerror
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() >= deadline:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another run"
            raise UserError(f"{directory}: {holder} is writing here: wait until it has ended, or give another --output")
        os.close(file)
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T},\n".encode(), 0)
    _held[directory] = file, made
    return None


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def leave_nothing() -> None:
    """Take away what `hold` has made of directories that nothing else was written to."""
    for directory, (_, made) in _held.items():
        with suppress(OSError):
            if os.listdir(directory) == [NAME]:
                os.unlink(directory / NAME)
                if made:
                    os.rmdir(directory)
