"""What the three examples share: launching, configs, the training engine, data, checkpoints, hooks, reports.

Importing it changes nothing in the process. docs/architecture.md lists the subpackages.
"""

import os

STARTED_BY = os.getpid(), os.getppid()  # this process and its parent, before imports that take seconds
