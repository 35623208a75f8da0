"""Starting and ending runs: command line, launchers, process groups, exit codes.

A train script names its parts in `SCRIPT = launch.Script(main, build, ...)` and calls `launch.run(SCRIPT)`; its `main`
begins with `launch.start(args)`. It imports this package first: from then on Ctrl-C, which may come during slow
imports, prints no traceback.
"""

import sys
from typing import Any


def _report(kind: type[BaseException], *rest: Any) -> None:
    """Print the traceback of an error that nothing has caught, but not of Ctrl-C."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


sys.excepthook = _report  # Python then ends as SIGINT ends a process, which shells call exit code 130

import numpy  # noqa: E402, F401 which torch would import, and go on without it after a Ctrl-C
from colossal_vit.launch.exits import call, run  # noqa: E402
from colossal_vit.launch.flags import Arguments, Script, parse  # noqa: E402
from colossal_vit.launch.startup import start  # noqa: E402
from colossal_vit.run import Run  # noqa: E402

__all__ = ["Arguments", "Run", "Script", "call", "parse", "run", "start"]
