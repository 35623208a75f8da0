"""What the three examples share: launching, configs, Colossal-AI's engine put together correctly, data, hooks, reports.

Import this package before `colossalai`: it silences the import-time warnings of optional packages that the examples
do not use. Nothing is patched here; `colossal_vit.launch` does that, from `colossal_vit.patches`.
"""

import logging
import warnings

for _module in (r"colossalai\.", r"torch\.jit\._script"):
    warnings.filterwarnings("ignore", module=_module)
# What Colossal-AI's 2D, 2.5D and 3D layers make a recent torch say in every step; tests compare their gradients.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)
logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
