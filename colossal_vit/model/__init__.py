"""timm's Vision Transformers as this repository trains them, and the FLOPs of a model."""
