"""Time of packing images into TFRecords on this machine, compared with copying their folder.

    python scripts/bench_build.py [--runs 7] [--images 20000] [--output results/build_cpu]

`build_tfrecords.py` with its defaults, which keep the bytes and check each image's header and end, and `cp -r` read the
same JPEGs, of ImageNet's mean size, from the page cache, and write to the same disk. Runs are paired, and the two
alternate in going first.

Writes build.md (the table), build.json (every run), log.txt and provenance.json.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from colossal_vit.benchmark import Benchmark, in_turns, spread

from bench_loader import write_images

ROOT = Path(__file__).resolve().parents[1]
KILOBYTES = 110  # ImageNet-1K: 1,281,167 training images in 138 GB


def multiply(folder: Path, num_images: int) -> float:
    """Fill a folder with copies of a few JPEGs, each padded to `KILOBYTES` by a comment; returns its size in MB."""
    few = folder.with_name("few")
    write_images(few)
    originals = [path.read_bytes() for path in sorted((few / "train").rglob("*.JPEG"))]
    size = 0
    for number in range(num_images):
        data = originals[number % len(originals)]
        lacking = max(0, KILOBYTES * 1000 - len(data) - 4)
        while lacking > 0:
            part = min(lacking, 65_000)
            data = data[:2] + b"\xff\xfe" + (part + 2).to_bytes(2) + bytes(part) + data[2:]
            lacking -= part + 4
        for split in ("train", "val") if number < 8 else ("train",):
            path = folder / split / f"n{number % 8:08d}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        size += len(data)
    return size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="paired runs (default %(default)s)")
    parser.add_argument("--images", type=int, default=20_000, help="how many (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "results/build_cpu", help="where the result goes")
    args = parser.parse_args()
    benchmark = Benchmark(args.output)
    seconds: dict[str, list[float]] = {"build_tfrecords.py": [], "cp -r": []}
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "images", Path(scratch) / "target"
        megabytes = multiply(source, args.images)
        benchmark.print(f"{args.images} images, {megabytes:.0f} MB")
        build = [sys.executable, str(ROOT / "vit_imagenet_dali/build_tfrecords.py"), str(source), str(target)]
        commands = {"build_tfrecords.py": build, "cp -r": ["cp", "-r", str(source), str(target)]}
        for number in range(args.runs):
            for name in in_turns(commands, number):
                subprocess.run(["sync"], check=True)
                started = time.perf_counter()
                subprocess.run(commands[name], check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
                shutil.rmtree(target)
            times = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
            benchmark.print(f"run {number}: {times}")
    ratios = [copied / built for built, copied in zip(*seconds.values(), strict=True)]
    table = ["| | MB/s, median | times `cp -r`, median (lowest, highest) |", "| --- | ---: | ---: |"]
    for name, values in seconds.items():
        rate = megabytes / statistics.median(values)
        times = "{} ({}, {})".format(*spread(ratios, ".2f")) if name[0] == "b" else "1"
        table.append(f"| `{name}` | {rate:.0f} | {times} |")
    document = {"images": args.images, "megabytes": megabytes, "seconds": seconds, "ratios": ratios}
    benchmark.finish("build", table, document)


if __name__ == "__main__":
    main()
