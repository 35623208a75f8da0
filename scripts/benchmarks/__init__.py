"""One file a benchmark, each with a `BENCHMARK`; what they share is in harness.py and training.py."""
