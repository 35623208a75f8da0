"""Random models in random layouts, compared with one process: losses, gradient norms, evaluation, change of layout.

    python scripts/fuzz_layouts.py SEED N [--first K] [--max-ranks 8] [--fp32] [--no-shrink] [--output DIRECTORY]

Case k of a seed is always the same: a small ViT with random sizes, number of classes, loss, augmentation, optimizer,
precision, clipping, label smoothing, accumulation, micro-batches and recomputation, including odd token counts, uneven
stages and partial test batches. It makes three steps in one layout, and three more from the checkpoint in another one.
Each step and the evaluation must agree with one process that makes all six: in fp32 within 1e-4 (1e-5 in the first
step); in bf16 losses within 2 % and norms within 10 % or, if the training itself amplifies rounding, within three times
the difference between one process in bf16 and in fp32. A failing case is simplified as long as it still fails, and
printed as commands. The ranks are forks of one process that has imported everything. Cases also depend on --max-ranks.

With --output it writes fuzz_layouts.md (largest deviations), fuzz_layouts.json (every case), log.txt and
provenance.json. Exit code 1 if a case failed.
"""

import argparse
import math
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("tests", "scripts", "vit_cifar10_hybrid"))]

from colossal_vit.errors import UserError  # noqa: E402
from colossal_vit.parallel.layout import Layout  # noqa: E402
from colossal_vit.provenance import ResultFolder  # noqa: E402
from colossal_vit.results import read_metrics  # noqa: E402

import conftest  # noqa: E402 hides GPUs, which forks could not share, before torch is imported
import fork_ranks  # noqa: E402
import recipes  # noqa: E402
import vit  # noqa: E402
from check_layouts import OPTIMIZERS as CHECKED_OPTIMIZERS  # noqa: E402
from check_layouts import errors  # noqa: E402

HALF, WHOLE = 3, 6  # optimizer steps
NUM_TEST_IMAGES = 27
TOLERANCE = {"fp32": {"loss": 1e-4, "grad_norm": 1e-4}, "bf16": {"loss": 2e-2, "grad_norm": 1e-1}}  # relative
FIRST_STEP = 1e-5  # in fp32
AMPLIFIED = 3  # times the difference between bf16 and fp32 in one process
TENSOR = [(None, 1, {}), ("1d", 2, {}), ("1d", 3, {}), ("1d", 4, {}), ("2d", 4, {})]
TENSOR += [("2.5d", 4, {"depth": 1}), ("2.5d", 8, {"depth": 2}), ("3d", 8, {})]

# The first updates of AdamW are g / (|g| + ε). With ε = 1e-8, rounding decides the sign where |g| is that small;
# the whole learning rate in another direction has moved a loss by 1.5e-4 although the layout was correct.
OPTIMIZERS = CHECKED_OPTIMIZERS | {"adamw": {"EPSILON": 1e-5}}

SIMPLE_LAYOUT = {"data": 1, "pipeline": 1, "chunks": 1, "micro_batches": 1, "accumulation": 1, "zero": None}

Case = dict[str, Any]


# ---- Drawing ---------------------------------------------------------------------------------------------------------


def draw_layout(draw: random.Random, max_ranks: int) -> Case:
    """Parallel sizes, micro-batches and accumulation."""
    while True:
        mode, size, more = draw.choice(TENSOR)
        pipeline, data, chunks = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2])
        if size * pipeline * data > max_ranks or (chunks > 1 and pipeline == 1):
            continue
        micro_batches = pipeline * draw.choice([1, 2]) if chunks > 1 else draw.choice([1, 2, 3])
        where = {"mode": mode, "size": size, **more, "pipeline": pipeline, "data": data, "chunks": chunks}
        how = {"micro_batches": micro_batches if pipeline > 1 else 1, "accumulation": draw.randint(1, 3)}
        return where | how | {"zero": draw.choice([None, 1, 2]) if data > 1 else None}


def draw_case(seed: int, number: int, max_ranks: int = 8) -> Case:
    """A random model, training and two layouts; draws again until the case is legal."""
    draw = random.Random(f"{seed} {number}")
    while True:
        heads, patch = draw.choice([2, 3, 4, 6, 8, 12]), draw.choice([2, 4, 5, 8])
        case = {
            "PATCH_SIZE": patch,
            "IMG_SIZE": patch * draw.randint(1, 4),
            "NUM_HEADS": heads,
            "HIDDEN_SIZE": heads * draw.choice([2, 3, 4, 8]),
            "DEPTH": draw.randint(1, 6),
            "MLP_RATIO": draw.choice([0.5, 1, 2, 2.5, 4]),
            "NUM_CLASSES": draw.randint(10, 24),
            "LABEL_SMOOTHING": draw.choice([0.0, 0.1]),
            "CHECKPOINT": draw.random() < 0.3,
            "clip_grad_norm": draw.choice([0.0, 0.1, 0.5, 5.0]),
            "SEED": draw.randrange(10**6),
            "optimizer": draw.choice(list(OPTIMIZERS)),
            "amp": draw.choice([None] * 9 + ["NAIVE"]),
            "global_batch": draw.choice([4, 6, 8, 12, 16, 24, 32]),
            "first": draw_layout(draw, max_ranks),
            "second": draw_layout(draw, max_ranks),
            "REPEATS": draw.choice([1, 1, 1, 2, 3]),
            "mix": draw.choice([None, None, None, "batch", "pair", "elem"]),
            "augment": draw.choice([None, None, None, "rand", "three"]),
            "bce": draw.choice([None, None, 0.2]),
        }
        if is_legal(case):
            return case


