"""Starting and ending runs: command line, launchers, process groups, exit codes.

A train script calls `launch.run(main, ...)`, and its `main` begins with `launch.start(args)`.
"""

import numpy  # noqa: F401 which torch would import, and go on without it after a Ctrl-C
from colossal_vit.launch.exits import call, run
from colossal_vit.launch.flags import Arguments, parse
from colossal_vit.launch.startup import start

__all__ = ["Arguments", "call", "parse", "run", "start"]
