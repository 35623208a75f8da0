"""`--set KEY=VALUE`: parsed, and applied where the file assigns the key, so that what is computed from it follows."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from colossal_vit.errors import UserError
from colossalai.legacy.amp import AMP_TYPE


class _Literals(ast.NodeTransformer):
    """`dict(a=1)` as the literal {'a': 1}, and `AMP_TYPE.NAIVE` as a constant, as configs write them."""

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
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def _quotes(key: str, literal: str) -> str:
    """The advice to quote a string, for what can have been meant as one."""
    return f"; a string needs quotes: --set \"{key}='{literal}'\"" if re.fullmatch(r"[\w./:~ -]+", literal) else ""


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse one `--set` argument.

    Args:
        text: `KEY=VALUE`; KEY may be nested with dots, VALUE is a Python literal, in which AMP_TYPE.<NAME> may stand.

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
        return path, ast.literal_eval(_Literals().visit(ast.parse(literal, mode="eval")))
    except UserError as error:
        raise UserError(f"--set {text}: {error}") from None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
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


class ApplyOverrides(ast.NodeTransformer):
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


def apply_overrides(name: str, value: Any, overrides: list[tuple[tuple[str, ...], Any]]) -> Any:
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
