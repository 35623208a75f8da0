"""Check on this machine that every layout computes the same training: 20 steps of each, compared with one process.

    python scripts/check_layouts.py [--world N] [--optimizer adamw|sgd|lamb] [--only NAME ...]

Prints a table: layout, relative error (the larger of `loss` and `grad_norm`) in the first step and in the worst one,
images/s. The model is small, in fp32, without dropout, on the digits sample; gradients are clipped. Exit code 1 if a
layout fails to run, or its error exceeds 1e-5 in the first step or 1e-4 in any.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import colossal_vit  # noqa: F401 silences the import of Colossal-AI
import torch
from colossal_vit.results import read_metrics

FOLDER = Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"
CONFIG = "configs/config_pipeline_parallel.py"
NUM_STEPS = 20
FIRST_STEP, ANY_STEP = 1e-5, 1e-4  # relative tolerances

# A ViT of 4 blocks on 32 px images cut into 16 patches, on a global batch of 32.
MODEL: dict[str, Any] = dict(
    IMG_SIZE=32,
    PATCH_SIZE=8,
    HIDDEN_SIZE=32,
    DEPTH=4,
    NUM_HEADS=4,
    BATCH_SIZE=32,
    NUM_EPOCHS=1,
    WARMUP_EPOCHS=0,
    LEARNING_RATE=3e-3,
    CHECKPOINT=False,
    NUM_MICRO_BATCHES=2,
    fp16=None,
    clip_grad_norm=0.5,
)


def tensor(mode: str, size: int, **more: int) -> dict[str, Any]:
    """Overrides for a tensor-parallel mode."""
    return {f"parallel.tensor.{key}": value for key, value in dict(mode=mode, size=size, **more).items()}


PIPELINE = {"parallel.pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name: processes, overrides
    "DP 2": (2, {"BATCH_SIZE": 16}),
    "DP 4": (4, {"BATCH_SIZE": 8}),
    "PP 2": (2, PIPELINE),
    "PP 2, 4 micro-batches": (2, {**PIPELINE, "NUM_MICRO_BATCHES": 4}),
    "PP 2 interleaved × 2": (2, {**PIPELINE, "model.num_chunks": 2}),
    "PP 2 interleaved × 2, 4 micro-batches": (2, {**PIPELINE, "model.num_chunks": 2, "NUM_MICRO_BATCHES": 4}),
    "PP 4": (4, {"parallel.pipeline": 4, "NUM_MICRO_BATCHES": 4}),
    "1D 2": (2, tensor("1d", 2)),
    "1D 4": (4, tensor("1d", 4)),
    "2D 4": (4, tensor("2d", 4)),
    "2.5D 4": (4, tensor("2.5d", 4, depth=1)),
    "2.5D 8": (8, tensor("2.5d", 8, depth=2)),
    "3D 8": (8, tensor("3d", 8)),
    "PP 2 × 1D 2": (4, {**PIPELINE, **tensor("1d", 2)}),
    "PP 2 × 2D 4": (8, {**PIPELINE, **tensor("2d", 4)}),
    "PP 2 × 2.5D 4": (8, {**PIPELINE, **tensor("2.5d", 4, depth=1)}),
    "DP 2 × PP 2": (4, {**PIPELINE, "BATCH_SIZE": 16}),
    "DP 2 × PP 2 × 1D 2": (8, {**PIPELINE, **tensor("1d", 2), "BATCH_SIZE": 16}),
    "DP 2 × 2D 4": (8, {**tensor("2d", 4), "BATCH_SIZE": 16}),
}


def set_flags(values: dict[str, Any]) -> list[str]:
    """`--set` flags for config values; nested keys have dots."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value!r}")]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"OPTIMIZER": "sgd", "LEARNING_RATE": 0.1, "WEIGHT_DECAY": 1e-4},
    "lamb": {"OPTIMIZER": "lamb", "LEARNING_RATE": 1.8e-2, "WEIGHT_DECAY": 0.1},
}


def train(processes: int, overrides: dict[str, Any], output: Path) -> list[dict]:
    """Train `NUM_STEPS` steps in a layout and return their records.

    Raises:
        subprocess.CalledProcessError: if the run fails, with its `stderr`.
    """
    values = {"parallel.pipeline": 1, **MODEL, **overrides}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["train_hybrid.py", "--config", CONFIG, "--output", str(output), "--max-steps", str(NUM_STEPS)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment.pop("DATA", None)
    command += set_flags(values)
    subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=True)
    return read_metrics(output)[0]


def errors(steps: list[dict], expected: list[dict]) -> list[float]:
    """The larger relative error of `loss` and `grad_norm`, step by step."""
    return [
        max(abs(here[key] - there[key]) / abs(there[key]) for key in ("loss", "grad_norm"))
        for here, there in zip(steps, expected, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 8
    parser.add_argument("--world", type=int, default=available, help="most processes to start (default %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, metavar="NAME", help="check only these layouts")
    args = parser.parse_args()
    optimizer = OPTIMIZERS[args.optimizer]
    chosen = {name: LAYOUTS[name] for name in args.only or LAYOUTS if LAYOUTS[name][0] <= args.world}
    left_out = [name for name in args.only or LAYOUTS if name not in chosen]

    print(f"{'layout':<40}{'first step':>12}{'worst step':>12}{'images/s':>10}")
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        expected = train(1, optimizer, Path(scratch) / "one process")
        for name, (processes, overrides) in {"one process": (1, {}), **chosen}.items():
            try:
                if name == "one process":
                    steps = expected
                else:
                    steps = train(processes, {**optimizer, **overrides}, Path(scratch) / name)
            except subprocess.CalledProcessError as error:
                wrong.append(name)
                print(f"{name:<40}does not run: {error.stderr.strip().splitlines()[0] if error.stderr else error}")
                continue
            first, *rest = errors(steps, expected)
            rate = statistics.median(record["images_per_s"] for record in steps)
            good = first <= FIRST_STEP and max(rest) <= ANY_STEP
            print(
                f"{name:<40}{first:>12.1e}{max(first, *rest):>12.1e}{rate:>10.0f}{'' if good else '  OUT'}", flush=True
            )
            if not good:
                wrong.append(name)
    if left_out:
        print(f"not checked, since they need more than {args.world} processes: {', '.join(left_out)}")
    if wrong:
        print(f"out: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
