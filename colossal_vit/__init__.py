"""What the three examples share: launching, configs, the training engine, data, checkpoints, hooks, reports.

Import this package before `colossalai`: it replaces modules that Colossal-AI imports and the examples never use by
stubs, and filters warnings. From then on Ctrl-C, which may come during slow imports, prints no traceback.
docs/architecture.md lists the subpackages.
"""

import sys
import warnings
from typing import Any

import colossal_vit.parent  # noqa: F401 records the parent process before the slow imports


def _report(kind: type[BaseException], *rest: Any) -> None:
    """Print the traceback of an error that nothing has caught, but not of Ctrl-C."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


sys.excepthook = _report  # Python then ends as SIGINT ends a process, which shells call exit code 130

from colossal_vit import streams  # noqa: E402
from colossal_vit.compat.stand_ins import install  # noqa: E402

for _module in (r"colossalai\.", r"torch\.jit\._script"):
    warnings.filterwarnings("ignore", module=_module)
# Colossal-AI's 2D, 2.5D and 3D layers cause these in every step on recent torch; tests check their gradients.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)
install()
streams.open_missing()
