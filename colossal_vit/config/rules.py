"""What the value of a setting must be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossalai.legacy.amp import AMP_TYPE

MOST = 2**31 - 1  # larger counts overflow in C++ somewhere
# Numbers other than 0 lie between these: float32 holds their products with ordinary ones.
LARGEST, SMALLEST = 1e30, 1e-30


@dataclass(frozen=True)
class Rule:
    """What a value must be: `expected` completes the sentence 'must be ...'.

    Attributes:
        allows: whether a value is right; never raises.
        ends: the smallest and the largest number that are, if it must be a number.
        names: the strings that are, if it must be one of a few.
        read: the value that is meant by one as written; never raises.
    """

    expected: str
    allows: Callable[[Any], bool]
    ends: tuple[float, float] | None = None
    names: tuple[str, ...] = ()
    read: Callable[[Any], Any] = lambda value: value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_int(value) and abs(value) <= 2**53)  # larger ones overflow in torch


def whole(low: int, high: int = MOST) -> Rule:
    """A whole number in a range."""
    expected = f"of at least {low} and below 2³¹" if high == MOST else f"from {low} to {high}"
    return Rule(f"a whole number {expected}", lambda value: _is_int(value) and low <= value <= high, (low, high))


def number(low: float, high: float, expected: str | None = None) -> Rule:
    """A number in a range. NaN, infinity and integers that no float holds are in none: Python compares them exactly."""
    expected = expected or f"a number from {low:g} to {high:g}"
    return Rule(expected, lambda value: _is_number(value) and low <= value <= high, (low, high))


def zero_or(rule: Rule, expected: str) -> Rule:
    """0, or what a rule for numbers allows: numbers just above 0 are 0 in float32, and would switch nothing off."""
    return Rule(expected, lambda value: (_is_number(value) and value == 0) or rule.allows(value), (0, rule.ends[1]))


def one_of(*allowed: Any) -> Rule:
    """One of these values, of the same type: True is not 1."""
    return Rule(
        f"one of {', '.join(map(repr, allowed))}",
        lambda value: any(type(value) is type(choice) and value == choice for choice in allowed),
        names=tuple(choice for choice in allowed if isinstance(choice, str)),
    )


POSITIVE_INT = whole(1)
NON_NEGATIVE_INT = whole(0)
POSITIVE = number(SMALLEST, LARGEST, "a number above 0 (1e-30 to 1e30)")
NON_NEGATIVE = zero_or(POSITIVE, "a number of at least 0 (0, or 1e-30 to 1e30)")
FRACTION = Rule(
    "a number from 0 up to, not including, 1", lambda value: _is_number(value) and 0 <= value < 1, (0, 1 - 2**-53)
)
SHARE = number(0, 1)
SHARE_ABOVE_0 = number(0.001, 1)
BOOL = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule(
    "a string that is not empty and has no NUL character",
    lambda value: isinstance(value, str) and value != "" and "\0" not in value,
)
SHAPE = Rule(
    "three whole numbers",  # 0 where a file divides BATCH_SIZE by more micro-batches, which a pipeline refuses by name
    lambda value: isinstance(value, (list, tuple)) and len(value) == 3 and all(map(NON_NEGATIVE_INT.allows, value)),
)
CHANNELS = Rule(
    "three numbers from 0.001 to 1",
    lambda value: isinstance(value, (list, tuple)) and len(value) == 3 and all(map(SHARE_ABOVE_0.allows, value)),
)
AREA = Rule(
    "the smallest and the largest share of an image that a crop may be, 0.001 <= smallest <= largest <= 1",
    lambda value: (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(map(SHARE_ABOVE_0.allows, value))
        and value[0] <= value[1]
    ),
)
DICTS = Rule(
    "a list of dicts", lambda value: isinstance(value, (list, tuple)) and all(isinstance(each, dict) for each in value)
)
MODE = Rule(
    "AMP_TYPE.TORCH, AMP_TYPE.NAIVE or AMP_TYPE.APEX, that name as a string, or None",
    lambda value: value is None or isinstance(value, AMP_TYPE),
    names=tuple(AMP_TYPE.__members__),
    read=lambda value: AMP_TYPE.__members__.get(value.upper(), value) if isinstance(value, str) else value,
)
