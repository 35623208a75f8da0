"""Gradient reduction over the data-parallel ranks in buckets, overlapped with the backward pass."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from colossalai.legacy.engine.gradient_handler import BaseGradientHandler
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20  # the default of torch's DistributedDataParallel
IN_FLIGHT_BYTES = 4 * BUCKET_BYTES  # sent at a time; with half of it, training on CPUs was 6 % slower
DIRECT_SIZE = 4  # of the largest group on CPUs in which messages go straight from rank to rank, measured on 2 and 4
LARGE_BYTES = 2**20  # of a weight that is sent alone: copying it would take longer than one more message


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, in the shapes of some tensors."""
    return [part.view_as(tensor) for part, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _is_direct(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether gradients and weights like this one are sent straight from rank to rank: in small groups on CPUs.

    In large groups, the owner of a large parameter would send much more than the others.
    """
    return tensor.device.type == "cpu" and group.size() <= DIRECT_SIZE


class _Messages:
    """Messages between ranks, of which `wait()` waits for all."""

    def __init__(self, messages: list[dist.Work]):
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


class _DirectSum(_Messages):
    """The sum of a tensor over a group's ranks, which all the others send straight to its owner.

    It takes a third less time than gloo's `reduce`, which passes sums on from rank to rank.
    """

    def __init__(self, tensor: Tensor, owner: int, group: dist.ProcessGroup):
        self._tensor = tensor
        self._received: list[Tensor] = []
        if group.rank() != owner:
            super().__init__([dist.isend(tensor, group=group, group_dst=owner)])
            return
        senders = [rank for rank in range(group.size()) if rank != owner]
        self._received = [torch.empty_like(tensor) for _ in senders]
        pairs = zip(self._received, senders, strict=True)
        super().__init__([dist.irecv(part, group=group, group_src=rank) for part, rank in pairs])

    def wait(self) -> None:
        super().wait()
        for part in self._received:
            self._tensor.add_(part)


def reduce_to_owner(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Any:
    """Start to sum a tensor over the ranks of a group, into that of `owner`; `wait()` of what is returned ends it."""
    if _is_direct(tensor, group):
        return _DirectSum(tensor, owner, group)
    return dist.reduce(tensor, group=group, group_dst=owner, async_op=True)


def broadcast_from_owner(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Any:
    """Start to bring a tensor from `owner` to all ranks of a group; `wait()` of what is returned ends it.

    Straight from the owner to each of the others, if they are few and on CPUs: with gloo's `broadcast`, training was
    3 % slower.
    """
    if not _is_direct(tensor, group):
        return dist.broadcast(tensor, group=group, group_src=owner, async_op=True)
    if group.rank() != owner:
        return dist.irecv(tensor, group=group, group_src=owner)
    others = [(owner + distance) % group.size() for distance in range(1, group.size())]
    return _Messages([dist.isend(tensor, group=group, group_dst=rank) for rank in others])


class Bucket:
    """Parameters of one data type whose gradients are averaged together, and whose weights are broadcast together.

    Args:
        group: the data-parallel ranks.
        owner: the rank in `group` that alone gets the averages, and has the new weights; None if all do.

    Attributes:
        parameters: those in the bucket.
    """

    def __init__(self, group: dist.ProcessGroup, owner: int | None = None):
        self.group, self.owner = group, owner
        self.used_here = owner is None or owner == group.rank()
        self.parameters: list[nn.Parameter] = []
        self._sum: Tensor | None = None
        self._parts: dict[nn.Parameter, Tensor] = {}  # of `_sum`
        self._taken: set[nn.Parameter] = set()  # those whose gradients are in `_sum`
        self._reduction: Any = None
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._small: list[nn.Parameter] = []  # those whose weights are in `_weights`
        self._weights: Tensor | None = None
        self._broadcasts: list[Any] = []

    @cached_property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    @property
    def received_bytes(self) -> int:
        """Of the buffers for the other ranks' gradients, which an owner has if they are sent to it directly."""
        received = self.owner == self.group.rank() and _is_direct(self.parameters[0], self.group)
        return self.nbytes * (self.group.size() - 1) if received else 0

    @property
    def full(self) -> bool:
        """Whether all gradients are there, and their reduction has not started."""
        return self._reduction is None and len(self._taken) == len(self.parameters)

    @property
    def waiting(self) -> bool:
        """Whether there are gradients whose reduction has not started."""
        in_bucket = bool(self._taken) and self._reduction is None
        return in_bucket or any(p.grad is not None for p in self.parameters)

    def take(self, parameter: nn.Parameter) -> None:
        """Move a gradient from the parameter into the bucket."""
        self.finish()  # of an earlier pass
        if self._sum is None:
            self._sum = parameter.grad.new_empty(sum(p.numel() for p in self.parameters))
            self._parts = dict(zip(self.parameters, _split(self._sum, self.parameters), strict=True))
        part, share = self._parts[parameter], 1 / self.group.size()
        if parameter in self._taken:
            part.add_(parameter.grad, alpha=share)
        else:
            torch.mul(parameter.grad, share, out=part)
        parameter.grad = None
        self._taken.add(parameter)

    def reduce(self) -> None:
        """Start to average the gradients. On all replicas the same parameters have one."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.take(parameter)
        for parameter, part in self._parts.items():
            if parameter not in self._taken:
                part.zero_()
        if self.owner is None:
            self._reduction = dist.all_reduce(self._sum, group=self.group, async_op=True)
        else:
            self._reduction = reduce_to_owner(self._sum, self.owner, self.group)

    def finish(self) -> None:
        """Wait for the averages, if gradients are being reduced, and free what other ranks own."""
        if self._reduction is None:
            return
        self._reduction.wait()
        for parameter, average in self._parts.items() if self.used_here else ():
            if parameter in self._averages:
                self._averages[parameter].add_(average)
            elif parameter in self._taken:
                self._averages[parameter] = average
        self._reduction = self._sum = None
        self._parts, self._taken = {}, set()

    def hand_over(self) -> None:
        """Wait, and make the sums of all averages so far the gradients of the parameters, where they are used."""
        self.finish()
        for parameter, average in self._averages.items():
            parameter.grad = average
        self._averages = {}

    @torch.no_grad()
    def send_weights(self) -> None:
        """Start to broadcast the weights from the owner: large ones in place, the others in one message."""
        messages = [p.detach() for p in self.parameters if p.nbytes >= LARGE_BYTES]
        self._small = [p for p in self.parameters if p.nbytes < LARGE_BYTES]
        if self._small:
            self._weights = torch.cat([p.flatten() for p in self._small])
            messages.append(self._weights)
        self._broadcasts = [broadcast_from_owner(message, self.owner, self.group) for message in messages]

    @torch.no_grad()
    def receive_weights(self) -> None:
        """Wait for the weights, if they are being broadcast."""
        for broadcast in self._broadcasts:
            broadcast.wait()
        if self._small and not self.used_here:
            torch._foreach_copy_(self._small, _split(self._weights, self._small))
        self._broadcasts, self._small, self._weights = [], [], None


def make_buckets(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, owners: Mapping[nn.Parameter, int]
) -> list[Bucket]:
    """Buckets of the trained parameters, in the order of the backward pass.

    About `BUCKET_BYTES` of consecutive parameters make one bucket, or as many as they have owners.

    Args:
        parameters: in forward order.
        group: the data-parallel ranks.
        owners: rank in `group` that owns a parameter; those not listed belong to all.
    """
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, dict[int | None, Bucket]] = {}
    sizes: dict[torch.dtype, int] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        dtype, owner = parameter.dtype, owners.get(parameter)
        if sizes.get(dtype, BUCKET_BYTES) >= BUCKET_BYTES:
            filling[dtype], sizes[dtype] = {}, 0
        if owner not in filling[dtype]:
            buckets.append(Bucket(group, owner))
            filling[dtype][owner] = buckets[-1]
        filling[dtype][owner].parameters.append(parameter)
        sizes[dtype] += parameter.nbytes
    return buckets


class GradientReducer(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks, in buckets, each as soon as it is complete.

    DistributedDataParallel does not support the several backward passes that a pipeline makes per step, nor owners;
    Colossal-AI's `DataParallelGradientHandler` starts only after the last backward pass. Buckets start in the same
    order on all replicas. At most `IN_FLIGHT_BYTES` are being sent at a time, and as many received, since a bucket's
    buffers are freed only when it has arrived.

    Args:
        buckets: see `make_buckets`.
        num_passes: backward passes after which a gradient is complete: those of an optimizer step, or 1 to reduce in
            each pass, so that gradients of parameters that other ranks own need not be kept.
    """

    def __init__(self, buckets: list[Bucket], num_passes: int):
        self.buckets, self.num_passes = buckets, num_passes
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._count)
        self._in_flight: deque[Bucket] = deque()
        self._begin()

    def _begin(self) -> None:
        self._started = 0
        self._passes_left = dict.fromkeys(self._bucket_of, self.num_passes)

    def _count(self, parameter: nn.Parameter) -> None:
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] != 0:
            return
        self._bucket_of[parameter].take(parameter)  # now, while it is in the cache
        while self._started < len(self.buckets) and self.buckets[self._started].full:
            bucket = self.buckets[self._started]
            bucket.reduce()
            self._started += 1
            self._in_flight.append(bucket)
            while self._too_much_in_flight():
                self._in_flight.popleft().finish()
        if self._started == len(self.buckets):
            self._begin()

    def _too_much_in_flight(self) -> bool:
        sent = sum(bucket.nbytes for bucket in self._in_flight)
        received = sum(bucket.received_bytes for bucket in self._in_flight)
        return max(sent, received) > IN_FLIGHT_BYTES

    def handle_gradient(self) -> None:
        """Reduce what is left in incomplete buckets, and wait for all of them."""
        for bucket in self.buckets:
            if bucket.waiting:
                bucket.reduce()
        for bucket in self.buckets:
            bucket.hand_over()
        self._in_flight.clear()
        self._begin()
