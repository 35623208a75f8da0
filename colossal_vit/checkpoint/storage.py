"""Checkpoints on disk: written atomically, so that a crash leaves only valid ones, and verified before they are read.

    <run directory>/checkpoints/step-00000042/
        model.safetensors       full weights in fp32 under timm's parameter names, whatever the layout
        optimizer.safetensors   full optimizer moments, `<moment>.<parameter name>`
        ema.safetensors         if the config has `ema`: full moving averages of the weights, under the weights' names
        state.json              everything else that a run needs to resume, see `contents.State`
        manifest.json           format version, size and SHA-256 of the other files

Reading a checkpoint cannot execute code: tensors are safetensors, the rest is JSON, read through `contents.py`'s types.
`python -m colossal_vit.checkpoint` lists, verifies, exports and imports them.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint.contents import VERSION, Fingerprint, Manifest, State
from colossal_vit.errors import UserError, reason
from colossal_vit.files import exchange, free_name, sync
from safetensors import SafetensorError, safe_open
from torch import Tensor

FOLDER = "checkpoints"  # in a run directory
MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
CONTENTS = (MODEL, OPTIMIZER, STATE)  # the files that the manifest lists, with EMA after them if there is one
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
STEP_NAME = re.compile(r"step-(\d{8,})")

TensorFiles = Mapping[str, Mapping[str, Tensor]]  # full tensors on the CPU, by file and name


def _to_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _fingerprint(path: Path) -> Fingerprint:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


# ---- Writing ----


def write(path: Path, tensors: TensorFiles, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically.

    Args:
        path: the checkpoint's folder; one that is there is replaced, unless the file system cannot exchange folders.
        tensors: those of MODEL and OPTIMIZER, and of EMA if there is an average.
        state: the contents of state.json.

    Raises:
        OSError: if it cannot be written; the temporary folder is removed.
    """

    def save(scratch: Path) -> None:
        for name in tensors:
            try:
                safetensors.torch.save_file(dict(tensors[name]), scratch / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(None, str(error)) from None

    finish(begin(path, save), path, state)


def begin(path: Path, save: Callable[[Path], Any]) -> Path:
    """Begin a checkpoint: make a temporary folder beside `path`, and call `save` with it.

    Returns:
        The folder.

    Raises:
        OSError: as `write`.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    with _removed_after_error(scratch):
        scratch.chmod(0o755)  # other ranks may be other users on their node
        save(scratch)
    return scratch


def finish(scratch: Path, path: Path, state: Mapping[str, Any]) -> None:
    """Make a checkpoint of a folder that has all its tensors: fsync it, and rename it to `path`.

    Raises:
        OSError: as `write`.
    """
    with _removed_after_error(scratch):
        contents = [*CONTENTS, *([EMA] if (scratch / EMA).exists() else [])]
        (scratch / STATE).write_text(_to_text(state))
        for name in contents:
            (scratch / name).chmod(0o644)
            sync(scratch / name)
        files = {name: _fingerprint(scratch / name) for name in contents}
        (scratch / MANIFEST).write_text(_to_text({"version": VERSION, "files": files}))
        sync(scratch / MANIFEST)
        sync(scratch)
        if path.exists():  # if the run was stopped just before an epoch's evaluation, and resumed
            exchange(scratch, path)
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.rename(path)
        sync(path.parent)


@contextmanager
def _removed_after_error(scratch: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint: rename it first, so that a half-removed one is never taken for a checkpoint."""
    doomed = path.with_name(f".{path.name}-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints in a folder except the newest `keep` and the one of step `best_step`."""
    for path in list_steps(folder)[keep:]:
        if step_of(path) != best_step:
            _remove(path)


def clean(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed while they wrote or removed a checkpoint."""
    for scratch in folder.glob(".step-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-<name>`, so that a new one can take its name; returns the new path."""
    target = path.with_name(f"damaged-{path.name}")
    return path.rename(free_name(target) if target.exists() else target)


# ---- Reading, also beside a run that removes its old checkpoints ----


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading `path` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{path}: {reason(error)}") from None


class Checkpoint:
    """A checkpoint of which every byte was checked against the manifest, and every field of state.json by its type.

    Its files are open as long as the object lives: they can be read even if another process has removed them.

    Args:
        path: of the checkpoint's folder.

    Attributes:
        path: as given.
        files: where to read each of its files, by name.
        state: the contents of state.json.

    Raises:
        UserError: naming the damaged file and the damage.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files: dict[str, Path] = {}
        self._descriptors: list[int] = []
        for name, expected in self._read_manifest()["files"].items():
            with _reading(path / name):
                found = _fingerprint(self._open(name))
                if found["bytes"] != expected["bytes"]:
                    raise ValueError(f"has {found['bytes']} bytes instead of {expected['bytes']}; cut off?")
                if found != expected:
                    raise ValueError("its SHA-256 is not the one in the manifest; damaged?")
                if name != STATE:
                    with safe_open(self.files[name], "pt"):  # which refuses what is no safetensors
                        pass
        self.state = typed_json.parse(self.files[STATE].read_bytes(), State, path / STATE)
        if (name := STEP_NAME.fullmatch(path.name)) and int(name[1]) != self.state["step"]:
            raise UserError(f"{path}: holds step {self.state['step']}; was it renamed?")

    def __del__(self):
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _open(self, name: str) -> Path:
        self._descriptors.append(os.open(self.path / name, os.O_RDONLY))
        self.files[name] = Path(f"/proc/self/fd/{self._descriptors[-1]}")
        return self.files[name]

    def _read_manifest(self) -> Manifest:
        path = self.path / MANIFEST
        with _reading(path):
            text = self._open(MANIFEST).read_bytes()
        manifest = typed_json.parse(text, Manifest, path)
        # Its own SHA-256 is nowhere: it is as it was written if it is what would be written again.
        if tuple(manifest["files"]) not in (CONTENTS, (*CONTENTS, EMA)) or text != _to_text(manifest).encode():
            raise UserError(f"{path}: does not list {', '.join(CONTENTS)} as it should")
        return manifest

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one of its files, which are read from the disk as they are used.

        Raises:
            UserError: if one is of a type that no checkpoint has.
        """
        tensors = safetensors.torch.load_file(self.files[name])
        for key, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise UserError(f"{self.path / name}: {key} is of type {tensor.dtype}, which no checkpoint here has")
        return tensors


def step_of(path: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(STEP_NAME.fullmatch(path.name)[1])


def list_steps(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, valid or not, newest first."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint in a folder, or None, and the reason why each newer one is not valid."""
    return _first_valid(lambda: list_steps(folder))


def _first_valid(list_paths: Callable[[], list[Path]]) -> tuple[Checkpoint | None, list[str]]:
    """Return the first valid checkpoint of those listed, or None, and the reason why each one before it is not valid.

    If one is removed while it is read, as a run that trains removes its old ones, there may be newer ones: all are
    listed again.
    """
    while True:
        skipped, removed = [], False
        for path in list_paths():
            try:
                return Checkpoint(path), skipped
            except UserError as error:
                skipped.append(str(error))
            if removed := not os.path.lexists(path):
                break
        if not removed:
            return None, skipped


# ---- Paths that the user gives ----


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is a checkpoint, valid or damaged; timm's model folders have a MODEL file but no others."""
    return bool(STEP_NAME.fullmatch(path.name)) or any((path / name).exists() for name in (OPTIMIZER, STATE, MANIFEST))


def named_by(path: Path) -> list[Path]:
    """Return the checkpoints that a path refers to: itself, or all in a run directory, newest first.

    Raises:
        UserError: if there are none.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if is_checkpoint(path):
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not (found := list_steps(folder)):
        raise UserError(f"{folder}: is no checkpoint, and there are none in it")
    return found


def open_named(path: Path) -> Checkpoint:
    """Return the checkpoint that a path refers to: itself, or the newest valid one in a run directory.

    Raises:
        UserError: if there is no valid one.
    """
    found, faults = _first_valid(lambda: named_by(path))
    if found is None:
        raise UserError(faults[0])
    return found
