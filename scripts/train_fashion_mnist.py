"""Train on Fashion-MNIST: five seeds, four layouts, all three examples, and Muon with five seeds.

    python scripts/sample_data.py fashion-mnist DATA
    python scripts/train_fashion_mnist.py DATA RUNS [--result results/fashion_mnist] [--only NAME ...]

About two hours on 2 CPU cores. Each training has a run directory in RUNS, so that a second call resumes where the first
was stopped. Model and training are those of vit_cifar10_hybrid/configs/config_fashion_mnist.py. The scripts that train
models of timm begin with timm's initial weights, and those that read image files and TFRecords crop by area.

Writes fashion_mnist.md (the table), fashion_mnist.json (the accuracy of each run after each epoch), each run's log, and
provenance.json.
"""

import argparse
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from colossal_vit.provenance import ResultFolder
from colossal_vit.results import read_metrics

from benchmarks.harness import ROOT
from layouts import LAYOUTS, set_flags

CONFIG = ROOT / "vit_cifar10_hybrid/configs/config_fashion_mnist.py"
SHARED = (
    *("BATCH_SIZE", "OPTIMIZER", "SCHEDULE", "LEARNING_RATE", "WEIGHT_DECAY", "NUM_EPOCHS", "WARMUP_EPOCHS"),
    *("LABEL_SMOOTHING", "IMG_SIZE", "PATCH_SIZE", "HIDDEN_SIZE", "DEPTH", "NUM_HEADS", "NUM_CLASSES", "FLIP"),
)
SEEDS = range(5)


def timm_values() -> dict[str, Any]:
    """Return the config's values for the scripts that train timm's models, which crop by area."""
    config = runpy.run_path(str(CONFIG))
    other = {"MODEL": "vit_base_patch16_224", "CROP_AREA": (0.75, 1.0), "DROP_RATE": 0.0, "fp16": None}
    return {key: config[key] for key in SHARED} | other


def runs() -> dict[str, tuple[str, str, str, int, dict[str, Any]]]:
    """Script, config, folder of data, processes and values of each training."""
    hybrid = ("vit_cifar10_hybrid/train_hybrid.py", str(CONFIG), "")
    timm = timm_values()
    return {
        **{f"seed {seed}": (*hybrid, 1, {"SEED": seed}) for seed in SEEDS},
        **{f"Muon, seed {seed}": (*hybrid, 1, {"SEED": seed, "OPTIMIZER": "muon"}) for seed in SEEDS},
        "DP 2": (*hybrid, 2, {"SEED": 0, "BATCH_SIZE": timm["BATCH_SIZE"] // 2}),
        **{name: (*hybrid, LAYOUTS[name][0], {"SEED": 0, **LAYOUTS[name][1]}) for name in ("PP 2", "1D 2")},
        "train_dp.py": (
            "vit_cifar10_hybrid/train_dp.py",
            "vit_cifar10_hybrid/configs/config_data_parallel.py",
            "",
            1,
            {key: value for key, value in timm.items() if key != "CROP_AREA"}
            | {"SEED": 0, "CROP_PADDING": 2, "gradient_accumulation": 1},
        ),
        "vit_caltech101_amp": (
            "vit_caltech101_amp/train.py",
            "vit_caltech101_amp/config/config_fp32.py",
            "images",
            1,
            timm | {"SEED": 0, "CACHE_SIZE": 32},
        ),
        "vit_imagenet_dali": (
            "vit_imagenet_dali/train.py",
            "vit_imagenet_dali/config.py",
            "imagenet_tfrecords",
            1,
            timm | {"SEED": 0, "GLOBAL_BATCH": timm["BATCH_SIZE"], "gradient_accumulation": 1, "mix": None},
        ),
    }


def train(data: Path, output: Path, script: str, config: str, format: str, processes: int, values: dict) -> list[float]:
    """Train to the end, unless a call before has; returns the accuracy after each epoch.

    Raises:
        SystemExit: if the script fails.
    """
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [*start, str(ROOT / script), "--config", str(ROOT / config), "--output", str(output), *set_flags(values)]
    environment = os.environ | {"DATA": str(data / format), "OMP_NUM_THREADS": "1"}
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.with_suffix(".log"), "a") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed: see {log.name}")
    return [evaluation["eval_accuracy"] for evaluation in read_metrics(output)[1]]


def make_table(accuracies: dict[str, list[float]]) -> list[str]:
    """Return the last accuracy of each run, and mean and deviation of the seeds', as Markdown."""
    last = {name: curve[-1] for name, curve in accuracies.items()}
    means = []
    for name, said in (("seed", "one process"), ("Muon, seed", "one process, Muon")):
        seeds = [last[f"{name} {seed}"] for seed in SEEDS if f"{name} {seed}" in last]
        if len(seeds) > 1:
            mean, deviation = statistics.mean(seeds), statistics.stdev(seeds)
            means.append(f"| {said}, {len(seeds)} seeds | {mean:.2%} ± {deviation:.2%} |")
    return ["| run | test accuracy |", "| --- | ---: |", *means, *(f"| {name} | {last[name]:.2%} |" for name in last)]


def main() -> None:
    every = runs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder that sample_data.py has written")
    parser.add_argument("runs", type=Path, help="folder of the run directories")
    parser.add_argument("--only", nargs="+", choices=every, metavar="NAME", help=f"of {', '.join(every)}")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    result = ResultFolder(args.result)
    data, accuracies = args.data.resolve(), {}
    for name, how in every.items():
        if args.only and name not in args.only:
            continue
        output = args.runs.resolve() / name.replace(",", "").replace(" ", "_").removesuffix(".py")
        accuracies[name] = train(data, output, *how)
        result.print(f"{name}: {accuracies[name][-1]:.2%}")
        if args.result:
            args.result.mkdir(parents=True, exist_ok=True)
            log = output.with_suffix(".log").read_text()
            for path, said in ((ROOT, "."), (args.runs.resolve(), "RUNS"), (data, "DATA")):
                log = log.replace(str(path), said)
            (args.result / output.with_suffix(".log").name).write_text(log)
    result.finish("fashion_mnist", make_table(accuracies), accuracies)


if __name__ == "__main__":
    main()
