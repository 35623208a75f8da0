"""What may stand in a config file: every key with its rule, and which scripts use it."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossal_vit.errors import UserError
from colossalai.legacy.amp import AMP_TYPE


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
SCHEMA: dict[str, Any] = {
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
