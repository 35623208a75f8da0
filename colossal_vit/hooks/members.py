"""Who was there: the processes of an elastic run, from each step on at which it has begun or resumed."""

import json
import socket
from collections import Counter

from colossal_vit.engine.loop import Trainer
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.collectives import all_gather_object, run_on_rank_0
from colossal_vit.run import Run
from colossalai.legacy.trainer.hooks import BaseHook

MEMBERS = "members.jsonl"  # in the run directory


class MembersHook(BaseHook):
    """Appends a line to `members.jsonl` whenever the run begins or resumes: steps made, layout, processes by host.

    Args:
        run: from `main.start`.
    """

    def __init__(self, run: Run):
        super().__init__(Priority.READER)
        self.run = run

    def before_train(self, trainer: Trainer) -> None:
        hosts = Counter(all_gather_object(socket.gethostname()))
        record = {"step": trainer.engine.num_steps, "layout": self.run.layout.short, "hosts": hosts}

        def append() -> None:
            path = self.run.output / MEMBERS
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            except OSError as error:
                self.run.log.info(f"{path}: cannot be written: {error.strerror or error}")

        run_on_rank_0(append)
