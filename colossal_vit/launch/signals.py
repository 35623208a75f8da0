"""Signals that ask a run to stop, heard by any rank and obeyed by all after the same step."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL = 2.0  # seconds


def heard_signals() -> list[signal.Signals]:
    """Return the `SIGNALS` that are for this process: a shell's background jobs ignore SIGINT, and nohup's SIGHUP."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in SIGNALS if number not in ignored]


class StopRequests:
    """What any rank asks all ranks to do after the same step: to stop, on a signal, or to save a checkpoint.

    SLURM sends SIGUSR1 and SIGTERM before a time limit, a preemption or a cancellation; SIGINT is Ctrl-C, and
    SIGHUP the end of a terminal or an ssh connection. No rank may act on a signal alone, since the others would wait
    for it in the next collective, and waiting for one another's answer in every step would cost time. So the ranks
    exchange what they have heard by an asynchronous all-reduce, begun after a step and finished after the next one: all
    know one step later. A second signal has its default effect, unless it comes within `SAME_SIGNAL` seconds: Ctrl-C
    reaches a rank twice, from the terminal and from torchrun.
    """

    def __init__(self):
        self._heard, self._heard_at, self._save = 0, 0.0, False
        self._asked: tuple[Tensor, dist.Work] | None = None
        self._alone = gpc.get_world_size(ParallelMode.GLOBAL) == 1

    def listen(self) -> None:
        """Hear signals from now on, in place of their default effects."""
        self._usual = {number: signal.signal(number, self._on_signal) for number in heard_signals()}

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if not self._heard:
            self._heard, self._heard_at = number, now
        elif (self._heard, number) == (signal.SIGHUP, signal.SIGTERM):
            pass  # from `parent`, since the shell has ended with its terminal
        elif now - self._heard_at > SAME_SIGNAL:
            self._restore_handlers()
            os.kill(os.getpid(), number)

    def _restore_handlers(self) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def ask(self, save: bool) -> None:
        """Tell the other ranks the signal that this one has heard, and whether it wants to save. Collective."""
        self._save = save
        if not self._alone:
            request = torch.tensor([self._heard, int(save)])
            group = gpc.get_cpu_group(ParallelMode.GLOBAL)
            self._asked = request, dist.all_reduce(request, dist.ReduceOp.MAX, group=group, async_op=True)

    def answer(self) -> tuple[int, bool]:
        """Return a signal that any rank had heard when last asked, or 0, and whether any wanted to save. Collective."""
        if self._alone:
            return self._heard, self._save
        if self._asked is None:
            return 0, False
        (request, work), self._asked = self._asked, None
        work.wait()
        heard, save = request.tolist()
        return heard, bool(save)

    def close(self) -> None:
        """Finish the exchange, and give signals their usual effects back. Collective."""
        self.answer()
        self._restore_handlers()
