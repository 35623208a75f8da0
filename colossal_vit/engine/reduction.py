"""Gradient reduction over the data-parallel ranks in buckets, overlapped with the backward pass."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine.gradient_handler import BaseGradientHandler
from colossalai.legacy.global_variables import tensor_parallel_env
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel
IN_FLIGHT_BYTES = 4 * BUCKET_BYTES  # sent at a time; with half of it, training on CPUs was 6 % slower
DIRECT_SIZE = 4  # ranks up to which `_DirectSum` sums on CPUs, measured on 2 and 4


def split_flat(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, in the shapes of some tensors."""
    return [part.view_as(tensor) for part, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True)]


class _DirectSum:
    """The sum of a tensor over a group's ranks, which all the others send straight to its owner; `wait()` ends it.

    On few CPU ranks it takes a third less time than gloo's `reduce`, which passes sums on from rank to rank. In large
    groups, the owner of a large parameter would receive much more than the others.
    """

    def __init__(self, tensor: Tensor, owner: int, group: dist.ProcessGroup):
        self._tensor, self.received = tensor, []
        if group.rank() != owner:
            self._messages = [dist.isend(tensor, group=group, group_dst=owner)]
            return
        senders = [rank for rank in range(group.size()) if rank != owner]
        self.received = [torch.empty_like(tensor) for _ in senders]
        pairs = zip(self.received, senders, strict=True)
        self._messages = [dist.irecv(part, group=group, group_src=rank) for part, rank in pairs]

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        for part in self.received:
            self._tensor.add_(part)


