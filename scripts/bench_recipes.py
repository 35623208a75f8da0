"""Test accuracy on the digits: a plain recipe, one with regularization, its moving average; and of fine-tuning.

    python scripts/bench_recipes.py [--seeds 1 2 3 4 5] [--epochs 30] [--only EXAMPLE ...] [--runs runs/bench_recipes]
                                    [--output results/recipes_digits]

A small Vision Transformer is trained with several seeds, for the same number of epochs:

- from scratch, in each example: "plain" and "full" (Mixup, colour jitter, no weight decay on vectors), and of the full
  runs also the moving average of the weights;
- on 10 images of each of the digits 5 to 9, in each example: from scratch, and from the weights of a plain run on the
  digits 0 to 4. The 10 images are the same for all seeds.

Each run is kept in a folder below --runs, named after the commit: a benchmark that was stopped resumes when it is
started again. The runs are forks of one process that has imported everything.

Writes recipes.md (mean and standard deviation over the seeds), recipes.json (every run), log.txt and provenance.json.
"""

import argparse
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "vit_imagenet_dali", "vit_cifar10_hybrid", "vit_caltech101_amp")
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in FOLDERS)]

from colossal_vit.data import digits  # noqa: E402
from colossal_vit.provenance import ResultFolder  # noqa: E402
from colossal_vit.results import read_metrics  # noqa: E402

import conftest  # noqa: E402, F401 one thread and no GPU, which forks could not share; unsets DATA
import fork_ranks  # noqa: E402
from build_tfrecords import build, parse  # noqa: E402
from check_layouts import set_flags  # noqa: E402

Values = dict[str, Any]
SIZE = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=64, DEPTH=4, NUM_HEADS=4, NUM_CLASSES=10, DROP_RATE=0.0, fp16=None)
TRAINING = dict(BATCH_SIZE=64, gradient_accumulation=1, WARMUP_EPOCHS=3, FLIP=False, clip_grad_norm=1.0)
TRAINING |= dict(OPTIMIZER="adamw", SCHEDULE="cosine", LEARNING_RATE=2e-3, WEIGHT_DECAY=0.05, LABEL_SMOOTHING=0.0)
EXAMPLES: dict[str, tuple[str, str, Values]] = {
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
FULL = {"mix.mixup": 0.2, "mix.prob": 0.5, "augment.color_jitter": 0.1, "DECAY_VECTORS": False}
FULL |= {"ema.decay": 0.99, "ema.warmup": True}
RECIPES: dict[str, Values] = {"plain": {}, "full": FULL}

OLD, NEW = tuple(range(5)), tuple(range(5, 10))  # the digits that the weights come from, and those they are tuned to
TRAIN_PER_CLASS = 10
FEW = {"NUM_CLASSES": len(NEW), "BATCH_SIZE": 10}  # 5 steps an epoch


def write_splits(root: Path) -> None:
    """Write the digits `OLD` and `NEW` in the formats of all examples, to `root/old` and `root/new`."""
    for name, classes, most in (("old", OLD, None), ("new", NEW, TRAIN_PER_CLASS)):
        digits.write_cifar10(root / name, classes, most)
        digits.write_caltech101(root / name, classes)  # its test set is what training leaves over
        folder = digits.write_imagenet(root / name, classes, most)
        with redirect_stdout(None):
            build(parse([str(folder), str(root / name)]))


def train(
    benchmark: ResultFolder, folder: Path, example: str, name: str, values: Values
) -> tuple[Path, dict[str, float]]:
    """Train, unless a benchmark that was stopped has: the run directory and its last evaluation.

    Args:
        benchmark: whose log gets what the run prints.
        folder: of all runs.
        example: a key of `EXAMPLES`.
        name: of the run, without the example.
        values: its config, beside `SIZE`, `TRAINING` and the example's own values.

    Raises:
        SystemExit: if the run fails.
    """
    script, config, own = EXAMPLES[example]
    run = folder / f"{example.split(',')[0]}-{name}".replace(" ", "-")
    printed = run / "printed.txt"
    if not printed.exists():
        flags = set_flags({**SIZE, **TRAINING, **own, **values})
        argv = ["--config", config, "--output", str(run), *flags]
        started = time.perf_counter()
        done = fork_ranks.run(script, argv)
        if done.codes != [0]:
            sys.exit(f"{example}, {name} failed:\n{done}")
        printed.write_text(f"{done.stdout[0]}{time.perf_counter() - started:.0f} s\n")
    last = read_metrics(run)[1][-1]
    benchmark.log += f"===== {example}, {name} =====\n{printed.read_text()}".replace(str(folder), "RUNS")
    benchmark.print(f"{example}, {name}: {last}")
    return run, last


def cell(accuracies: list[float]) -> str:
    """Mean and standard deviation, in percent."""
    spread = f" ± {statistics.stdev(accuracies):.1%}" if len(accuracies) > 1 else ""
    return f"{statistics.mean(accuracies):.1%}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 to 5")
    parser.add_argument("--epochs", type=int, default=30, help="of each run (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), help="these examples")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/bench_recipes", help="where the runs are kept")
    parser.add_argument("--output", type=Path, default=ROOT / "results/recipes_digits", help="where the result goes")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)
    folder = args.runs.resolve() / f"{benchmark.origin['commit'][:12]}-{args.epochs}"
    write_splits(folder / "data")

    scratch: dict[str, dict[str, list[float]]] = {}
    tuned: dict[str, dict[str, list[float]]] = {}
    for example in args.only:
        found = scratch[example] = {"plain": [], "full": [], "full, EMA": []}
        for seed in args.seeds:
            always = {"NUM_EPOCHS": args.epochs, "SEED": seed}
            for recipe, values in RECIPES.items():
                _, last = train(benchmark, folder, example, f"{recipe} {seed}", {**always, **values})
                found[recipe].append(last["eval_accuracy"])
            found["full, EMA"].append(last["ema_accuracy"])
            old = {**always, "NUM_CLASSES": len(OLD), "DATA": str(folder / "data/old")}
            weights, _ = train(benchmark, folder, example, f"old digits {seed}", old)
            new = {**always, **FEW, "DATA": str(folder / "data/new")}
            if example == "Caltech101":  # which has no split on disk
                new["TRAIN_PER_CLASS"] = TRAIN_PER_CLASS
            starts = {"from scratch": {}, "from weights": {"finetune.weights": str(weights)}}
            for start, values in starts.items():
                _, last = train(benchmark, folder, example, f"new digits {start} {seed}", {**new, **values})
                tuned.setdefault(example, {}).setdefault(start, []).append(last["eval_accuracy"])

    table = ["| test accuracy | plain | full | full, EMA |", "| --- |" + " ---: |" * 3]
    table += [f"| {name} | {' | '.join(map(cell, found.values()))} |" for name, found in scratch.items()]
    if tuned:
        table += ["", f"Digits 5 to 9, {TRAIN_PER_CLASS} training images each:", ""]
        table += ["| test accuracy | from scratch | from weights of 0 to 4 |", "| --- |" + " ---: |" * 2]
        table += [f"| {name} | {' | '.join(map(cell, found.values()))} |" for name, found in tuned.items()]
    details = {"from_scratch": scratch, "fine_tuning": tuned, "seeds": args.seeds, "epochs": args.epochs}
    details |= {"size": SIZE, "training": TRAINING, "full": FULL, "few": FEW}
    benchmark.finish("recipes", table, details)


if __name__ == "__main__":
    main()
