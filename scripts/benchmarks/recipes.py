"""Test accuracy on the digits: a plain recipe, one with regularization, its moving average; and of fine-tuning.

Hours on 2 CPU cores. A small Vision Transformer is trained for the same number of epochs, in each example; a round is a
seed. From scratch: "plain" and "full" (Mixup, colour jitter, no weight decay on vectors), and of the full runs also the
moving average of the weights. On 10 images of each of the digits 5 to 9: from scratch, and from the weights of a plain
run on the digits 0 to 4. The 10 images are the same for all seeds.
"""

import argparse
from functools import cache, partial
from pathlib import Path
from typing import Any

from colossal_vit.data import digits

from benchmarks import jpegs
from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import set_flags, train

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
        {"CROP_AREA": (0.7, 1.0), "mix": None, "DECAY_VECTORS": True},
    ),
}
FULL = {"mix.mixup": 0.2, "mix.prob": 0.5, "augment.color_jitter": 0.1, "DECAY_VECTORS": False}
FULL |= {"ema.decay": 0.99, "ema.warmup": True}

OLD, NEW = tuple(range(5)), tuple(range(5, 10))  # the digits that the weights come from, and those they are tuned to
TRAIN_PER_CLASS = 10
FEW = {"NUM_CLASSES": len(NEW), "BATCH_SIZE": 10}  # 5 steps an epoch


@cache
def data() -> Path:
    """A folder with the digits `OLD` and `NEW` in the formats of all examples, in `old` and `new`."""
    root = jpegs.temporary_folder()
    for name, classes, most in (("old", OLD, None), ("new", NEW, TRAIN_PER_CLASS)):
        digits.write_cifar10(root / name, classes, most)
        digits.write_caltech101(root / name, classes)  # its test set is what training leaves over
        jpegs.pack(digits.write_imagenet(root / name, classes, most), root / name)
    return root


def accuracy(
    example: str, epochs: int, values: Values, number: int, output: Path | None = None
) -> dict[str, float | None]:
    """Train with seed `number + 1`; returns the accuracies of the last evaluation."""
    script, config, own = EXAMPLES[example]
    values = {**SIZE, **TRAINING, **own, "NUM_EPOCHS": epochs, "SEED": number + 1, **values}
    _, evaluations = train(script, ["--config", config, *set_flags(values)], output)
    averaged = evaluations[-1].get("ema_accuracy")
    return {
        "test accuracy, %": 100 * evaluations[-1]["eval_accuracy"],
        "of the average, %": averaged and 100 * averaged,
    }


def tuned_accuracy(example: str, epochs: int, number: int) -> dict[str, float | None]:
    """Train on the old digits, and then, from these weights, on the new ones."""
    weights = jpegs.temporary_folder() / "run"
    old = {"NUM_CLASSES": len(OLD), "DATA": str(data() / "old")}
    accuracy(example, epochs, old, number, weights)
    return accuracy(example, epochs, {**new_digits(example), "finetune.weights": str(weights)}, number)


def new_digits(example: str) -> Values:
    # Caltech101 has no split on disk.
    return {
        **FEW,
        "DATA": str(data() / "new"),
        **({"TRAIN_PER_CLASS": TRAIN_PER_CLASS} if example == "Caltech101" else {}),
    }


def recipes(example: str, args: argparse.Namespace) -> dict[str, Side]:
    return {
        "plain": partial(accuracy, example, args.epochs, {}),
        "full": partial(accuracy, example, args.epochs, FULL),
    }


def fine_tuning(example: str, args: argparse.Namespace) -> dict[str, Side]:
    return {
        "from scratch": partial(accuracy, example, args.epochs, new_digits(example)),
        "from weights of 0 to 4": partial(tuned_accuracy, example, args.epochs),
    }


def cases(args: argparse.Namespace) -> dict[str, Case]:
    if args.small:
        args.epochs = 4  # of which 3 warm up
    return {
        **{example: Case(partial(recipes, example)) for example in EXAMPLES},
        **{f"{example}, digits 5 to 9": Case(partial(fine_tuning, example)) for example in EXAMPLES},
    }


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=30, help="of each run (default %(default)s)")


BENCHMARK = Benchmark(cases, rounds=5, flags=flags, compared=0)
