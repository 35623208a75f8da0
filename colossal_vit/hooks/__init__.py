"""Trainer hooks: metrics, progress bar, checkpoints, profiling."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
from colossal_vit.hooks.standard import standard_hooks

__all__ = ["standard_hooks"]
