"""Colossal-AI 0.5.0 corrected, run without CUDA, and imported quickly."""
