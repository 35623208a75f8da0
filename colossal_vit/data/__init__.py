"""Samples and their order."""
