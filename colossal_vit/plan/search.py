"""`--plan`: the time and memory of every layout, and the best ones."""

import sys

from colossal_vit.plan import meter, report
from colossal_vit.plan.trace import trace


class PlanRequested(Exception):
    """Ends `launch.start` on purpose: the train script is to be planned."""

    def __init__(self, path, config, overrides, check, script):
        super().__init__()
        self.path, self.config, self.overrides, self.check, self.script = path, config, overrides, check, script


def traced(main, request, choice, observe=trace):
    parts = choice.layout.batch_parts
    one = {
        "parallel": {"pipeline": 1, "tensor": choice.settings()["parallel"]["tensor"]},
        "BATCH_SIZE": 8 * parts,
        "gradient_accumulation": 1,
        "zero": None,
    }
    if request.script == "train_hybrid":
        one |= {"NUM_MICRO_BATCHES": 1, "model": {"num_chunks": 1}, "CHECKPOINT": False}
    if "DEPTH" in request.config:
        one["DEPTH"] = 2

    def of_rank():
        meter.observe = observe
        sys.argv[1:] = ["--config", request.path, "--dry-run", "--world_size", str(choice.layout.tensor)]
        for override in [*request.overrides, *(f"{key}={value!r}" for key, value in one.items())]:
            sys.argv += ["--set", override]
        return main()

    return report.in_fork(of_rank)
