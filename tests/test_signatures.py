"""What we pass to torch, torchvision, timm and DALI, held against the signatures of those that are installed.

Found in the source, so that calls which need a GPU count, too. The CUDA 12 set (`bash scripts/test.sh --cu12`) has the
oldest versions that pyproject.toml takes.
"""

import ast
import importlib
import inspect
import re
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
import torch.distributed as dist
from colossal_vit.config import schema
from nvidia.dali import Pipeline, fn, pipeline_def
from timm.models.vision_transformer import VisionTransformer
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchvision", "timm", "nvidia")
SOURCES = sorted(path for folder in ("colossal_vit", "scripts", "vit_*") for path in ROOT.glob(f"{folder}/**/*.py"))
SOURCES = [path for path in SOURCES if path.parent.name != "tests"]
HANDED_ON = {timm.create_model: VisionTransformer, pipeline_def: Pipeline}  # who takes a function's other keywords
UNKNOWN = object()


class Call(NamedTuple):
    """A call of something in `PACKAGES`, with its arguments as far as the source tells them."""

    line: int
    name: str
    function: Callable
    num_positional: int
    keywords: set[str]
    whole: bool  # there are no other arguments


def imported_names(tree: ast.AST) -> dict[str, object]:
    """What the names are that a module imports from `PACKAGES`, wherever it does.

    Raises:
        ModuleNotFoundError, AttributeError: there is no such thing in what is installed.
    """
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                if top in PACKAGES:
                    names[alias.asname or top] = importlib.import_module(alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = member(module, alias.name)
    return names


def member(value: object, name: str) -> object:
    """`value.name`, which may be a module that is not imported yet."""
    if isinstance(value, types.ModuleType) and not hasattr(value, name):
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"{value.__name__}.{name}")
    return getattr(value, name)


def resolve(node: ast.AST, names: dict[str, object]) -> object:
    """What `a.b.c` is, or `UNKNOWN` if `a` is not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        value = resolve(node.value, names)
        return value if value is UNKNOWN else member(value, node.attr)
    return UNKNOWN


def keys(node: ast.AST, scope: ast.AST) -> set[str]:
    """The keys of `**node` that stand in the source: of dicts, and of names that are dicts in the same function."""
    if isinstance(node, ast.Dict):
        inner = (keys(value, scope) for key, value in zip(node.keys, node.values, strict=True) if key is None)
        return {key.value for key in node.keys if isinstance(key, ast.Constant)}.union(*inner)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg for keyword in node.keywords if keyword.arg}
    if isinstance(node, ast.IfExp):
        return keys(node.body, scope) | keys(node.orelse, scope)
    if isinstance(node, ast.BinOp | ast.BoolOp):
        sides = node.values if isinstance(node, ast.BoolOp) else (node.left, node.right)
        return set().union(*(keys(side, scope) for side in sides))
    if isinstance(node, ast.Name):
        found = set()
        for child in ast.walk(scope):
            if isinstance(child, ast.Assign | ast.AugAssign):
                for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                    if isinstance(target, ast.Name) and target.id == node.id and not isinstance(child.value, ast.Name):
                        found |= keys(child.value, scope)
        return found
    return set()


def calls(source: str) -> Iterator[Call]:
    """All calls by a name that the module imports from `PACKAGES`, also by `partial` and `super().__init__`."""
    tree = ast.parse(source)
    names = imported_names(tree)

    def visit(node: ast.AST, scope: ast.AST, bases: list[object]) -> Iterator[Call]:
        if isinstance(node, ast.FunctionDef):
            scope = node
        if isinstance(node, ast.ClassDef):
            bases = [base for base in (resolve(base, names) for base in node.bases) if base is not UNKNOWN]
        if isinstance(node, ast.Call):
            called, positional, is_partial = node.func, node.args, False
            if ast.unparse(called) in ("partial", "functools.partial"):
                called, positional, is_partial = positional[0], positional[1:], True
            function = resolve(called, names)
            if isinstance(called, ast.Call) and resolve(called.func, names) is pipeline_def:
                function = Pipeline  # pipeline_def(function)(arguments of the pipeline)
            if ast.unparse(called) == "super().__init__" and len(bases) == 1:
                function = bases[0]
            if function is not UNKNOWN:
                keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
                others = [keyword.value for keyword in node.keywords if keyword.arg is None]
                starred = [argument for argument in positional if isinstance(argument, ast.Starred)]
                keywords = keywords.union(*(keys(other, scope) for other in others))
                count, whole = len(positional) - len(starred), not (is_partial or starred or others)
                yield Call(node.lineno, ast.unparse(called), function, count, keywords, whole)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope, bases)

    yield from visit(tree, tree, [])


def keywords_in_c(function: Callable) -> set[str] | None:
    """The keywords of a function in C: by its operator's schemas, else by its docstring, if that has its arguments."""
    if schemas := torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}"):
        return {argument.name for one in schemas for argument in one.arguments} | {"out", "requires_grad"}
    for documented in (function, getattr(function, "__init__", None)):
        name, text = documented.__name__, documented.__doc__ or ""
        if lines := re.findall(rf"^\W*(?:\d\. )?{name}\((.*)\)", text, re.MULTILINE):
            return set(re.findall(r"(\w+)(?=[:=,)]|$)", " ".join(lines)))
    return None


