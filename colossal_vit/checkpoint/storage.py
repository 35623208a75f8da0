"""Checkpoints on disk: written so that a crash leaves only valid ones, and checked before they are read.

    <run directory>/checkpoints/step-00000042/
        model.safetensors       full weights in fp32 under timm's parameter names, whatever the layout was
        optimizer.safetensors   full moments, `<moment>.<name of the parameter>`
        ema.safetensors         with the block `ema`: full moving averages of the weights, named as these
        state.json              all else that a run needs to resume, see `capture.py`
        manifest.json           format version, size and SHA-256 of the other files

Nothing that is read here can run code: tensors are safetensors, the rest is JSON.

    python -m colossal_vit.checkpoint ls RUN_DIRECTORY
    python -m colossal_vit.checkpoint verify RUN_DIRECTORY|CHECKPOINT ...
    python -m colossal_vit.checkpoint export CHECKPOINT FOLDER [--dtype fp16] [--ema]
    python -m colossal_vit.checkpoint import WEIGHTS.safetensors CHECKPOINT [--img-size 384] [--num-classes 10]
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from colossal_vit.errors import UserError
from colossal_vit.files import free_name, sync
from safetensors import SafetensorError, safe_open
from torch import Tensor

FOLDER = "checkpoints"  # in a run directory
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
EMA = "ema.safetensors"
CONTENTS = (MODEL, OPTIMIZER, STATE)  # what the manifest vouches for, and EMA where there is one
VERSION = 1
STEP_NAME = re.compile(r"step-(\d{8,})")
_STATE_KEYS = {
    *("step", "epoch", "images", "global_batch", "best", "optimizer", "moments_step", "scaler"),
    *("layout", "ranks", "config"),
}


def _to_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _remove(path: Path) -> None:
    """Remove a checkpoint; from the first moment on it is none any more."""
    doomed = path.with_name(f".{path.name}-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def write(
    path: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    ema: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint, which appears under its name whole, on the disk, and in one rename.

    Args:
        path: its folder, which must not exist.
        model: full weights, on the CPU.
        optimizer: full moments, on the CPU.
        state: for JSON.
        ema: full moving averages of the weights, on the CPU, if there are any.

    Raises:
        OSError: if it cannot be written; nothing is left of it then.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    tensors_of = {MODEL: model, OPTIMIZER: optimizer} | ({EMA: ema} if ema else {})
    contents = (*CONTENTS, EMA) if ema else CONTENTS
    try:
        for name, tensors in tensors_of.items():
            safetensors.torch.save_file(dict(tensors), scratch / name, metadata={"format": "pt"})
        (scratch / STATE).write_text(_to_text(state))
        for name in contents:
            (scratch / name).chmod(0o644)
            sync(scratch / name)
        files = {name: _fingerprint(scratch / name) for name in contents}
        (scratch / MANIFEST).write_text(_to_text({"version": VERSION, "files": files}))
        sync(scratch / MANIFEST)
        scratch.chmod(0o755)
        sync(scratch)
        scratch.rename(path)
        sync(path.parent)
    except SafetensorError as error:
        raise OSError(None, str(error)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints in a folder but the newest `keep` and that of `best_step`."""
    for path in list_steps(folder)[keep:]:
        if step_of(path) != best_step:
            _remove(path)


def clean(folder: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint, or removed one, has left."""
    for scratch in folder.glob(".step-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    return int(STEP_NAME.fullmatch(path.name)[1])


def list_steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a file into one line that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None


def verify(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint; returns its state.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    with _reading(path / MANIFEST):
        text = (path / MANIFEST).read_text()
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or "version" not in manifest:
            raise ValueError("is no manifest of a checkpoint")
        if manifest["version"] != VERSION:
            raise ValueError(f"format version {manifest['version']!r}, and only {VERSION} is known here")
        files = manifest.get("files")
        if (
            not isinstance(files, dict)
            or tuple(files) not in (CONTENTS, (*CONTENTS, EMA))
            or text != _to_text(manifest)
        ):
            raise ValueError(f"does not list {', '.join(CONTENTS)} as it should")
    for name in files:
        with _reading(path / name):
            if (size := (path / name).stat().st_size) != files[name].get("bytes"):
                raise ValueError(f"has {size} bytes instead of {files[name].get('bytes')}; cut off?")
            if _fingerprint(path / name) != files[name]:
                raise ValueError("its SHA-256 is not the one in the manifest; damaged?")
    for name in files.keys() - {STATE}:
        with _reading(path / name), safe_open(path / name, "pt"):
            pass
    state = read_state(path)
    if (name := STEP_NAME.fullmatch(path.name)) and int(name[1]) != state["step"]:
        raise UserError(f"{path}: holds step {state['step']}; was it renamed?")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint that `verify` has found to hold."""
    with _reading(path / STATE):
        state = json.loads((path / STATE).read_text())
        if not isinstance(state, dict) or not state.keys() >= _STATE_KEYS:
            lacks = ", ".join(sorted(_STATE_KEYS - set(state)))
            raise ValueError(f"lacks {lacks}")
    return state


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint in a folder, and why each newer one is not valid."""
    return first_valid(list_steps(folder))


def first_valid(paths: list[Path]) -> tuple[Path | None, list[str]]:
    """The first valid one of some checkpoints, and why each before it is not valid."""
    skipped = []
    for path in paths:
        try:
            verify(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is not valid to `damaged-<name>`, out of the way; returns the new name."""
    target = path.with_name(f"damaged-{path.name}")
    return path.rename(free_name(target) if target.exists() else target)
