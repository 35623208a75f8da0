"""Memory, speed and loss of every mixed-precision mode on this machine.

    python benchmark.py [--help]

Each config is trained by train.py in processes of its own, so that no mode affects another's memory.
The warm-up steps are not counted; it/s and images/s are those of the median step after them, on all processes together.
Memory is the peak of one process: allocated and reserved by torch on a GPU, resident (RSS) on a CPU, Python and
libraries included. A mode that fails is a row with its reason. With --find-batch-size, each mode runs with the largest
BATCH_SIZE that fits, found by doubling the config's (or --batch-size) until memory is exhausted or --max-batch-size is
reached, and then by bisection. On a GPU, fp32 has a second row with TensorFloat-32, in which the published table's fp32
must have been; on a CPU, modes that would compute in bf16 instead of fp16 have no row. --compile adds a row for each
mode, or each named, with torch.compile. All rows are compared with the first: config_fp32, eager and in strict fp32.

Writes amp.md (the table), amp.json, amp.png, log.txt and provenance.json into runs/bench/amp, or where --output says.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from colossal_vit.engine import precision
from colossal_vit.errors import UserError

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from benchmarks.harness import Benchmark, Case, Failed, Rounds, Side, Values, positive
from benchmarks.training import add_set, device, mfu, summary_of, train
from train import SCRIPT

FOLDER = Path(__file__).resolve().parent
MODES = ("fp32", "AMP_torch", "AMP_bf16", "AMP_naive", "AMP_naive_bf16", "AMP_apex")
CPU_MODES = ("fp32", "AMP_bf16", "AMP_naive_bf16")  # the others would compute in bf16, too
SMALL = ["IMG_SIZE=32", "CACHE_SIZE=36", "PATCH_SIZE=8", "HIDDEN_SIZE=32", "DEPTH=1", "NUM_HEADS=2"]


def flags(parser: argparse.ArgumentParser) -> None:
    shipped = [FOLDER / f"config/config_{mode}.py" for mode in (MODES if device().type == "cuda" else CPU_MODES)]
    parser.add_argument("--configs", nargs="+", type=Path, default=shipped, help="default: all that this device can do")
    parser.add_argument("--nproc_per_node", type=positive, default=1, help="processes (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that do not count (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="random images instead of the data set")
    parser.add_argument("--batch-size", type=positive, help="instead of the configs' BATCH_SIZE")
    parser.add_argument("--find-batch-size", action="store_true", help="the largest that fits, for each mode")
    parser.add_argument(
        "--max-batch-size", type=positive, default=4096, help="where the search ends (default %(default)s)"
    )
    parser.add_argument(
        "--compile", nargs="*", metavar="CONFIG", help="those of these names with torch.compile too (default: all)"
    )
    add_set(parser)


def largest_batch_size(fits: Callable[[int], bool], start: int, most: int) -> int:
    """Return the largest batch size up to `most` that fits, to within an eighth, by doubling `start` and bisection.

    Raises:
        Failed: if not even 1 fits.
    """
    good, bad, size = 0, most + 1, min(start, most)
    while size > good and bad - good > max(1, good // 8):
        good, bad = (size, bad) if fits(size) else (good, size)
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    if not good:
        raise Failed("out of memory with BATCH_SIZE = 1")
    return good


def measure(config: Path, overrides: list[str], args: argparse.Namespace, number: int) -> Values:
    """Train in one mode, and summarise its steps."""

    def steps(batch_size: int, warm_up: int, counted: int) -> list[dict]:
        command = ["--config", str(config.resolve()), "--max-steps", str(warm_up + counted)]
        command += [f"--set={override}" for override in (*overrides, f"BATCH_SIZE={batch_size}")]
        return train(FOLDER / "train.py", command, ranks=args.nproc_per_node)

    def fits(batch_size: int) -> bool:
        try:
            steps(batch_size, 1, 1)
        except Failed as error:
            if str(error) != "out of memory":
                raise
            return False
        return True

    try:
        resolved = SCRIPT.load(config, overrides)
    except UserError as error:
        raise Failed(str(error)) from None
    batch_size = args.batch_size or resolved.BATCH_SIZE
    if args.find_batch_size:
        batch_size = largest_batch_size(fits, batch_size, args.max_batch_size)
    records = steps(batch_size, args.warm_up, args.steps)[args.warm_up :]
    if not records:
        raise Failed("an epoch ends before the warm-up: lower BATCH_SIZE, --warm-up or raise NUM_EPOCHS")
    found = summary_of(records)
    images_per_s = found["images/s"] / args.nproc_per_node
    mode = {"mode": precision.describe(resolved.fp16, device()), "batch size": batch_size}
    return {**found, **mode, "MFU, %": mfu(resolved, images_per_s)}


def common(args: argparse.Namespace) -> list[str]:
    """Return the values that all rows have."""
    return [*(SMALL if args.small else []), *args.set, *(["SYNTHETIC=True"] if args.synthetic else [])]


def sides(args: argparse.Namespace) -> dict[str, Side]:
    """Return the modes, by config, mode and what else is special."""
    rows = []
    for config in args.configs:
        rows.append((config.stem, config, ["COMPILE=False"]))
        if config.stem == "config_fp32" and device().type == "cuda":
            rows.append(("config_fp32, TF32", config, ["COMPILE=False", "TF32=True"]))
    if args.compile is not None:
        rows += [
            (f"{name}, compiled", config, [*own, "COMPILE=True"])
            for name, config, own in rows
            if not args.compile or name in args.compile
        ]
    if args.small:
        rows, args.warm_up, args.batch_size = rows[:1], 1, 2
    return {name: partial(measure, config, [*own, *common(args)], args) for name, config, own in rows}


def heading(found: Mapping[str, Rounds], args: argparse.Namespace) -> list[str]:
    """Return the line above the table: what all rows are trained with."""
    config = SCRIPT.load(args.configs[0], common(args))
    model = f"{config.MODEL} at {config.IMG_SIZE} px, dropout {config.DROP_RATE}, {config.OPTIMIZER}"
    return [f"{model}; {args.steps} steps after {args.warm_up}.", ""]


BENCHMARK = Benchmark(
    lambda args: {"AMP": Case(sides, once=True)}, rounds=1, steps=20, flags=flags, compared=2, summary=heading
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.run("amp", __doc__, sys.argv[1:]))
