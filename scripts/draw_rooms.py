"""Draw the dependencies between the rooms of colossal_vit as the Mermaid diagram in docs/architecture.md.

    python scripts/draw_rooms.py             print the diagram
    python scripts/draw_rooms.py --write     put it into docs/architecture.md
    python scripts/draw_rooms.py --numbers   count floors, rooms, arrows, cycles, long files, lines

A room is a subpackage, or a module directly in colossal_vit; a floor is a layer of the import contract in
pyproject.toml. An arrow means that a room imports another one; arrows implied by others are left out.
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
    """The rooms that each room imports from."""
    graph = grimp.build_graph("colossal_vit", cache_dir=None)
    rooms = graph.find_children("colossal_vit")
    for room in rooms:
        graph.squash_module(room)
    found = {room: graph.find_modules_directly_imported_by(room) & rooms for room in rooms}
    return {_name(room): {_name(other) for other in others - {room}} for room, others in sorted(found.items())}


def _name(module: str) -> str:
    return module.removeprefix("colossal_vit.")


def _reachable(arrows: dict[str, set[str]], room: str) -> set[str]:
    seen, left = set(), list(arrows[room])
    while left:
        if (other := left.pop()) not in seen:
            seen.add(other)
            left += arrows[other]
    return seen


def reduce(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction of an acyclic graph: without arrows that other arrows imply."""
    return {
        room: {other for other in others if not any(other in _reachable(arrows, third) for third in others - {other})}
        for room, others in arrows.items()
    }


def floors() -> list[list[str]]:
    """The rooms of each floor, top floor first, as pyproject.toml declares them."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [re.split(r"\s*[|:]\s*", layer) for layer in contract["layers"]]


def diagram() -> str:
    """The rooms floor by floor, as Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for number, rooms in enumerate(floors()):
        lines += [f"    subgraph floor{number}[ ]", "        direction LR"]
        lines += [f"        {room}" for room in rooms] + ["    end"]
    arrows = reduce(imports())
    lines += [f"    {room} --> {other}" for room in arrows for other in sorted(arrows[room])]
    return "\n".join([*lines, "```"])


def numbers() -> str:
    """The counts of `--numbers`, as text."""
    arrows = imports()
    files = {path: len(path.read_text().splitlines()) for path in (ROOT / "colossal_vit").rglob("*.py")}
    scripts = sum(len(path.read_text().splitlines()) for path in (ROOT / "scripts").glob("*.py"))
    long = [f"{path.relative_to(ROOT)} ({count})" for path, count in sorted(files.items()) if count > LONG]
    cycles = [room for room in arrows if room in _reachable(arrows, room)]
    return (
        f"{len(floors())} floors, {len(arrows)} rooms, {sum(map(len, arrows.values()))} arrows, rooms in a cycle: "
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
