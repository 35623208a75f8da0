"""JSON that is read from disk, through types: it may be damaged, edited, or forged, and it may be of another version.

A type is anything that pydantic takes, such as a TypedDict or a dataclass; constraints belong into it:

    class Position(TypedDict):
        __pydantic_config__ = RECORD
        step: Count
        loss: NotRequired[Finite]

    position = typed_json.read(path, Position)
"""

import json
import reprlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from colossal_vit.errors import UserError, oserror_as_user_error
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

# A whole number of at least 0 which every 64-bit integer, and every float, holds exactly; 3.0, "3" and true are none.
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Number = Annotated[float, Field(strict=True)]  # whole or not, infinite and NaN too; "3" and true are none
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
RECORD = ConfigDict(extra="allow")  # keeps fields that the type does not name: those of a newer version, for example


@cache
def adapter(model: type[T]) -> TypeAdapter[T]:
    """Return what validates values of a type. It is built once, which takes about a millisecond."""
    return TypeAdapter(model)


def _describe(errors: list[ErrorDetails]) -> str:
    """Return the first error, in a few words that name field and value; missing fields are named together."""
    first = errors[0]
    where, what = first["loc"], first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if first["type"] == "missing":
        *where, _ = where
        beside = [error for error in errors if error["type"] == "missing" and error["input"] is first["input"]]
        what = f"lacks {', '.join(sorted(str(error['loc'][-1]) for error in beside))}"
    elif where:
        what = f"= {reprlib.repr(first['input'])}: {what}"
    return " ".join([*".".join(map(str, where)).split(), what])


def check(value: Any, model: type[T], source: str | Path) -> T:
    """Return a value that a JSON text held, as one of type `model`.

    Args:
        value: as `json.loads` returns it.
        model: the type.
        source: of the value, for messages.

    Raises:
        UserError: if it is not of the type; one line that names the source, the field and its value.
    """
    try:
        return adapter(model).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{source}: {_describe(error.errors(include_url=False))}") from None


def parse(text: str | bytes, model: type[T], source: str | Path) -> T:
    """Return the value in a JSON text; the arguments are those of `check`.

    Raises:
        UserError: also if it is no JSON.
    """
    try:
        # Not pydantic's own parser, which refuses the surrogates that stand for bytes of file names that are no UTF-8.
        value = json.loads(text)
    except RecursionError:
        raise UserError(f"{source}: is too deeply nested") from None
    except ValueError as error:
        raise UserError(f"{source}: is no JSON: {error}") from None
    return check(value, model, source)


def read(path: Path, model: type[T]) -> T:
    """Return the value in a JSON file, see `parse`.

    Raises:
        UserError: also if the file cannot be read.
    """
    with oserror_as_user_error(path):
        text = path.read_bytes()
    return parse(text, model, path)
