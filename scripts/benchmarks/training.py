"""Steps of training as sides of a benchmark, in ranks of its own; and runs of the train scripts in new processes."""

import argparse
import ctypes
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.data.loaders import import_loader
from colossal_vit.dry_run.fakes import FakeReductions
from colossal_vit.engine import precision
from colossal_vit.engine.engine import Engine
from colossal_vit.main import Script, load_script, start, start_alone
from colossal_vit.model.mfu import peak_of, training_flops
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.results import read_metrics
from colossal_vit.run import Run
from colossalai.accelerator import get_accelerator
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import ROOT, Failed, Side
from layouts import CONFIG, set_flags
from layouts import FOLDER as HYBRID

CHECKED_STEPS, TOLERANCE = 3, 1e-4  # relative tolerance of losses; these steps are also the warm-up
OUT_OF_MEMORY = re.compile(r"out of memory|(not enough|allocate) memory|MemoryError|SIGKILL|exitcode *: *-9", re.I)

Batch = tuple[Tensor, Tensor]
# One optimizer step on this rank's part of a batch; returns the loss, or None if this rank does not compute it.
Step = Callable[[Tensor, Tensor], Tensor | None]


@cache
def device() -> torch.device:
    """Return the first GPU, or the CPU. A process that has asked for GPUs can no longer use them in forks."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def seconds(work: Callable[[], Any]) -> float:
    """Return seconds that `work` takes, including its work on the device."""
    synchronize = torch.cuda.synchronize if device().type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for the train scripts")


# ---- Steps, on each rank ---------------------------------------------------------------------------------------------


def start_run(args: argparse.Namespace, script: Path, config: Path, values: Mapping[str, Any]) -> Run:
    """Start this process as a rank of a training, in a folder that ends with the benchmark.

    Args:
        args: the command line of the benchmark.
        script: the train script.
        config: the file.
        values: config values, before those of `--set`.
    """
    flags = [*set_flags(values), *(f"--set={override}" for override in getattr(args, "set", ()))]
    argv = ["--config", str(config), "--output", f"{args.on_ranks[1]}/run", *flags]
    run = start(load_script(script).parse(argv))
    run.config.setdefault("NUM_CLASSES", import_loader(run.args, run.config).NUM_CLASSES)
    return run


def return_freed_memory() -> None:
    """Undo that a rank on a CPU keeps freed memory, which takes what others need here: all share one machine."""
    mmap_max, trim_threshold = -4, -1
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(mmap_max, 2**16)
    mallopt(trim_threshold, 2**17)


def start_hybrid(args: argparse.Namespace, values: Mapping[str, Any]) -> Run:
    """Start a rank of train_hybrid.py."""
    return start_run(args, HYBRID / "train_hybrid.py", HYBRID / CONFIG, values)


def start_rank_0(script: Script, flags: Sequence[str], world_size: int) -> Run:
    """Start this process as rank 0 of a layout whose other ranks do not exist, on the real device.

    Its process groups are torch's fake ones: a message takes no time, and brings nothing.
    """
    # What would be received is zero instead of anything, NaN included, which would end the training.
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    args = script.parse([*flags, "--world_size", str(world_size), "--output", "/nonexistent"])
    return start_alone(args, 0, FakeStore(), lambda device: FakeReductions().__enter__())


def in_new_process(function: Callable, *arguments: Any) -> Any:
    """Return what a function returns in a process of its own: this one then has no process groups, and no GPU.

    Raises:
        Failed: if the process is killed, as the kernel does where memory runs out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise Failed("out of memory") from None


def engine_step(engine: Engine) -> Step:
    """Return a training step of an engine."""

    def step(images: Tensor, labels: Tensor) -> Tensor | None:
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(images, labels)]))[2]
        engine.step()
        return loss

    return step


def plain_step(model: nn.Module, optimizer: Optimizer, criterion: nn.Module) -> Step:
    """Return a training step in plain PyTorch."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def random_batches(run: Run) -> Iterator[Batch]:
    """Yield this rank's parts of global batches of random images, endlessly."""
    generator, size = torch.Generator().manual_seed(run.config.SEED), run.config.IMG_SIZE
    global_batch = run.config.BATCH_SIZE * run.layout.data
    replica = gpc.get_local_rank(ParallelMode.DATA)
    while True:
        images = torch.randn(global_batch, 3, size, size, generator=generator)
        labels = torch.randint(run.config.NUM_CLASSES, (global_batch,), generator=generator)
        yield tuple(whole.chunk(run.layout.data)[replica].to(run.device) for whole in (images, labels))


