"""Training time for several numbers of GPUs, and the settings that keep the published global batch on each."""

import json
import statistics
from pathlib import Path

from colossal_vit.plan.report import format_table
from colossal_vit.results import read_metrics
from colossalai.context import Config

NUM_IMAGES = 1_281_167  # ImageNet-1K's training set
GLOBAL_BATCH = 32_768
NUM_GPUS = {4, 64, 1024}
PUBLISHED_HOURS = {  # of 300 epochs on 4 A100s, from the tutorial
    "vit_base_patch32_224": 14.58,
    "vit_base_patch16_224": 78.58,
    "vit_large_patch32_224": 37.83,
}


def images_per_s(config: Config, output: Path) -> tuple[float, str] | None:
    """Images/s of one GPU, and its source: the config's IMAGES_PER_S, an earlier run in `output`, or the tutorial."""
    if "IMAGES_PER_S" in config:
        return config.IMAGES_PER_S, "as given by IMAGES_PER_S"
    if (output / "metrics.jsonl").exists():
        run = json.loads((output / "config.json").read_text())
        per_gpu = run["BATCH_SIZE"] * run["gradient_accumulation"]  # images of a GPU in a step
        rates = [per_gpu / step["step_s"] for step in read_metrics(output)[0]]
        if rates:
            return statistics.median(rates), f"the median of the run in {output}"
    if config.MODEL in PUBLISHED_HOURS:
        seconds = PUBLISHED_HOURS[config.MODEL] * 3600
        return 300 * NUM_IMAGES / seconds / 4, "published, for an A100"
    return None


def split(num_gpus: int, batch_size: int) -> tuple[int, int]:
    """Micro-batch per GPU, at most `batch_size`, and accumulation steps that give the published global batch."""
    per_gpu = GLOBAL_BATCH // num_gpus
    micro_batch = max(size for size in range(1, min(batch_size, per_gpu) + 1) if per_gpu % size == 0)
    return micro_batch, per_gpu // micro_batch


def schedule(config: Config, output: Path, num_gpus: int) -> list[str]:
    """Lines with batch settings and training time, for `num_gpus` and several other numbers of GPUs."""
    rate = images_per_s(config, output)
    rows = []
    for number in sorted(NUM_GPUS | {num_gpus}):
        micro_batch, accumulation = split(number, config.BATCH_SIZE)
        steps = NUM_IMAGES // GLOBAL_BATCH * config.NUM_EPOCHS
        hours = f"{config.NUM_EPOCHS * NUM_IMAGES / (rate[0] * number) / 3600:.2f}" if rate else "?"
        rows.append([str(number), str(micro_batch), str(accumulation), f"{steps:,}", hours])
    header = ["GPUs", "BATCH_SIZE", "gradient_accumulation", f"optimizer steps in {config.NUM_EPOCHS} epochs", "hours"]
    said = f"{rate[0]:,.0f} images/s a GPU ({rate[1]}), and perfect scaling" if rate else "set IMAGES_PER_S for hours"
    return [f"a global batch of {GLOBAL_BATCH:,}; {said}", *format_table(header, rows)]
