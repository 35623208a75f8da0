"""The parallel layout, parameter shards, and communication of Python objects."""
