"""Types of settings, which pydantic validates. They keep a value as it is written, but for the name of an AMP mode.

The description of a type completes the sentence 'must be ...'. Its examples are what a wrong string may have meant.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from colossalai.legacy.amp import AMP_TYPE
from pydantic import BeforeValidator, Field, InstanceOf, Strict, WrapValidator
from pydantic.fields import FieldInfo

MOST = 2**31 - 1  # larger counts overflow in C++ somewhere
# Numbers other than 0 lie between these: float32 holds their products with ordinary ones.
LARGEST, SMALLEST = 1e30, 1e-30

# Whole ones stay whole; larger ones overflow in torch.
Real = Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)] | InstanceOf[float]


def expected(kind: Any) -> str:
    """Return what completes the sentence 'must be ...' for a type; the type itself if it has no description."""
    return FieldInfo.from_annotation(kind).description or str(kind)


def names(kind: Any) -> list[str]:
    """Return the strings that a type takes, if they are a few."""
    return [example for example in FieldInfo.from_annotation(kind).examples or () if isinstance(example, str)]


def whole(low: int, high: int = MOST) -> Any:
    """Return the type of a whole number in a range; 3.0 and True are none."""
    ends = f"of at least {low} and below 2³¹" if high == MOST else f"from {low} to {high}"
    return Annotated[int, Field(strict=True, ge=low, le=high, description=f"a whole number {ends}")]


def real(low: float, high: float, description: str | None = None) -> Any:
    """Return the type of a number in a range; NaN, infinity and integers that no float holds are in none."""
    return Annotated[Real, Field(ge=low, le=high, description=description or f"a number from {low:g} to {high:g}")]


def one_of(*choices: Any) -> Any:
    """Return the type that has these values, each of its own type: for Literal alone, True is 1."""
    field = Field(description=f"one of {', '.join(map(repr, choices))}", examples=[*choices])
    return Annotated[Literal[choices], WrapValidator(_keep_type), field]


def several(item: Any, length: int | None, description: str) -> Any:
    """Return the type of a list or tuple of values of one type; of any length, if that is None."""
    sequence = Annotated[tuple[item, ...], Strict()] | Annotated[list[item], Strict()]
    return Annotated[sequence, Field(min_length=length, max_length=length, description=description)]


def _keep_type(value: Any, validate: Callable[[Any], Any]) -> Any:
    if type(choice := validate(value)) is not type(value):
        raise ValueError("is of another type")
    return choice


def _amp_mode(value: Any) -> Any:
    return AMP_TYPE.__members__.get(value.upper(), value) if isinstance(value, str) else value


PositiveInt = whole(1)
NonNegativeInt = whole(0)
Positive = real(SMALLEST, LARGEST, "a number above 0 (1e-30 to 1e30)")
NonNegative = Annotated[
    real(0, LARGEST, "a number of at least 0 (0, or 1e-30 to 1e30)"),
    Predicate(lambda value: value == 0 or value >= SMALLEST),  # smaller ones are 0 in float32
]
Fraction = Annotated[Real, Field(ge=0, lt=1, description="a number from 0 up to, not including, 1")]
Share = real(0, 1)
ShareAbove0 = real(0.001, 1)
Bool = Annotated[bool, Field(strict=True, description="True or False")]
Text = Annotated[
    str,
    Field(strict=True, description="a string that is not empty and has no NUL character"),
    Predicate(lambda text: text != "" and "\0" not in text),
]
# 0 where a file divides BATCH_SIZE by more micro-batches, which a pipeline refuses by name.
Shape = several(NonNegativeInt, 3, "three whole numbers")
Channels = several(ShareAbove0, 3, "three numbers from 0.001 to 1")
Area = Annotated[
    several(
        ShareAbove0,
        2,
        "the smallest and the largest share of an image that a crop may be, 0.001 <= smallest <= largest <= 1",
    ),
    Predicate(lambda area: area[0] <= area[1]),
]
Dicts = several(InstanceOf[dict], None, "a list of dicts")
Mode = Annotated[
    InstanceOf[AMP_TYPE] | None,
    BeforeValidator(_amp_mode),
    Field(
        description="AMP_TYPE.TORCH, AMP_TYPE.NAIVE or AMP_TYPE.APEX, that name as a string, or None",
        examples=[*AMP_TYPE.__members__],
    ),
]
