"""Memory and messages of a rank with and without split optimizer state, for four models on 4, 8 and 64 GPUs.

    python scripts/plan_zero.py [--output results/zero_plan]

About 5 minutes on 2 CPU cores. Dry runs of train_hybrid.py, data parallel, in NAIVE half precision with LAMB and 16
images of 224 × 224 pixels on each rank.

Writes zero.md (the table), zero.json (every plan) and provenance.json.
"""

import argparse
import sys
from pathlib import Path

from colossal_vit import launch
from colossal_vit.plan import report
from colossal_vit.plan.meter import StepPlan
from colossal_vit.provenance import ResultFolder

sys.path.append(str(Path(__file__).resolve().parents[1] / "vit_cifar10_hybrid"))

import train_hybrid
from layouts import CONFIG, FOLDER, set_flags

COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "IMG_SIZE": 224, "BATCH_SIZE": 16, "CHECKPOINT": False}
COMMON |= {"OPTIMIZER": "lamb", "NUM_CLASSES": 1000, "fp16.initial_scale": 1.0}
MODELS = {
    "B/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 768, "DEPTH": 12, "NUM_HEADS": 12},
    "L/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 1024, "DEPTH": 24, "NUM_HEADS": 16},
    "H/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1280, "DEPTH": 32, "NUM_HEADS": 16},
    "g/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1408, "DEPTH": 40, "NUM_HEADS": 16, "MLP_RATIO": 6144 / 1408},
}
RANKS = (4, 8, 64)
KINDS = {"not split": {}, "stage 1": {"zero.stage": 1}}


def plan(values: dict, ranks: int) -> StepPlan:
    """The plan of rank 0."""
    flags = [*set_flags({**COMMON, **values}), "--set", "fp16.mode=AMP_TYPE.NAIVE"]
    argv = ["--config", str(FOLDER / CONFIG), "--dry-run", "--world_size", str(ranks), *flags]
    args = launch.parse(argv, script="train_hybrid", check=train_hybrid.check_vit)
    return report.plan_rank(train_hybrid.main, args, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "results/zero_plan", help="of the result")
    args = parser.parse_args()
    result = ResultFolder(args.output, True)
    header = "| | parameters | ranks | not split: optimizer, GB | peak, GB | stage 1: optimizer, GB | peak, GB |"
    table, details = [header + " sent, stage 1 ÷ not split |", "| --- |" + " ---: |" * 7], {}
    for model, values in MODELS.items():
        for ranks in RANKS:
            plans = {kind: plan({**values, **more}, ranks) for kind, more in KINDS.items()}
            sent = [sum(each.sent.values()) for each in plans.values()]
            cells = [f"{each.memory[part] / 1e9:.2f}" for each in plans.values() for part in ("optimizer", "peak")]
            millions = f"{plans['not split'].parameters / 1e6:,.0f} M"
            table.append(f"| {model} | {millions} | {ranks} | {' | '.join(cells)} | {sent[1] / sent[0]:.3f} |")
            print(table[-1], flush=True)
            details[f"{model}, {ranks} ranks"] = {
                kind: {"memory": each.memory, "calls": each.calls, "sent": each.sent} for kind, each in plans.items()
            }
    result.finish("zero", table, details)


if __name__ == "__main__":
    launch.call(main)
