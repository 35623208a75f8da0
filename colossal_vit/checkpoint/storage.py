"""Checkpoints on disk: written atomically, so that a crash leaves only valid ones, and verified before they are read.

    <run directory>/checkpoints/step-00000042/
        model.safetensors       full weights in fp32 under timm's parameter names, whatever the layout
        optimizer.safetensors   full optimizer moments, `<moment>.<parameter name>`
        ema.safetensors         if the config has `ema`: full moving averages of the weights, under the weights' names
        state.json              everything else that a run needs to resume, see `capture.py`
        manifest.json           format version, size and SHA-256 of the other files

Reading a checkpoint cannot execute code: tensors are safetensors, the rest is JSON, read through `contents.py`'s types.

    python -m colossal_vit.checkpoint ls RUN_DIRECTORY
    python -m colossal_vit.checkpoint verify RUN_DIRECTORY|CHECKPOINT ...
    python -m colossal_vit.checkpoint export CHECKPOINT FOLDER [--dtype fp16] [--ema]
    python -m colossal_vit.checkpoint import WEIGHTS.safetensors CHECKPOINT [--img-size 384] [--num-classes 10]
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from colossal_vit import typed_json
from colossal_vit.checkpoint.contents import VERSION, Fingerprint, Manifest, State
from colossal_vit.errors import UserError
from colossal_vit.files import free_name, sync
from safetensors import SafetensorError, safe_open
from torch import Tensor

FOLDER = "checkpoints"  # in a run directory
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
EMA = "ema.safetensors"
CONTENTS = (MODEL, OPTIMIZER, STATE)  # the files that the manifest lists, with EMA after them if there is one
STEP_NAME = re.compile(r"step-(\d{8,})")

_held: dict[Path, int] = {}  # descriptors of files, see `hold`


def _to_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _fingerprint(path: Path) -> Fingerprint:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _remove(path: Path) -> None:
    """Remove a checkpoint: rename it first, so that a half-removed one is never taken for a checkpoint."""
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
    """Write a checkpoint atomically: to a temporary folder, which is fsynced and then renamed to `path`.

    Args:
        path: the checkpoint's folder, which must not exist.
        model: full weights, on the CPU.
        optimizer: full moments, on the CPU.
        state: the contents of state.json.
        ema: full moving averages of the weights, on the CPU, or None.

    Raises:
        OSError: if it cannot be written; the temporary folder is removed.
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
    """Remove all checkpoints in a folder except the newest `keep` and the one of step `best_step`."""
    for path in list_steps(folder)[keep:]:
        if step_of(path) != best_step:
            _remove(path)


def clean(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed while they wrote or removed a checkpoint."""
    for scratch in folder.glob(".step-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def step_of(path: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(STEP_NAME.fullmatch(path.name)[1])


def list_steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, valid or not, newest first."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


# ---- Reading, also beside a run that removes its old checkpoints ----


def hold(path: Path) -> None:
    """Keep the files of a checkpoint readable in this process, even if another one removes them, until `release`."""
    for file in (path / name for name in (*CONTENTS, EMA, MANIFEST)):
        if file not in _held:
            with suppress(OSError):  # `verify` says so
                _held[file] = os.open(file, os.O_RDONLY)


def release(path: Path | None = None) -> None:
    """Let go of what `hold` holds of a checkpoint, or of all; the disk space of what was removed is free then."""
    for file in [file for file in _held if path in (None, file.parent)]:
        os.close(_held.pop(file))


def readable(file: Path) -> Path:
    """Where to read a file of a checkpoint: under its own path, unless it is held."""
    return Path(f"/proc/self/fd/{_held[file]}") if file in _held else file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading `path` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None


def _read_manifest(path: Path) -> Manifest:
    with _reading(path):
        text = readable(path).read_bytes()
    manifest = typed_json.parse(text, Manifest, path)
    # Its own SHA-256 is nowhere: it is as it was written if it is what would be written again.
    if tuple(manifest["files"]) not in (CONTENTS, (*CONTENTS, EMA)) or text != _to_text(manifest).encode():
        raise UserError(f"{path}: does not list {', '.join(CONTENTS)} as it should")
    return manifest


def verify(path: Path, held: bool = False) -> State:
    """Check every byte of a checkpoint against its manifest, and every field of state.json.

    Args:
        path: of the checkpoint.
        held: whether to `hold` it if it is valid, and so to read later what is checked here.

    Raises:
        UserError: naming the damaged file and the damage.
    """
    if held:
        hold(path)
    try:
        return _verify(path)
    except UserError:
        release(path)
        raise


def _verify(path: Path) -> State:
    files = _read_manifest(path / MANIFEST)["files"]
    for name, expected in files.items():
        with _reading(path / name):
            found = _fingerprint(readable(path / name))
            if found["bytes"] != expected["bytes"]:
                raise ValueError(f"has {found['bytes']} bytes instead of {expected['bytes']}; cut off?")
            if found != expected:
                raise ValueError("its SHA-256 is not the one in the manifest; damaged?")
    for name in files.keys() - {STATE}:
        with _reading(path / name), safe_open(readable(path / name), "pt"):
            pass
    state = read_state(path)
    if (name := STEP_NAME.fullmatch(path.name)) and int(name[1]) != state["step"]:
        raise UserError(f"{path}: holds step {state['step']}; was it renamed?")
    return state


def read_state(path: Path) -> State:
    """The contents of state.json, in a checkpoint that `verify` has passed.

    Raises:
        UserError: if it cannot be read or a field is wrong.
    """
    with _reading(path / STATE):
        text = readable(path / STATE).read_bytes()
    return typed_json.parse(text, State, path / STATE)


def newest(folder: Path, held: bool = False) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint in a folder, or None, and the reason why each newer one is not valid.

    Args:
        folder: with the checkpoints.
        held: see `verify`.
    """
    return first_valid(lambda: list_steps(folder), held)


def first_valid(list_paths: Callable[[], list[Path]], held: bool = False) -> tuple[Path | None, list[str]]:
    """The first valid checkpoint of those listed, or None, and the reason why each one before it is not valid.

    If one is removed while it is read, as a run that trains removes its old ones, there may be newer ones: all are
    listed again.
    """
    while True:
        skipped, removed = [], False
        for path in list_paths():
            try:
                verify(path, held)
                return path, skipped
            except UserError as error:
                skipped.append(str(error))
            if removed := not os.path.lexists(path):
                break
        if not removed:
            return None, skipped


def rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-<name>`, so that a new one can take its name; returns the new path."""
    target = path.with_name(f"damaged-{path.name}")
    return path.rename(free_name(target) if target.exists() else target)
