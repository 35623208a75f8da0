"""Draw what each augmentation does to eight digits of the sample, and each recipe to eight crops of two photographs.

    python scripts/draw_augmentation.py [--output results/augmentation]

The photographs are scikit-learn's "china.jpg" (by sonbuddy) and "flower.jpg" (by dany13), both CC BY 2.0. Recipes are
the files in vit_imagenet_dali/configs: crop, mirror, `augment` and `mix`, by torchvision.

Writes augmentation.png, recipes.png, augmentation.md (the settings of each row), augmentation.json (the same) and
provenance.json.
"""

import argparse
from pathlib import Path

import torch
from colossal_vit import config as configs
from colossal_vit.data import mixing
from colossal_vit.data.augment import Augment
from colossal_vit.data.batches import Loader
from colossal_vit.data.digits import digits
from colossal_vit.provenance import ResultFolder
from colossalai.context import Config
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.utils import make_grid

ROOT = Path(__file__).resolve().parents[1]
COUNT, SEED = 8, 4
ROWS = {
    "as they are": {},
    "RandAugment": {"augment": {"policy": "rand", "n": 2, "m": 10}},
    "3-Augment, jitter": {"augment": {"policy": "three", "color_jitter": 0.3}},
    "random erasing": {"augment": {"erase": 1.0}},
    "Mixup, per image": {"mix": {"mixup": 0.8, "mode": "elem"}},
    "CutMix, per image": {"mix": {"cutmix": 1.0, "mode": "elem"}},
}


class One(Loader):
    """A single batch.

    Args:
        images: float32, (B, 3, H, W).
    """

    def __init__(self, images: Tensor):
        self.batch = images, torch.zeros(len(images), dtype=torch.int64)

    def __len__(self) -> int:
        return 1

    def __iter__(self):
        return iter([self.batch])


def draw_row(images: Tensor, blocks: dict) -> Tensor:
    """The images (B, 3, H, W), uint8, as a training with these blocks gets them, from 0 to 1."""
    sizes = dict(BATCH_SIZE=len(images), gradient_accumulation=1, IMG_SIZE=images.shape[-1], NUM_CLASSES=10)
    config = Config(dict(SEED=SEED, **sizes, **blocks))
    augmented = Augment(config)(
        images, torch.arange(len(images)), 0, torch.zeros(3, 1, 1), torch.full((3, 1, 1), 255.0)
    )
    if "mix" not in blocks:
        return augmented
    ((mixed, _),) = mixing.MixedBatches(One(augmented), config, rank=0, num_ranks=1)
    return mixed


def recipe_rows() -> dict[str, dict]:
    """The blocks of each recipe, by the name of its file."""
    found = {}
    for path in sorted((ROOT / "vit_imagenet_dali/configs").glob("config_*.py")):
        config = configs.load(path, script="imagenet")
        blocks = {key: dict(config[key]) for key in ("augment", "mix") if config.get(key)}
        found[path.stem.removeprefix("config_")] = {"CROP_AREA": tuple(config.CROP_AREA), **blocks}
    return found


def crops(area: tuple[float, float], size: int = 112) -> Tensor:
    """Random crops of the photographs, (COUNT, 3, size, size), uint8."""
    torch.manual_seed(SEED)
    crop = v2.Compose([v2.RandomResizedCrop(size, area, antialias=True), v2.RandomHorizontalFlip()])
    photographs = [torch.tensor(load_sample_image(name)).permute(2, 0, 1) for name in ("china.jpg", "flower.jpg")]
    return torch.stack([crop(photographs[number % 2]) for number in range(COUNT)])


def draw(rows: dict[str, Tensor], path: Path, height: float) -> None:
    """Write a picture with a labelled row of images (B, 3, H, W) from 0 to 1 for each entry."""
    figure = Figure(figsize=(9, height), dpi=100)
    for axes, (name, images) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        row = make_grid(images, nrow=COUNT, padding=2, pad_value=1.0)
        axes.imshow(row.clamp(0, 1).permute(1, 2, 0))
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    figure.subplots_adjust(left=0.22, right=0.99, top=0.99, bottom=0.01, hspace=0.04)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results/augmentation", help="where the result goes")
    args = parser.parse_args()
    result = ResultFolder(args.output)
    images = torch.from_numpy(digits(32)[0][:COUNT])[:, None].expand(-1, 3, -1, -1)
    recipes = recipe_rows()
    table = ["| row | blocks |", "| --- | --- |"]
    table += [f"| {name} | `{blocks}` |" for name, blocks in {**ROWS, **recipes}.items()]
    result.finish("augmentation", table, {**ROWS, **recipes})
    draw({name: draw_row(images, blocks) for name, blocks in ROWS.items()}, args.output / "augmentation.png", 5.8)
    drawn = {}
    for name, blocks in recipes.items():
        own = {key: block for key, block in blocks.items() if key != "CROP_AREA"}
        drawn[name] = draw_row(crops(blocks["CROP_AREA"]), own)
    draw(drawn, args.output / "recipes.png", 5.8)


if __name__ == "__main__":
    main()
