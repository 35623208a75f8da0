"""Plant defects in the code, one at a time, and see whether parity, or the tests, notice them.

    python -m tools.parity.planted [parity] [--only NAME ...] [--precision fp64|own] [--result results/mutations]
    python -m tools.parity.planted tests [--only NAME ...] [--result results/slips]
    python -m tools.parity.planted [parity|tests] --list

Each is planted in a copy of the code. There, with `parity`, `python -m tools.parity` trains a small model with
train_hybrid.py in one process and in the layout that should show the defect: in fp64, and with `--own-precision` in
fp32, or in the half precision that the defect needs. The list is mutations.py. With `tests`, the tests run that should
notice a defect that all layouts share; the lists are slips_engine.py and slips_data.py.

Outcomes of `parity`: "named" is a difference where the list expects it, "elsewhere" one at another place, "error" a
run that ends without a comparison, "escaped" no difference. Outcomes of tests: "noticed" if one fails, "escaped" if
all pass, else "error". Controls see to it that without any defect every layout agrees and every test passes.

What has run is in --log, a JSON object a line, and does not run again until the code, the defect or its values change.
Exit code 1 if a control differs, if parity does not name a defect rightly and the list does not say why, or says so
wrongly, or if the tests notice fewer than 95 % of the defects.
"""

import argparse
import dataclasses
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from colossal_vit.provenance import ROOT, ResultFolder

from tools.parity.planted.mutations import FP64, MUTATIONS, OWN, Mutation
from tools.parity.planted.planting import CONTROL, Job, planted, run_jobs
from tools.parity.planted.slips import Slip
from tools.parity.planted.slips_data import SLIPS as DATA
from tools.parity.planted.slips_engine import SLIPS as ENGINE

sys.path += [str(ROOT / "scripts"), str(ROOT / "vit_cifar10_hybrid")]

import cifar10
from layouts import CONFIG, MODEL, RANDOM, set_flags

PACKAGES = ("colossalai.legacy", "timm", "torch.utils.tensorboard", "torchvision")

# ---------------------------------------------------------------------------------------------------------------------
# By parity
# ---------------------------------------------------------------------------------------------------------------------

RUNS = ("colossal_vit/**/*.py", "vit_cifar10_hybrid/**/*.py", "tools/*.py", "tools/parity/*.py")  # of the repository
SCRIPT, CONFIG_FILE = "vit_cifar10_hybrid/train_hybrid.py", f"vit_cifar10_hybrid/{CONFIG}"
VALUES = {**MODEL, **RANDOM, "DEPTH": 2, "IMG_SIZE": 16, "HIDDEN_SIZE": 32, "parallel.pipeline": 1}
NUM_TEST_IMAGES = 90  # two batches of 32 and a part of one
RECORD_BYTES = 1 + 3 * 32 * 32  # of an image in CIFAR-10's format
PARITY_OUTCOMES = ("named", "elsewhere", "error", "escaped")


def controls(chosen: Iterable[Mutation]) -> Iterator[Mutation]:
    """Yield what has to agree: nothing replaced, for each layout with the values of some mutation."""
    for layout, values in sorted({(mutation.layout, mutation.values) for mutation in chosen}):
        own = [m for m in chosen if (m.layout, m.values) == (layout, values)]
        precisions = tuple(sorted({precision for mutation in own for precision in mutation.precisions}))
        yield Mutation(CONTROL, "", "", "", "", layout, "", values, precisions)


def compare(words: list[str], data: Path, folder: Path) -> None:
    """Run `python -m tools.parity` in a copy."""
    os.chdir(folder)
    sys.argv[1:] = words
    os.environ["DATA"] = str(data)
    runpy.run_module("tools.parity", run_name="__main__", alter_sys=True)


def parity_job(mutation: Mutation, precision: str, files: Mapping[str, bytes], data: Path) -> Job:
    """Return the comparison of a layout with a mutation, or of a control."""
    values = VALUES
    if any(value.startswith("fp16=") for value in mutation.values):
        values = {key: value for key, value in VALUES.items() if key != "fp16"}
    words = [SCRIPT, mutation.layout, "--config", CONFIG_FILE, *set_flags(values)]
    words += [*(f"--set={value}" for value in mutation.values), "--timeout", "20"]
    words += ["--own-precision"] if precision == OWN else []
    start = f"{mutation.layout}: "

    def said(out: list[str], err: list[str]) -> str | None:
        found = [line.removeprefix(start) for line in out if line.startswith(start)]
        return found[-1] if found else None

    defect = mutation if mutation.path else None
    conditions = f"{precision}, {mutation.layout}"
    return Job(mutation.name, conditions, defect, files, partial(compare, words, data), said, words, limit=300)


