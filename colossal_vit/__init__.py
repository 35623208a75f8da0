"""What the three examples share: launching, configs, Colossal-AI's engine put together correctly, data, hooks, reports.

Import this package before `colossalai`: it puts stand-ins in the place of modules that Colossal-AI imports and the
examples never use, and silences warnings. docs/architecture.md says what is where.
"""

import warnings

import colossal_vit.parent  # noqa: F401 knows who started this process
from colossal_vit.compat.stand_ins import install

for _module in (r"colossalai\.", r"torch\.jit\._script"):
    warnings.filterwarnings("ignore", module=_module)
# What Colossal-AI's 2D, 2.5D and 3D layers make a recent torch say in every step; tests compare their gradients.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)
install()
