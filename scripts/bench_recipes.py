"""Test accuracy of a plain recipe, of the same with all regularization on, and of its moving average, on the digits.

    python scripts/bench_recipes.py [--seeds 5] [--epochs 30] [--only EXAMPLE ...] [--output results/recipes_digits]

Trains a small Vision Transformer in each example, from scratch, with several seeds: "plain", "full" (Mixup, CutMix,
binary cross entropy, augmentation, drop path), and of the full runs also the moving average of the weights. The number
of epochs is the same.

Writes recipes.md (mean and standard deviation over the seeds), recipes.json (every run), log.txt and provenance.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from colossal_vit.benchmark import Benchmark
from colossal_vit.results import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SIZE = dict(IMG_SIZE=32, PATCH_SIZE=4, HIDDEN_SIZE=96, DEPTH=4, NUM_HEADS=4, NUM_CLASSES=10, DROP_RATE=0.0, fp16=None)
TRAINING = dict(BATCH_SIZE=64, gradient_accumulation=1, WARMUP_EPOCHS=3, FLIP=False, clip_grad_norm=1.0)
TRAINING |= dict(OPTIMIZER="adamw", SCHEDULE="cosine", LEARNING_RATE=2e-3, WEIGHT_DECAY=0.05, LABEL_SMOOTHING=0.0)
EXAMPLES = {
    "CIFAR-10": (
        "vit_cifar10_hybrid/train_hybrid.py",
        "configs/config_pipeline_parallel.py",
        {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "CROP_PADDING": 2, "CHECKPOINT": False},
    ),
    "Caltech101": ("vit_caltech101_amp/train.py", "config/config_fp32.py", {"CROP_AREA": (0.7, 1.0)}),
    "ImageNet, DALI": (
        "vit_imagenet_dali/train.py",
        "config_sample.py",
        {"CROP_AREA": (0.7, 1.0), "dali.mixup_alpha": 0, "LAMB_EXCLUDE_VECTORS": False},
    ),
}
FULL = {"mix.mixup": 0.8, "mix.cutmix": 1.0, "bce.threshold": 0.0, "DROP_PATH_RATE": 0.05, "DECAY_VECTORS": False}
FULL |= {"ema.decay": 0.99, "ema.warmup": True, "augment.policy": "three", "augment.color_jitter": 0.3}


def train(example: str, recipe: str, seed: int, epochs: int) -> tuple[dict[str, float], str]:
    """The last evaluation of a run, and what the run printed."""
    script, config, values = EXAMPLES[example]
    values = {**SIZE, **TRAINING, **values, "NUM_EPOCHS": epochs, "SEED": seed}
    if recipe == "full":
        values |= FULL
    path = ROOT / script
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, path.name, "--config", config, "--output", f"{scratch}/run"]
        command += [part for key, value in values.items() for part in ("--set", f"{key}={value!r}")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("DATA", None)
        done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
        said = (done.stdout + done.stderr).replace(scratch, "SCRATCH")
        if done.returncode:
            sys.exit(f"{example}, {recipe}, seed {seed} failed:\n{said}")
        return read_metrics(Path(scratch) / "run")[1][-1], said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each recipe (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="of each run (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), help="these examples")
    parser.add_argument("--output", type=Path, default=ROOT / "results/recipes_digits", help="where the result goes")
    args = parser.parse_args()
    benchmark = Benchmark(args.output)
    results: dict[str, dict[str, list[float]]] = {}
    table = ["| test accuracy | plain | full | full, EMA |", "| --- |" + " ---: |" * 3]
    for example in args.only:
        found = results[example] = {"plain": [], "full": [], "full, EMA": []}
        for seed in range(1, args.seeds + 1):
            for recipe in ("plain", "full"):
                last, said = train(example, recipe, seed, args.epochs)
                found[recipe].append(last["eval_accuracy"])
                if recipe == "full":
                    found["full, EMA"].append(last["ema_accuracy"])
                benchmark.log += f"===== {example}, {recipe}, seed {seed} =====\n{said}"
                benchmark.say(f"{example}, {recipe}, seed {seed}: {last}")
        cells = (
            f"{statistics.mean(values):.1%} ± {statistics.stdev(values) if len(values) > 1 else 0:.1%}"
            for values in found.values()
        )
        table.append(f"| {example} | {' | '.join(cells)} |")
    details = {"accuracy": results, "epochs": args.epochs, "size": SIZE, "training": TRAINING, "full": FULL}
    benchmark.finish("recipes", table, details)


if __name__ == "__main__":
    main()
