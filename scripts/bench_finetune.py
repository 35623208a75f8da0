"""What fine-tuning gives on the digits, by the commands of docs/finetuning.md.

    python scripts/bench_finetune.py [--output results/finetune_digits]

About 4 minutes on 2 CPU cores. Trains the model of the quickstart, on one process; then evaluates its features by
nearest neighbours, trains a linear probe on them, and fine-tunes it on larger images, beside the same from scratch. One
seed.

Writes finetune.md (the table), finetune.json (each command and its accuracy), log.txt and provenance.json.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from colossal_vit.benchmark import Benchmark

from check_layouts import CONFIG, FOLDER, set_flags

DIGITS = {
    **{"parallel.pipeline": 1, "IMG_SIZE": 32, "PATCH_SIZE": 8, "HIDDEN_SIZE": 64, "DEPTH": 4, "NUM_HEADS": 4},
    **{"CHECKPOINT": False, "fp16": None, "FLIP": False, "CROP_PADDING": 2, "BATCH_SIZE": 64, "NUM_MICRO_BATCHES": 4},
}
QUICKSTART = {"NUM_EPOCHS": 60, "WARMUP_EPOCHS": 3, "LEARNING_RATE": 2e-3, "WEIGHT_DECAY": 0.05}
SHORT = {"NUM_EPOCHS": 5, "WARMUP_EPOCHS": 1}
LARGER = {**SHORT, "IMG_SIZE": 48, "LEARNING_RATE": 1e-3}
ACCURACY = re.compile(r"accuracy (?:of \S+ )?([\d.]+)\s?%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "results/finetune_digits", help="of the result")
    args = parser.parse_args()
    benchmark = Benchmark(args.output)
    environment = {key: value for key, value in os.environ.items() if key != "DATA"}
    with tempfile.TemporaryDirectory() as scratch:
        start = {"finetune.weights": f"{scratch}/run"}
        tasks = {  # name of the run directory, values, flags
            "trained for 60 epochs": ("run", QUICKSTART, []),
            "k-NN of its features": ("run", QUICKSTART, ["--eval-knn"]),
            "linear probe, 5 epochs": ("probe", {**SHORT, **start, "finetune.linear_probe": True}, []),
            "48 px, two blocks frozen, 5 epochs": (
                "larger",
                {**LARGER, **start, "finetune.frozen_blocks": 2, "LAYER_DECAY": 0.75},
                [],
            ),
            "48 px from scratch, the same 5 epochs": ("scratch", LARGER, []),
        }
        table, details = ["| on a CPU, one process, one seed | test accuracy |", "| --- | ---: |"], {}
        for name, (run, values, flags) in tasks.items():
            command = ["train_hybrid.py", "--config", CONFIG, "--output", f"{scratch}/{run}", *flags]
            command += set_flags({**DIGITS, **values})
            done = subprocess.run(
                [sys.executable, *command], cwd=FOLDER, env=environment, capture_output=True, text=True
            )
            said = (done.stdout + done.stderr).replace(scratch, "SCRATCH")
            benchmark.print(f"===== {name}\n{said}")
            if done.returncode:
                sys.exit(f"{name} failed, see above")
            accuracy = ACCURACY.findall(said)[-1]
            table.append(f"| {name} | {float(accuracy):.1f} % |")
            details[name] = {"command": " ".join(command).replace(scratch, "SCRATCH"), "accuracy": accuracy}
    benchmark.finish("finetune", table, details)


if __name__ == "__main__":
    main()
