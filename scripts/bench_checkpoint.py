"""Cost of a checkpoint: the pause in training, the time to write, verify and load it, and its size.

    python scripts/bench_checkpoint.py [--models NAME ...] [--runs N] [--scratch DIR] [--result results/checkpoint]

About 6 minutes on 2 CPU cores; needs 12 GB of free memory, and 4 GB of free space in `--scratch`. Each model is trained
in a separate process, in fp32 with LAMB on 2 random images. Training pauses while its state is gathered (`gather`),
and continues while the state is written (`storage.write`); steps without and during a write are timed alternately.
`Checkpointer.prepare` verifies from the disk, after the files are dropped from the page cache; `load` then reads from
the page cache, as when a run is restarted. All numbers are medians. "Every ... s for 1%" is the shortest interval
between saves for which training pauses at most 1 % of the time: 100 times the pause. Slower steps during a write come
on top.

Prints the table. With `--result` also writes checkpoint.md, checkpoint.json (every time), log.txt and provenance.json.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from colossal_vit import launch
from colossal_vit.checkpoint import storage, tensors
from colossal_vit.data.batches import SyntheticBatches
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.loop import Trainer
from colossal_vit.models import build_timm_vit
from colossal_vit.provenance import ResultFolder
from colossalai.accelerator import get_accelerator
from colossalai.nn.lr_scheduler import LinearWarmupLR

from check_layouts import set_flags

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "vit_imagenet_dali/config.py"
MODELS = ("vit_base_patch16_224", "vit_large_patch32_224")
SETTINGS = dict(BATCH_SIZE=2, gradient_accumulation=1, fp16=None)
NUM_TAKEN = 5  # captures of the state, after a warm-up
NUM_BATCHES = 1000  # per epoch: more than are used
GOAL = 0.01  # largest share of the time that training may pause


def seconds(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes, including its work on the device."""
    get_accelerator().synchronize()
    started = time.perf_counter()
    work()
    get_accelerator().synchronize()
    return time.perf_counter() - started


def forget(path: Path) -> None:
    """Ask the kernel to drop a checkpoint's files from the page cache."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(name: str, num_runs: int, scratch: Path) -> dict[str, Any]:
    """All times of a model in seconds, and the sizes of its files; runs in a separate process."""
    flags = set_flags({**SETTINGS, "MODEL": name})
    run = launch.start(launch.parse(["--config", str(CONFIG), "--output", str(scratch / "run"), *flags]))
    config, device = run.config, run.device
    model = build_timm_vit(config).to(device)
    optimizer = Lamb(model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY)
    scheduler = LinearWarmupLR(optimizer, total_steps=NUM_BATCHES, warmup_steps=NUM_BATCHES // 2)
    shape = (config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE)
    batches = SyntheticBatches(NUM_BATCHES, shape, config.NUM_CLASSES, device, config.SEED)
    engine, loader, _, scheduler = initialize(model, optimizer, torch.nn.CrossEntropyLoss(), batches, None, scheduler)
    trainer = Trainer(engine, scheduler, run.log)
    engine.train()
    times: dict[str, list[float]] = {key: [] for key in ("take", "write", "verify", "resume", "alone", "beside")}
    folder = run.output / storage.FOLDER
    folder.mkdir(exist_ok=True)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter(loader))
        engine.step()
        scheduler.step()

    def gather() -> storage.TensorFiles:
        return tensors.gather(engine)

    def write(files: storage.TensorFiles, state: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        storage.write(path, files, state)
        times["write"].append(time.perf_counter() - started)

    for _ in range(2):  # the first step creates the moments
        step()
    times["take"] = [seconds(gather) for _ in range(1 + NUM_TAKEN)][1:]
    num_alone = 3
    for _ in range(num_runs):
        for old in storage.list_steps(folder):
            shutil.rmtree(old)
        times["alone"] += [seconds(step) for _ in range(num_alone)]
        path = folder / f"step-{engine.num_steps:08d}"
        state = run.checkpointer.state(trainer, loader, 0, engine.num_steps)
        writer = Thread(target=write, args=[gather(), state])
        writer.start()
        beside = []
        while writer.is_alive():
            beside.append(seconds(step))
        times["beside"] += beside[:-1] or beside  # the write ended during the last step
        num_alone = len(beside)
        forget(path)
        times["verify"].append(seconds(run.checkpointer.prepare))
        times["resume"].append(seconds(lambda: run.checkpointer.load(trainer, loader)))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": {file.name: file.stat().st_size for file in sorted(path.iterdir())},
        "seconds": times,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }


def make_table(results: dict[str, dict]) -> list[str]:
    """Medians as a Markdown table with one row per model."""
    columns = ["model", "parameters, M", "checkpoint, MB", "weights, MB", "moments, MB"]
    columns += ["training stops, s", f"every ... s for {GOAL:.0%}", "write, s", "verify, s", "restore, s"]
    columns += ["step alone, s", "step beside a write, s", "longer by"]
    table = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for name, result in results.items():
        size = {key: value / 1e6 for key, value in result["bytes"].items()}
        s = {key: statistics.median(values) for key, values in result["seconds"].items()}
        cells = [name, f"{result['parameters'] / 1e6:.1f}", f"{sum(size.values()):.1f}"]
        cells += [f"{size[storage.MODEL]:.1f}", f"{size[storage.OPTIMIZER]:.1f}"]
        cells += [f"{s['take']:.2f}", f"{max(s['take'] / GOAL, s['write']):.0f}"]
        cells += [f"{s[key]:.1f}" for key in ("write", "verify", "resume")]
        cells += [f"{s['alone']:.2f}", f"{s['beside']:.2f}", f"{s['beside'] / s['alone'] - 1:+.0%}"]
        table.append(f"| {' | '.join(cells)} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="of timm (default: the docstring)")
    parser.add_argument("--runs", type=int, default=5, help="checkpoints to write (default %(default)s)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="default %(default)s")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    benchmark = ResultFolder(args.result)

    disk = ["df", "--output=fstype", str(args.scratch)]
    file_system = subprocess.run(disk, capture_output=True, text=True, check=True).stdout.split()[-1]
    free = shutil.disk_usage(args.scratch).free
    benchmark.print(f"{args.scratch} is {file_system} with {free / 1e9:.1f} GB free")
    results = {}
    for name in args.models:
        with (
            tempfile.TemporaryDirectory(dir=args.scratch) as scratch,
            ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
        ):
            results[name] = process.submit(measure, name, args.runs, Path(scratch)).result()
        benchmark.print(f"{name}: {results[name]}")
    details = {"settings": SETTINGS, "file_system": file_system, "free_bytes": free, "models": results}
    benchmark.finish("checkpoint", make_table(results), details)


if __name__ == "__main__":
    main()
