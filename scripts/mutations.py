"""Plant defects in the code, one at a time, and see whether `--parity` finds them and names their place.

    python scripts/mutations.py [--only NAME ...] [--precision fp64|own] [--result results/mutations]
    python scripts/mutations.py --list

Each is planted in a copy of the code, where `train_hybrid.py --parity` then trains a small model in one
process and in the layout that should show the defect: in fp64, and with `--own-precision` in fp32, or in the half
precision that the defect needs. The list is mutations_list.py.

Outcomes: "named" is a difference where the list expects it, "elsewhere" one at another place, "error" a run that ends
without a comparison, "escaped" no difference. Without any defect every layout has to agree: controls see to that.

What has run is in --log, a JSON object a line, and does not run again until the code, the defect or its values change.
Exit code 1 if a control differs, a defect is not named rightly and the list does not say why, or it says so wrongly.
"""

import argparse
import dataclasses
import gc
import hashlib
import importlib
import json
import multiprocessing.connection
import os
import re
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from colossal_vit.data.digits import write_cifar10
from colossal_vit.provenance import ROOT, ResultFolder

from mutations_list import FP64, MUTATIONS, OWN, Mutation

sys.path.append(str(ROOT / "vit_cifar10_hybrid"))

from layouts import CONFIG, MODEL, RANDOM, set_flags

TREES = ("colossal_vit", "vit_cifar10_hybrid")  # what runs, of the repository
VALUES = {**MODEL, **RANDOM, "DEPTH": 2, "IMG_SIZE": 16, "HIDDEN_SIZE": 32, "parallel.pipeline": 1}
NUM_TEST_IMAGES = 90  # two batches of 32 and a part of one
RECORD_BYTES = 1 + 3 * 32 * 32  # of an image in CIFAR-10's format
LIMIT = 300  # seconds for a run
OUTCOMES = ("named", "elsewhere", "error", "escaped")
CONTROL = "no defect"


@cache
def sources() -> dict[str, bytes]:
    """The files that run, by path."""
    paths = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


def planted(mutation: Mutation) -> bytes:
    """The file of a mutation, with the defect.

    Raises:
        ValueError: if its text is not there exactly once, or the file is not Python any more.
    """
    text = sources()[mutation.path].decode()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.path} has its text {count} times")
    text = text.replace(mutation.old, mutation.new)
    try:
        compile(text, mutation.path, "exec")
    except SyntaxError as error:
        raise ValueError(f"{mutation.name}: {mutation.path} is not Python any more: {error}") from None
    return text.encode()


def controls(chosen: Iterable[Mutation]) -> Iterator[Mutation]:
    """What has to agree: nothing replaced, for each layout with the values of some mutation."""
    for layout, values in sorted({(mutation.layout, mutation.values) for mutation in chosen}):
        own = [m for m in chosen if (m.layout, m.values) == (layout, values)]
        precisions = tuple(sorted({precision for mutation in own for precision in mutation.precisions}))
        yield Mutation(CONTROL, "", "", "", "", layout, "", values, precisions)


def key(mutation: Mutation, precision: str) -> str:
    """A digest of all that a run depends on."""
    digest = hashlib.sha256(repr([dataclasses.replace(mutation, named="", why=""), precision, VALUES]).encode())
    for name, content in sources().items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def become(folder: Path, flags: list[str], data: Path) -> None:
    """Run the train script of a copy in this fork, whose output goes to files in the folder of the copy.

    Other packages, whose imports take longer than the training, are those that the parent has imported.
    """
    os.setsid()
    for stream, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
    for name in [name for name in sys.modules if name.split(".")[0] in ("colossal_vit", "layouts")]:
        del sys.modules[name]
    script = folder / "vit_cifar10_hybrid/train_hybrid.py"
    os.chdir(script.parent)
    sys.path[:0] = map(str, (script.parent, folder))
    sys.argv = [str(script), *flags]
    os.environ["DATA"] = str(data)
    if not Path(importlib.import_module("colossal_vit").__file__).is_relative_to(folder):
        sys.exit("this is not the code with the defect")
    runpy.run_path(str(script), run_name="__main__")


class Run:
    """A copy of the code that is run, with a defect.

    Args:
        mutation: the defect, or a control.
        precision: FP64 or OWN.
        data: the folder with the images.
    """

    def __init__(self, mutation: Mutation, precision: str, data: Path):
        self.mutation, self.precision = mutation, precision
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        for name, content in sources().items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if mutation.path:
            (self.folder / mutation.path).write_bytes(planted(mutation))
        values = VALUES
        if any(value.startswith("fp16=") for value in mutation.values):
            values = {key: value for key, value in VALUES.items() if key != "fp16"}
        flags = ["--config", CONFIG, *set_flags(values), *(f"--set={value}" for value in mutation.values)]
        flags += ["--timeout", "20", "--parity", mutation.layout]
        flags += ["--own-precision"] if precision == OWN else []
        self.process = multiprocessing.get_context("fork").Process(target=become, args=(self.folder, flags, data))
        self.process.start()
        self.end = time.monotonic() + LIMIT

    def finish(self) -> str:
        """What `--parity` has said: the layout's line, or the last one on stderr."""
        late = time.monotonic() > self.end
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        out, err = ((self.folder / name).read_text().splitlines() for name in ("out", "err"))
        start = f"{self.mutation.layout}: "
        found = [line.removeprefix(start) for line in out if line.startswith(start)]
        text = found[-1] if found else f"no end within {LIMIT} s" if late else (err or ["nothing"])[-1]
        self.scratch.cleanup()
        return text.replace(self.scratch.name, "")


