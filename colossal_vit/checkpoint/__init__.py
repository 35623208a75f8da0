"""Checkpoints: the state of a run, saved in one layout and loaded in any other."""
