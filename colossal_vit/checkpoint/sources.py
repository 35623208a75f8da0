"""What a path that the user gives refers to: a checkpoint, the newest one of a run, a file with weights."""

from pathlib import Path

from colossal_vit.checkpoint.storage import (
    FOLDER,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    STEP_NAME,
    first_valid,
    list_steps,
)
from colossal_vit.errors import UserError


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, valid or damaged; timm's model folders have a MODEL file but no others."""
    return bool(STEP_NAME.fullmatch(path.name)) or any((path / name).exists() for name in (OPTIMIZER, STATE, MANIFEST))


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints a path on the command line refers to: itself, or all in a run directory, newest first.

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


def one_valid(path: Path) -> Path:
    """The checkpoint a path on the command line refers to: itself, or the newest valid one in a run directory.

    It is held, see `storage.hold`.

    Raises:
        UserError: if there is no valid one.
    """
    found, faults = first_valid(lambda: checkpoints(path), held=True)
    if found is None:
        raise UserError(faults[0])
    return found


def weights_file(source: Path) -> Path:
    """The weights file for `import`; one in a checkpoint is verified first.

    Raises:
        UserError: if there is none, or it is not a safetensors file.
    """
    if source.is_dir():
        if (source / MODEL).exists() and not is_checkpoint(source):
            return source / MODEL
        return one_valid(source) / MODEL
    if source.suffix != ".safetensors":
        raise UserError(
            f"{source}: only .safetensors files are read, and folders with one: files of other formats (.bin, .pth, "
            f".pt, .ckpt, .npz) can run code when they are opened"
        )
    return source
