"""Draw the dependencies between the modules of colossal_vit as the Mermaid diagram in docs/architecture.md.

    python scripts/draw_imports.py             print the diagram
    python scripts/draw_imports.py --write     put it into docs/architecture.md

Modules are the subpackages of colossal_vit and the files directly in it; layers are those of the import contract in
pyproject.toml. An arrow means that a module imports another one; arrows that follow from others are left out, and so
are imports that the contract ignores.
"""

import argparse
import re
import tomllib
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"


def contract() -> dict:
    """Return the import contract of pyproject.toml that declares the layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (contract for contract in contracts if contract["type"] == "layers")
    return found


def arrows() -> list[tuple[str, str]]:
    """Return each module and another one that it imports, unless that follows from other arrows."""
    graph = grimp.build_graph("colossal_vit", cache_dir=None)
    for ignored in contract().get("ignore_imports", ()):
        importer, imported = ignored.split(" -> ")
        graph.remove_import(importer=importer, imported=imported)
    modules = graph.find_children("colossal_vit")
    for module in modules:
        graph.squash_module(module)
    imports = networkx.DiGraph()
    for module in modules:
        others = graph.find_modules_directly_imported_by(module) & modules
        imports.add_edges_from((module, other) for other in others - {module})
    edges = networkx.transitive_reduction(imports).edges
    return sorted(tuple(module.removeprefix("colossal_vit.") for module in edge) for edge in edges)


def diagram() -> str:
    """Return the modules by layer, as Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in enumerate(contract()["layers"]):
        lines += [f"    subgraph layer{number}[ ]", "        direction LR"]
        lines += [f"        {module}" for module in re.split(r"\s*[|:]\s*", layer)] + ["    end"]
    return "\n".join([*lines, *(f"    {module} --> {other}" for module, other in arrows()), "```"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(re.sub(r"```mermaid\n.*?\n```", lambda _: diagram(), PAGE.read_text(), flags=re.DOTALL))
    else:
        print(diagram())
