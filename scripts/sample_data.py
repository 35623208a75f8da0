"""Make the small data sets that the examples run on when DATA is not set.

python scripts/sample_data.py [FOLDER]      # default: data/sample in this repository
"""

import sys
from pathlib import Path

from colossal_vit.sample import write_cifar10

if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "data" / "sample"
    print(f"CIFAR-10 format: {write_cifar10(root)}")