def parity_outcome(mutation: Mutation, said: str) -> str:
    """Return one of PARITY_OUTCOMES."""
    if difference := re.match(r"differs first in (step \d+, .+?): ", said):
        return "named" if re.fullmatch(mutation.named, difference[1].strip()) else "elsewhere"
    return "escaped" if re.match(r"all \d+ tensors", said) else "error"


def small_data(folder: Path) -> Path:
    """Write the digits in CIFAR-10's format with few test images; returns the folder."""
    test = cifar10.write_images(folder) / "test_batch.bin"
    test.write_bytes(test.read_bytes()[: NUM_TEST_IMAGES * RECORD_BYTES])
    return folder


def as_table(rows: Iterable[Iterable[object]], numbers: bool = False) -> list[str]:
    """Rows, the first of which is the head, as Markdown; all columns but the first may be of numbers."""
    head, *body = rows
    lines = [head, ["---", *["---:" if numbers else "---"] * (len(head) - 1)], *body]
    return [f"| {' | '.join(map(str, row))} |" for row in lines]


def parity_summary(chosen: list[Mutation], found: Mapping[str, dict[str, str]]) -> list[str]:
    """Return how many defects have which outcome."""
    rows = [["precision", "defects", *PARITY_OUTCOMES]]
    for precision in (FP64, OWN):
        counts = Counter(parity_outcome(m, found[m.name][precision]) for m in chosen if precision in found[m.name])
        rows.append([precision, counts.total(), *(counts[kind] for kind in PARITY_OUTCOMES)])
    return as_table(rows, numbers=True)


def parity_details(chosen: list[Mutation], found: Mapping[str, dict[str, str]]) -> list[str]:
    """Return each defect with its outcomes."""
    rows = [["defect", "layout", FP64, OWN, "named first", "why"]]
    for mutation in chosen:
        said = {precision: found[mutation.name].get(precision, "") for precision in (FP64, OWN)}
        places = dict.fromkeys(text.partition(": ")[0].removeprefix("differs first in ") for text in said.values())
        cells = [f"**{mutation.name}.** {mutation.defect}", mutation.layout]
        cells += [text and parity_outcome(mutation, text) for text in said.values()]
        rows.append([*cells, "; ".join(filter(None, places)), mutation.why])
    return as_table(rows)


def by_parity(chosen: list[Mutation], args: argparse.Namespace, result: ResultFolder) -> list[str]:
    """Judge mutations by parity; returns what is not as the list says."""
    paths = sorted(path for pattern in RUNS for path in ROOT.glob(pattern))
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        data = small_data(Path(folder))
        jobs = {
            parity_job(mutation, precision, files, data): (mutation, precision)
            for mutation in (*controls(chosen), *chosen)
            for precision in ([args.precision] if args.precision else (FP64, OWN))
            if precision in mutation.precisions
        }
        for job, said in run_jobs(list(jobs), args.jobs, PACKAGES, args.log):
            mutation, precision = jobs[job]
            kind = parity_outcome(mutation, said)
            result.print(f"{job.conditions}, {job.name}: {kind}: {said}")
            if job.defect:
                found[mutation.name][precision] = said
            elif kind != "escaped":
                wrong.append(f"{mutation.layout} without a defect")
    for mutation in chosen:
        kinds = {parity_outcome(mutation, said) for said in found[mutation.name].values()}
        if kinds != {"named"} and not mutation.why:
            wrong.append(f"{mutation.name} ({mutation.layout})")
        if kinds == {"named"} and mutation.why and len(found[mutation.name]) == len(mutation.precisions):
            wrong.append(f"{mutation.name} ({mutation.layout}), which is named rightly")
    rows = [{**dataclasses.asdict(mutation), "said": found[mutation.name]} for mutation in chosen]
    table = [*parity_summary(chosen, found), "", *parity_details(chosen, found)]
    result.finish("mutations", table, {"values": VALUES, "defects": rows})
    return wrong


# ---------------------------------------------------------------------------------------------------------------------
# By tests
# ---------------------------------------------------------------------------------------------------------------------

TESTS_PACKAGES = ("matplotlib.figure", "numba", "nvidia.dali", "pytest", "rich.console", "sklearn.neighbors")
TESTS_OUTCOMES = ("noticed", "escaped", "error")
LEAST = 0.95  # of the defects that are to be noticed
AREAS = {"engine": ENGINE, "data": DATA}
PASSED = re.compile(r"\d+ passed")


class Outcome:
    """A plugin for pytest that says which test has failed, or how many have passed or been skipped.

    Args:
        file: it is appended to. While tests run, pytest has the standard streams.
    """

    def __init__(self, file: Path):
        self.file, self.counts = file, Counter()

    def say(self, text: str) -> None:
        with open(self.file, "a") as file:
            file.write(f"\noutcome: {text}\n")  # pytest may be within a line

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            reason = report.longrepr.reprcrash.message.partition("\n")[0] if report.longrepr else ""
            self.say(f"{report.nodeid} failed: {reason}")
        if report.when == "call" or report.skipped:
            self.counts[report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self.say(", ".join(f"{count} {kind}" for kind, count in self.counts.items()))


def run_tests(ids: Iterable[str], folder: Path) -> None:
    """Run tests of a copy up to the first that fails."""
    import pytest

    os.chdir(folder)
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(folder / "tmp")]
    sys.exit(pytest.main([*flags, *ids], plugins=[Outcome(folder / "out")]))


