"""timm's Vision Transformers as this repository trains them, and the FLOPs of a model."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
