"""A config file evaluated, overridden, checked and filled in."""

import ast
import json
import math
import traceback
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit.compat.patches import restore_amp_type
from colossal_vit.config.check import check, check_effect
from colossal_vit.config.complete import complete, older_names, replace_older_names
from colossal_vit.config.overrides import Overridden, Override, override, parse_override
from colossal_vit.config.schema import OLDER_NAMES, SCHEMA
from colossal_vit.config.settings import Settings, SettingsBlock
from colossal_vit.errors import UserError
from colossalai.context import Config


def _parse(texts: Iterable[str], schema: Settings) -> list[Override]:
    """Return the overrides parsed, and checked before a file computes with them; an older name sets what it stands for,
    too.

    A block that is always there, such as `parallel`, is given as a whole with all its defaults, for the file to read.

    Raises:
        UserError: if an override is malformed, its key unknown or its value wrong, or an older name and the setting
            that it stands for have different values.
    """
    given = [parse_override(text, schema) for text in texts]
    parsed = []
    for path, value in given:
        if not path[0].startswith("_"):
            check(override({}, [(path, value)]), "--set", schema)
            if len(path) == 1 and isinstance(block := schema.get(path[0]), SettingsBlock) and block.default is not None:
                value = complete(value or {}, block.settings, in_block=True)
        parsed.append((path, value))
    values = override({}, given)
    replace_older_names(values, schema, (), "--set")  # refuses two names with different values
    meant = [setting.items() for *_, setting in older_names(values, schema)]
    return [(tuple(key.split(".")), value) for items in meant for key, value in items] + parsed


def _evaluate(path: Path, overrides: list[Override], schema: Settings) -> dict[str, Any]:
    """Return the values that a config file assigns, overridden; without helpers, unless they are written like a
    setting.

    Raises:
        UserError: if the file cannot be read, or fails.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe might wait forever
            raise UserError(f"--config {path}: is no regular file")
        tree = ast.parse(path.read_bytes(), str(path))
        code = compile(tree, str(path), "exec")
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
        raise UserError(f"--config {where}: not valid Python: {getattr(error, 'msg', error)}") from None
    restore_amp_type()
    namespace = Overridden({"__file__": str(path.resolve()), "__name__": path.stem}, overrides)
    try:
        exec(code, namespace)  # noqa: S102 a config file is a program
    except (Exception, SystemExit) as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise UserError(f"--config {where}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    namespace.apply_all()

    nodes = list(ast.walk(tree))
    written = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    written |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}

    def is_helper(key: str, value: Any) -> bool:
        if key in schema or key in OLDER_NAMES:
            return False
        meant = key.isupper() and key in written  # neither imported nor a class: a key that is misspelled
        return key.startswith("_") or isinstance(value, types.ModuleType) or (callable(value) and not meant)

    return {key: value for key, value in namespace.items() if not is_helper(key, value)}


def load(path: str | Path, overrides: Iterable[str] = (), schema: Settings = SCHEMA) -> Config:
    """Evaluate a config file.

    Args:
        path: the Python file.
        overrides: `KEY=VALUE` strings, see `parse_override`.
        schema: all keys that the file may have, those of model and loader, too.

    Returns:
        Colossal-AI's `Config`: a dict whose items are attributes too. It has all defaults (see `schema`), also in its
        blocks; blocks of features that are off are None. Older names are replaced by what they stand for. Keys that
        are ignored stay, see `idle_keys`.

    Raises:
        UserError: if the file is missing or fails, a key is unknown or missing, or a value has the wrong type.
    """
    path = Path(path)
    parsed = _parse(overrides, schema)
    overridden = [".".join(keys) for keys, _ in parsed]
    values = check(_evaluate(path, parsed, schema), str(path), schema)
    values = replace_older_names(values, schema, overridden, str(path))
    check_effect(values, str(path), schema, overridden)
    values = complete(values, schema)
    warm_up, epochs = values["WARMUP_EPOCHS"], values.get("NUM_EPOCHS", math.inf)
    if warm_up >= epochs:
        raise UserError(f"{path}: WARMUP_EPOCHS = {warm_up} must be less than NUM_EPOCHS = {epochs}")
    return Config(values)


def written(path: str | Path, overrides: Iterable[str], key: str) -> str | None:
    """Return the string that an override or a config file gives for a key, without evaluating the file; None for any
    other.
    """
    for text in reversed(list(overrides)):
        if text.partition("=")[0].strip() == key:
            found = parse_override(text)[1]
            return found if isinstance(found, str) else None
    try:
        tree = ast.parse(Path(path).read_bytes()) if Path(path).is_file() else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # which `load` says
        return None
    for node in reversed(tree.body):
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == key for to in node.targets):
            return node.value.value if isinstance(node.value, ast.Constant) else None
    return None


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved config as it is read back from `to_json`."""
    return json.loads(to_json(config))


def to_json(config: Mapping[str, Any]) -> str:
    """Return the resolved config as JSON; AMP modes by name."""

    def encode(value: Any) -> Any:
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        raise TypeError(f"{value!r} has no JSON form")

    return json.dumps(config, indent=2, default=encode)


def num_model_chunks(config: Mapping[str, Any]) -> int:
    """Into how many chunks `model = dict(num_chunks=...)` cuts each pipeline stage; 1 is the plain 1F1B schedule."""
    return config["model"]["num_chunks"] if config.get("model") else 1
