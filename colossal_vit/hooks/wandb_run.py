"""The records of a run for Weights & Biases (https://wandb.ai), with the flag `--wandb`."""

import importlib.util
import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossal_vit import config as configs
from colossal_vit.errors import UserError, reason
from colossal_vit.files import write_text
from colossal_vit.launch.exits import Ending
from colossal_vit.parallel.collectives import RankLogger
from colossalai.context import Config

INIT_TIMEOUT = 60.0  # seconds for the server's first answer, which the other ranks wait for in their first step
FINISH_TIMEOUT = 20.0  # seconds for the last upload; 30 after a rank's end torchrun kills the others
MAX_NAME = 128  # characters that the server accepts


def check_installed() -> None:
    """Raise `UserError` if the package wandb is not installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # without origin: a folder of this name, in which wandb has kept runs
        raise UserError("--wandb needs the package wandb: pip install wandb")


def _read_id(file: Path) -> str | None:
    """Return the id of a run of Weights & Biases in a file; None if there is none, or it is damaged."""
    if not file.exists():
        return None
    said = file.read_bytes().decode(errors="replace").strip()
    return said if re.fullmatch(r"[\w-]{1,64}", said, re.ASCII) else None


class WandbRun:
    """A run of Weights & Biases, which is the same one again when the training resumes.

    Its id and its files are in `wandb/` of the run directory, its project has the example's name. wandb's environment
    variables apply, for example WANDB_MODE=offline, WANDB_PROJECT and WANDB_NAME.

    Args:
        directory: the run directory.
        config: the resolved config, which is recorded too.
        log: where it says which run it is, and that something failed.
    """

    def __init__(self, directory: Path, config: Config, log: RankLogger):
        self.directory, self.config, self.log = directory, config, log
        self.run = self._opened = None

    def open(self) -> None:
        """Begin or resume the run; if the server does not answer, offline.

        Raises:
            UserError: if there is no API key, or the server refuses it.
            OSError: if the run directory cannot be written.
        """
        import wandb  # takes seconds to import; only one rank needs it

        id_file = self.directory / "wandb" / "id.txt"
        options = {
            "project": os.environ.get("WANDB_PROJECT") or Path(sys.argv[0]).resolve().parent.name,
            "name": os.environ.get("WANDB_NAME") or self.directory.name[:MAX_NAME],
            "id": _read_id(id_file) or secrets.token_hex(4),
            "resume": "allow",
            "dir": str(self.directory),
            "config": configs.plain(self.config),
            "allow_val_change": True,
        }
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
        for mode, otherwise in ((None, "this run is recorded offline"), ("offline", "this run is not recorded there")):
            try:
                wandb.setup(settings)  # silent from here on: nobody can answer a question on all ranks
                self.run = self._opened = wandb.init(mode=mode, **options)
                break
            except Exception as error:  # whatever it is, training begins, unless the user can correct it
                said = " ".join(str(error).split()) or reason(error)
                refused = re.search(r"\berror 40[13]\b", said)  # the server's answer to a key
                if refused or isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError):
                    raise UserError(f"--wandb: {said} (WANDB_MODE=offline needs no login)") from None
                self.log.info(f"Weights & Biases: {said}; {otherwise}", ranks=None)
                wandb.teardown()  # which makes the id free again
        else:
            return
        id_file.parent.mkdir(exist_ok=True)  # with WANDB_MODE=disabled there is none
        write_text(id_file, f"{self.run.id}\n")
        self.run.define_metric("*", step_metric="step")  # wandb's own count of steps only grows, also after a resume
        where = f"offline, `wandb sync` uploads {self.run.settings.sync_dir}" if self.run.offline else self.run.url
        self.log.info(f"Weights & Biases: run {self.run.id} of {options['project']}: {where}", ranks=None)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; after an error, no further ones."""
        if self.run:
            try:
                self.run.log(record)
            except Exception as error:  # whatever it is, training continues
                self.run = None
                self.log.info(f"Weights & Biases: the records end here: {reason(error)}", ranks=None)

    def finish(self, ending: Ending) -> None:
        """End the run with an exit code, within `FINISH_TIMEOUT`."""
        if self._opened and not ending.after_another:
            with suppress(Exception):
                self._opened.finish(exit_code=ending.code)
