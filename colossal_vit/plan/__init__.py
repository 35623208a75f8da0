"""Dry runs: memory and communication of an optimizer step, from fake tensors and process groups."""
