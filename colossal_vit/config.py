"""Config files: plain Python, as the Colossal-AI tutorials have them, loaded, overridden and checked.

UPPERCASE names are hyper-parameters, lowercase ones switch features of Colossal-AI (`parallel`, `fp16`, ...). A file
is evaluated once, with every `--set KEY=VALUE` applied at the assignment of KEY, so that values computed further down
follow the override.
"""

import ast
import builtins
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from colossal_vit.errors import UserError
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE

# ---------------------------------------------------------------------------------------------------------------------
# What may stand in a config
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What a value must be: `expected` completes the sentence 'must be ...'."""

    expected: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*allowed: Any) -> Rule:
    return Rule(f"one of {', '.join(map(repr, allowed))}", lambda value: value in allowed)


POSITIVE_INT = Rule("a whole number of at least 1", lambda value: _is_int(value) and value >= 1)
NON_NEGATIVE_INT = Rule("a whole number of at least 0", lambda value: _is_int(value) and value >= 0)
POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and value > 0)
NON_NEGATIVE = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0)
FRACTION = Rule("a number from 0 up to, not including, 1", lambda value: _is_number(value) and 0 <= value < 1)
BOOL = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
TENSOR_MODE = _one_of(None, "1d", "2d", "2.5d", "3d")
SHAPE = Rule(
    "a sequence of whole numbers",
    lambda value: isinstance(value, (list, tuple)) and all(_is_int(size) and size > 0 for size in value),
)

# Every key that an example or a published tutorial has. A nested table is a block such as `parallel = dict(...)`.
KEYS: dict[str, Any] = {
    # training
    "SEED": NON_NEGATIVE_INT,
    "BATCH_SIZE": POSITIVE_INT,
    "NUM_EPOCHS": POSITIVE_INT,
    "WARMUP_EPOCHS": NON_NEGATIVE_INT,
    "OPTIMIZER": _one_of("adamw", "sgd", "lamb"),
    "MOMENTUM": FRACTION,
    "LEARNING_RATE": POSITIVE,
    "WEIGHT_DECAY": NON_NEGATIVE,
    "LAMB_EXCLUDE_VECTORS": BOOL,
    "LABEL_SMOOTHING": FRACTION,
    "IMAGES_PER_S": POSITIVE,
    # data
    "DATA": TEXT,
    "CACHE_SIZE": POSITIVE_INT,
    "TRAIN_PER_CLASS": POSITIVE_INT,
    "SYNTHETIC": BOOL,
    "CROP_PADDING": NON_NEGATIVE_INT,
    "FLIP": BOOL,
    "CROP_AREA": Rule(
        "the smallest and the largest share of an image that a crop may be, 0 < smallest <= largest <= 1",
        lambda value: (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(map(_is_number, value))
            and 0 < value[0] <= value[1] <= 1
        ),
    ),
    # model
    "MODEL": TEXT,
    "IMG_SIZE": POSITIVE_INT,
    "PATCH_SIZE": POSITIVE_INT,
    "HIDDEN_SIZE": POSITIVE_INT,
    "DEPTH": POSITIVE_INT,
    "NUM_HEADS": POSITIVE_INT,
    "MLP_RATIO": POSITIVE,
    "NUM_CLASSES": POSITIVE_INT,
    "DROP_RATE": FRACTION,
    "DROP_PATH_RATE": FRACTION,
    "CHECKPOINT": BOOL,
    "SEQ_LENGTH": POSITIVE_INT,
    # layout
    "TENSOR_PARALLEL_SIZE": POSITIVE_INT,
    "TENSOR_PARALLEL_MODE": TENSOR_MODE,
    "NUM_MICRO_BATCHES": POSITIVE_INT,
    "NUM_CHUNKS": POSITIVE_INT,
    "TENSOR_SHAPE": SHAPE,
    "parallel": {
        "pipeline": POSITIVE_INT,
        "tensor": {"mode": TENSOR_MODE, "size": POSITIVE_INT, "depth": POSITIVE_INT},
    },
    "model": {"num_chunks": POSITIVE_INT},
    # features
    "checkpoint": {"every_steps": POSITIVE_INT, "every_minutes": POSITIVE, "keep": POSITIVE_INT},
    "fp16": {
        # beside these two, what the mode's loss scaler takes: see _SCALER_KEYS
        "mode": Rule(
            "AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX or None",
            lambda value: value in (AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX, None),
        ),
        "dtype": _one_of("fp16", "bf16"),
        "opt_level": _one_of("O0", "O1", "O2", "O3"),
        "initial_scale": POSITIVE,
        "init_scale": POSITIVE,
        "growth_factor": POSITIVE,
        "backoff_factor": POSITIVE,
        "growth_interval": POSITIVE_INT,
        "hysteresis": POSITIVE_INT,
        "min_scale": POSITIVE,
        "max_scale": POSITIVE,
    },
    "torch_ddp": {  # arguments of torch's DistributedDataParallel
        "bucket_cap_mb": POSITIVE,
        "static_graph": BOOL,
        "find_unused_parameters": BOOL,
    },
    "gradient_accumulation": POSITIVE_INT,
    "clip_grad_norm": NON_NEGATIVE,
    "COMPILE": BOOL,
    "TF32": BOOL,
    "cudnn_benchmark": BOOL,
    "cudnn_deterministic": BOOL,
    "dali": {
        "gpu_aug": BOOL,
        "mixup_alpha": NON_NEGATIVE,
        "rand_augment": Rule(
            "a dict(n=..., m=...): n operations an image, of magnitude m, a whole number from 0 to 30",
            lambda value: (
                value is None
                or (
                    isinstance(value, Mapping)
                    and value.keys() == {"n", "m"}
                    and all(map(_is_int, value.values()))
                    and value["n"] >= 1
                    and 0 <= value["m"] <= 30
                )
            ),
        ),
        "max_bad": NON_NEGATIVE_INT,
    },
}

_DP, _HYBRID = "vit_cifar10_hybrid/train_dp.py", "vit_cifar10_hybrid/train_hybrid.py"
_CALTECH101, _IMAGENET = "vit_caltech101_amp/train.py", "vit_imagenet_dali/train.py"
SCRIPTS = (_DP, _HYBRID, _CALTECH101, _IMAGENET)
# Which scripts use a key, where it is not all of them.
USED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("OPTIMIZER", "MOMENTUM"), (_HYBRID, _CALTECH101)),
    "LAMB_EXCLUDE_VECTORS": (_IMAGENET,),
    "IMAGES_PER_S": (_IMAGENET,),
    **dict.fromkeys(("CACHE_SIZE", "TRAIN_PER_CLASS"), (_CALTECH101,)),
    **dict.fromkeys(("SYNTHETIC", "CROP_AREA"), (_CALTECH101, _IMAGENET)),
    "CROP_PADDING": (_DP, _HYBRID),
    "MODEL": (_DP, _CALTECH101, _IMAGENET),
    **dict.fromkeys(("MLP_RATIO", "DROP_PATH_RATE", "CHECKPOINT", "SEQ_LENGTH"), (_HYBRID,)),
    **dict.fromkeys(("TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE", "NUM_MICRO_BATCHES", "NUM_CHUNKS"), (_HYBRID,)),
    **dict.fromkeys(("TENSOR_SHAPE", "model"), (_HYBRID,)),
    "dali": (_IMAGENET,),
}

_SCALER_KEYS = {
    AMP_TYPE.TORCH: {"init_scale", "growth_factor", "backoff_factor", "growth_interval"},
    AMP_TYPE.NAIVE: {
        "initial_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "min_scale",
        "max_scale",
    },
    AMP_TYPE.APEX: {"opt_level"},  # the scalers of O1 and O2 are those of TORCH and NAIVE, with their defaults
}


def _nearest(name: str, names: Iterable[str]) -> str:
    by_folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]}?" if close else f"; known are {', '.join(sorted(by_folded.values()))}"


def _check(values: Mapping[str, Any], rules: Mapping[str, Any], prefix: str, source: str) -> None:
    for key, value in values.items():
        name = prefix + key
        if key not in rules:
            helper = "" if prefix else " (a helper's name starts with _)"
            raise UserError(f"{source}: unknown key {name}{_nearest(key, rules)}{helper}")
        rule = rules[key]
        if isinstance(rule, Rule):
            if not rule.holds(value):
                raise UserError(f"{source}: {name} = {value!r}, but it must be {rule.expected}")
        elif value is not None:  # a block; None switches the feature off
            if not isinstance(value, Mapping):
                raise UserError(f"{source}: {name} = {value!r}, but it must be a dict({', '.join(rule)})")
            _check(value, rule, f"{name}.", source)


def _check_used(keys: Iterable[str], script: Path, source: str) -> None:
    """Refuse keys that the script at hand would ignore; a script of the user's own may use any."""
    name = "/".join(script.parts[-2:])
    for key in keys if name in SCRIPTS else ():
        if name not in (users := USED_BY.get(key, SCRIPTS)):
            raise UserError(f"{source}: {key} is not used by {name}, only by {' and '.join(users)}: leave it out")


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


