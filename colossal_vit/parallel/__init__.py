"""The parallel layout, parameter shards, and communication of Python objects."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
