"""What all ranks of a run must have in common, and the first thing that one has otherwise."""

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import colossal_vit
import torch
from colossal_vit import config as configs
from colossal_vit.config.check import shown
from colossalai.context import Config

# Attributes of `Arguments` that may differ: a rank's place and paths, what rank 0 alone uses, and what the config has.
OF_A_RANK = {"rank", "local_rank", "host", "port", "launcher", "timeout", "output", "wandb"}
OF_A_RANK |= {"config", "set", "compile", "backend", "world_size", "settings", "check", "notes", "loader", "exits"}


def _code(loader: Path | None = None) -> str:
    """Return a digest of the source files of this library, and of script, loader and the modules beside them that they
    import.

    Args:
        loader: the file of the loader, which is imported.
    """
    library, script = Path(colossal_vit.__file__).parent, Path(sys.argv[0]).absolute()
    folders = {script.parent, script.resolve().parent}
    if loader:
        folders.add(loader.parent)
    modules = [file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))]
    beside = {name for name in set(map(os.path.dirname, modules)) if Path(name) in folders}  # far fewer than modules
    imported = [Path(file) for file in modules if os.path.dirname(file) in beside]
    files = {str(path.relative_to(library)): path for path in library.rglob("*.py")}
    files |= {f"../{path.name}": path for path in imported if path.is_file()}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n".encode() + files[name].read_bytes())
    return digest.hexdigest()[:12]


def common(args: argparse.Namespace, config: Config, backend: str, loader: Path | None = None) -> dict[str, Any]:
    """Return what every rank of a run must have in common, beside the world size, by the names that messages give it.

    Paths may differ from node to node: of DATA and --resume it only counts whether there is one. The data are compared
    once they are read, and rank 0 alone reads the checkpoint.

    Args:
        args: the command line.
        config: as resolved.
        backend: of the process groups.
        loader: the file of the loader, which is imported.
    """
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in OF_A_RANK}
    return {
        "script": Path(sys.argv[0]).name,
        "code": {"colossal_vit": _code(loader), "torch": torch.__version__},
        "backend": backend,
        **flags,
        "--resume": args.resume if args.resume in ("auto", "never") else "a path",
        **configs.plain(config),
        "DATA": "set" if config.get("DATA") or os.environ.get("DATA") else "not set",
    }


def first_difference(first: Any, other: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first value that differs in two of `common`: its name, with dots inside blocks, and both values."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        each = (first_difference(first.get(key), other.get(key), f"{name}.{key}") for key in first | other)
        return next(filter(None, each), None)
    return None if first == other else (name.removeprefix("."), first, other)


def describe_difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Describe in one line how a rank differs from rank 0; empty if it does not."""
    if (found := first_difference(first, other)) is None:
        return ""
    name, expected, value = found
    return (
        f"rank {rank} does not fit rank 0: {name} is {shown(value)} there and {shown(expected)} on rank 0; give all "
        f"ranks of a run the same command, config and code"
    )
