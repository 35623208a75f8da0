"""Data parallelism beside a pipeline: gradients are averaged while the last backward pass still runs."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.engine.gradient_handler import BaseGradientHandler
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


class _Bucket:
    """Gradients that are averaged together.

    Attributes:
        parameters: that have them, all of one type.
        missing: how many gradients of backward passes it still waits for in this optimizer step.
        sum: their gradients one after another, from when they are complete.
        work: the all-reduce of `sum`; None before it starts.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.missing = 0
        self.sum: Tensor | None = None
        self.work: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to average; gradients that there are none of, on any replica, stay so."""
        gradients = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        if gradients:
            self.sum = torch.cat(gradients).div_(group.size())
            self.work = dist.all_reduce(self.sum, group=group, async_op=True)

    def finish(self) -> None:
        """Wait, and give the parameters their averages."""
        if self.work is not None:
            self.work.wait()
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            parts = self.sum.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        self.sum = self.work = None


class PipelineGradientHandler(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks, in buckets, each as soon as it is complete.

    A pipeline makes several backward passes a step, which DistributedDataParallel does not expect, and Colossal-AI's
    `DataParallelGradientHandler` starts after the last one. Buckets start in the same order on all replicas.

    Args:
        parameters: of the stage; backward passes reach them from the last to the first.
        group: the data-parallel ranks.
        num_passes: backward passes of a parameter in an optimizer step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, num_passes: int):
        self.group, self.num_passes = group, num_passes
        self.buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        open_buckets: dict[torch.dtype, tuple[_Bucket, int]] = {}
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            bucket, size = open_buckets.get(parameter.dtype, (None, BUCKET_BYTES))
            if size >= BUCKET_BYTES:
                bucket, size = _Bucket(), 0
                self.buckets.append(bucket)
            bucket.parameters.append(parameter)
            open_buckets[parameter.dtype] = bucket, size + parameter.numel() * parameter.element_size()
            self._bucket_of[parameter] = bucket
            parameter.register_post_accumulate_grad_hook(self._count)
        self._begin_step()

    def _begin_step(self) -> None:
        self._started = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters) * self.num_passes

    def _count(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].missing -= 1
        while self._started < len(self.buckets) and not self.buckets[self._started].missing:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._started].start(self.group)
        self._started += 1

    def handle_gradient(self) -> None:
        """Start what no backward pass has completed, and wait for all of it."""
        while self._started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()
        self._begin_step()
