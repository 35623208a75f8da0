"""What is to be planned: a train script with its command line, and its model as forks of this process see it."""

from functools import partial
from typing import Any, NamedTuple

import torch
from colossal_vit.dry_run.meter import measure
from colossal_vit.dry_run.report import in_fork, in_forks
from colossal_vit.launch.flags import Arguments
from colossal_vit.launch.launchers import planned_rendezvous
from colossal_vit.main import Script, read_config
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config

from tools.planner.enumeration import Choice, enumerate_layouts, is_hybrid
from tools.planner.trace import TensorParallel, Trace, trace

TRACED_IMAGES = 8  # per part of a batch; traces have half of it, too


class Request(NamedTuple):
    """What a command line asks for.

    Attributes:
        script: the train script.
        args: its command line, with `--dry-run`.
        config: loaded from it, with the DEPTH of the model.
        world_size: number of ranks.
    """

    script: Script
    args: Arguments
    config: Config
    world_size: int

    @property
    def images(self) -> int:
        """Images of a step: GLOBAL_BATCH, or what the config's own layout makes of BATCH_SIZE.

        Raises:
            UserError: if that layout does not fit the number of ranks.
        """
        config = self.config
        return config.get("GLOBAL_BATCH") or Layout.of(config, self.world_size).global_batch(config)

    def choices(self) -> list[Choice]:
        """Return every layout of the model that makes as many images.

        Raises:
            UserError: if model or config do not fit.
        """
        config = self.config
        check = self.args.check if is_hybrid(config) else None  # timm's are the same in all layouts
        found = enumerate_layouts(config, self.world_size, self.images, check)
        if check and not found:
            check(config, Layout.of(config, self.world_size))
        return found

    def with_values(self, values: dict[str, Any], world_size: int) -> Arguments:
        """Return the command line with other config values and another number of ranks."""
        overrides = [*self.args.set, *(f"{key}={value!r}" for key, value in values.items())]
        return self.args.replace(set=overrides, world_size=world_size, rank=None, local_rank=None, backend=None)

    def trace(self, tensor: TensorParallel) -> Trace:
        """Return what a rank does with this tensor parallelism, recorded in a fork, of a model of two blocks."""
        mode, size, depth = tensor
        deep = {"depth": depth} if depth else {}
        parallel = {"pipeline": 1, "tensor": {"mode": mode, "size": size, **deep}}
        parts = Layout.of(Config({"parallel": parallel}), size).batch_parts
        values: dict[str, Any] = {"BATCH_SIZE": TRACED_IMAGES * parts, "gradient_accumulation": 1}
        values |= {"zero": None, "DEPTH": 2}
        if is_hybrid(self.config):
            values |= {"parallel": parallel, "NUM_MICRO_BATCHES": 1, "model": {"num_chunks": 1}, "CHECKPOINT": False}
        elif self.config.get("DROP_PATH_RATE"):
            values["DROP_PATH_UNIFORM"] = True  # the first of two blocks would have none, and it stands for all

        def traced() -> Trace:
            training = self.script.build_fake(self.with_values(values, size))
            return trace(training.engine, training.train_dataloader)

        return in_fork(traced)

    def memory(self, choice: Choice) -> float:
        """Return the peak bytes of the fullest rank of a layout, by dry runs in forks.

        That is a rank of the first stage, which has most micro-batches on their way; of the second, which may have more
        blocks; or of the last one, which has the head.
        """
        layout = choice.layout
        args = self.with_values(choice.settings(is_hybrid(self.config)), self.world_size)
        stages = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
        measured = [partial(_measure, self.script, args, stage * layout.tensor) for stage in stages]
        return max(in_forks(measured))


def _measure(script: Script, args: Arguments, rank: int) -> int:
    """Return the peak bytes of a rank; called in a fork."""
    training = script.build_fake(args, rank)
    return measure(training.engine, training.train_dataloader).memory["peak"]


def request_of(script: Script, args: Arguments) -> Request:
    """Return what a script and its command line ask for.

    Raises:
        UserError: if flags or config are not usable.
    """
    config, _ = read_config(args)
    world_size = planned_rendezvous(args, config).world_size
    own = Layout.of(config, world_size)
    if not is_hybrid(config):
        if args.check:
            args.check(config, own)
        with torch.device("meta"):
            config = Config({**config, "DEPTH": len(build_timm_vit(config).blocks)})
    return Request(script, args, config, world_size)
