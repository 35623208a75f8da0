"""Results that can be made again: a folder with a table, every number, the log, and where they are from.

python -m colossal_vit.provenance RUN_DIRECTORY results/NAME --command "..." --log FILE

keeps a run as such a result.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from colossal_vit.files import protect_streams
from colossal_vit.results import CURVES, METRICS

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is WSL's


def has_driver() -> bool:
    """Return whether this machine has a driver for NVIDIA's GPUs; a container may show one of these signs only."""
    return bool(shutil.which("nvidia-smi")) or any(map(os.path.exists, DRIVERS))


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch can use here.

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


def provenance(command: str, changes_allowed: bool) -> dict[str, Any]:
    """Return what it takes to reproduce a result: command, commit, date, hardware, versions.

    Args:
        command: the command line.
        changes_allowed: record a working tree that differs from its commit instead of refusing it. Always on in a
            rehearsal (`scripts/gpu_check.sh --rehearse`), whose results are not kept. Results are no such difference.

    Raises:
        SystemExit: with one line, if the working tree differs from its commit or there is no commit to name.
    """
    changes_allowed = changes_allowed or "REHEARSE" in os.environ

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        # Programs that write several results change files of git in results/ before they take the next provenance.
        if git("status", "--porcelain", "--untracked-files=no", "--", ":(exclude)results"):
            if not changes_allowed:
                sys.exit("error: commit first: a result must name the commit that made it")
            commit += ", with changes"
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("COMMIT") or "unknown"
        if commit == "unknown" and not changes_allowed:
            sys.exit("error: no git repository: set COMMIT to the commit that this is a copy of")
    packages = ("torch", "torchvision", "colossalai", "timm", "nvidia-dali-cuda120", "nvidia-dali-cuda130")
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


class ResultFolder:
    """A folder for what a program finds, with the provenance taken at the start.

    Args:
        folder: where to write, created if missing; None writes nothing.
        changes_allowed: see `provenance`.
        command: what was typed; by default this process's command line.

    Attributes:
        origin: the `provenance` of the command; None without a folder.
        log: the contents of log.txt so far.

    Raises:
        SystemExit: with one line, if there is a folder and the working tree differs from its commit.
    """

    def __init__(self, folder: Path | None, changes_allowed: bool = False, command: str | None = None):
        protect_streams()
        self.folder = folder
        module = sys.modules["__main__"].__spec__  # of `python -m`, which puts the file's path into sys.argv
        is_module = module and module.origin == sys.argv[0]
        program = ["-m", module.name.removesuffix(".__main__")] if is_module else sys.argv[:1]
        command = command or shlex.join(["python", *program, *sys.argv[1:]])
        self.origin = provenance(command, changes_allowed) if folder else None
        self.log = ""

    def print(self, line: str) -> None:
        """Print a line and append it to the log."""
        print(line, flush=True)
        self.log += line + "\n"

    def write_origin(self) -> None:
        """Write `provenance.json` and, unless it is empty, `log.txt`, in which the repository's own path becomes `.`"""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.log:
            (self.folder / "log.txt").write_text(self.log.replace(str(ROOT), "."))
        (self.folder / "provenance.json").write_text(json.dumps(self.origin, indent=2) + "\n")

    def write(self, name: str, table: list[str], details: Any) -> None:
        """Write `<name>.md`, `<name>.json`, without the repository's own path, and what `write_origin` writes.

        Args:
            name: the stem of both file names.
            table: lines of Markdown.
            details: all measurements, JSON-serialisable.
        """
        if self.folder:
            self.write_origin()
            (self.folder / f"{name}.md").write_text("\n".join(table) + "\n")
            (self.folder / f"{name}.json").write_text(json.dumps(details, indent=2).replace(str(ROOT), ".") + "\n")

    def finish(self, name: str, table: list[str], details: Any) -> None:
        """Print the table, then `write`."""
        print("\n".join(table), flush=True)
        self.write(name, table, details)


def keep_run(directory: Path, folder: Path, command: str, log: Path) -> None:
    """Copy a run's metrics, curves and config to the folder of a result, with its log and provenance.

    Args:
        directory: the run directory.
        folder: of the result.
        command: the command line of the run.
        log: the file with its output.

    Raises:
        SystemExit: see `ResultFolder`.
    """
    result = ResultFolder(folder, command=command)
    result.log = log.read_text()
    result.write_origin()
    for name in (METRICS, *CURVES, "config.json"):
        shutil.copy(directory / name, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--command", required=True, help="what was typed")
    parser.add_argument("--log", required=True, type=Path, help="what it printed")
    args = parser.parse_args()
    keep_run(args.run, args.result, args.command, args.log)
