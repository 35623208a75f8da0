"""Colossal-AI 0.5.0 as this repository uses it: imported fast, corrected, and on machines without CUDA.

Importing this package imports Colossal-AI, without what nobody here needs. So whatever uses Colossal-AI imports this
package first, by itself or through another one; tests/test_imports.py sees to it.
"""

import warnings

from colossal_vit.compat.import_stubs import import_stubs

with import_stubs(), warnings.catch_warnings(action="ignore"):
    import colossalai.legacy.engine.schedule
    import colossalai.legacy.nn
    import colossalai.legacy.trainer.hooks
    import colossalai.nn.lr_scheduler
    import colossalai.nn.optimizer  # noqa: F401
