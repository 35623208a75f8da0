"""What the three examples share: launching, configs, the training engine, data, checkpoints, hooks, reports.

Import this package before `colossalai`: it replaces modules that Colossal-AI imports and the examples never use by
stubs, and filters warnings. docs/architecture.md lists the subpackages.
"""

import warnings

import colossal_vit.parent  # noqa: F401 records the parent process before the slow imports
from colossal_vit import streams
from colossal_vit.compat.stand_ins import install

for _module in (r"colossalai\.", r"torch\.jit\._script"):
    warnings.filterwarnings("ignore", module=_module)
# Colossal-AI's 2D, 2.5D and 3D layers cause these in every step on recent torch; tests check their gradients.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)
install()
streams.open_missing()