def command(case: Case, layout: Case | None) -> tuple[int, list[str]]:
    """Number of ranks and flags of `train_hybrid.py` in a layout, or in one process for None.

    Raises:
        UserError: if the global batch cannot be split over the layout.
    """
    layout = layout or {"mode": None, "size": 1, **SIMPLE_LAYOUT}
    share = layout["data"] * layout["accumulation"]
    if case["global_batch"] % share:
        raise UserError("the batch cannot be split")
    values = {key: value for key, value in case.items() if key.isupper() or key == "clip_grad_norm"}
    values |= OPTIMIZERS[case["optimizer"]]
    values |= {"mix.mode": case["mix"], "mix.mixup": 0.8, "mix.cutmix": 1.0} if case["mix"] else {}
    values |= {"augment.policy": case["augment"], "augment.erase": 0.3} if case["augment"] else {}
    values |= {"bce.threshold": case["bce"]} if case["bce"] else {}
    values |= {"BATCH_SIZE": case["global_batch"] // share, "gradient_accumulation": layout["accumulation"]}
    values |= {"parallel.pipeline": layout["pipeline"], "NUM_MICRO_BATCHES": layout["micro_batches"], "NUM_EPOCHS": 2}
    if layout["mode"]:
        sizes = {key: layout[key] for key in ("mode", "size", "depth") if key in layout}
        values |= {f"parallel.tensor.{key}": value for key, value in sizes.items()}
    if layout["chunks"] > 1:
        values["model.num_chunks"] = layout["chunks"]
    if layout["zero"]:
        values["zero.stage"] = layout["zero"]
    return layout["size"] * layout["pipeline"] * layout["data"], recipes.flags(case["amp"], **values)


def is_legal(case: Case) -> bool:
    try:
        for layout in (None, case["first"], case["second"]):
            ranks, flags = command(case, layout)
            config = recipes.config(flags)
            vit.check_vit(config, Layout.of(config, ranks))
            if config.get("mix") and config.BATCH_SIZE % 2:
                return False
    except UserError:
        return False
    return True


# ---- Running ---------------------------------------------------------------------------------------------------------


def commands(case: Case) -> list[tuple[Case | None, str, int]]:
    """Layout, run directory and last step of each command of a case."""
    return [(None, "one", WHOLE), (case["first"], "two", HALF), (case["second"], "two", WHOLE)]


def run(case: Case, layout: Case | None, output: Path, steps: int) -> str | None:
    """Train; returns the error, or None."""
    ranks, flags = command(case, layout)
    result = fork_ranks.run(recipes.HYBRID, [*flags, "--output", str(output), "--max-steps", str(steps)], ranks)
    if result.codes != [0] * ranks:
        return f"exit codes {result.codes}: {next(filter(None, map(str.strip, result.stderr)), '')[-300:]}"
    return None


def farthest(steps: list[dict], expected: list[dict], key: str) -> float:
    """The largest relative difference of one metric in any step."""
    return max(abs(here[key] / there[key] - 1) for here, there in zip(steps, expected, strict=True))


def tolerance(case: Case, expected: list[dict], folder: Path) -> dict[str, float]:
    """Relative tolerances of loss and norm in any step; wider in bf16 if one process differs much from its fp32 run."""
    if not case["amp"]:
        return TOLERANCE["fp32"]
    run({**case, "amp": None}, None, folder / "fp32", WHOLE)
    exact, _ = read_metrics(folder / "fp32")
    return {key: max(limit, AMPLIFIED * farthest(expected, exact, key)) for key, limit in TOLERANCE["bf16"].items()}


def deviation(case: Case) -> tuple[float, float, str | None]:
    """Relative deviation of the first step, largest of any step or the evaluation, and the failure, or None."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        for layout, name, steps in commands(case):
            if fault := run(case, layout, folder / name, steps):
                return math.inf, math.inf, fault
        (expected, tested), (steps, evaluations) = read_metrics(folder / "one"), read_metrics(folder / "two")
        limits = tolerance(case, expected, folder)
    finally:
        shutil.rmtree(folder)
    first, *later = errors(steps, expected)
    images = evaluations[-1]["eval_images"]
    loss = abs(evaluations[-1]["eval_loss"] / tested[-1]["eval_loss"] - 1)
    worst = max(first, *later, loss)
    fault = None
    if images != tested[-1]["eval_images"] or images != NUM_TEST_IMAGES:
        fault = f"{images} images evaluated"
    elif not loss <= limits["loss"] or any(farthest(steps, expected, key) > limit for key, limit in limits.items()):
        fault = f"off by {worst:.1e}"
    elif not case["amp"] and not first <= FIRST_STEP:
        fault = f"off by {first:.1e} in the first step"
    return first, worst, fault


SIMPLE = {"amp": None, "optimizer": "sgd", "clip_grad_norm": 0.0, "LABEL_SMOOTHING": 0.0, "CHECKPOINT": False}
SIMPLE |= {"MLP_RATIO": 4, "NUM_CLASSES": 10, "DEPTH": 2, "PATCH_SIZE": 4, "IMG_SIZE": 8, "NUM_HEADS": 4}
SIMPLE |= {"REPEATS": 1, "mix": None, "augment": None, "bce": None}
SIMPLE |= {"HIDDEN_SIZE": 16, "global_batch": 8, "SEED": 0}


def complexity(case: Case) -> int:
    """The size of a case, for `shrink`: lower is simpler."""
    parts = case["first"], case["second"]
    values = sum(case[key] != value for key, value in SIMPLE.items())
    sizes = sum(part[key] != value for part in parts for key, value in SIMPLE_LAYOUT.items())
    return values + sizes + sum(part["mode"] is not None for part in parts) + (parts[0] != parts[1])


def simpler(case: Case) -> list[Case]:
    """All cases with one value simplified, in one of its layouts or in both."""
    cases = [{**case, "second": case["first"]}]
    cases += [{**case, key: value} for key, value in SIMPLE.items()]
    for change in ({"mode": None, "size": 1}, *({key: value} for key, value in SIMPLE_LAYOUT.items())):
        first, second = ({**case[part], **change} for part in ("first", "second"))
        cases += [{**case, "first": first, "second": second}, {**case, "first": first}, {**case, "second": second}]
    return [candidate for candidate in cases if complexity(candidate) < complexity(case)]


def shrink(case: Case) -> Case:
    """Simplify a failing case step by step as long as it still fails."""
    while True:
        for candidate in simpler(case):
            if is_legal(candidate) and deviation(candidate)[2]:
                case = candidate
                break
        else:
            return case


def as_commands(case: Case) -> str:
    """Shell commands that reproduce the case in vit_cifar10_hybrid/."""
    lines = []
    for layout, name, steps in commands(case):
        ranks, flags = command(case, layout)
        flags[1] = recipes.PIPELINE_CONFIG
        flags += ["--output", f"/tmp/{name}", "--max-steps", str(steps)]
        lines.append(f"torchrun --standalone --nproc_per_node {ranks} train_hybrid.py {shlex.join(flags)}")
    return "\n".join(lines)


def describe(case: Case, part: str) -> str:
    ranks, flags = command(case, case[part])
    chunks = case[part]["chunks"]
    return Layout.of(recipes.config(flags), ranks).short + (f", {chunks} chunks" if chunks > 1 else "")


# ---- Command line ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default %(default)s)")
    parser.add_argument("--max-ranks", type=int, default=8, help="of a layout (default %(default)s)")
    parser.add_argument("--fp32", action="store_true", help="leave mixed precision out")
    parser.add_argument("--no-shrink", action="store_true", help="leave cases that fail as they are")
    parser.add_argument("--output", type=Path, help="where the result goes; without, it is only printed")
    args = parser.parse_args(argv)
    result = ResultFolder(args.output)
    results, worst = [], defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-data-"))

    conftest.small_digits(folder, NUM_TEST_IMAGES)
    with conftest.pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(folder))
        conftest.random_start(patch)
        started = time.monotonic()
        for number in range(args.first, args.first + args.cases):
            case = draw_case(args.seed, number, args.max_ranks)
            case["amp"] = None if args.fp32 else case["amp"]
            first, most, fault = deviation(case)
            layouts = [describe(case, part) for part in ("first", "second")]
            kind = "bf16" if case["amp"] else "fp32"
            said = f"{number}: {' → '.join(layouts)}, {case['optimizer']}, {kind}: {first:.1e}, {most:.1e}"
            result.print(said + (f": {fault}" if fault else ""))
            results.append({"number": number, "case": case, "first_step": first, "worst": most, "fault": fault})
            for part in ("first", "second"):
                worst[case[part]["mode"] or "no tensor parallelism", kind].append((first, most))
            if fault:
                result.print(
                    as_commands(case) if args.no_shrink else f"as simple as it fails:\n{as_commands(shrink(case))}"
                )
        result.print(f"{args.cases} cases in {time.monotonic() - started:.0f} s")
    shutil.rmtree(folder)
    failed = [r["number"] for r in results if r["fault"]]
    table = ["| tensor mode | precision | layouts | first step: worst | any step: median | worst |"]
    table.append("| --- | --- |" + " ---: |" * 4)
    for (mode, kind), found in sorted(worst.items()):
        firsts, mosts = zip(*found, strict=True)
        numbers = " | ".join(f"{value:.1e}" for value in (max(firsts), statistics.median(mosts), max(mosts)))
        table.append(f"| {mode} | {kind} | {len(found)} | {numbers} |")
    table += ["", f"Seed {args.seed}: {len(results)} cases, {len(failed)} failed{f': {failed}' if failed else ''}."]
    result.finish("fuzz_layouts", table, {"cases": results})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
