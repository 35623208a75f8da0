"""stdout and stderr that never end a run: what they cannot write is lost, and training continues.

The disk under a log may be full, its reader gone, its terminal closed, its encoding ASCII; and a process may have been
started without them. None of that is a reason to lose what was trained.
"""

import io
import os
import sys
from contextlib import suppress


class _UnfailingFile(io.FileIO):
    """A file whose writes succeed, whatever becomes of the data, so that nothing waits in a buffer to fail later."""

    def write(self, data) -> int:
        written = None
        with suppress(OSError):
            written = super().write(data)  # None where a non-blocking pipe is full
        return len(data) if written is None else written


def open_missing() -> None:
    """Open /dev/null as stdin, stdout or stderr where the process was started without it.

    Otherwise the next file that is opened gets its number, a checkpoint for example, and C++ libraries write their
    warnings into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one


def protect() -> None:
    """Make `sys.stdout` and `sys.stderr` never fail. Streams that replace them, as in tests and notebooks, stay."""
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
