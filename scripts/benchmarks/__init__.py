"""One file a benchmark, each with a `BENCHMARK`; what they share is in harness.py and training.py."""

import sys
from pathlib import Path

# The modules of the examples, which benchmarks measure. No two have the same name but `train`, which none imports.
# The last folder is the root, for tools/.
FOLDERS = ("vit_cifar10_hybrid", "vit_imagenet_dali", "")
sys.path += [str(Path(__file__).resolve().parents[2] / name) for name in FOLDERS]
