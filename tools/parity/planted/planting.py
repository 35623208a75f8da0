"""Runs of programs in copies of the repository, each with another defect in its code."""

import gc
import hashlib
import importlib
import json
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from colossal_vit.provenance import ROOT

CONTROL = "no defect"


class Defect(Protocol):
    """A text that its file has exactly once, and what replaces it."""

    path: str
    old: str
    new: str


def planted(name: str, defect: Defect, content: bytes) -> bytes:
    """Return the file of a defect, with it.

    Args:
        name: of the defect.
        defect: the change.
        content: of the file, without it.

    Raises:
        ValueError: if its text is not there exactly once, or the file is not Python any more.
    """
    text = content.decode()
    if (count := text.count(defect.old)) != 1:
        raise ValueError(f"{name}: {defect.path} has its text {count} times")
    text = text.replace(defect.old, defect.new)
    try:
        compile(text, defect.path, "exec")
    except SyntaxError as error:
        raise ValueError(f"{name}: {defect.path} is not Python any more: {error}") from None
    return text.encode()


@dataclass(frozen=True, eq=False)
class Job:
    """A program in a copy of the repository.

    Attributes:
        name: of the defect, or `CONTROL`.
        conditions: what tells it from other jobs of that name.
        defect: None for a control.
        files: what the copy has, by path.
        program: takes the copy's folder; runs in a fork of this process, with a new session and its output in files.
        said: of the lines on stdout and stderr, the one that counts, if it is there.
        depends: what else the outcome depends on.
        limit: seconds that the program may take.
    """

    name: str
    conditions: str
    defect: Defect | None
    files: Mapping[str, bytes]
    program: Callable[[Path], None]
    said: Callable[[list[str], list[str]], str | None]
    depends: object
    limit: float

    @cached_property
    def key(self) -> str:
        """A digest of all that the outcome depends on."""
        change = self.defect and (self.defect.path, self.defect.old, self.defect.new)
        digest = hashlib.sha256(repr([self.name, self.conditions, change, self.depends]).encode())
        for name, content in self.files.items():
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


def _is_own(path: str | None) -> bool:
    """Return whether a file or folder is this repository's, and not of an environment in it."""
    return bool(path) and Path(path).is_relative_to(ROOT) and not Path(path).is_relative_to(sys.prefix)


def _become(job: Job, folder: Path) -> None:
    """Run the program of a job in this fork.

    Other packages, whose imports take longer than most programs, are those that the parent has imported.
    """
    os.setsid()
    for stream, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    own = [name for name, module in sys.modules.items() if _is_own(getattr(module, "__file__", None))]
    for name in set(own) - {"__main__"}:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if not _is_own(path))]
    if not Path(importlib.import_module("colossal_vit").__file__).is_relative_to(folder):
        sys.exit("this is not the code with the defect")
    job.program(folder)


class _TestRun:
    """A job that is running."""

    def __init__(self, job: Job):
        self.job = job
        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.folder = Path(self.scratch.name)
        for name, content in job.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            is_changed = job.defect and job.defect.path == name
            path.write_bytes(planted(job.name, job.defect, content) if is_changed else content)
        self.process = multiprocessing.get_context("fork").Process(target=_become, args=(job, self.folder))
        self.process.start()
        self.end = time.monotonic() + job.limit

    def finish(self) -> str:
        """Return what the program has said, or the last line on stderr."""
        late = time.monotonic() > self.end
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        out, err = ((self.folder / name).read_text(errors="replace").splitlines() for name in ("out", "err"))
        said = self.job.said(out, err) or (f"no end within {self.job.limit} s" if late else (err or ["nothing"])[-1])
        self.scratch.cleanup()
        return said.replace(self.scratch.name, "")


def _run_all(jobs: Sequence[Job], number: int, packages: Sequence[str]) -> Iterator[tuple[Job, str]]:
    waiting, running = deque(jobs), {}
    if waiting:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for name in packages:
            importlib.import_module(name)
        gc.freeze()
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # more ranks than cores: they interrupt less
    try:
        while waiting or running:
            while waiting and len(running) < number:
                run = _TestRun(waiting.popleft())
                running[run.process.sentinel] = run
            ended = multiprocessing.connection.wait(running, timeout=1.0)
            for sentinel in [s for s, run in running.items() if s in ended or time.monotonic() > run.end]:
                run = running.pop(sentinel)
                yield run.job, run.finish()
    finally:
        for run in running.values():
            run.finish()


def run_jobs(jobs: Sequence[Job], number: int, packages: Sequence[str], log: Path) -> Iterator[tuple[Job, str]]:
    """Yield each job with what its program says, those first whose outcome is known.

    Args:
        jobs: programs in copies.
        number: of those that run at a time.
        packages: what they import, but for this repository's modules; they are forks of a process that has.
        log: of earlier outcomes, which is added to.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    known = {line["key"]: line["said"] for line in lines}
    new = []
    for job in jobs:
        if job.key in known:
            yield job, known[job.key]
        else:
            new.append(job)
    for job, said in _run_all(new, number, packages):
        line = {"name": job.name, "conditions": job.conditions, "said": said, "key": job.key}
        with open(log, "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        yield job, said
