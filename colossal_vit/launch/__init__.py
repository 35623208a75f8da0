"""Starting and ending runs: command line, launchers, process groups, exit codes.

A train script calls `launch.run(main)`, and its `main` begins with `launch.start(...)`.
"""

from colossal_vit.launch.exits import run
from colossal_vit.launch.startup import start

__all__ = ["run", "start"]
