"""Draw the curves of a run from its `metrics.jsonl`, and record results with their provenance.

python -m colossal_vit.results draw RUN_DIRECTORY ...
python -m colossal_vit.results record RUN_DIRECTORY results/NAME --command "..." --log FILE
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired

from colossal_vit import typed_json
from colossal_vit.errors import UserError
from colossal_vit.typed_json import RECORD, Count, Number, Positive
from typing_extensions import TypedDict

METRICS, CURVES = "metrics.jsonl", ("loss.png", "accuracy.png")  # in a run directory
DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is WSL's


class Step(TypedDict):
    """What is recorded of an optimizer step, see `hooks.metrics`; a norm that overflowed is no finite number."""

    __pydantic_config__ = RECORD
    step: Count
    epoch: Count
    loss: Number
    step_s: NotRequired[Positive]


class Evaluation(TypedDict):
    """What is recorded of an evaluation."""

    __pydantic_config__ = RECORD
    step: Count
    epoch: Count
    eval_loss: Number
    eval_accuracy: Number
    ema_loss: NotRequired[Number]
    ema_accuracy: NotRequired[Number]


def read_records(path: Path) -> tuple[list[tuple[bytes, Step | Evaluation]], list[str]]:
    """The records of a `metrics.jsonl`, each with its line, and what is wrong with each line that is none.

    Raises:
        OSError: if it cannot be read.
    """
    records, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            kind = Evaluation if b'"eval_loss"' in line else Step
            records.append((line, typed_json.parse(line, kind, f"{path}, line {number}")))
        except UserError as error:
            if line.endswith(b"\n"):  # else the run was killed while it wrote the line
                faults.append(str(error))
    return records, faults


def read_metrics(directory: Path) -> tuple[list[Step], list[Evaluation]]:
    """The records of a run's `metrics.jsonl`: those of steps, and those of evaluations; damaged lines are left out.

    Raises:
        OSError: if it cannot be read.
    """
    records = [record for _, record in read_records(directory / METRICS)[0]]
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def draw(directory: Path) -> None:
    """Write `loss.png` and `accuracy.png` into a run directory.

    Raises:
        OSError: if the directory has no `metrics.jsonl` or cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second to import; only one rank needs it, at the end

    steps, evaluations = read_metrics(directory)
    curves = {
        "loss.png": ("loss", [("training", steps, "loss"), ("test", evaluations, "eval_loss")]),
        "accuracy.png": ("test accuracy", [("test", evaluations, "eval_accuracy")]),
    }
    if averaged := [record for record in evaluations if "ema_loss" in record]:
        for filename, key in (("loss.png", "ema_loss"), ("accuracy.png", "ema_accuracy")):
            curves[filename][1].append(("test, EMA", averaged, key))
    for filename, (title, lines) in curves.items():
        figure = Figure(figsize=(7, 4.2), dpi=120)
        figure.subplots_adjust(bottom=0.14, right=0.96)
        axes = figure.add_subplot(xlabel="optimizer step", ylabel=title, title=f"{directory.name}: {title}")
        for label, records, key in lines:
            marker = None if records is steps else "o"
            axes.plot([r["step"] for r in records], [r[key] for r in records], label=label, marker=marker, markersize=3)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(directory / filename)


def has_driver() -> bool:
    """Whether this machine has a driver for NVIDIA's GPUs; a container may show one of these signs only."""
    return bool(shutil.which("nvidia-smi")) or any(map(os.path.exists, DRIVERS))


def gpu_names() -> list[str]:
    """The names of the GPUs that torch can use here.

    Asked in a new process: who asks starts CUDA, and no fork of a process that has done so can use a GPU.
    """
    if not has_driver():
        return []
    # A driver that is too old for this torch counts GPUs, and cannot name them.
    code = (
        "import json; from torch import cuda; "
        "print(json.dumps([cuda.get_device_name(n) for n in range(cuda.device_count() * cuda.is_available())]))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


def hardware() -> dict[str, Any]:
    """This machine's processor, its cores, and its GPUs."""
    path = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "gpus": gpu_names(),
    }


def provenance(command: str, changes_allowed: bool = False) -> dict[str, Any]:
    """What it takes to reproduce a result: command, commit, date, hardware, versions.

    Args:
        command: the command line.
        changes_allowed: record a working tree that differs from its commit instead of refusing it. Always on in a
            rehearsal (`scripts/gpu_check.sh --rehearse`), whose results are not kept.

    Raises:
        SystemExit: with one line, if the working tree differs from its commit or there is no commit to name.
    """
    root = Path(__file__).resolve().parents[1]
    changes_allowed = changes_allowed or "REHEARSE" in os.environ

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no"):
            if not changes_allowed:
                sys.exit("error: commit first: a result must name the commit that made it")
            commit += ", with changes"
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("COMMIT") or "unknown"
        if commit == "unknown" and not changes_allowed:
            sys.exit("error: no git repository: set COMMIT to the commit that this is a copy of")
    packages = ("torch", "torchvision", "colossalai", "timm", "nvidia-dali-cuda130")
    installed = {distribution.name for distribution in metadata.distributions()}
    return {
        "command": command,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages if name in installed},
        },
    }


def write_origin(result: Path, origin: dict, log: str) -> None:
    """Write `provenance.json` and, unless it is empty, `log.txt`, in which the repository's own path becomes `.`."""
    if log:
        (result / "log.txt").write_text(log.replace(str(Path(__file__).resolve().parents[1]), "."))
    (result / "provenance.json").write_text(json.dumps(origin, indent=2) + "\n")


def record(directory: Path, result: Path, command: str, log: Path) -> None:
    """Copy a run's metrics, curves and config to the folder `result`, and add the raw log and `provenance.json`.

    Args:
        directory: the run directory.
        result: the folder, created if missing.
        command: the command line of the run.
        log: the file with its output.

    Raises:
        SystemExit: see `provenance`.
    """
    origin = provenance(command)
    result.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, "loss.png", "accuracy.png", "config.json"):
        shutil.copy(directory / name, result / name)
    write_origin(result, origin, log.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="verb", required=True)
    drawing = commands.add_parser("draw", help="write loss.png and accuracy.png into run directories")
    drawing.add_argument("runs", nargs="+", type=Path)
    recording = commands.add_parser("record", help="keep a run under results/, with its provenance")
    recording.add_argument("run", type=Path)
    recording.add_argument("result", type=Path)
    recording.add_argument("--command", required=True, help="what was typed")
    recording.add_argument("--log", required=True, type=Path, help="what it printed")
    args = parser.parse_args()
    if args.verb == "draw":
        for run in args.runs:
            for fault in read_records(run / METRICS)[1]:
                print(f"left out: {fault}", file=sys.stderr)
            draw(run)
    else:
        record(args.run, args.result, args.command, args.log)