def mistake(call: Call) -> str | None:
    """What is wrong with a call, or None; `NotImplementedError` if that cannot be known."""
    positional, keywords = [None] * call.num_positional, dict.fromkeys(call.keywords)
    try:
        signature = inspect.signature(call.function)
    except (ValueError, TypeError):
        accepted = keywords_in_c(call.function)
        if accepted is None:
            if not positional and not keywords:
                return None  # nothing that it could not take
            raise NotImplementedError from None
        wrong = call.keywords - accepted
        return f"no keyword {', '.join(sorted(wrong))}" if wrong else None
    try:
        (signature.bind if call.whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    if call.function in HANDED_ON:
        here, there = (inspect.signature(one).parameters for one in (call.function, HANDED_ON[call.function]))
        wrong = call.keywords - here.keys() - there.keys()
        return f"neither it nor {HANDED_ON[call.function].__name__} has {', '.join(sorted(wrong))}" if wrong else None
    return None


def check(source: str) -> tuple[list[str], list[object], list[str]]:
    """The mistakes in a module, what it calls rightly, and the names of what cannot be checked."""
    wrong, right, unknown = [], [], []
    for call in calls(source):
        try:
            if said := mistake(call):
                wrong.append(f"line {call.line}: {call.name}: {said}")
            else:
                right.append(call.function)
        except NotImplementedError:
            unknown.append(call.name)
    return wrong, right, unknown


IMPORTS = """
import torch, timm
import torch.distributed as dist
from functools import partial
from nvidia.dali import fn, pipeline_def
from torch import nn
from torch.nn.parallel import DistributedDataParallel
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("DistributedDataParallel(model, init_sync=False)", None),
        ("DistributedDataParallel(model, nonsense=1)", "nonsense"),
        ("DistributedDataParallel(model, **options)", "nonsense"),
        ("partial(DistributedDataParallel, nonsense=1)", "nonsense"),
        ("DistributedDataParallel()", "module"),
        ("dist.reduce(tensor, group_dst=0, nonsense=1)", "nonsense"),
        ("dist.broadcast(tensor, 0, None, False, 0, 1)", "too many positional"),
        ("dist.nonsense(tensor)", "nonsense"),
        ("torch.zeros(2, 3, nonsense=1)", "nonsense"),
        ("torch.zeros(2, 3, dtype=torch.int8, pin_memory=True, out=tensor)", None),
        ("torch.tensor(1, nonsense=1)", "nonsense"),
        ("dist.TCPStore('host', 1, is_master=True, nonsense=1)", "nonsense"),
        ("fn.resize(images, resize_shorter=3)", None),
        ("fn.resize(images, nonsense=1)", "nonsense"),
        ("pipeline_def(graph)(batch_size=1, nonsense=1)", "nonsense"),
        ("timm.create_model('vit', img_size=3)", None),
        ("timm.create_model('vit', nonsense=1)", "nonsense"),
        ("class Mine(nn.LayerNorm):\n        def __init__(self): super().__init__(3, nonsense=1)", "nonsense"),
    ],
)
def test_a_keyword_that_there_is_not_is_found(line, words):
    try:
        wrong, *_ = check(f"{IMPORTS}def function(model):\n    options = dict(nonsense=1)\n    {line}")
    except AttributeError as error:
        wrong = [str(error)]
    assert len(wrong) == (words is not None)
    assert words is None or words in wrong[0]


def test_every_call_fits_the_installed_versions():
    """Of functions and classes; of methods of tensors and modules the source does not say whose they are."""
    wrong, right, unknown = [], [], []
    for path in SOURCES:
        try:
            said, fits, open_ = check(path.read_text())
        except (ImportError, AttributeError) as error:
            said, fits, open_ = [str(error)], [], []
        wrong += [f"{path.relative_to(ROOT)}, {text}" for text in said]
        right, unknown = right + fits, unknown + open_
    assert not wrong, "\n".join(wrong)
    assert not unknown, f"{len(unknown)} calls cannot be checked: {sorted(set(unknown))}"
    assert len(right) > 300, "most of the calls are found"
    hardest = {DistributedDataParallel, dist.reduce, dist.broadcast}
    assert hardest | {fn.external_source, Pipeline, timm.create_model, torch.optim.AdamW} <= set(right)


def test_arguments_of_ddp_that_a_config_may_name_exist():
    assert schema.SCHEMA["torch_ddp"].settings.keys() <= inspect.signature(DistributedDataParallel).parameters.keys()


@pytest.mark.parametrize("package", ["torch", "torchvision", "timm"])
def test_the_oldest_version_that_is_taken_is_in_the_cuda_12_set(package):
    """So that it is tested: `bash scripts/test.sh --cu12`."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = (line.partition(">=")[2] for line in dependencies if re.match(rf"{package}\W", line))
    (locked,) = re.findall(rf"^{package}==(\S+)", (ROOT / "requirements-cu12.txt").read_text(), re.MULTILINE)
    assert oldest == locked
    if torch.version.cuda.startswith("12."):
        assert version(package).partition("+")[0] == locked
