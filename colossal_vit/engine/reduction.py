"""Gradient reduction for data parallelism with a pipeline, overlapped with the last backward pass."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.engine.gradient_handler import BaseGradientHandler
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel


class _Bucket:
    """Gradients that are averaged in one all-reduce.

    Attributes:
        parameters: whose gradients these are, all of one data type.
        missing: gradient accumulations still to come in this optimizer step.
        sum: the concatenated gradients; None until they are complete.
        work: the all-reduce of `sum`; None before it starts.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.missing = 0
        self.sum: Tensor | None = None
        self.work: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Start the all-reduce. Parameters without gradient, the same on all replicas, are left out."""
        gradients = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        if gradients:
            self.sum = torch.cat(gradients).div_(group.size())
            self.work = dist.all_reduce(self.sum, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, and copy the averages into the gradients."""
        if self.work is not None:
            self.work.wait()
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            parts = self.sum.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        self.sum = self.work = None


class PipelineGradientHandler(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks, in buckets, each as soon as it is complete.

    A pipeline makes several backward passes per step, which DistributedDataParallel does not support, and Colossal-AI's
    `DataParallelGradientHandler` starts only after the last one. Buckets start in the same order on all replicas.

    Args:
        parameters: of the pipeline stage, in forward order.
        group: the data-parallel ranks.
        num_passes: backward passes per optimizer step.
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
        """Start the remaining, incomplete buckets, and wait for all of them."""
        while self._started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()
        self._begin_step()
