"""What benchmarks share that time several implementations of a training step in the same processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit import launch
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.parallel.ranks import all_gather_object
from colossal_vit.provenance import ResultFolder
from colossal_vit.run import Run
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor, nn
from torch.optim import Optimizer

from check_layouts import CONFIG, FOLDER
from turns import in_turns

sys.path.append(str(FOLDER))

from vit import build_vit, check_vit

CHECKED_STEPS, TOLERANCE = 3, 1e-4  # relative tolerance of losses; these steps are also the warm-up

# One optimizer step on this rank's part of a batch; returns the loss, or None if this rank does not compute it.
Step = Callable[[Tensor, Tensor], Tensor | None]


# ---- On each rank ----------------------------------------------------------------------------------------------------


def start_rank(args: argparse.Namespace, more: list[str]) -> Run:
    """Start a rank of `start`: `more` are flags for train_hybrid.py."""
    return launch.start(launch.parse([*more, f"--output={args.output}"], script="train_hybrid", check=check_vit))


def build_engine(run: Run, criterion: nn.Module) -> Engine:
    """The model and the engine of train_hybrid.py, whatever the layout."""
    model = build_vit(run.config, run.layout)
    return initialize(model, build_optimizer(run.config, model), criterion)[0]


def ours(engine: Engine) -> Step:
    """A training step of an engine."""

    def step(images: Tensor, labels: Tensor) -> Tensor | None:
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(images, labels)]))[2]
        engine.step()
        return loss

    return step


def plain(model: nn.Module, optimizer: Optimizer, criterion: nn.Module) -> Step:
    """A training step in plain PyTorch."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def time_in_turns(
    run: Run,
    sides: Mapping[str, Step],
    num_runs: int,
    num_steps: int,
    finish: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Check that all sides compute the same losses, then time them; they take turns run by run.

    Args:
        run: of this rank.
        sides: by name.
        num_runs: of each side.
        num_steps: of a run; all sides get the same batches.
        finish: called at the end of each run, within its time, to wait for what a step has left to be done later.

    Returns:
        Images/s of each side in each run.

    Raises:
        SystemExit: if the losses differ.
    """
    generator, size = torch.Generator().manual_seed(run.config.SEED), run.config.IMG_SIZE
    global_batch = run.config.BATCH_SIZE * run.layout.data
    replica = gpc.get_local_rank(ParallelMode.DATA)

    def next_batch() -> list[Tensor]:
        images = torch.randn(global_batch, 3, size, size, generator=generator)
        labels = torch.randint(run.config.NUM_CLASSES, (global_batch,), generator=generator)
        return [whole.chunk(run.layout.data)[replica].to(run.device) for whole in (images, labels)]

    def mean_loss(loss: Tensor | None) -> float:
        losses = all_gather_object(None if loss is None else loss.item())
        return statistics.fmean(value for value in losses if value is not None)

    for _ in range(CHECKED_STEPS):
        batch = next_batch()
        losses = {side: mean_loss(step(*batch)) for side, step in sides.items()}
        run.log.info(f"losses: {losses}")
        if max(losses.values()) - min(losses.values()) > TOLERANCE * min(losses.values()):
            sys.exit(f"the sides do not compute the same losses: {losses}")
    images_per_s: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(num_runs):
        batches = [next_batch() for _ in range(num_steps)]
        seconds = {}
        for side in in_turns(sides, number):
            dist.barrier()
            started = time.perf_counter()
            for batch in batches:
                sides[side](*batch)
            finish()
            dist.barrier()
            seconds[side] = time.perf_counter() - started
        for side, rates in images_per_s.items():
            rates.append(global_batch * num_steps / seconds[side])
        last = {side: round(rates[-1], 2) for side, rates in images_per_s.items()}
        run.log.info(f"run {number + 1}, images/s: {last}")
    return images_per_s


def give_back(run: Run, result: Any) -> None:
    """Make `start` return what each rank gives here, a JSON-serialisable object."""
    results = all_gather_object(result)
    if dist.get_rank() == 0:
        (run.output / "result.json").write_text(json.dumps(results))


# ---- In the process that starts them ---------------------------------------------------------------------------------


def start(script: str, name: str, processes: int, flags: list[str], benchmark: ResultFolder) -> list[Any]:
    """Start a benchmark's own ranks, and return what each gave back; `benchmark` logs what they print.

    Args:
        script: file that does the work of a rank where LOCAL_RANK is set.
        name: passed as `--only`.
        processes: number of ranks.
        flags: more of the script's flags, or train_hybrid.py's.
        benchmark: logs the output.
    """
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [script, f"--only={name}", *flags, f"--config={FOLDER / CONFIG}", f"--output={output}"]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ}, **options) as ranks:
            for line in ranks.stdout:
                benchmark.print(line.rstrip("\n").replace(output, "SCRATCH"))
        if ranks.returncode:
            sys.exit(f"{name} on {processes} processes failed, see above")
        return json.loads((Path(output) / "result.json").read_text())
