"""Training time for several numbers of GPUs, and the settings that keep the config's global batch on each."""

import statistics
from pathlib import Path

from colossal_vit import typed_json
from colossal_vit.config.settings import Setting, Settings
from colossal_vit.config.types import Positive
from colossal_vit.data.loaders import expected_images
from colossal_vit.model.timm_vit import SHAPE
from colossal_vit.results import METRICS, format_table, read_metrics
from colossal_vit.typed_json import Count
from colossalai.context import Config
from typing_extensions import TypedDict

import imagenet_dali_dataloader
from imagenet_dali_dataloader import NUM_IMAGES

SETTINGS: Settings = {
    "IMAGES_PER_S": Setting(
        Positive, "images/s of one GPU, from which `--dry-run` computes hours", affects_training=False
    ),
}
NUM_GPUS = {4, 64, 1024}
PUBLISHED_HOURS = {  # what 300 epochs take on 4 A100s, as the tutorial says
    "vit_base_patch32_224": 14.58,
    "vit_base_patch16_224": 78.58,
    "vit_large_patch32_224": 37.83,
}


class EarlierConfig(TypedDict):
    """What is needed of an earlier run's config.json."""

    BATCH_SIZE: Count
    gradient_accumulation: Count


def images_per_s(config: Config, output: Path) -> tuple[float, str] | None:
    """Images/s of one GPU, and its source: the config's IMAGES_PER_S, an earlier run in `output`, or the tutorial.

    Raises:
        UserError: if the config of the run in `output` is damaged.
    """
    if "IMAGES_PER_S" in config:
        return config.IMAGES_PER_S, "as given by IMAGES_PER_S"
    if (output / METRICS).exists():
        run = typed_json.read(output / "config.json", EarlierConfig)
        per_gpu = run["BATCH_SIZE"] * run["gradient_accumulation"]  # images of a GPU in a step
        rates = [per_gpu / step["step_s"] for step in read_metrics(output)[0] if "step_s" in step]
        if rates:
            return statistics.median(rates), f"the median of the run in {output}"
    if config.MODEL in PUBLISHED_HOURS and config.IMG_SIZE == 224 and not SHAPE.keys() & config.keys():
        seconds = PUBLISHED_HOURS[config.MODEL] * 3600
        return 300 * NUM_IMAGES / seconds / 4, "published, for an A100"
    return None


def batch_and_accumulation(
    num_gpus: int, batch_size: int, global_batch: int, even: bool = False
) -> tuple[int, int] | None:
    """Micro-batch per GPU, at most `batch_size`, and accumulation steps that make the global batch.

    Args:
        num_gpus, batch_size, global_batch: see above.
        even: whether the micro-batch must be, as for mix.

    Returns:
        None if there are none.
    """
    per_gpu, rest = divmod(global_batch, num_gpus)
    sizes = [] if rest else range(min(batch_size, per_gpu), 0, -1)
    found = (size for size in sizes if per_gpu % size == 0 and not (even and size % 2))
    return next(((size, per_gpu // size) for size in found), None)


def schedule(config: Config, output: Path, num_gpus: int) -> list[str]:
    """Return lines with batch settings and training time, for `num_gpus` and several other numbers of GPUs."""
    rate = images_per_s(config, output)
    here = config.BATCH_SIZE * config.gradient_accumulation * num_gpus
    global_batch = config.get("GLOBAL_BATCH", here)
    settings = {
        number: batch_and_accumulation(number, config.BATCH_SIZE, global_batch, even=bool(config.mix))
        for number in sorted(NUM_GPUS | {num_gpus})
    }
    images = expected_images(config, imagenet_dali_dataloader)
    steps = images // global_batch * config.NUM_EPOCHS
    rows = []
    for number, (micro_batch, accumulation) in ((n, found) for n, found in settings.items() if found):
        hours = f"{config.NUM_EPOCHS * images / (rate[0] * number) / 3600:.2f}" if rate else "?"
        rows.append([str(number), str(micro_batch), str(accumulation), f"{steps:,}", hours])
    header = ["GPUs", "BATCH_SIZE", "gradient_accumulation", f"optimizer steps in {config.NUM_EPOCHS} epochs", "hours"]
    said = f"{rate[0]:,.0f} images/s a GPU ({rate[1]}), and perfect scaling" if rate else "set IMAGES_PER_S for hours"
    lines = [f"a global batch of {global_batch:,}, {images:,} images an epoch; {said}", *format_table(header, rows)]
    if here != global_batch:
        advice = "--set what is above" if settings[num_gpus] else f"{num_gpus} cannot make {global_batch:,}"
        lines.append(f"as it is, the config makes a global batch of {here:,} on {num_gpus} GPU(s): {advice}")
    return lines
