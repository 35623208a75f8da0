"""A checkpoint as a folder that timm, transformers and onnxruntime open, with the proof that they compute the same."""

import json
from pathlib import Path
from typing import Any

import torch
from colossal_vit.checkpoint import onnx_model, storage
from colossal_vit.checkpoint.card import preprocessing, say_proof, write_card
from colossal_vit.checkpoint.proof import batches_of_folder, batches_of_run, open_elsewhere, prove
from colossal_vit.checkpoint.storage import Checkpoint
from colossal_vit.checkpoint.timm_model import class_names, load_model, write_timm
from colossal_vit.errors import UserError, reason
from colossal_vit.files import atomic_folder
from colossal_vit.results import read_metrics
from safetensors import SafetensorError
from torch import nn

PROOF, CARD = "proof.json", "README.md"


def _recorded_accuracy(checkpoint: Checkpoint, ema: bool) -> float | None:
    """Return the accuracy of a checkpoint's weights that is on record in its run directory, or in itself."""
    step, best = checkpoint.state["step"], checkpoint.state["best"]
    key = "ema_accuracy" if ema else "eval_accuracy"
    if checkpoint.path.resolve().parent.name == storage.FOLDER:
        try:
            records = read_metrics(checkpoint.path.resolve().parents[1])[1]
        except OSError:
            records = []
        if found := [record[key] for record in records if record["step"] == step and key in record]:
            return found[-1]
    return best["accuracy"] if best and best["step"] == step and not ema else None


def _prove(checkpoint: Checkpoint, model: nn.Module, folder: Path, onnx: bool, images: Path | None) -> dict[str, Any]:
    """Return the contents of proof.json, of an export that is complete but for it.

    Raises:
        UserError: if what was written computes something else, or cannot be opened.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if images:
        batches, of = batches_of_folder(images, model), "images of a folder"
    else:
        try:
            batches, of = batches_of_run(checkpoint, folder.parent, device), "test images of the run"
        except UserError as error:
            return {"images": 0, "not_proven": str(error)}
    of_pixels = {"onnxruntime": onnx_model.open_onnx(folder / onnx_model.ONNX)} if onnx else {}
    return {"of": of, **prove(model, open_elsewhere(folder, device), of_pixels, batches, device)}


def export(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, ema: bool, onnx: bool = False, images: Path | None = None
) -> list[str]:
    """Write a checkpoint as a folder for timm, transformers and, with `onnx`, for onnxruntime; with a model card and
    the proof that they compute what was trained.

    Args:
        checkpoint, dtype, ema: see `load_model`.
        folder: must not exist, or be empty; written atomically.
        onnx: write an ONNX file, too.
        images: a folder of images for the proof, in place of the run's test images.

    Returns:
        Lines about the proof, and what is left to do.

    Raises:
        UserError: if the folder is not empty or cannot be written, if what was written computes something else than the
            model, or see `load_model`.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: exists already, and is not an empty folder")
    if onnx:
        onnx_model.check_installed()
    model = load_model(checkpoint, dtype, ema).eval()
    try:
        if folder.exists():
            folder.rmdir()
        with atomic_folder(folder) as scratch:
            write_timm(model, scratch)
            model = model.float()  # what is computed in: the weights are rounded already
            if onnx:
                facts = {"classes": class_names(model), **preprocessing(model)}
                onnx_model.write_onnx(model, scratch / onnx_model.ONNX, facts)
            proof = _prove(checkpoint, model, scratch, onnx, images)
            (scratch / PROOF).write_text(json.dumps(proof, indent=2) + "\n")
            accuracy = _recorded_accuracy(checkpoint, ema)
            name = str(dtype).removeprefix("torch.")
            card = write_card(model, checkpoint.state, name, ema, accuracy, proof, onnx)
            (scratch / CARD).write_text(card, encoding="utf-8", errors="replace")
            for file in scratch.iterdir():
                file.chmod(0o644)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written: {reason(error)}") from None
    return [*say_proof(proof), f"{folder / CARD} is its model card: fill in the licence"]
