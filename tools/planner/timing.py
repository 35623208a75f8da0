"""`--machine here`: layouts are timed by training in them for a few steps."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from colossal_vit.errors import UserError
from colossal_vit.results import read_metrics

from tools.planner.enumeration import Choice, is_hybrid
from tools.planner.request import Request

UNCOUNTED, COUNTED = 3, 5  # steps: the first ones compile, and fill caches


def time_layout(path: Path, request: Request, choice: Choice) -> float:
    """Return seconds of an optimizer step of a layout on this machine, without the wait for data: the median of some.

    Args:
        path: of the train script, which trains on random images in processes of its own.
        request: what is asked for.
        choice: the layout.

    Raises:
        UserError: with the script's last words, if it fails.
    """
    values = {**choice.settings(is_hybrid(request.config)), "SYNTHETIC": True}
    flags = [word for key, value in values.items() for word in ("--set", f"{key}={value!r}")]
    start = [sys.executable]
    if request.world_size > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={request.world_size}"]
    given = [word for override in request.args.set for word in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*start, str(path), "--config", str(request.args.config), *given, *flags, "--output", folder]
        command += ["--max-steps", str(UNCOUNTED + COUNTED)]
        done = subprocess.run(command, capture_output=True, text=True, env={**_one_thread(request), **os.environ})
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error: " in line] or done.stderr.splitlines()
            raise UserError(f"{choice}: cannot be timed: {(lines or ['no message'])[0].strip()}")
        steps, _ = read_metrics(Path(folder))
    return statistics.median(step["step_s"] - step["data_s"] for step in steps[UNCOUNTED:])


def _one_thread(request: Request) -> dict[str, str]:
    """Return what torchrun sets for several processes, without its warning."""
    return {"OMP_NUM_THREADS": "1"} if request.world_size > 1 else {}
