"""Packs images into TFRecords for DALI; `--help` and `colossal_vit.data.packing` say how."""

import sys

from colossal_vit.data.packing import main

if __name__ == "__main__":
    sys.exit(main())
