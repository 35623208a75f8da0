"""What the three examples share: launching, configs, Colossal-AI's engine put together correctly, data, hooks, reports.

Import this package before `colossalai`: it silences the import-time warnings of optional packages that the examples
do not use, and keeps out one module of Colossal-AI. All else that is patched is in `colossal_vit.patches`, which
`colossal_vit.launch` applies.
"""

import logging
import sys
import types
import warnings

for _module in (r"colossalai\.", r"torch\.jit\._script"):
    warnings.filterwarnings("ignore", module=_module)
# What Colossal-AI's 2D, 2.5D and 3D layers make a recent torch say in every step; tests compare their gradients.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)
logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)

# Imported, this module replaces PyTorch's shape functions of some twenty operators (convolution, layer norm, dropout)
# for good by those of torch 1.12, and torch.compile dies in the backward pass of a convolution. Nothing else is in it.
sys.modules.setdefault(_stand_in := "colossalai._analyzer._subclasses._meta_registration", types.ModuleType(_stand_in))