def import_packages() -> None:
    """Import what train scripts import, but for this repository's modules."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("colossalai.legacy", "timm", "torch.utils.tensorboard", "torchvision"):
        importlib.import_module(name)
    gc.freeze()


def run_all(jobs: Iterable[tuple[Mutation, str]], number: int, data: Path) -> Iterator[tuple[Mutation, str, str]]:
    """Each defect and precision with what `--parity` says of it, `number` at a time."""
    waiting, running = deque(jobs), {}
    if waiting:
        import_packages()
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # more ranks than cores: they interrupt less
    try:
        while waiting or running:
            while waiting and len(running) < number:
                run = Run(*waiting.popleft(), data)
                running[run.process.sentinel] = run
            ended = multiprocessing.connection.wait(running, timeout=1.0)
            for sentinel in [s for s, run in running.items() if s in ended or time.monotonic() > run.end]:
                run = running.pop(sentinel)
                yield run.mutation, run.precision, run.finish()
    finally:
        for run in running.values():
            run.finish()


def outcome(mutation: Mutation, said: str) -> str:
    """One of OUTCOMES."""
    if difference := re.match(r"differs first in (step \d+, .+?): ", said):
        return "named" if re.fullmatch(mutation.named, difference[1].strip()) else "elsewhere"
    return "escaped" if re.match(r"all \d+ tensors", said) else "error"


def small_data(folder: Path) -> Path:
    """Write the digits in CIFAR-10's format with few test images; returns the folder."""
    test = write_cifar10(folder) / "test_batch.bin"
    test.write_bytes(test.read_bytes()[: NUM_TEST_IMAGES * RECORD_BYTES])
    return folder


def summary(chosen: list[Mutation], found: Mapping[str, dict[str, str]]) -> list[str]:
    """How many have which outcome, as a Markdown table."""
    rows = [["precision", "defects", *OUTCOMES], ["---", *["---:"] * (1 + len(OUTCOMES))]]
    for precision in (FP64, OWN):
        counts = Counter(outcome(m, found[m.name][precision]) for m in chosen if precision in found[m.name])
        rows.append([precision, counts.total(), *(counts[kind] for kind in OUTCOMES)])
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def details(chosen: list[Mutation], found: Mapping[str, dict[str, str]]) -> list[str]:
    """Each defect with its outcomes, as a Markdown table."""
    rows = [["defect", "layout", FP64, OWN, "named first", "why"], ["---"] * 6]
    for mutation in chosen:
        said = {precision: found[mutation.name].get(precision, "") for precision in (FP64, OWN)}
        places = dict.fromkeys(text.partition(": ")[0].removeprefix("differs first in ") for text in said.values())
        cells = [f"**{mutation.name}.** {mutation.defect}", mutation.layout]
        cells += [text and outcome(mutation, text) for text in said.values()]
        rows.append([*cells, "; ".join(filter(None, places)), mutation.why])
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="check that each can be planted, list them, and run none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--precision", choices=(FP64, OWN), help="only in this one (default: both)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default %(default)s)")
    parser.add_argument("--log", type=Path, default=ROOT / "runs/mutations.jsonl", help="default %(default)s")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    names = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in args.only or () if name not in names]:
        parser.error(f"--only {unknown[0]!r}: no such defect; see --list")
    chosen = [names[name] for name in args.only] if args.only else MUTATIONS
    try:
        for mutation in chosen:
            planted(mutation)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(f"{m.name} ({m.layout}): {m.defect}" for m in chosen))
        return 0
    result = ResultFolder(args.result)
    precisions = (args.precision,) if args.precision else (FP64, OWN)
    every = [*controls(chosen), *chosen]
    jobs = [(m, precision) for m in every for precision in precisions if precision in m.precisions]
    args.log.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if args.log.exists():
        known = {line["key"]: line["said"] for line in map(json.loads, args.log.read_text().splitlines())}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = {job: key(*job) for job in jobs}
        new = [job for job in jobs if keys[job] not in known]
        old = ((*job, known[keys[job]]) for job in jobs if keys[job] in known)
        for mutation, precision, said in chain(old, run_all(new, args.jobs, small_data(Path(folder)))):
            if (mutation, precision) in new:
                line = {"name": mutation.name, "layout": mutation.layout, "values": mutation.values}
                line |= {"precision": precision, "said": said, "key": keys[mutation, precision]}
                with open(args.log, "a") as log:
                    log.write(json.dumps(line, ensure_ascii=False) + "\n")
            kind = outcome(mutation, said)
            result.print(f"{precision}, {mutation.layout}, {mutation.name}: {kind}: {said}")
            if mutation.name != CONTROL:
                found[mutation.name][precision] = said
            elif kind != "escaped":
                wrong.append(f"{mutation.layout} without a defect")
    for mutation in chosen:
        kinds = {outcome(mutation, said) for said in found[mutation.name].values()}
        if kinds != {"named"} and not mutation.why:
            wrong.append(f"{mutation.name} ({mutation.layout})")
        if kinds == {"named"} and mutation.why and len(found[mutation.name]) == len(mutation.precisions):
            wrong.append(f"{mutation.name} ({mutation.layout}), which is named rightly")
    rows = [{**dataclasses.asdict(mutation), "said": found[mutation.name]} for mutation in chosen]
    table = [*summary(chosen, found), "", *details(chosen, found)]
    result.finish("mutations", table, {"values": VALUES, "defects": rows})
    if wrong:
        print(f"not as the list says: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
