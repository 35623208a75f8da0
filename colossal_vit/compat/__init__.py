"""Fixes for Colossal-AI 0.5.0: defects, machines without CUDA, import time."""
