"""Make the tables of dry runs that pages show.

    python scripts/dry_run_tables.py [memory|recipes|zero ...] [--output results]

Minutes each on 2 CPU cores. Each goes into a folder of its own, with every number, the log and provenance.json:

memory_plan    what each shipped config takes of a GPU's memory, on the GPUs of its docstring's command, and what to set
               where a GPU has 24 GB: half the BATCH_SIZE, and twice the gradient_accumulation, until 22 GB are enough.
               The rest is for what a dry run does not count: CUDA's context, NCCL's buffers, fragments.
recipes_plan   what the recipes in vit_imagenet_dali/configs take on 4 and on 8 GPUs, and the hours at published rates
zero_plan      memory and messages of a rank with and without split optimizer state, for four models
"""

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from colossal_vit.dry_run.meter import StepPlan
from colossal_vit.dry_run.report import BuildRank, format_report, plan_rank, plan_stages
from colossal_vit.errors import Parser
from colossal_vit.launch.exits import Exits
from colossal_vit.main import load_script
from colossal_vit.provenance import ROOT, ResultFolder

from layouts import set_flags

sys.path.append(str(ROOT))


LIMIT = 22  # GB that a rank may take of a GPU with 24
RANKS = (4, 8, 64)
COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "IMG_SIZE": 224, "CHECKPOINT": False, "NUM_CLASSES": 1000}
COMMON |= {"OPTIMIZER": "lamb", "gradient_accumulation": 1, "fp16.initial_scale": 1.0, "BATCH_SIZE": 16}
MODELS = {
    "B/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 768, "DEPTH": 12, "NUM_HEADS": 12},
    "L/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 1024, "DEPTH": 24, "NUM_HEADS": 16},
    "H/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1280, "DEPTH": 32, "NUM_HEADS": 16},
    "g/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1408, "DEPTH": 40, "NUM_HEADS": 16, "MLP_RATIO": 6144 / 1408},
}
HYBRID, IMAGENET = ROOT / "vit_cifar10_hybrid/train_hybrid.py", ROOT / "vit_imagenet_dali/train.py"
# Trainings that somebody has timed: epochs, hours, GPUs. H. Touvron et al., arXiv:2012.12877; FINETUNE.md of MAE.
DEIT_S = 300, 72, 4, "DeiT-S in less than 3 days on 4 GPUs"
DEIT_B = 300, 53, 8, "DeiT-B in 53 h on 8 GPUs"
TIMED = {
    "deit3_s16": DEIT_S,
    "deit3_b16": (*DEIT_B[:3], f"{DEIT_B[3]}, but at 224 px"),
    "deit3_b16_finetune": DEIT_B,
    "big_vision_s16": DEIT_S,
    "mae_b16_finetune": (100, 7 + 11 / 60, 32, "the same on 32 V100s"),
    "mae_l16_finetune": (50, 8 + 52 / 60, 32, "the same on 32 V100s"),
}
NUM_IMAGES = 1_281_167  # ImageNet-1K's training set


def builder(path: Path, config: Path, ranks: int, *more: str, **values: Any) -> BuildRank:
    """Return what a train script with a config and some values builds for a rank, on fake tensors."""
    script = load_script(path)
    flags = ["--config", str(config), "--world_size", str(ranks), "--output", "/nonexistent", "--dry-run"]
    return partial(script.build_fake, script.parse([*flags, *set_flags(values), *more]))


def dry_run(result: ResultFolder, script: Path, config: Path, ranks: int, values: dict[str, Any]) -> list[StepPlan]:
    """Return the plans of a config's stages, which the log gets, too."""
    plans = plan_stages(builder(script, config, ranks, **values))
    result.log += f"===== {config.relative_to(ROOT)}, {ranks} ranks, {values} =====\n{format_report(plans)}\n\n"
    return plans


def shipped() -> Iterator[tuple[Path, Path, int]]:
    """Train script, path and number of processes of each config, as its docstring has them."""
    for path in sorted(ROOT.glob("vit_*/**/config*.py")):
        if path.name == "config_sample.py":  # which is for a CPU
            continue
        example = path.parents[path.parent.name.startswith("config")]
        processes, name = re.search(r"--nproc_per_node (\d+) (\w+\.py)", path.read_text()).groups()
        yield example / name, path, int(processes)


