"""Trainer hooks: metrics, progress bar, checkpoints, profiling."""

from colossal_vit.hooks.standard import standard_hooks

__all__ = ["standard_hooks"]
