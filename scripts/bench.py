"""Measure something in pairs, in turns, on this machine.

    python scripts/bench.py                 list what there is to measure
    python scripts/bench.py NAME [--help]   measure it

Writes NAME.md (the table), NAME.json (every round), log.txt and provenance.json into runs/bench/NAME, or where --output
says. A folder in results/ is written only if nothing else is uncommitted, so that provenance.json names what ran.
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "BENCHMARK = " in path.read_text())


def main() -> int:
    if sys.argv[1:2] == [] or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        for name in NAMES:
            print(f"{name:<12}{(FOLDER / f'{name}.py').read_text().splitlines()[0].strip(chr(34))}")
        return 0
    name = sys.argv[1]
    if name not in NAMES:
        print(f"bench.py: error: there is no benchmark {name!r}: choose from {', '.join(NAMES)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{name}")
    return module.BENCHMARK.run(name, module.__doc__, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
