"""Checkpoints on disk: written so that a crash leaves whole ones only, and checked before they are read.

    <run directory>/checkpoints/step-00000042/
        model.safetensors       full weights in fp32 under timm's parameter names, whatever the layout was
        optimizer.safetensors   full moments, `<moment>.<name of the parameter>`
        state.json              all else that a run needs to go on, see `state.py`
        manifest.json           format version, size and SHA-256 of the other files

Nothing that is read here can run code: tensors are safetensors, the rest is JSON.

    python -m colossal_vit.checkpoint ls RUN_DIRECTORY
    python -m colossal_vit.checkpoint verify RUN_DIRECTORY|CHECKPOINT ...
    python -m colossal_vit.checkpoint export CHECKPOINT FOLDER [--dtype fp16]
    python -m colossal_vit.checkpoint import WEIGHTS.safetensors CHECKPOINT [--img-size 384] [--num-classes 10]
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from colossal_vit.errors import UserError
from safetensors import SafetensorError, safe_open
from torch import Tensor

FOLDER = "checkpoints"  # in a run directory
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
CONTENTS = (MODEL, OPTIMIZER, STATE)  # what the manifest vouches for
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_STATE_KEYS = {
    *("step", "epoch", "images", "global_batch", "best", "optimizer", "moments_step", "scaler"),
    *("layout", "ranks", "config"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def _sync(path: Path) -> None:
    """Have the disk hold what the kernel still keeps of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def write(path: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint, which appears under its name whole, on the disk, and in one rename.

    Args:
        path: its folder, which must not exist.
        model: full weights, on the CPU.
        optimizer: full moments, on the CPU.
        state: for JSON.

    Raises:
        OSError: if it cannot be written; nothing is left of it then.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            safetensors.torch.save_file(dict(tensors), scratch / name, metadata={"format": "pt"})
        (scratch / STATE).write_text(_to_text(state))
        for name in CONTENTS:
            (scratch / name).chmod(0o644)
            _sync(scratch / name)
        files = {name: _fingerprint(scratch / name) for name in CONTENTS}
        (scratch / MANIFEST).write_text(_to_text({"version": VERSION, "files": files}))
        _sync(scratch / MANIFEST)
        scratch.chmod(0o755)
        _sync(scratch)
        scratch.rename(path)
        _sync(path.parent)
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


# ---------------------------------------------------------------------------------------------------------------------
# Finding and checking
# ---------------------------------------------------------------------------------------------------------------------


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    return int(_NAME.fullmatch(path.name)[1])


def list_steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
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
        if not isinstance(files, dict) or tuple(files) != CONTENTS or text != _to_text(manifest):
            raise ValueError(f"does not list {', '.join(CONTENTS)} as it should")
    for name in CONTENTS:
        with _reading(path / name):
            if (size := (path / name).stat().st_size) != files[name].get("bytes"):
                raise ValueError(f"has {size} bytes instead of {files[name].get('bytes')}; cut off?")
            if _fingerprint(path / name) != files[name]:
                raise ValueError("its SHA-256 is not the one in the manifest; damaged?")
    for name in (MODEL, OPTIMIZER):
        with _reading(path / name), safe_open(path / name, "pt"):
            pass
    return read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint that `verify` has found to hold."""
    with _reading(path / STATE):
        state = json.loads((path / STATE).read_text())
        if not isinstance(state, dict) or not state.keys() >= _STATE_KEYS:
            lacks = ", ".join(sorted(_STATE_KEYS - set(state)))
            raise ValueError(f"lacks {lacks}")
    return state


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in a folder that holds, and why each newer one does not."""
    return _first_that_holds(list_steps(folder))


def _first_that_holds(paths: list[Path]) -> tuple[Path | None, list[str]]:
    """The first of some checkpoints that holds, and why each before it does not."""
    passed_over = []
    for path in paths:
        try:
            verify(path)
            return path, passed_over
        except UserError as error:
            passed_over.append(str(error))
    return None, passed_over


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that does not hold to `damaged-<name>`, out of the way; returns the new name."""
    number = 0
    while (target := path.with_name(f"damaged-{path.name}" + (f".{number}" if number else ""))).exists():
        number += 1
    with suppress(OSError):
        path.rename(target)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the verbs and their flags)")


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, whole or not; timm's folders have a MODEL too, but none of the others."""
    return bool(_NAME.fullmatch(path.name)) or any((path / name).exists() for name in (OPTIMIZER, STATE, MANIFEST))


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoints that a path on the command line means: itself, or all of a run, newest first.

    Raises:
        UserError: if there are none.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if _is_checkpoint(path):
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not (found := list_steps(folder)):
        raise UserError(f"{folder}: is no checkpoint, and there are none in it")
    return found


def _one_that_holds(path: Path) -> Path:
    """The checkpoint that a path on the command line means: itself, or the newest of a run that holds.

    Raises:
        UserError: if it does not hold, or none does.
    """
    found, faults = _first_that_holds(_checkpoints(path))
    if found is None:
        raise UserError(faults[0])
    return found


def _weights(source: Path) -> Path:
    """The file that `import` is to read: one of ours has been checked.

    Raises:
        UserError: if there is none, or it is of another format.
    """
    if source.is_dir():
        if (source / MODEL).exists() and not _is_checkpoint(source):
            return source / MODEL
        return _one_that_holds(source) / MODEL
    if source.suffix != ".safetensors":
        raise UserError(
            f"{source}: only .safetensors files are read, and folders with one: files of other formats (.bin, .pth, "
            f".pt, .ckpt, .npz) can run code when they are opened"
        )
    return source


def _ls(args: argparse.Namespace) -> int:
    best = None
    for path in _checkpoints(args.run):
        try:
            state = verify(path)
        except UserError as error:
            print(f"{path.name}  damaged: {error}")
            continue
        best = best or state["best"]  # the newest one knows
        size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        mark = f"  best: {best['accuracy']:.2%}" if best and best["step"] == state["step"] else ""
        print(f"{path.name}  epoch {state['epoch']}  {size:.1f} MB{mark}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    code = 0
    for path in [each for named in args.paths for each in _checkpoints(named)]:
        try:
            print(f"{path}: good, step {verify(path)['step']}")
        except UserError as error:
            print(error)
            code = 1
    return code


def _export(args: argparse.Namespace) -> int:
    path = _one_that_holds(args.checkpoint)
    from colossal_vit.exchange import export_timm  # timm takes 5 seconds to import

    export_timm(path, args.folder, _DTYPES[args.dtype])
    print(f'{path} is in {args.folder}: timm.create_model("local-dir:{args.folder}", pretrained=True)')
    return 0


def _import(args: argparse.Namespace) -> int:
    source = _weights(args.source)
    from colossal_vit.exchange import import_timm

    import_timm(source, args.checkpoint, args.img_size, args.num_classes)
    print(f"{source} is in {args.checkpoint}: start from it with --resume {args.checkpoint}")
    return 0


def _get_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m colossal_vit.checkpoint",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("ls", help="list the checkpoints of a run, newest first")
    verb.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    verb.set_defaults(act=_ls)

    verb = verbs.add_parser("verify", help="check every byte; the exit code is 1 if any is damaged")
    verb.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, or a run directory for all")
    verb.set_defaults(act=_verify)

    verb = verbs.add_parser("export", help="write a folder that timm.create_model takes")
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="or a run directory for the newest")
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="must not exist, or be empty")
    verb.add_argument("--dtype", choices=_DTYPES, default="fp32", help="of the weights (default %(default)s)")
    verb.set_defaults(act=_export)

    verb = verbs.add_parser("import", help="make a checkpoint to start from of weights that timm has")
    verb.add_argument("source", type=Path, metavar="SOURCE", help="a .safetensors file, a folder with one, or a run")
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="must not exist")
    verb.add_argument("--img-size", type=int, metavar="N", help="resample the position embedding for images of N px")
    verb.add_argument(
        "--num-classes", type=int, metavar="N", help="start with a head of zeros, unless it has N already"
    )
    verb.set_defaults(act=_import)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default this process's; a user's mistake becomes one line on stderr.

    Returns:
        The exit code: 0, 1 if `verify` found damage, 2 for a user's mistake.
    """
    try:
        args = _get_parser().parse_args(argv)
        return args.act(args)
    except UserError as error:
        print(f"checkpoint: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
