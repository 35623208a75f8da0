"""Whether an export is what was trained: all test images of the run through both, in each library that opens it."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch
from colossal_vit.checkpoint.storage import Checkpoint
from colossal_vit.checkpoint.timm_model import image_reader
from colossal_vit.data.batches import IGNORED
from colossal_vit.data.folders import find_images
from colossal_vit.data.loaders import load_test_data
from colossal_vit.errors import UserError, reason
from colossal_vit.model.pixels import to_pixels
from colossal_vit.parallel.collectives import RankLogger
from colossal_vit.parallel.layout import Layout
from colossal_vit.run import Run
from colossalai.context import Config
from torch import Tensor, nn
from tqdm import tqdm

LIMIT = 1e-4  # of the difference between two logits; the libraries round differently
BATCH_SIZE = 64
Batches = Iterator[tuple[Tensor, Tensor | None]]  # images (B, 3, H, W), normalised; labels (B,), if they are known
Logits = Callable[[Tensor], Tensor]


def batches_of_run(checkpoint: Checkpoint, scratch: Path, device: torch.device) -> Batches:
    """Return the test images that the run of a checkpoint was evaluated on.

    Args:
        checkpoint: of which run.
        scratch: a folder for what its loader writes.
        device: of the images.

    Raises:
        UserError: if they are not there any more, or there are none.
    """
    state = checkpoint.state
    config = Config({**state["config"], "gradient_accumulation": 1})
    silent = RankLogger(rank=1)
    run = Run(Namespace(eval_only=True, loader=None), config, Layout(1, 1, 1, None, 1), scratch, device, silent)
    try:
        loader = load_test_data(run, state.get("source") or {}, state.get("data") or {})
    except (AttributeError, ImportError, KeyError, OSError) as error:  # keys that an older version did not record
        raise UserError(f"the run's data cannot be read: {reason(error)}") from None
    return ((images[labels != IGNORED], labels[labels != IGNORED]) for images, labels in loader)


def batches_of_folder(folder: Path, model: nn.Module) -> Batches:
    """Return the images in a folder, prepared as the run's test images were.

    Raises:
        UserError: see `find_images`; later, naming an image that cannot be decoded.
    """
    paths, _ = find_images([folder])
    read = image_reader(model)

    def batches() -> Batches:
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(paths), BATCH_SIZE):
                try:
                    images = list(pool.map(read, paths[start : start + BATCH_SIZE]))
                except UserError as error:
                    raise UserError(f"{error}; repair or remove it") from None
                yield torch.stack(images), None

    return batches()


def open_elsewhere(folder: Path, device: torch.device) -> dict[str, Logits]:
    """Return an exported folder as timm and transformers open it, in fp32.

    Raises:
        UserError: if one of them cannot.
    """
    from transformers import AutoModelForImageClassification  # takes seconds
    from transformers.utils import logging

    logging.disable_progress_bar()
    library = "timm"
    try:
        of_timm = timm.create_model(f"local-dir:{folder}", pretrained=True).float().eval().to(device)
        library = "transformers"
        of_transformers = AutoModelForImageClassification.from_pretrained(folder).float().eval().to(device)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{library} cannot open the export, which is not written: {reason(error)}") from None
    return {"timm": of_timm, "transformers": lambda images: of_transformers(pixel_values=images).logits}


def prove(
    model: nn.Module, others: dict[str, Logits], of_pixels: dict[str, Logits], batches: Batches, device: torch.device
) -> dict[str, Any]:
    """Return how far the logits of others are from the model's at most, over all images, and what the model's accuracy
    is.

    Args:
        model: ours, in evaluation mode.
        others: functions of normalised images (B, 3, H, W), by library.
        of_pixels: functions of the same images in 8 bits, (B, H, W, 3) on the CPU, by library.
        batches: the images.
        device: where models run.

    Raises:
        UserError: if one of the differences is above `LIMIT`.
    """
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key], device=device).view(3, 1, 1) for key in ("mean", "std"))
    model, largest, count, correct = model.to(device), dict.fromkeys((*others, *of_pixels), 0.0), 0, None

    def compare(name: str, logits: Tensor, expected: Tensor) -> None:
        difference = (logits.to(device) - expected).abs().max().item()
        if not difference <= LIMIT:  # nor is it a number
            raise UserError(
                f"the export is not written: in {name} a logit of test images {count} to {count + len(logits) - 1} "
                f"differs by {difference:.2g} from the model's, more than {LIMIT:g}"
            )
        largest[name] = max(largest[name], difference)

    # On GPUs, convolutions in TensorFloat-32 would differ by more than the limit.
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for images, labels in tqdm(batches, "comparing", unit="batch", disable=None):
            images = images.to(device)
            expected = model(images)
            for name, logits in others.items():
                compare(name, logits(images), expected)
            if of_pixels:
                pixels = to_pixels(images, mean, std)
                expected_of_pixels = model((pixels.permute(0, 3, 1, 2) / 255 - mean) / std)
                for name, logits in of_pixels.items():
                    compare(name, logits(pixels.cpu()), expected_of_pixels)
            count += len(images)
            if labels is not None:
                correct = (correct or 0) + (expected.argmax(dim=1) == labels.to(device)).sum().item()
    accuracy = {} if correct is None else {"accuracy": correct / count}
    versions = {name: metadata.version(name) for name in ("torch", *largest)}
    return {"images": count, "limit": LIMIT, "largest_difference": largest, **accuracy, "versions": versions}
