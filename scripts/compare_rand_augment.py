"""DALI's RandAugment compared with torchvision's, operation by operation, on the two photographs of scikit-learn.

    python scripts/compare_rand_augment.py [--output results/rand_augment]

Takes half a minute. Each operation is applied with the same m and the same direction by both. "As they are" is with the
defaults of either. "Alike" gives torchvision what it can be given of DALI's: grey filling of 128 and bilinear
interpolation. Values are those of pixels, from 0 to 255.

Writes rand_augment.md (the table), rand_augment.json and provenance.json.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from colossal_vit.benchmark import Benchmark
from nvidia.dali import fn, pipeline_def
from nvidia.dali.auto_aug.core._augmentation import Augmentation
from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

ROOT = Path(__file__).resolve().parents[1]
SIZE, CORNERS = 224, ((0, 0), (100, 300), (203, 416))  # of the parts taken of each photograph, in pixels
MAGNITUDES, NUM_BINS = (9, 30), 31
ALIKE = dict(interpolation=InterpolationMode.BILINEAR, fill=128)
FILLED = "torchvision fills with black and takes the nearest pixel"
OPERATIONS = {  # DALI's name: torchvision's, and why they differ
    "identity": ("Identity", ""),
    "shear_x": (
        "ShearX",
        f"{FILLED}; a positive magnitude is the other direction, and both directions are as frequent",
    ),
    "shear_y": ("ShearY", f"{FILLED}; the other direction, too"),
    "translate_x": ("TranslateX", f"{FILLED}; 100 of 224 pixels at most, in torchvision 150 of 331 and whole pixels"),
    "translate_y": ("TranslateY", "the same"),
    "rotate": ("Rotate", FILLED),
    "brightness": ("Brightness", ""),
    "color": ("Color", "torchvision cuts off the fraction of the grey image: 2 apart at most"),
    "contrast": ("Contrast", ""),
    "sharpness": ("Sharpness", "torchvision leaves the outermost pixels as they are"),
    "posterize": ("Posterize", ""),
    "solarize": ("Solarize", "thresholds up to 256, in torchvision up to 255"),
    "auto_contrast": ("AutoContrast", ""),
    "equalize": ("Equalize", "the formula of OpenCV, in torchvision that of PIL"),
}
OTHER_WAY = ("shear_x", "shear_y")


class Deviation(NamedTuple):
    """How far two versions of images are apart.

    Attributes:
        share: of values that differ by more than 1, which is rounding.
        mean: difference of all values.
        largest: difference.
    """

    share: float
    mean: float
    largest: int


def deviation(ours: Tensor, theirs: Tensor) -> Deviation:
    """Of images of type uint8."""
    apart = (ours.int() - theirs.int()).abs()
    return Deviation((apart > 1).float().mean().item(), apart.float().mean().item(), apart.max().item())


def photographs() -> Tensor:
    """Six parts of two photographs, (6, 3, SIZE, SIZE), uint8."""
    parts = [p[y : y + SIZE, x : x + SIZE] for p in load_sample_images().images for y, x in CORNERS]
    return torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2)


def by_dali(operation: Augmentation, images: Tensor, m: int, sign: int) -> Tensor:
    """Images (B, 3, SIZE, SIZE), uint8, after an operation of `get_rand_augment_suite` of magnitude `m`."""
    magnitude = {}
    if operation.mag_range is not None:
        low, high = operation.mag_range
        operation = operation.augmentation((sign * low, sign * high), randomly_negate=False)
        magnitude = dict(magnitude_bin=m, num_magnitude_bins=NUM_BINS)
    source = list(images.permute(0, 2, 3, 1).contiguous().numpy())

    @pipeline_def(batch_size=len(source), num_threads=1, device_id=None, seed=1)
    def graph():
        data = fn.external_source(source=lambda: source, layout="HWC", batch=True)
        return operation(data, shape=[SIZE, SIZE], fill_value=128, interp_type=None, **magnitude)

    pipeline = graph()
    pipeline.build()
    (made,) = pipeline.run()
    return torch.from_numpy(np.stack([np.array(made[place]) for place in range(len(source))])).permute(0, 3, 1, 2)


def by_torchvision(name: str, images: Tensor, m: int, sign: int, **options) -> Tensor:
    """The same with the operation of `v2.RandAugment` that has this name."""
    policy = v2.RandAugment(1, m, NUM_BINS, **options)
    magnitudes, signed = policy._AUGMENTATION_SPACE[name]
    values = magnitudes(NUM_BINS, SIZE, SIZE)
    magnitude = 0.0 if values is None else float(values[m]) * (sign if signed else 1)
    apply = policy._apply_image_or_video_transform
    return apply(images, name, magnitude, interpolation=policy.interpolation, fill=policy._fill)


def compare(name: str, m: int) -> dict[str, Deviation]:
    """Deviations of DALI's operation `name` with magnitude `m`: "as they are" and "alike"."""
    (operation,) = (each for each in get_rand_augment_suite(use_shape=True) if each.name == name)
    signs = (1, -1) if operation.randomly_negate else (1,)
    images, turned = photographs(), -1 if name in OTHER_WAY else 1
    ours = torch.cat([by_dali(operation, images, m, sign) for sign in signs])
    return {
        how: deviation(
            ours,
            torch.cat([by_torchvision(OPERATIONS[name][0], images, m, turned * sign, **options) for sign in signs]),
        )
        for how, options in (("as they are", {}), ("alike", ALIKE))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results/rand_augment", help="where the result goes")
    args = parser.parse_args()
    benchmark = Benchmark(args.output)
    found = {name: {m: compare(name, m) for m in MAGNITUDES} for name in OPERATIONS}
    table = [
        "| values that differ by more than 1; mean difference | "
        + " | ".join(f"m = {m}, as they are | m = {m}, alike" for m in MAGNITUDES)
        + " | why |",
        "| --- |" + " ---: |" * 2 * len(MAGNITUDES) + " --- |",
    ]
    for name, (_, reason) in OPERATIONS.items():
        cells = [f"{d.share:.1%}; {d.mean:.2f}" for of_m in found[name].values() for d in of_m.values()]
        table.append(f"| {name} | {' | '.join(cells)} | {reason} |")
    details = {
        name: {m: {how: d._asdict() for how, d in of_m.items()} for m, of_m in of_name.items()}
        for name, of_name in found.items()
    }
    benchmark.finish("rand_augment", table, details)


if __name__ == "__main__":
    main()
