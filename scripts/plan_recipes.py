"""What the recipes in `vit_imagenet_dali/configs/` take on 4 and on 8 GPUs, by `--dry-run`.

    python scripts/plan_recipes.py [--only NAME ...] [--gpus 4 8] [--output results/recipes_plan]

Takes about 4 minutes on a CPU. Memory is that of a GPU; hours are those of a rate that somebody has published, stated
beside them, and of perfect scaling.

Writes plan.md (the table), plan.json, log.txt (every dry run) and provenance.json.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from colossal_vit import config as configs
from colossal_vit import launch
from colossal_vit.plan import report
from colossal_vit.provenance import ResultFolder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "vit_imagenet_dali"
sys.path.append(str(FOLDER))

import train  # noqa: E402
from planning import NUM_IMAGES  # noqa: E402


class Published(NamedTuple):
    """A training that somebody has timed."""

    epochs: int
    hours: float
    gpus: int
    what: str

    @property
    def images_per_s(self) -> float:
        """Of one GPU."""
        return self.epochs * NUM_IMAGES / (self.hours * 3600 * self.gpus)


# H. Touvron et al., arXiv:2012.12877, on training time.
DEIT_S = Published(300, 72, 4, "DeiT-S in less than 3 days on 4 GPUs")
DEIT_B = Published(300, 53, 8, "DeiT-B in 53 h on 8 GPUs")
RATES = {
    "deit3_s16": DEIT_S,
    "deit3_b16": DEIT_B._replace(what=f"{DEIT_B.what}, but at 224 px"),
    "deit3_b16_finetune": DEIT_B,
    "big_vision_s16": DEIT_S,
    "mae_b16_finetune": Published(100, 7 + 11 / 60, 32, "the same on 32 V100s"),  # FINETUNE.md of MAE
    "mae_l16_finetune": Published(50, 8 + 52 / 60, 32, "the same on 32 V100s"),
}


def command_line(name: str, num_gpus: int) -> list[str]:
    """The flags of a recipe on so many GPUs, with the accumulation that keeps its global batch."""
    path = FOLDER / "configs" / f"config_{name}.py"
    config = configs.load(path, script="imagenet")
    accumulation, rest = divmod(config.GLOBAL_BATCH, config.BATCH_SIZE * num_gpus)
    if rest or not accumulation:
        sys.exit(f"{path}: {num_gpus} GPUs cannot make {config.GLOBAL_BATCH} images of batches of {config.BATCH_SIZE}")
    return ["--config", str(path), "--set", f"gradient_accumulation={accumulation}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RATES, default=list(RATES), help="these recipes")
    parser.add_argument("--gpus", nargs="+", type=int, default=[4, 8], help="default %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "results/recipes_plan", help="where the result goes")
    args = parser.parse_args()
    result = ResultFolder(args.output)
    table = [
        "| recipe | GPUs | images of a GPU × accumulation | memory, GB | hours | at images/s a GPU, published for |",
        "| --- |" + " ---: |" * 4 + " --- |",
    ]
    details = []
    for name in args.only:
        rate = RATES[name]
        for number in args.gpus:
            flags = command_line(name, number)
            given = ["--set", f"IMAGES_PER_S={rate.images_per_s:.0f}", "--output", "/nonexistent"]
            argv = [*flags, *given, "--dry-run", "--world_size", str(number)]
            plans = report.plan(train.main, launch.parse(argv, script="imagenet", check=train.check_timm_vit))
            (plan,) = plans
            result.print(f"===== {name} on {number} GPUs =====\n{report.format_report(plans)}\n")
            memory = plan.memory["peak"] / 1e9
            hours = plan.config["NUM_EPOCHS"] * NUM_IMAGES / (rate.images_per_s * number * 3600)
            size = f"{plan.config['BATCH_SIZE']} × {plan.config['gradient_accumulation']}"
            row = [name, number, size, f"{memory:.1f}", f"{hours:.0f}", f"{rate.images_per_s:.0f}, {rate.what}"]
            table.append(f"| {' | '.join(map(str, row))} |")
            details.append(dict(recipe=name, gpus=number, memory=plan.memory, hours=hours, published=rate._asdict()))
    result.finish("plan", table, details)


if __name__ == "__main__":
    main()
