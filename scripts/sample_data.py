"""Make the small data sets that the examples run on when DATA is not set.

python scripts/sample_data.py [FOLDER] [--imagenet]      # default: data/sample in this repository

By default it writes FOLDER/cifar-10-batches-bin. With --imagenet it writes FOLDER/imagenet instead: the train/ and val/
folders of image files that vit_imagenet_dali/build_tfrecords.py packs.
"""

import argparse
from pathlib import Path

from colossal_vit.data.digits import write_cifar10, write_imagenet

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1] / "data" / "sample")
    parser.add_argument("--imagenet", action="store_true", help="the folders of ImageNet instead of CIFAR-10's files")
    args = parser.parse_args()
    if args.imagenet:
        print(f"ImageNet folders: {write_imagenet(args.folder)}")
    else:
        print(f"CIFAR-10 format: {write_cifar10(args.folder)}")
