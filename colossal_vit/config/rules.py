"""What the value of a setting must be."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from colossalai.legacy.amp import AMP_TYPE


@dataclass(frozen=True)
class Rule:
    """What a value must be: `expected` completes the sentence 'must be ...'."""

    expected: str
    allows: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*allowed: Any) -> Rule:
    return Rule(f"one of {', '.join(map(repr, allowed))}", lambda value: value in allowed)


POSITIVE_INT = Rule("a whole number of at least 1", lambda value: _is_int(value) and value >= 1)
NON_NEGATIVE_INT = Rule("a whole number of at least 0", lambda value: _is_int(value) and value >= 0)
POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and value > 0)
NON_NEGATIVE = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0)
MAGNITUDE = Rule("a whole number from 0 to 30", lambda value: _is_int(value) and 0 <= value <= 30)
FRACTION = Rule("a number from 0 up to, not including, 1", lambda value: _is_number(value) and 0 <= value < 1)
SHARE = Rule("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
SHARE_ABOVE_0 = Rule("a number above 0 and up to 1", lambda value: _is_number(value) and 0 < value <= 1)
BOOL = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule("a string that is not empty", lambda value: isinstance(value, str) and value != "")
TENSOR_MODE = one_of(None, "1d", "2d", "2.5d", "3d")
SHAPE = Rule(
    "a sequence of whole numbers",
    lambda value: isinstance(value, (list, tuple)) and all(_is_int(size) and size > 0 for size in value),
)
AREA = Rule(
    "the smallest and the largest share of an image that a crop may be, 0 < smallest <= largest <= 1",
    lambda value: (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(map(_is_number, value))
        and 0 < value[0] <= value[1] <= 1
    ),
)
RAND_AUGMENT = Rule(
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
)
MODE = Rule(
    "AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX or None",
    lambda value: value in (AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX, None),
)