# ---------------------------------------------------------------------------------------------------------------------
# Overrides
# ---------------------------------------------------------------------------------------------------------------------


class _DictCalls(ast.NodeTransformer):
    """`dict(a=1)` as the literal {'a': 1}."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
            return node
        keys = [keyword.arg and ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def _quotes(key: str, literal: str) -> str:
    """The advice to quote a string, for what can have been meant as one."""
    return f"; a string needs quotes: --set \"{key}='{literal}'\"" if re.fullmatch(r"[\w./:~ -]+", literal) else ""


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse one `--set` argument.

    Args:
        text: `KEY=VALUE`; KEY may be nested with dots, VALUE is a Python literal or `AMP_TYPE.<NAME>`.

    Returns:
        The path of the key and the value.

    Raises:
        UserError: if either side is malformed.
    """
    key, equals, literal = text.partition("=")
    path = tuple(key.strip().split("."))
    literal = literal.strip()
    if not equals or not all(part.isidentifier() for part in path):
        raise UserError(f"--set {text}: must have the form KEY=VALUE, for example --set BATCH_SIZE=64")
    if literal.startswith("AMP_TYPE."):
        try:
            return path, AMP_TYPE[literal.removeprefix("AMP_TYPE.")]
        except KeyError:
            names = ", ".join(f"AMP_TYPE.{mode.name}" for mode in AMP_TYPE)
            raise UserError(f"--set {text}: {literal} is none of {names}") from None
    try:
        return path, ast.literal_eval(_DictCalls().visit(ast.parse(literal, mode="eval")))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        raise UserError(f"--set {text}: {literal!r} is not a Python literal{_quotes(key, literal)}") from None


