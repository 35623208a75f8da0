"""Which layout? The planner's answer for five Vision Transformers on 4 to 1,024 H100s, and what is known of its errors.

    python scripts/plan_layouts.py [--output results/layouts_plan]

About 6 minutes on 2 CPU cores. All is predicted, in NAIVE half precision with LAMB, at 224 x 224 pixels and 4,096
images per step. Beside the fastest layout there is plain data parallelism, and the fastest one that splits the model.
Three runs whose hours are published are predicted, too, from their configs in `vit_imagenet_dali/`. Last, the CPU time
that `--plan` itself takes, measured.

Writes layouts.md (the tables), layouts.json (the best ten of each) and provenance.json.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossal_vit import launch
from colossal_vit.plan import search
from colossal_vit.plan.enumeration import Choice, enumerate_layouts, own_layout
from colossal_vit.plan.machines import RESERVED_GB, find_machine
from colossal_vit.plan.search import Prediction, Predictor, Trace
from colossal_vit.provenance import ResultFolder

sys.path.append(str(Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"))

from layouts import CONFIG, FOLDER, set_flags
from plan_zero import MODELS

IMAGENET = FOLDER.parent / "vit_imagenet_dali"
sys.path += [str(FOLDER), str(IMAGENET)]

import planning  # noqa: E402
import train  # noqa: E402
import train_hybrid  # noqa: E402

IMAGES = 4096  # of a step
COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "IMG_SIZE": 224, "CHECKPOINT": False, "NUM_CLASSES": 1000}
COMMON |= {"OPTIMIZER": "lamb", "gradient_accumulation": 1}
# Width, depth and heads of ViT-22B: M. Dehghani et al., arXiv:2302.05442, table 1.
LARGEST = {"PATCH_SIZE": 14, "HIDDEN_SIZE": 6144, "DEPTH": 48, "NUM_HEADS": 48, "MLP_RATIO": 4.0}
RANKS = (4, 8, 64, 1024)
# Configs of the published runs, on 4 A100s. It is not published whether these have 40 or 80 GB.
PUBLISHED = {"B/32": "config_vit_b32.py", "B/16": "config.py", "L/32": "config_vit_l32.py"}


def command(values: dict[str, Any], machine: str, ranks: int) -> list[str]:
    """Flags of train_hybrid.py for a plan."""
    flags = [*set_flags({**COMMON, **values}), "--set", "fp16.mode=AMP_TYPE.NAIVE"]
    return ["--config", str(FOLDER / CONFIG), *flags, "--plan", machine, "--world_size", str(ranks)]


def prepare(values: dict[str, Any], machine: str, ranks: int, known: dict) -> tuple[Predictor, list[Choice], Choice]:
    """What predicts the model, all of its layouts, and its own one; `known` keeps the model's traces."""
    args = launch.parse(command(values, machine, ranks), script="train_hybrid", check=train_hybrid.check_vit)
    request = search.request_of(train_hybrid.main, args)
    own = own_layout(request.config, ranks)
    images = own.layout.global_batch(request.config)
    choices = enumerate_layouts(request.config, ranks, images, request.args.script, request.args.check)
    traces: dict[Any, Trace] = {}
    for tensor in dict.fromkeys([own.tensor, *(choice.tensor for choice in choices)]):
        if tensor not in known:
            known[tensor] = search.record(request, tensor)
        traces[tensor] = known[tensor]
    return Predictor(request.config, find_machine(machine, None, True, False), traces), choices, own


def cells(best: list[Prediction], images: int) -> str:
    """Layout, images/s and memory of the first prediction."""
    if not best:
        return "none fits | |"
    first = best[0]
    return f"{first.choice.short} | {images / first.seconds:,.0f} | {first.memory / 1e9:.1f}"


def plan_models(details: dict[str, Any]) -> list[str]:
    kinds: dict[str, Callable[[Choice], bool]] = {
        "fastest": lambda choice: True,
        "plain data parallel": lambda c: c.layout.pipeline * c.layout.tensor == 1 and not c.zero,
        "fastest with a split model": lambda c: c.layout.pipeline * c.layout.tensor > 1,
    }
    head = " | ".join(f"{kind} | images/s | GB" for kind in kinds)
    table = [f"| | H100s | {head} |", "| --- | ---: |" + " --- | ---: | ---: |" * len(kinds)]
    for model, values in {**MODELS, "22B/14": LARGEST}.items():
        known: dict = {}
        for ranks in RANKS:
            predictor, choices, _ = prepare({**values, "BATCH_SIZE": IMAGES // ranks}, "h100", ranks, known)
            plans = {kind: search.search(predictor, filter(of_kind, choices)) for kind, of_kind in kinds.items()}
            row = " | ".join(cells(plan.best, IMAGES) for plan in plans.values())
            table.append(f"| {model} | {ranks:,} | {row} |")
            print(table[-1], flush=True)
            details[f"{model}, {ranks} ranks"] = {
                kind: {
                    "layouts": plan.num_layouts,
                    "do not fit": plan.num_too_large,
                    "best": [
                        {**best._asdict(), "choice": str(best.choice), "events": len(best.events)} for best in plan.best
                    ],
                }
                for kind, plan in plans.items()
            }
    return table


def compare_published(details: dict[str, Any]) -> list[str]:
    table = ["| published, 4 A100s | hours | predicted | error | GB per rank |", "| --- |" + " ---: |" * 4]
    for model, name in PUBLISHED.items():
        argv = ["--config", str(IMAGENET / name), "--plan", "a100", "--world_size", "4"]
        request = search.request_of(train.main, launch.parse(argv, script="imagenet", check=train.check_timm_vit))
        config = search.with_depth(request.config)
        own = own_layout(config, 4)
        traces = {own.tensor: search.record(request, own.tensor)}
        seen = Predictor(config, find_machine("a100", None, True, False), traces).predict(own)
        hours = planning.PUBLISHED_HOURS[config.MODEL]
        steps = config.NUM_EPOCHS * planning.NUM_IMAGES / own.layout.global_batch(config)
        predicted = steps * seen.seconds / 3600
        table.append(
            f"| {model} | {hours} | {predicted:.2f} | {predicted / hours - 1:+.0%} | {seen.memory / 1e9:.1f} |"
        )
        print(table[-1], flush=True)
        details[f"published {model}"] = dict(
            config=name, hours=hours, predicted=predicted, seconds=seen.seconds, bytes=seen.memory
        )
    return table


def time_the_planner(details: dict[str, Any]) -> list[str]:
    table = ["| `--plan` of g/14 | CPU seconds in all |", "| ---: | ---: |"]
    for ranks in (4, 1024, 16384):
        values = {**MODELS["g/14"], "BATCH_SIZE": 64}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [sys.executable, str(FOLDER / "train_hybrid.py"), *command(values, "h100", ranks)]
        subprocess.run(argv, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        details[f"CPU seconds on {ranks} ranks"] = seconds
        table.append(f"| {ranks:,} ranks | {seconds:.0f} |")
        print(table[-1], flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "results/layouts_plan", help="of the result")
    args = parser.parse_args()
    result = ResultFolder(args.output, True)
    details: dict[str, Any] = {"images": IMAGES, "reserved_gb": RESERVED_GB}
    tables = [plan_models(details), compare_published(details), time_the_planner(details)]
    result.finish("layouts", [line for table in tables for line in (*table, "")][:-1], details)


if __name__ == "__main__":
    launch.call(main)
