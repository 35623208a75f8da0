"""What happens around optimizer steps."""

from colossal_vit.hooks.standard import standard_hooks

__all__ = ["standard_hooks"]
