"""`--set KEY=VALUE`: parsed, and applied wherever the file assigns the key, so that what follows from it follows."""

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from colossal_vit.config.schema import SCHEMA, setting_at
from colossal_vit.config.settings import Ignored, Setting, Settings, SettingsBlock
from colossal_vit.errors import UserError
from colossal_vit.typed_json import adapter
from colossalai.legacy.amp import AMP_TYPE
from pydantic import ValidationError

Override = tuple[tuple[str, ...], Any]  # the path of a key, and its value


class _Literals(ast.NodeTransformer):
    """`dict(a=1, b=text)` as the literal {'a': 1, 'b': 'text'}, and `AMP_TYPE.NAIVE` as a constant."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "AMP_TYPE":
            try:
                return ast.Constant(AMP_TYPE[node.attr])
            except KeyError:
                names = ", ".join(f"AMP_TYPE.{mode.name}" for mode in AMP_TYPE)
                raise UserError(f"AMP_TYPE.{node.attr} is none of {names}") from None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args:
            return node
        keys = [keyword.arg and ast.Constant(keyword.arg) for keyword in node.keywords]
        values = [keyword.value for keyword in node.keywords]
        return ast.Dict(keys, [ast.Constant(value.id) if isinstance(value, ast.Name) else value for value in values])


def _read(value: Any, setting: Setting | SettingsBlock | Ignored | None) -> Any:
    """Return the value that is meant by one as written, also inside a block; a wrong one, or an unknown key's, as it
    is.
    """
    if isinstance(setting, Setting):
        with suppress(ValidationError):
            return adapter(setting.type).validate_python(value)
    if isinstance(setting, SettingsBlock) and isinstance(value, Mapping):
        return {key: _read(inner, setting.settings.get(key)) for key, inner in value.items()}
    return value


def parse_override(text: str, schema: Settings = SCHEMA) -> Override:
    """Parse one `--set` argument.

    Args:
        text: `KEY=VALUE`; KEY may be nested with dots. VALUE is a Python literal, in which AMP_TYPE.<NAME> may stand,
            or else a string without its quotes.
        schema: all keys.

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
    try:
        value = ast.literal_eval(_Literals().visit(ast.parse(literal, mode="eval")))
    except UserError as error:
        raise UserError(f"--set {text}: {error}") from None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if not re.fullmatch(r"[^'\"\[({][^'\"]*", literal):  # a literal that is cut off, say
            raise UserError(f"--set {text}: {literal!r} is not a Python literal") from None
        value = literal
    return path, _read(value, setting_at(".".join(path), schema))


class Overridden(dict):
    """A dict in which overrides hold, whatever is assigned to their keys: a config's namespace, or a block in it.

    Args:
        values: to begin with.
        overrides: paths, and the values that they have instead. A later one counts more.
    """

    def __init__(self, values: Mapping[str, Any], overrides: Sequence[Override]):
        super().__init__(values)
        self.overrides = overrides

    def __setitem__(self, name: str, value: Any) -> None:
        inside: list[Override] = []
        for (first, *rest), new in self.overrides:
            if first == name and rest:
                inside.append((tuple(rest), new))
            elif first == name:
                value = new
                inside = [((key,), item) for key, item in new.items()] if isinstance(new, Mapping) else []
        if inside:
            value = override(value if isinstance(value, Mapping) else {}, inside)
        super().__setitem__(name, value)

    def apply_all(self) -> None:
        """Apply the overrides to keys that have been assigned before, or never."""
        for (name, *_), _ in self.overrides:
            self[name] = self.get(name)


def override(values: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the values with these overrides, which go on to hold whatever is assigned."""
    overridden = Overridden(values, overrides)
    overridden.apply_all()
    return overridden
