"""Runs programs that fork, and prints which of their processes start CUDA: run by test_cuda_starts.py as a new process.

    python tests/cuda_starts.py '{"name": ["script.py", "--flag", ...], ...}' FOLDER

Each program is a fork of this process, which must not have started CUDA: for that reason it is no test process. Prints
a line of JSON: by name, the exit code, what was said on stderr, the number of the program's process, and the numbers of
those that have started CUDA, in order. "modules" has the modules of the dry run and of matplotlib that train scripts
import.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import colossal_vit.compat  # noqa: F401 so that programs need not import it, nor the other
import timm  # noqa: F401
import torch
from colossal_vit import provenance

import fork_ranks
import schemas


def unneeded_modules() -> list[str]:
    """The modules that a train script needs for `--dry-run` or curves only, and imports nevertheless."""
    for path in schemas.SCRIPTS:
        sys.path.insert(0, str((fork_ranks.ROOT / path).parent))
        runpy.run_path(str(fork_ranks.ROOT / path))
    return [name for name in sys.modules if name.startswith(("colossal_vit.dry_run", "matplotlib"))]


modules = fork_ranks.call(unneeded_modules, launched=False)[0]

torch.set_num_threads(1)
provenance.DRIVERS = (__file__,)  # as on a machine that has a driver
found = {}
for name, (script, *argv) in json.loads(sys.argv[1]).items():
    starts = Path(sys.argv[2]) / name
    starts.touch()
    sys.path.insert(0, str((fork_ranks.ROOT / script).parent))  # as Python does, which runpy leaves to us
    world = fork_ranks.start(script, argv, [{"CUDA_STARTS": str(starts)}])
    del sys.path[0]
    (pid,) = world.pids
    done = world.wait()
    found[name] = (done.codes[0], done.stderr[0], pid, list(map(int, starts.read_text().split())))
own = Path(os.environ["CUDA_STARTS"])
found["imports"] = (0, "", os.getpid(), list(map(int, own.read_text().split())) if own.exists() else [])
print(json.dumps({**found, "modules": (0, "", 0, modules)}))
