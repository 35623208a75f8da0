"""Speed of the ImageNet example on this machine: training with random data, training with DALI, and DALI alone.

    python scripts/bench_imagenet.py [--models vit_base_patch32_224 ...] [--precision fp32 bf16 fp16] [--rounds 3]
                                     [--batch-size N] [--accumulation 1] [--steps 8] [--output DIRECTORY]

Each training measurement is a run of `train.py` in a separate process, with LAMB, Mixup and clipping as in `config.py`;
its result is the median step after the first two. "loop" is the speed of training with DALI divided by the lower one of
DALI alone and training with random data, all in the same round: 1 means that training never waits for data. DALI reads
`DATA`, or generated JPEGs of 500 x 375 pixels. MFU, with random data, is given if the device's peak is known. On a GPU,
a batch has 256 images, or as many as its memory takes.

Writes imagenet.md (the table, medians of all rounds), imagenet.json (every run), log.txt and provenance.json.
"""

import argparse
import math
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch
from colossal_vit import config as configs
from colossal_vit.mfu import peak_of, training_flops
from colossal_vit.models import build_timm_vit
from colossal_vit.provenance import ResultFolder
from colossal_vit.results import read_metrics

from bench_loader import write_images
from turns import in_turns

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "vit_imagenet_dali"
sys.path.append(str(FOLDER))

import build_tfrecords as tfrecords  # noqa: E402
from imagenet_dali_dataloader import DaliLoader, find_records  # noqa: E402

SKIPPED = 2  # steps of a run that are not counted
PRECISION = {"fp32": "fp16=None", "bf16": "fp16.dtype='bf16'", "fp16": "fp16.dtype='fp16'"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(overrides: list[str], data: Path, num_steps: int) -> list[dict]:
    """Train, and return the records of all steps but the first `SKIPPED`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "train.py", "--config", "config.py", "--output", f"{scratch}/run"]
        command += ["--max-steps", str(SKIPPED + num_steps)]
        for override in overrides:
            command += ["--set", override]
        environment = {**os.environ, "DATA": str(data)}
        done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        return read_metrics(Path(scratch) / "run")[0][SKIPPED:]


def drain(data: Path, batch_size: int, num_batches: int) -> float:
    """Images/s of DALI's training batches without training; runs in a separate process."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = configs.load(FOLDER / "config.py", [f"BATCH_SIZE={batch_size}"], "imagenet")
    options = dict(num_threads=len(os.sched_getaffinity(0)), rank=0, num_ranks=1, with_images=True)
    loader = DaliLoader(find_records(data, "train"), True, config, device, **options)

    def endless():
        while True:
            yield from loader

    batches = endless()
    for _ in range(SKIPPED + 3):  # 3 are prefetched
        next(batches)
    started = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return batch_size * num_batches / (time.perf_counter() - started)


def make_data(folder: Path, num_images: int) -> Path:
    """Make TFRecords of generated JPEGs of ImageNet's usual size, repeated until there are enough for a run."""
    write_images(folder / "few")
    for split in ("train", "val"):
        for part in sorted((folder / "few" / split).iterdir()):
            (folder / "images" / split / part.name).mkdir(parents=True)
            files = sorted(part.iterdir())
            for number in range(num_images // 8 if split == "train" else 1):
                os.link(files[number % len(files)], folder / "images" / split / part.name / f"{number}.JPEG")
    with redirect_stdout(None):
        tfrecords.build(tfrecords.parse([str(folder / "images"), str(folder / "tfrecords")]))
    return folder / "tfrecords"


def mfu(model: str, precision: str, images_per_s: float) -> str:
    peak = peak_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[precision])
    if not peak:
        return ""
    config = configs.load(FOLDER / "config.py", [f"MODEL={model!r}"], (), {"SEED": 0})
    with torch.device("meta"):
        flops = training_flops(build_timm_vit(config), config.IMG_SIZE)
    return f"{images_per_s * flops / peak:.1%}"


def batch_size_for(memory: float) -> int:
    """The largest power of two, up to 256, of images that a GPU with so many bytes trains any of the three models on.

    By their dry runs, see results/memory_plan, an image takes up to 0.09 GB, and a model up to 7 GB. DALI and CUDA's
    context get 2 GB.
    """
    return 2 ** min(8, int(math.log2(max((memory / 1e9 - 9) / 0.09, 1))))


def main() -> None:
    # ---- Command line ----------------------------------------------------------------------------------------------
    gpu = torch.cuda.is_available()
    models = (
        ["vit_base_patch16_224", "vit_base_patch32_224", "vit_large_patch32_224"] if gpu else ["vit_base_patch32_224"]
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=models, help="default %(default)s")
    parser.add_argument("--precision", nargs="+", choices=PRECISION, default=["fp16", "bf16"] if gpu else ["fp32"])
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    batch_size = batch_size_for(torch.cuda.get_device_properties(0).total_memory) if gpu else 16
    parser.add_argument("--batch-size", type=int, default=batch_size, help="here %(default)s by default")
    parser.add_argument("--accumulation", type=int, default=1, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="counted, of each run (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / f"results/imagenet_{'gpu' if gpu else 'cpu'}")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output)

    # ---- Measure ---------------------------------------------------------------------------------------------------
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        needed = args.batch_size * args.accumulation * (SKIPPED + args.steps + 1)
        data = Path(os.environ["DATA"]) if os.environ.get("DATA") else make_data(Path(scratch), needed)
        pool = multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1)
        for round_number in range(args.rounds):
            for model in args.models:
                for precision in args.precision:
                    common = [f"MODEL={model!r}", PRECISION[precision], "NUM_EPOCHS=1", "WARMUP_EPOCHS=0"]
                    common += [f"BATCH_SIZE={args.batch_size}", f"gradient_accumulation={args.accumulation}"]
                    result = {"model": model, "precision": precision}
                    steps = {}
                    for kind in in_turns(("dali", "synthetic"), round_number):
                        steps[kind] = train([*common, f"SYNTHETIC={kind == 'synthetic'}"], data, args.steps)
                        result[kind] = statistics.median(step["images_per_s"] for step in steps[kind])
                    result["loader"] = pool.apply(drain, (data, args.batch_size, 20))
                    result["memory_gb"] = max(step["memory_gb"] for step in steps["dali"])
                    result["waited"] = sum(s["data_s"] for s in steps["dali"]) / sum(s["step_s"] for s in steps["dali"])
                    result["loop"] = result["dali"] / min(result["synthetic"], result["loader"])
                    results.append(result)
                    benchmark.print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in result.items()))
        pool.close()
        pool.join()

    # ---- Result ----------------------------------------------------------------------------------------------------
    table = [
        "| model | precision | random data, images/s | with DALI | DALI alone | loop | MFU | peak memory, GB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in args.models:
        for precision in args.precision:
            rounds = [r for r in results if (r["model"], r["precision"]) == (model, precision)]
            median = {k: statistics.median(r[k] for r in rounds) for k in rounds[0] if k not in ("model", "precision")}
            rates = " | ".join(f"{median[kind]:,.4g}" for kind in ("synthetic", "dali", "loader"))
            share = mfu(model, precision, median["synthetic"])
            row = f"| {model} | {precision} | {rates} | {median['loop']:.3f} | {share} | {median['memory_gb']:.1f} |"
            table.append(row)
    settings = {"BATCH_SIZE": args.batch_size, "gradient_accumulation": args.accumulation, "steps": args.steps}
    benchmark.finish("imagenet", table, {**settings, "rounds": results})


if __name__ == "__main__":
    main()