def reduce_to_owner(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Any:
    """Start to sum a tensor over the ranks of a group, into that of `owner`; `wait()` of what is returned ends it."""
    if tensor.is_cpu and group.size() <= DIRECT_SIZE:
        return _DirectSum(tensor, owner, group)
    return dist.reduce(tensor, group=group, group_dst=owner, async_op=True)


class GradientBucket:
    """Parameters of one data type whose gradients are averaged together.

    Args:
        group: the data-parallel ranks.
        owner: the rank in `group` that alone gets the averages; None if all do.

    Attributes:
        parameters: those in the bucket.
        is_owner: whether this rank gets the averages.
    """

    def __init__(self, group: dist.ProcessGroup, owner: int | None):
        self.group, self.owner = group, owner
        self.is_owner = owner is None or owner == group.rank()
        self.parameters: list[nn.Parameter] = []
        self._reduced: list[nn.Parameter] = []  # the parameters whose gradients are in `_sum`
        self._sum: Tensor | None = None
        self._reduction: Any = None
        self._averages: dict[nn.Parameter, Tensor] = {}

    @cached_property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    def start(self) -> None:
        """Move the gradients from their parameters into one tensor, and start to average it."""
        self.finish()  # the reduction of an earlier pass
        self._reduced = [p for p in self.parameters if p.grad is not None]  # the same parameters on all replicas
        self._sum = torch.cat([p.grad.flatten() for p in self._reduced]).mul_(1 / self.group.size())
        for parameter in self._reduced:
            parameter.grad = None
        if self.owner is None:
            self._reduction = dist.all_reduce(self._sum, group=self.group, async_op=True)
        else:
            self._reduction = reduce_to_owner(self._sum, self.owner, self.group)

    def finish(self) -> None:
        """Wait for the averages, if gradients are being reduced, and free what other ranks own."""
        if self._reduction is None:
            return
        self._reduction.wait()
        if self.is_owner:
            for parameter, average in zip(self._reduced, split_flat(self._sum, self._reduced), strict=True):
                if parameter in self._averages:
                    self._averages[parameter].add_(average)
                else:
                    self._averages[parameter] = average
        self._reduction = self._sum = None

    def assign_gradients(self) -> None:
        """Wait, and make the sums of all averages so far the gradients of the parameters, on their owner."""
        self.finish()
        for parameter, average in self._averages.items():
            parameter.grad = average
        self._averages = {}


def make_buckets(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, owners: Mapping[nn.Parameter, int]
) -> list[GradientBucket]:
    """Buckets of the trained parameters, in the order of the backward pass.

    About `BUCKET_BYTES` of consecutive parameters make one bucket, or as many as they have owners.

    Args:
        parameters: in forward order.
        group: the data-parallel ranks.
        owners: rank in `group` that owns a parameter; those not listed belong to all.
    """
    buckets: list[GradientBucket] = []
    filling: dict[torch.dtype, dict[int | None, GradientBucket]] = {}
    sizes: dict[torch.dtype, int] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        dtype, owner = parameter.dtype, owners.get(parameter)
        if sizes.get(dtype, BUCKET_BYTES) >= BUCKET_BYTES:
            filling[dtype], sizes[dtype] = {}, 0
        if owner not in filling[dtype]:
            buckets.append(GradientBucket(group, owner))
            filling[dtype][owner] = buckets[-1]
        filling[dtype][owner].parameters.append(parameter)
        sizes[dtype] += parameter.nbytes
    return buckets


class GradientReducer(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks, in buckets, each as soon as it is complete.

    DistributedDataParallel does not support the several backward passes that a pipeline makes per step, nor owners;
    Colossal-AI's `DataParallelGradientHandler` starts only after the last backward pass. Buckets start in the same
    order on all replicas. At most `IN_FLIGHT_BYTES` are being reduced at a time, since a bucket's buffer is freed only
    when it has arrived.

    Args:
        buckets: see `make_buckets`.
        num_passes: backward passes after which a gradient is complete: those of an optimizer step, or 1 to reduce in
            each pass, so that gradients of parameters that other ranks own need not be kept.
    """

    def __init__(self, buckets: list[GradientBucket], num_passes: int):
        self.buckets, self.num_passes = buckets, num_passes
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._count)
        self._in_flight: deque[GradientBucket] = deque()
        self._begin()

    def _begin(self) -> None:
        self._num_started = 0
        self._passes_left = dict.fromkeys(self._bucket_of, self.num_passes)
        self._incomplete = {bucket: len(bucket.parameters) for bucket in self.buckets}  # gradients still to come

    def _count(self, parameter: nn.Parameter) -> None:
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] != 0:
            return
        self._incomplete[self._bucket_of[parameter]] -= 1
        while self._num_started < len(self.buckets) and not self._incomplete[self.buckets[self._num_started]]:
            bucket = self.buckets[self._num_started]
            bucket.start()
            self._num_started += 1
            self._in_flight.append(bucket)
            while sum(bucket.nbytes for bucket in self._in_flight) > IN_FLIGHT_BYTES:
                self._in_flight.popleft().finish()
        if self._num_started == len(self.buckets):
            self._begin()

    def handle_gradient(self) -> None:
        """Reduce what is left in incomplete buckets, and wait for all of them."""
        for bucket in self.buckets:
            if any(parameter.grad is not None for parameter in bucket.parameters):
                bucket.start()
        for bucket in self.buckets:
            bucket.assign_gradients()
        self._in_flight.clear()
        self._begin()


# By mode, groups of ranks whose product is the tensor-parallel one.
_GROUPS = {
    "1d": (ParallelMode.PARALLEL_1D,),
    "2d": (ParallelMode.PARALLEL_2D_ROW, ParallelMode.PARALLEL_2D_COL),
    "2.5d": (ParallelMode.PARALLEL_2P5D_ROW, ParallelMode.PARALLEL_2P5D_COL, ParallelMode.PARALLEL_2P5D_DEP),
    "3d": (ParallelMode.PARALLEL_3D_INPUT, ParallelMode.PARALLEL_3D_WEIGHT, ParallelMode.PARALLEL_3D_OUTPUT),
}


class CopiesHandler(BaseGradientHandler):
    """Gives copies of a parameter on several tensor-parallel ranks the gradient of the first of them, to the bit.

    Each averages over data-parallel ranks of its own. NCCL's order of summation is a communicator's, and from three
    ranks on rounding shows it: the copies would part, and a run that resumes from one of them would not be exact.

    Args:
        parameters: of this rank's part of the model, with the attribute `shard`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        used = [parameter for parameter in parameters if parameter.shard.in_use]
        # By group, in the same order on all ranks: what its ranks have the same piece of.
        modes = [mode for mode in _GROUPS[tensor_parallel_env.mode] if gpc.get_world_size(mode) > 1]
        self._copied = {mode: [p for p in used if mode not in p.shard.modes] for mode in modes}

    def handle_gradient(self) -> None:
        """Broadcast the gradients in one message over each group. Call when they are averaged."""
        for mode, parameters in self._copied.items():
            gradients = [p.grad for p in parameters if p.grad is not None]  # of the same parameters on all ranks
            if gradients:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.broadcast(flat, group=gpc.get_group(mode), group_src=0)
                torch._foreach_copy_(gradients, split_flat(flat, gradients))
