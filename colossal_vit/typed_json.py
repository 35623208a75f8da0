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

from colossal_vit.errors import UserError
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

# A whole number of at least 0 which every 64-bit integer, and every float, holds exactly; 3.0, "3" and true are none.
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # a number, whole or not; "3" and true are none
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
RECORD = ConfigDict(extra="allow")  # keeps fields that the type does not name: those of a newer version, for example


@cache
def _adapter(model: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(model)


def _describe(errors: list[ErrorDetails]) -> str:
    """The first error, in a few words that name field and value; missing fields are named together."""
    first = errors[0]
    where, what = first["loc"], first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if first["type"] == "missing":
        *where, _ = where
        missing = [
            error["loc"][-1] for error in errors if error["type"] == "missing" and error["input"] is first["input"]
        ]
        what = f"lacks {', '.join(sorted(missing))}"
    elif where:
        what = f"= {reprlib.repr(first['input'])}: {what}"
    return " ".join([*".".join(map(str, where)).split(), what])


def parse(text: str | bytes, model: type[T], source: str | Path) -> T:
    """The value in a JSON text.

    Args:
        text: of one JSON value.
        model: the type of the value.
        source: of the text, for messages.

    Raises:
        UserError: if it is no JSON or not of the type; one line that names the source, the field and its value.
    """
    try:
        # Not pydantic's own parser, which refuses the surrogates that stand for bytes of file names that are no UTF-8.
        value: Any = json.loads(text)
    except RecursionError:
        raise UserError(f"{source}: is too deeply nested") from None
    except ValueError as error:
        raise UserError(f"{source}: is no JSON: {error}") from None
    try:
        return _adapter(model).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{source}: {_describe(error.errors(include_url=False))}") from None


def read(path: Path, model: type[T]) -> T:
    """The value in a JSON file, see `parse`.

    Raises:
        UserError: also if the file cannot be read.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    return parse(text, model, path)
