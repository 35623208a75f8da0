"""The files of this repository, tracked or new, and its pages."""

import shutil
import subprocess

import pytest

from fork_ranks import ROOT

TRACKED = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
FILES = [ROOT / name for name in TRACKED.stdout.split("\n") if name and (ROOT / name).exists()]
PAGES = [path for path in FILES if path.suffix == ".md" and "results" not in path.parts]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FOLDERS = ("vit_imagenet_dali", "vit_cifar10_hybrid", "vit_caltech101_amp")  # of the tutorials


def copy(folder, *left_out):
    """Copy the files into a folder, but for those in these folders of the root."""
    for path in FILES:
        name = path.relative_to(ROOT)
        if name.parts[0] not in left_out:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