def memory(result: ResultFolder) -> None:
    header = "| config | GPUs | `BATCH_SIZE` | peak, GB | with 24 GB add | peak, GB |"
    table, details = [header, "| --- | ---: | ---: | ---: | --- | ---: |"], []
    for script, path, processes in shipped():
        config, values, peaks = load_script(script).load(path), {}, []
        batch, accumulation = config.BATCH_SIZE, config.get("gradient_accumulation", 1)
        while True:
            plans = dry_run(result, script, path, processes, values)
            peaks.append(max(each.memory["peak"] for each in plans) / 1e9)
            if peaks[-1] <= LIMIT:
                break
            batch, accumulation = batch // 2, accumulation * 2
            values = {"BATCH_SIZE": batch, "gradient_accumulation": accumulation}
        hint = " ".join(f"`--set {key}={value}`" for key, value in values.items()) or "nothing"
        name = f"{path.relative_to(ROOT).parts[0]}/{path.stem}"
        row = f"{name} | {processes} | {config.BATCH_SIZE} | {peaks[0]:.1f} | {hint}"
        table.append(f"| {row} | {peaks[-1]:.1f} |")
        details.append(dict(config=str(path.relative_to(ROOT)), gpus=processes, peaks=peaks, values=values))
    result.finish("memory", table, details)


def recipes(result: ResultFolder) -> None:
    header = (
        "| recipe | GPUs | images of a GPU × accumulation | memory, GB | hours | at images/s a GPU, published for |"
    )
    table, details = [header, "| --- |" + " ---: |" * 4 + " --- |"], []
    for name, (epochs, hours, gpus, what) in TIMED.items():
        rate = epochs * NUM_IMAGES / (hours * 3600 * gpus)
        path = IMAGENET.parent / "configs" / f"config_{name}.py"
        config = load_script(IMAGENET).load(path)
        for number in (4, 8):
            accumulation = config.GLOBAL_BATCH // (config.BATCH_SIZE * number)
            values = {"gradient_accumulation": accumulation, "IMAGES_PER_S": round(rate)}
            (found,) = dry_run(result, IMAGENET, path, number, values)
            takes = found.config["NUM_EPOCHS"] * NUM_IMAGES / (rate * number * 3600)
            size = f"{found.config['BATCH_SIZE']} × {found.config['gradient_accumulation']}"
            row = [name, number, size, f"{found.memory['peak'] / 1e9:.1f}", f"{takes:.0f}", f"{rate:.0f}, {what}"]
            table.append(f"| {' | '.join(map(str, row))} |")
            details.append(dict(recipe=name, gpus=number, memory=found.memory, hours=takes, published=TIMED[name]))
    result.finish("plan", table, details)


def zero(result: ResultFolder) -> None:
    kinds = {"not split": {}, "stage 1": {"zero.stage": 1}, "stage 3": {"zero.stage": 3}}
    columns = [f"{kind}: {part}, GB" for kind in kinds for part in ("optimizer", "peak")]
    columns += [f"sent, {kind} ÷ not split" for kind in kinds if kind != "not split"]
    header = f"| | parameters | ranks | {' | '.join(columns)} |"
    table, details = [header, "| --- |" + " ---: |" * (2 + len(columns))], {}
    config = HYBRID.parent / "configs/config_pipeline_parallel.py"
    for model, values in MODELS.items():
        for ranks in RANKS:
            plans = {}
            for kind, more in kinds.items():
                given = {**COMMON, **values, **more}
                plans[kind] = plan_rank(builder(HYBRID, config, ranks, "--set", "fp16.mode=NAIVE", **given), 0)
            whole, *sent = (sum(each.sent.values()) for each in plans.values())
            cells = [f"{each.memory[part] / 1e9:.2f}" for each in plans.values() for part in ("optimizer", "peak")]
            millions = f"{plans['not split'].parameters / 1e6:,.0f} M"
            cells += [f"{each / whole:.3f}" for each in sent]
            table.append(f"| {model} | {millions} | {ranks} | {' | '.join(cells)} |")
            details[f"{model}, {ranks} ranks"] = {
                kind: {"memory": each.memory, "calls": each.calls, "sent": each.sent} for kind, each in plans.items()
            }
    result.finish("zero", table, details)


TABLES = {"memory": memory, "recipes": recipes, "zero": zero}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TABLES)}; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="where the folders go")
    args = parser.parse_args()
    if unknown := set(args.names) - TABLES.keys():
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    results = {
        name: ResultFolder(args.output / f"{name}_plan", command=f"python scripts/dry_run_tables.py {name}")
        for name in args.names or TABLES
    }
    for name, result in results.items():
        TABLES[name](result)


if __name__ == "__main__":
    Exits().call(main)
