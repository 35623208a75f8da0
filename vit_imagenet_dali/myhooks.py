"""A hook that logs the training speed of each epoch."""

import statistics
from typing import Any

import torch
from colossal_vit.engine import precision
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.loop import Trainer
from colossal_vit.hooks.priority import Priority
from colossal_vit.model.mfu import peak_of, training_flops
from colossal_vit.parallel.collectives import RankLogger
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import nn


class ThroughputHook(BaseHook):
    """Logs after each epoch: global batch size, images/s, MFU if the device's peak is known, memory, time for data.

    Args:
        model: to count FLOPs of.
        device: this rank's.
        log: the run's logger.
    """

    def __init__(self, model: nn.Module, device: torch.device, log: RankLogger):
        super().__init__(Priority.READER)
        self.log = log
        self.peak = peak_of(device, precision.compute_dtype(gpc.config.fp16, device), gpc.config.TF32)
        self.flops = training_flops(model, gpc.config.IMG_SIZE) if self.peak else None

    def after_train_epoch(self, trainer: Trainer) -> None:
        if records := trainer.states.get("records"):  # on the rank where `MetricsHook` has them
            num_ranks = gpc.get_world_size(ParallelMode.DATA)
            epoch = f"epoch {trainer.cur_epoch} of {trainer.num_epochs}"
            self.log.info(f"{epoch}: {self.summary(trainer.engine, records, num_ranks)}", ranks=None)

    def summary(self, engine: Engine, records: list[dict[str, Any]], num_ranks: int) -> str:
        """Return one line about the steps of an epoch."""
        rate = statistics.median(record["images_per_s"] for record in records)
        waited, total = (sum(record[key] for record in records) for key in ("data_s", "step_s"))
        batch = engine.schedule.batch_size * engine.accumulation * num_ranks
        said = [f"total batch {batch:,}", f"{rate:,.0f} images/s ({rate / num_ranks:,.0f} a process)"]
        if self.peak:
            said.append(f"MFU {rate / num_ranks * self.flops / self.peak:.1%}")
        said += [f"peak memory {records[-1]['memory_gb']:.1f} GB", f"waited for data {waited / total:.1%}"]
        return ", ".join(said)