def check_agreement(losses: Mapping[str, float], tolerance: float) -> None:
    """Raise SystemExit unless all sides have the same loss, to a relative tolerance."""
    if max(losses.values()) - min(losses.values()) > tolerance * min(losses.values()):
        sys.exit(f"the sides do not compute the same losses: {losses}")


def step_sides(
    run: Run, steps: Mapping[str, Step], num_steps: int, finish: Callable[[], None] = lambda: None
) -> dict[str, Side]:
    """Sides that each make the same steps; they must compute the same losses before they are timed.

    Args:
        run: of this rank.
        steps: by name of the side.
        num_steps: of a round.
        finish: called at the end of a round, within its time, to wait for what a step has left to be done later.

    Raises:
        SystemExit: if the losses differ.
    """

    def mean_loss(loss: Tensor | None) -> float:
        losses = all_gather_object(None if loss is None else loss.item())
        return statistics.fmean(value for value in losses if value is not None)

    def side(step: Step, batches: Iterator[Batch]) -> Side:
        def measure(number: int) -> dict[str, float]:
            those_of_the_round = [next(batches) for _ in range(num_steps)]
            dist.barrier()
            started = time.perf_counter()
            for batch in those_of_the_round:
                step(*batch)
            finish()
            get_accelerator().synchronize()
            dist.barrier()
            num_images = run.config.BATCH_SIZE * run.layout.data * num_steps
            return {"images/s": num_images / (time.perf_counter() - started)}

        return measure

    batches = {name: random_batches(run) for name in steps}
    for _ in range(CHECKED_STEPS):
        losses = {name: mean_loss(step(*next(batches[name]))) for name, step in steps.items()}
        run.log.info(f"losses: {losses}")
        check_agreement(losses, TOLERANCE)
    return {name: side(step, batches[name]) for name, step in steps.items()}


# ---- Runs, in new processes ------------------------------------------------------------------------------------------


def train(script: str | Path, flags: Sequence[str], ranks: int = 1, **variables: str) -> list[dict]:
    """Run a train script; returns the records of its steps.

    Args:
        script: its path, absolute or from the root.
        flags: all but `--output`.
        ranks: number of processes.
        variables: of the environment.

    Raises:
        Failed: if the run fails, with its error.
    """
    path = ROOT / script
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, *launcher, path.name, *flags, "--output", f"{scratch}/run"]
        done = subprocess.run(command, cwd=path.parent, env={**os.environ, **variables}, capture_output=True, text=True)
        if not done.returncode:
            return read_metrics(Path(scratch) / "run")[0]
    if OUT_OF_MEMORY.search(done.stdout + done.stderr) or done.returncode == -9:
        raise Failed("out of memory")
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
    own = [line for line in lines if "error: " in line or re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    raise Failed((own or lines)[0].strip())


def summary_of(steps: Sequence[dict]) -> dict[str, float | None]:
    """Speed, memory, wait and loss of the steps of a run that count."""
    seconds = statistics.median(step["step_s"] for step in steps)
    reserved = max(step.get("reserved_gb", 0.0) for step in steps)
    return {
        "images/s": steps[0]["images_per_s"] * steps[0]["step_s"] / seconds,
        "peak memory, GB": max(step["memory_gb"] for step in steps),
        "reserved, GB": reserved or None,
        "it/s": 1 / seconds,
        "waiting for data, %": 100 * sum(step["data_s"] for step in steps) / sum(step["step_s"] for step in steps),
        "final loss": steps[-1]["loss"],
    }


def mfu(config: Config, images_per_s: float) -> float | None:
    """Model FLOPs utilisation of one process in percent, or None if the device's peak is unknown."""
    peak = peak_of(device(), precision.compute_dtype(config.fp16, device()), config.TF32)
    if not peak:
        return None
    with torch.device("meta"):
        model = build_timm_vit(Config({"NUM_CLASSES": 101, **config}))
        flops = training_flops(model, config.IMG_SIZE)
    return 100 * images_per_s * flops / peak
