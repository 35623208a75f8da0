"""`--profile`: the time of the parts of a step."""

import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.collectives import RankLogger
from colossalai.accelerator import get_accelerator
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor
from torch.profiler import profile, record_function, schedule


def idle_time(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the microseconds in which a device runs no kernel on any stream, and those from its first to its last.

    Args:
        events: of a trace in Chrome's format, by one process with one device; copies are no kernels.
    """
    kernels = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel")
    if not kernels:
        return 0.0, 0.0
    idle, (first, end) = 0.0, kernels[0]
    for start, stop in kernels:
        idle += max(start - end, 0.0)
        end = max(end, stop)
    return idle, end - first


class ProfileHook(BaseHook):
    """`--profile`: traces one optimizer step and times the parts of others.

    The second step of the process is traced by torch's profiler into `profile-rank<N>.json`, for chrome://tracing or
    https://ui.perfetto.dev; on a GPU, its idle time in that step is reported, to which tracing adds. In the third the
    host's waits for the GPU are counted. In all later ones, waiting for data, forward, backward and update (gradient
    reduction, clipping, optimizer) are timed. Host and device are synchronised there at the end of each part, so that
    its device time is included; this makes steps slightly slower.

    Args:
        directory: the run directory.
        train_dataloader: as `engine.initialize` returned it; measures the time spent waiting for data.
        log: where the mean times are reported after training.
    """

    TRACED, COUNTED = 2, 3

    def __init__(self, directory: Path, train_dataloader: TrainLoader, log: RankLogger):
        super().__init__(Priority.READER)
        self.directory, self.train_dataloader, self.log = directory, train_dataloader, log
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update"), 0.0)
        self.made = 0  # steps
        self.step_s, self.num_timed = 0.0, 0
        self.idle_us = self.traced_us = 0.0
        self.counting = warnings.catch_warnings(record=True)
        self.caught: list[warnings.WarningMessage] | None = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with record_function(name):
            yield
            if self.made >= self.COUNTED:  # before, it would be a wait of the host, in which the device becomes idle
                get_accelerator().synchronize()
        if self.engine.model.training:  # not evaluating
            self.seconds[name] += time.perf_counter() - started

    def _export(self, profiler: profile) -> None:
        path = self.directory / f"profile-rank{gpc.get_global_rank()}.json"
        profiler.export_chrome_trace(str(path))
        if get_accelerator().get_current_device().type == "cuda":
            self.idle_us, self.traced_us = idle_time(json.loads(path.read_text())["traceEvents"])

    def before_train(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        self.engine.part = self._timed
        steps = schedule(wait=0, warmup=self.TRACED - 1, active=1, repeat=1)
        self.profiler = profile(schedule=steps, on_trace_ready=self._export)
        self.profiler.start()
        self._restart()

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._restart()

    def _restart(self) -> None:
        self.step_started, self.waited = time.perf_counter(), self.train_dataloader.data_s

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        self.made += 1
        if self.made == self.COUNTED - 1 and get_accelerator().get_current_device().type == "cuda":
            self.caught = self.counting.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self.made == self.COUNTED and self.caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self.counting.__exit__(None, None, None)
        if self.made > self.COUNTED:
            self.num_timed += 1
            self.step_s += time.perf_counter() - self.step_started
            self.seconds["data"] += self.train_dataloader.data_s - self.waited
        else:
            self.seconds = dict.fromkeys(self.seconds, 0.0)
            self.profiler.step()  # has no effect after the traced step
        self._restart()

    def after_train(self, trainer: Trainer) -> None:
        self.profiler.stop()
        if not self.num_timed:
            self.log.info(f"--profile times steps after the first {self.COUNTED}: let the run make more of them")
            return
        if self.caught is not None:
            waits = sum("called a synchronizing" in str(warning.message) for warning in self.caught)
            self.log.info(f"in a step the host waits for the device: {waits}")
        if self.traced_us:
            idle, traced = 1e-3 * self.idle_us, 1e-3 * self.traced_us
            self.log.info(f"in the traced step the device runs no kernel for {idle:.1f} of {traced:.1f} ms")
        step_s = self.step_s / self.num_timed
        means = {name: seconds / self.num_timed for name, seconds in self.seconds.items()}
        means["other"] = step_s - sum(means.values())
        said = ", ".join(f"{name} {1e3 * mean:.1f} ms ({mean / step_s:.1%})" for name, mean in means.items())
        self.log.info(f"a step takes {1e3 * step_s:.1f} ms, the mean of {self.num_timed}: {said}")
