"""Random numbers that are functions of what they are for, never of rank, layout or what was drawn before."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
