"""Make a result of results/ again with today's code, and compare it with what is expected of it.

    python scripts/reproduce.py NAME [--output DIR]   such as lamb_cpu or 1x_NVIDIA_H200/lamb
    python scripts/reproduce.py --list                name the results, with the time that each takes and what it needs

Prints a table: quantity, old value, new value, interval, within or not. Exit code 1 if the command fails or a value is
outside its interval. What the command writes is kept in DIR, by default a new folder for temporary files. A result
whose provenance wants a commit is refused by its command while the working tree has changes.

The expectation stands beside the result before anything is run again, in expect.json:

    command   makes the result today; bash runs it in the root of the repository, with the folder in place of {output}
    minutes   that it takes, about, on two free CPU cores or on the GPU that it needs
    needs     what it takes besides two CPU cores, or ""
    values    for each quantity the file in the folder and the regular expression whose one group is the number, the
              interval that it must be in, both ends included, and why. `take` says which of several matches counts:
              "first", "last", "min", "max", "median", or their "count". Without it there must be one. Where an earlier
              version of the command wrote another format, `recorded` has the file, pattern and `take` of the old value.

provenance.json keeps the command and the commit that made the old value.
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from colossal_vit.errors import Parser, UserError, oserror_as_user_error, run_command

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
EXPECT = "expect.json"
TAKES = {
    "first": lambda found: found[0],
    "last": lambda found: found[-1],
    "min": min,
    "max": max,
    "median": statistics.median,
}


def names() -> list[str]:
    """Return the folders of results/ that have an expectation, also nested ones, by their paths."""
    return sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob(EXPECT))


def read_value(folder: Path, where: dict[str, Any]) -> float:
    """Return the number in a folder that `file`, `pattern` and `take` name.

    Raises:
        UserError: if it is not there, or there are several and `take` does not say which.
    """
    path = folder / where["file"]
    if not path.is_file():
        raise UserError(f"{path} is missing")
    found = re.findall(where["pattern"], path.read_text(), re.MULTILINE)
    take = where.get("take")
    if take == "count":
        return len(found)
    if not found or (take is None and len(found) > 1):
        raise UserError(f"{path}: {len(found)} matches of {where['pattern']!r}")
    return TAKES[take or "first"]([float(number.replace(",", "")) for number in found])


def load(name: str) -> tuple[dict[str, Any], list[float]]:
    """Return the expectation of a result, and the old values that it is compared with.

    Raises:
        UserError: if it is no JSON or lacks a key, or an old value is missing or outside its interval.
    """
    path = RESULTS / name / EXPECT
    try:
        expected = json.loads(path.read_text())
        old = [read_value(path.parent, value.get("recorded", value)) for value in expected["values"]]
        for value, number in zip(expected["values"], old, strict=True):
            if not is_within(number, value["interval"]):
                raise UserError(f"{path}: {value['quantity']}: {number:.9g} is not in {value['interval']}")
        missing = {"command", "minutes", "needs", "values"} - expected.keys()
        missing |= {key for value in expected["values"] for key in {"quantity", "why"} - value.keys()}
    except (ValueError, LookupError, TypeError, re.error) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from None
    if missing or not expected["values"]:
        raise UserError(f"{path}: lacks {', '.join(sorted(missing)) or 'values'}")
    return expected, old


def is_within(number: float, interval: list[float]) -> bool:
    low, high = interval
    return low <= number <= high  # which no NaN is


def reproduce(name: str, output: Path) -> bool:
    """Run a result's command, print the table; return whether it has ended well and every value is in its interval."""
    expected, old = load(name)
    command = expected["command"].replace("{output}", shlex.quote(str(output)))
    commit = json.loads((RESULTS / name / "provenance.json").read_text())["commit"]
    print(f"{name}, made at {commit[:7]}, takes about {expected['minutes']} minutes\n{command}", flush=True)
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    code = subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=ROOT, env=environment).returncode
    good = not code
    rows = ["| quantity | old | new | interval | within |", "| --- | ---: | ---: | --- | --- |"]
    for value, before in zip(expected["values"], old, strict=True):
        try:
            now = read_value(output, value)
            within, said = is_within(now, value["interval"]), f"{now:.9g}"
        except (UserError, ValueError) as error:
            within, said = False, str(error).replace("|", "\\|")
        good &= within
        interval = " to ".join(f"{end:.9g}" for end in value["interval"])
        rows.append(f"| {value['quantity']} | {before:.9g} | {said} | {interval} | {'yes' if within else 'no'} |")
    print("\n".join(["", *rows, "", f"exit code of the command: {code}; its files are in {output}"]))
    return good


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a result, see --list")
    parser.add_argument("--list", action="store_true", help="name the results, and make none")
    parser.add_argument("--output", type=Path, metavar="DIR", help="new or empty folder for what the command writes")
    args = parser.parse_args()
    if args.list:
        for name in names():
            expected, _ = load(name)
            print(f"{name:<32}{expected['minutes']:>5} min  {expected['needs']}".rstrip())
        return 0
    if args.name not in names():
        raise UserError(f"{args.name or 'no name'}: choose from {', '.join(names())}")
    output = (args.output or Path(tempfile.mkdtemp(prefix="reproduce-"))).resolve()
    with oserror_as_user_error(output):
        output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise UserError(f"--output {output}: is not empty")
    return 0 if reproduce(args.name, output) else 1


if __name__ == "__main__":
    sys.exit(run_command("reproduce.py", main))
