"""From the command line to process groups, and every way a run ends.

Every train script is `launch.run(main)`, and `main` begins with `launch.start(...)`.
"""

from colossal_vit.launch.exits import run
from colossal_vit.launch.startup import start

__all__ = ["run", "start"]