def _names_bound_by(statement: ast.stmt) -> set[str]:
    """Top-level names that a simple statement assigns, or changes through an item or attribute."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    else:
        return set()
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


class _ApplyOverrides(ast.NodeTransformer):
    """After each statement that binds an overridden NAME, put `NAME = <override>("NAME", NAME)`."""

    HELPER = "__override__"

    def __init__(self, names: set[str]):
        self.names = names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # names inside a function are its own

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field, block in ast.iter_fields(node):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, field, [new for statement in block for new in self._followed(statement)])
        return node

    def _followed(self, statement: ast.stmt) -> list[ast.stmt]:
        followed = [statement]
        for name in sorted(_names_bound_by(statement) & self.names):
            call = ast.parse(f"{name} = {self.HELPER}({name!r}, {name})").body[0]
            followed.append(ast.copy_location(call, statement))
        return followed


def _overridden(name: str, value: Any, overrides: list[tuple[tuple[str, ...], Any]]) -> Any:
    """`value` of `name` with every override of it, or of something inside it, applied in order."""
    for (first, *rest), new in overrides:
        if first != name:
            continue
        if not rest:
            value = new
            continue
        value = dict(value) if isinstance(value, Mapping) else {}
        block = value
        for part in rest[:-1]:
            block[part] = dict(block[part]) if isinstance(block.get(part), Mapping) else {}
            block = block[part]
        block[rest[-1]] = new
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


def _import_for_configs(name: str, globals=None, locals=None, fromlist=(), level=0):
    """`import` as a config sees it: `colossalai.amp`, where the tutorials find AMP_TYPE, still has it."""
    if name in ("colossalai.amp", "colossalai.amp.amp_type"):
        return types.SimpleNamespace(AMP_TYPE=AMP_TYPE)
    return builtins.__import__(name, globals, locals, fromlist, level)


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    required: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    script: Path | None = None,
) -> Config:
    """Evaluate a config file.

    Args:
        path: the Python file.
        overrides: `KEY=VALUE` strings, see `parse_override`.
        required: keys that the file or an override must set.
        defaults: values of keys that both may leave out.
        script: the train script, which must use every key.

    Returns:
        Colossal-AI's `Config`: a dict whose items are attributes too. The lowercase blocks are always there: `parallel`
        filled in completely, `fp16` None without mixed precision, `gradient_accumulation` 1 and `clip_grad_norm` 0
        where the file is silent.

    Raises:
        UserError: if the file is missing or fails, a key is unknown or missing, or a value has the wrong type.
    """
    path = Path(path)
    parsed = [parse_override(text) for text in overrides]
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
        raise UserError(f"--config {where}: not valid Python: {getattr(error, 'msg', error)}") from None

    tree = ast.fix_missing_locations(_ApplyOverrides({keys[0] for keys, _ in parsed}).visit(tree))
    namespace: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": _import_for_configs},
        "__file__": str(path.resolve()),
        "__name__": path.stem,
        _ApplyOverrides.HELPER: lambda name, value: _overridden(name, value, parsed),
    }
    try:
        exec(compile(tree, str(path), "exec"), namespace)
    except Exception as error:
        trace, line = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(path):
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"{path}:{line}" if line else str(path)
        raise UserError(f"--config {where}: {type(error).__name__}: {error}") from None

    values = {
        key: value
        for key, value in namespace.items()
        if not key.startswith("_") and not isinstance(value, types.ModuleType) and not callable(value)
    }
    for keys, _ in parsed:  # keys that the file does not mention
        if keys[0] not in values:
            values[keys[0]] = _overridden(keys[0], None, parsed)

    _check(values, KEYS, "", str(path))
    if script is not None:
        _check_used(values, script, str(path))
    for key in required:
        if key not in values:
            raise UserError(f"{path}: {key} is missing; it must be {KEYS[key].expected}")
    values = {"gradient_accumulation": 1, "clip_grad_norm": 0.0, **(defaults or {}), **values}
    warm_up, epochs = values.get("WARMUP_EPOCHS", 0), values.get("NUM_EPOCHS", math.inf)
    if warm_up >= epochs:
        raise UserError(f"{path}: WARMUP_EPOCHS = {warm_up} must be less than NUM_EPOCHS = {epochs}")
    parallel = values.get("parallel") or {}
    tensor = {"mode": None, "size": 1, **(parallel.get("tensor") or {})}
    if tensor["mode"] == "2.5d":
        tensor.setdefault("depth", 1)
    values["parallel"] = {"pipeline": parallel.get("pipeline", 1), "tensor": tensor}
    _check_derived(values, {keys[0] for keys, _ in parsed}, str(path))
    fp16 = values.get("fp16") or {}
    if not fp16.get("mode"):
        values["fp16"] = None
    else:
        allowed = _SCALER_KEYS[fp16["mode"]]
        for key in fp16.keys() - {"mode", "dtype"} - allowed:
            raise UserError(f"{path}: fp16.{key} is not an option of {fp16['mode']}{_nearest(key, allowed)}")
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


# ---------------------------------------------------------------------------------------------------------------------
# Layout
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How many processes share the work, and along which axis: data × pipeline × tensor = world size.

    Attributes:
        data, pipeline, tensor: sizes.
        tensor_mode: None, '1d', '2d', '2.5d' or '3d'.
        side: q, into how many parts the tensor-parallel ranks split heads and hidden size: all of them in 1D, the side
            of the square in 2D and 2.5D, of the cube in 3D.
    """

    data: int
    pipeline: int
    tensor: int
    tensor_mode: str | None
    side: int

    @property
    def batch_parts(self) -> int:
        """Into how many parts the tensor-parallel ranks split a batch."""
        return {"2d": self.side, "2.5d": self.side, "3d": self.side**2}.get(self.tensor_mode, 1)

    @property
    def hidden_parts(self) -> int:
        """Into how many parts they split the hidden size of activations between layers; in 1D each has it whole."""
        return self.side if self.tensor_mode in ("2d", "2.5d", "3d") else 1

    @classmethod
    def of(cls, config: Config, world_size: int) -> "Layout":
        """The layout that `config.parallel` gives on `world_size` processes.

        Raises:
            UserError: if the sizes do not fit each other or the world.
        """
        pipeline, tensor = config.parallel.pipeline, config.parallel.tensor
        side = _side(tensor.mode, tensor.size, tensor.get("depth"))
        model = pipeline * tensor.size
        if world_size % model:
            nearest = [size for size in (world_size // model * model, (world_size // model + 1) * model) if size]
            raise UserError(
                f"world size {world_size} does not fit parallel.pipeline = {pipeline} × parallel.tensor.size = "
                f"{tensor.size}: start {' or '.join(map(str, nearest))} processes (a multiple of {model})"
            )
        return cls(world_size // model, pipeline, tensor.size, tensor.mode, side)

    def __str__(self) -> str:
        tensor = f" ({self.tensor_mode})" if self.tensor_mode else ""
        return f"data {self.data} × pipeline {self.pipeline} × tensor {self.tensor}{tensor}"


def num_model_chunks(config: Config) -> int:
    """Into how many chunks `model = dict(num_chunks=...)` cuts each pipeline stage; 1 is the plain 1F1B schedule."""
    return (config.get("model") or {}).get("num_chunks", 1)


def _side(mode: str | None, size: int, depth: int | None) -> int:
    """The side of the tensor-parallel ranks' arrangement; see `Layout`."""
    if depth is not None and mode != "2.5d":
        raise UserError(f"parallel.tensor.depth = {depth} is for mode '2.5d' only, but the mode is {mode!r}")
    if mode is None:
        if size > 1:
            raise UserError(
                f"parallel.tensor.size = {size} needs parallel.tensor.mode = '1d', '2d', '2.5d' or '3d'; None needs 1"
            )
        return 1
    if mode == "1d":
        return size
    depth = depth or 1
    power, shape = {
        "2d": (2, "a square, q² processes"),
        "2.5d": (2, f"depth × q², and depth is {depth}"),
        "3d": (3, "a cube, q³ processes"),
    }[mode]
    sizes = [depth * q**power for q in range(2, 65)]
    if size not in sizes:
        below, above = [s for s in sizes if s < size][-1:], [s for s in sizes if s > size][:1]
        raise UserError(
            f"parallel.tensor.size = {size}, but mode '{mode}' needs {shape}: use "
            f"{' or '.join(map(str, below + above))}"
        )
    return sizes.index(size) + 2