def tests_job(name: str, area: str, slip: Slip | None, ids: Iterable[str], files: Mapping[str, bytes]) -> Job:
    """Return the run of tests with a slip, or without."""

    def said(out: list[str], err: list[str]) -> str | None:
        found = [line.removeprefix("outcome: ") for line in out if line.startswith("outcome: ")]
        errors = [line for line in out if line.startswith(("E  ", "ERROR"))]
        return next(iter([*found, *errors]), None)

    return Job(name, area, slip, files, partial(run_tests, ids), said, ids, limit=900)


def tests_outcome(said: str) -> str:
    """Return one of TESTS_OUTCOMES."""
    if re.match(r"(\w+/)*tests/\S+?(\[.*?\])? failed: ", said):
        return "noticed"
    return "escaped" if PASSED.fullmatch(said) else "error"


def by_tests(chosen: list[Slip], args: argparse.Namespace, result: ResultFolder) -> list[str]:
    """Judge slips by tests; returns what is not as it should be."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    names = [name for name in listed if not name.startswith(("results/", "tools/parity/planted/slips_"))]
    files = {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}
    area_of = {slip.defect: area for area, slips in AREAS.items() for slip in slips}
    tests = defaultdict(dict)  # by file
    for name in dict.fromkeys(name for slip in chosen for name in slip.tests):
        tests[name.partition("::")[0]][name] = None
    jobs = [tests_job(CONTROL, file, None, tuple(ids), files) for file, ids in tests.items()]
    jobs += [tests_job(slip.defect, area_of[slip.defect], slip, slip.tests, files) for slip in chosen]
    found, wrong = {}, []
    for job, said in run_jobs(jobs, args.jobs, (*PACKAGES, *TESTS_PACKAGES), args.log):
        kind = tests_outcome(said)
        result.print(f"{job.conditions}, {job.name}: {kind}: {said}")
        if job.defect:
            found[job.name] = said
        elif kind != "escaped":
            wrong.append(f"{job.conditions} without a defect")
    rows = [["area", "defects", *TESTS_OUTCOMES]]
    for area in (*AREAS, "all"):
        counts = Counter(tests_outcome(found[s.defect]) for s in chosen if area in (area_of[s.defect], "all"))
        rows.append([area, counts.total(), *(counts[kind] for kind in TESTS_OUTCOMES)])
    details = [["defect", "area", "outcome", "first said"]]
    details += [[s.defect, area_of[s.defect], tests_outcome(found[s.defect]), found[s.defect]] for s in chosen]
    details = [[str(cell).replace("|", "\\|") for cell in row] for row in details]
    slips = [{**dataclasses.asdict(slip), "said": found[slip.defect]} for slip in chosen]
    result.finish("slips", [*as_table(rows, numbers=True), "", *as_table(details)], {"defects": slips})
    missed = [slip.defect for slip in chosen if tests_outcome(found[slip.defect]) != "noticed"]
    return [*wrong, *(missed if len(missed) > (1 - LEAST) * len(chosen) else ())]


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.parity.planted", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("judge", nargs="?", choices=("parity", "tests"), default="parity", help="default %(default)s")
    parser.add_argument("--list", action="store_true", help="check that each can be planted, list them, and run none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--precision", choices=(FP64, OWN), help="with parity: only in this one (default: both)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default %(default)s)")
    parser.add_argument("--log", type=Path, help="default runs/mutations.jsonl, of tests runs/slips.jsonl")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    judge: Callable
    if args.judge == "parity":
        judge, names = by_parity, {mutation.name: mutation for mutation in MUTATIONS}
        lines = {m.name: f"{m.name} ({m.layout}): {m.defect}" for m in MUTATIONS}
    else:
        judge, names = by_tests, {slip.defect: slip for slips in AREAS.values() for slip in slips}
        lines = {name: f"{name} ({', '.join(slip.tests)})" for name, slip in names.items()}
    args.log = args.log or ROOT / f"runs/{'mutations' if args.judge == 'parity' else 'slips'}.jsonl"
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only {unknown[0]!r}: no such defect; see --list")
    chosen = {name: names[name] for name in args.only or names}
    try:
        for name, defect in chosen.items():
            planted(name, defect, (ROOT / defect.path).read_bytes())
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(lines[name] for name in chosen))
        return 0
    wrong = judge(list(chosen.values()), args, ResultFolder(args.result))
    if wrong:
        print(f"not as it should be: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
