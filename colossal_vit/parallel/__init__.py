"""The parallel layout, parameter shards, random seeds of the ranks, and communication of Python objects."""
