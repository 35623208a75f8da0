"""Exceptions that end a run with one line and an exit code. Any other exception is a bug and keeps its traceback."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from colossal_vit.files import protect_streams


class UserError(Exception):
    """A mistake that only the user can correct; the message names the key, its value and what is allowed.

    Ends every rank with that one line on stderr and exit code 2.

    Args:
        message: the line.
        own: True if only this process may have the error, so that it prints the line whatever its rank; False if rank
            0 certainly has it too; None if nobody knows.
    """

    exit_code = 2

    def __init__(self, message: str, own: bool | None = None):
        super().__init__(message)
        self.own = own


class TrainingError(Exception):
    """Training cannot continue, although the configuration is valid: for example, the loss is not finite.

    Ends every rank with that one line on stderr and exit code 1.
    """

    exit_code = 1


class Preempted(Exception):
    """The run stopped between two optimizer steps because a signal from the scheduler or the user asked for it.

    Ends every rank with one line on stderr and exit code 75 (EX_TEMPFAIL in sysexits.h: try again), or another one.
    """

    exit_code = 75

    def __init__(self, message: str, exit_code: int | None = None):
        super().__init__(message)
        self.exit_code = self.exit_code if exit_code is None else exit_code


class Interrupted(Preempted):
    """Stopped by Ctrl-C. Exit code 130, as shells report SIGINT, so that no scheduler restarts the run."""

    exit_code = 130


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` for a wrong command line and accepts no abbreviated flags."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


@contextmanager
def oserror_as_user_error(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError`, about `path` if the error names no file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from None


def as_user_error(error: BaseException) -> BaseException:
    """Return a `UserError` for a path that this user may not look at, or too long a name; any other error as it is.

    pathlib's questions such as `exists` raise these two, and answer others with False.
    """
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
        return UserError(f"{error.filename}: {error.strerror}")
    return error


def reason(error: BaseException) -> str:
    """Return an error's first line; its type, too, if it says nothing, or like a `KeyError` only a key."""
    if isinstance(error, MemoryError):  # which says nothing
        return "out of memory"
    said = "".join(str(error).strip().splitlines()[:1])
    if said and not isinstance(error, LookupError):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def in_one_line(text: str) -> str:
    """Return the text with its line breaks written as escapes: names of files may have some."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def multiples_near(number: int, size: int) -> str:
    """Name the multiples of `size` above 0 that are next to a number which is none."""
    below = max(number, 0) // size * size
    return " or ".join(str(multiple) for multiple in (below, below + size) if multiple)


def error_line(error: Exception) -> str:
    """Return the line to print for an error: the name of the script, or of the package that `python -m` runs, and
    message. A stop that was asked for is not called an error.
    """
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    return f"{name}: {'' if isinstance(error, Preempted) else 'error: '}{in_one_line(str(error))}"


def run_command(name: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command that starts no ranks; a `UserError`, a `TrainingError` or Ctrl-C becomes one line on stderr.

    Args:
        name: the command's, in the line.
        command: returns the exit code.
        interrupted: what the line says of Ctrl-C.

    Returns:
        The exit code: the command's, the error's, or 130 for Ctrl-C.
    """
    protect_streams()
    try:
        return command()
    except (UserError, TrainingError, OSError) as error:
        mistake = as_user_error(error)
        if isinstance(mistake, OSError):
            raise
        code, message = mistake.exit_code, f"error: {in_one_line(str(mistake))}"
    except KeyboardInterrupt:
        code, message = Interrupted.exit_code, interrupted
    print(f"{name}: {message}", file=sys.stderr)
    return code


def end_process(code: int, message: str | None = None) -> NoReturn:
    """End this process from any thread, even while another thread is blocked in a collective operation.

    Nothing is cleaned up: destroying a process group whose other members have died may hang.
    """
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
