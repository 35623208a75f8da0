"""Draw the dependencies between the modules of colossal_vit as the Mermaid diagram in docs/architecture.md.

    python scripts/draw_imports.py             print the diagram
    python scripts/draw_imports.py --write     put it into docs/architecture.md
    python scripts/draw_imports.py --numbers   count layers, modules, arrows, cycles, long files, lines

Modules are the subpackages of colossal_vit and the files directly in it; layers are those of the import contract in
pyproject.toml. An arrow means that a module imports another one; arrows implied by others are left out.
"""

import argparse
import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
LONG = 300  # lines


def imports() -> dict[str, set[str]]:
    """The modules that each module imports from."""
    graph = grimp.build_graph("colossal_vit", cache_dir=None)
    modules = graph.find_children("colossal_vit")
    for module in modules:
        graph.squash_module(module)
    found = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    return {_name(module): {_name(other) for other in others - {module}} for module, others in sorted(found.items())}


def _name(module: str) -> str:
    return module.removeprefix("colossal_vit.")


def _reachable(arrows: dict[str, set[str]], module: str) -> set[str]:
    seen, left = set(), list(arrows[module])
    while left:
        if (other := left.pop()) not in seen:
            seen.add(other)
            left += arrows[other]
    return seen


def reduce(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction of an acyclic graph: without arrows that other arrows imply."""
    return {
        module: {other for other in others if not any(other in _reachable(arrows, third) for third in others - {other})}
        for module, others in arrows.items()
    }


def layers() -> list[list[str]]:
    """The modules of each layer, the top one first, as pyproject.toml declares them."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [re.split(r"\s*[|:]\s*", layer) for layer in contract["layers"]]


def diagram() -> str:
    """The modules by layer, as Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for number, modules in enumerate(layers()):
        lines += [f"    subgraph layer{number}[ ]", "        direction LR"]
        lines += [f"        {module}" for module in modules] + ["    end"]
    arrows = reduce(imports())
    lines += [f"    {module} --> {other}" for module in arrows for other in sorted(arrows[module])]
    return "\n".join([*lines, "```"])


def numbers() -> str:
    """The counts of `--numbers`, as text."""
    arrows = imports()
    files = {path: len(path.read_text().splitlines()) for path in (ROOT / "colossal_vit").rglob("*.py")}
    scripts = sum(len(path.read_text().splitlines()) for path in (ROOT / "scripts").glob("*.py"))
    long = [f"{path.relative_to(ROOT)} ({count})" for path, count in sorted(files.items()) if count > LONG]
    cycles = [module for module in arrows if module in _reachable(arrows, module)]
    return (
        f"{len(layers())} layers, {len(arrows)} modules, {sum(map(len, arrows.values()))} arrows, modules in a cycle: "
        f"{len(cycles)}; {len(files)} files, above {LONG} lines: {', '.join(long) or 'none'}; "
        f"lines: {sum(files.values()):,} in colossal_vit/, {scripts:,} in scripts/"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--numbers", action="store_true")
    args = parser.parse_args()
    if args.numbers:
        print(numbers())
    elif args.write:
        page = PAGE.read_text()
        PAGE.write_text(re.sub(r"```mermaid\n.*?\n```", lambda _: diagram(), page, flags=re.DOTALL))
    else:
        print(diagram())


if __name__ == "__main__":
    main()
