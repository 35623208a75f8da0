"""A config file evaluated, overridden, checked and filled in."""

import ast
import builtins
import json
import math
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit.config import check, schema
from colossal_vit.config.overrides import ApplyOverrides, apply_overrides, parse_override
from colossal_vit.errors import UserError
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE


def _check_derived(values: Mapping[str, Any], overridden: set[str], source: str) -> None:
    """Refuse to override what `parallel` or `model` is computed from in other files, and not in this one."""
    tensor = values["parallel"]["tensor"]
    for key, name, used in (
        ("TENSOR_PARALLEL_SIZE", "parallel.tensor.size", tensor["size"]),
        ("TENSOR_PARALLEL_MODE", "parallel.tensor.mode", tensor["mode"]),
        ("NUM_CHUNKS", "model.num_chunks", num_model_chunks(values)),
    ):
        if key in overridden and values[key] != used:
            raise UserError(f"{source}: {key} = {values[key]!r}, but {name} = {used!r}, which is what counts: set that")


def _complete(parallel: Mapping[str, Any] | None) -> dict[str, Any]:
    """The block `parallel` with its defaults."""
    parallel = parallel or {}
    tensor = {"mode": None, "size": 1, **(parallel.get("tensor") or {})}
    if tensor["mode"] == "2.5d":
        tensor.setdefault("depth", 1)
    return {"pipeline": parallel.get("pipeline", 1), "tensor": tensor}


def _parse(texts: Iterable[str]) -> list[tuple[tuple[str, ...], Any]]:
    """The overrides parsed, and checked before a file computes with them; a whole `parallel` is complete, for the same.

    Raises:
        UserError: if an override is malformed, its key unknown or its value wrong.
    """
    parsed = [parse_override(text) for text in texts]
    for (name, *rest), value in parsed:
        if not name.startswith("_"):
            check.check({name: apply_overrides(name, None, [((name, *rest), value)])}, "--set")
    return [(keys, _complete(value) if keys == ("parallel",) else value) for keys, value in parsed]


def _import_for_configs(name: str, globals=None, locals=None, fromlist=(), level=0):
    """`import` as a config sees it: `colossalai.amp`, where the tutorials find AMP_TYPE, still has it."""
    if name in ("colossalai.amp", "colossalai.amp.amp_type"):
        return types.SimpleNamespace(AMP_TYPE=AMP_TYPE)
    return builtins.__import__(name, globals, locals, fromlist, level)


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    script: str | None = None,
) -> Config:
    """Evaluate a config file.

    Args:
        path: the Python file.
        overrides: `KEY=VALUE` strings, see `parse_override`.
        script: one of `settings.SCRIPTS`, which must use every key and has defaults of its own; None for any other one.

    Returns:
        Colossal-AI's `Config`: a dict whose items are attributes too. It has all defaults (see `schema`), `parallel` is
        complete, and `fp16` is None without mixed precision.

    Raises:
        UserError: if the file is missing or fails, a key is unknown or missing, or a value has the wrong type.
    """
    path = Path(path)
    parsed = _parse(overrides)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe might wait forever
            raise UserError(f"--config {path}: is no regular file")
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
        raise UserError(f"--config {where}: not valid Python: {getattr(error, 'msg', error)}") from None

    tree = ast.fix_missing_locations(ApplyOverrides({keys[0] for keys, _ in parsed}).visit(tree))
    namespace: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": _import_for_configs},
        "__file__": str(path.resolve()),
        "__name__": path.stem,
        ApplyOverrides.HELPER: lambda name, value: apply_overrides(name, value, parsed),
    }
    try:
        exec(compile(tree, str(path), "exec"), namespace)
    except (Exception, SystemExit) as error:
        trace, line = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(path):
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"{path}:{line}" if line else str(path)
        raise UserError(f"--config {where}: {type(error).__name__}: {' '.join(str(error).split())}") from None

    values = {
        key: value
        for key, value in namespace.items()
        if not key.startswith("_") and not isinstance(value, types.ModuleType) and not callable(value)
    }
    for keys, _ in parsed:  # keys that the file does not mention
        if keys[0] not in values:
            values[keys[0]] = apply_overrides(keys[0], None, parsed)

    check.check(values, str(path))
    if script is not None:
        check.check_script(values, script, str(path))
    check.check_effect(values, script, str(path))
    values = {**schema.defaults(script), **values}
    warm_up, epochs = values.get("WARMUP_EPOCHS", 0), values.get("NUM_EPOCHS", math.inf)
    if warm_up >= epochs:
        raise UserError(f"{path}: WARMUP_EPOCHS = {warm_up} must be less than NUM_EPOCHS = {epochs}")
    values["parallel"] = _complete(values.get("parallel"))
    _check_derived(values, {keys[0] for keys, _ in parsed}, str(path))
    if not (values.get("fp16") or {}).get("mode"):
        values["fp16"] = None
    return Config(values)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved config as it is read back from `to_json`."""
    return json.loads(to_json(config))


def to_json(config: Mapping[str, Any]) -> str:
    """The resolved config as JSON; AMP modes by name."""

    def encode(value: Any) -> Any:
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        raise TypeError(f"{value!r} has no JSON form")

    return json.dumps(config, indent=2, default=encode)


def num_model_chunks(config: Config) -> int:
    """Into how many chunks `model = dict(num_chunks=...)` cuts each pipeline stage; 1 is the plain 1F1B schedule."""
    return (config.get("model") or {}).get("num_chunks", 1)
