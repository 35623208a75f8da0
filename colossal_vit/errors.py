"""The ways a run ends early on purpose. Every other exception is a bug and keeps its traceback."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """Something only the user can put right; the message names the key, the value and what would be right.

    Ends every rank with that one line on stderr and exit code 2.

    Args:
        message: the line.
        own: whether it concerns this process alone, so that no other rank can be trusted to say it.
    """

    exit_code = 2

    def __init__(self, message: str, own: bool = False):
        super().__init__(message)
        self.own = own


class TrainingError(Exception):
    """Training cannot continue although nothing was set wrongly, for example a loss that is not finite.

    Ends every rank with that one line on stderr and exit code 1.
    """

    exit_code = 1


class Preempted(Exception):
    """The scheduler or the user has told the run to stop, and it stopped between two optimizer steps.

    Ends every rank with one line on stderr and the exit code that sysexits.h calls a temporary failure: try again.
    """

    exit_code = 75


class Interrupted(Preempted):
    """The same by Ctrl-C, with the exit code of a shell: whoever stops a run so does not want it started again."""

    exit_code = 130


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are a `UserError`, and whose flags cannot be abbreviated."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


def error_line(error: Exception) -> str:
    """The one line that an error is to the user."""
    return f"{Path(sys.argv[0]).name}: error: {error}"


def end_process(code: int, message: str | None = None) -> NoReturn:
    """End this process from any of its threads, even while another one waits for a rank that is gone.

    Nothing is cleaned up: the destructor of a process group whose other members are gone may hang.
    """
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
