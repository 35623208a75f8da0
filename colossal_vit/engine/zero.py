"""Optimizer state split over the data-parallel ranks, known as ZeRO (S. Rajbhandari et al., arXiv:1910.02054)."""

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.engine.reduction import IN_FLIGHT_BYTES, GradientBucket, GradientReducer, make_buckets, split_flat
from torch import Tensor, nn
from torch.optim import Optimizer

LARGE_BYTES = 2**20  # size from which on a weight is sent alone: copying it would take longer than one more message


def assign_owners(parameters: Iterable[Tensor], num_ranks: int) -> dict[Tensor, int]:
    """Whole parameters to ranks, balanced by size: the largest first, each to the rank with the fewest elements so far.

    The result depends on the shapes and their order only, so that all ranks agree on it.

    Args:
        parameters: of this rank's part of the model.
        num_ranks: data-parallel size.

    Returns:
        The data-parallel rank of each parameter.
    """
    loads, owners = [0] * num_ranks, {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):  # stable
        owners[parameter] = loads.index(min(loads))
        loads[owners[parameter]] += parameter.numel()
    return owners


class WeightBroadcast:
    """The weights of a bucket on their way from their owner to all ranks, from the first moment on."""

    @torch.no_grad()
    def __init__(self, bucket: GradientBucket):
        self.is_owner = bucket.is_owner
        weights = [p.detach() for p in bucket.parameters]
        messages = [w for w in weights if w.nbytes >= LARGE_BYTES]  # sent in place
        self.small = [w for w in weights if w.nbytes < LARGE_BYTES]  # sent in one message
        if self.small:
            self.flat = torch.cat([w.flatten() for w in self.small])
            messages.append(self.flat)
        to_all = dict(group=bucket.group, group_src=bucket.owner, async_op=True)
        self.broadcasts = [dist.broadcast(message, **to_all) for message in messages]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the weights."""
        for broadcast in self.broadcasts:
            broadcast.wait()
        if self.small and not self.is_owner:
            torch._foreach_copy_(self.small, split_flat(self.flat, self.small))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in any `blocks` of a model, but for lists of modules, which nobody calls."""
    containers = [module for name, module in model.named_modules() if name.split(".")[-1] == "blocks"]
    lists = nn.ModuleList, nn.ModuleDict
    return [block for blocks in containers for block in blocks.children() if not isinstance(block, lists)]


class Zero:
    """Each parameter has an owner among the data-parallel ranks, which alone has its optimizer state and updates it.

    Gradients are reduced to the owners, and new weights broadcast from them during the next forward pass: as many bytes
    as an all-reduce of the gradients. Owners have whole parameters (under tensor parallelism, whole shards), so that
    LAMB's trust ratios are exact. With stage 2, only the owner keeps a gradient from one backward pass to the next.

    Args:
        parameters: those that are trained, of this rank's part of the model.
        optimizer: over these and frozen ones; keeps those that this rank owns, and the frozen ones.
        group: the data-parallel ranks.
        stage: 1 or 2.

    Attributes:
        owners: rank in `group` that owns a parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: Optimizer, group: dist.ProcessGroup, stage: int):
        self.group, self.stage = group, stage
        self.owners = assign_owners(parameters, group.size())
        for options in optimizer.param_groups:
            options["params"] = [p for p in options["params"] if self.owns(p)]
        self.buckets: list[GradientBucket] = []
        self._unsent: deque[GradientBucket] = deque()  # in the order in which they are waited for
        self._in_flight: dict[GradientBucket, WeightBroadcast] = {}

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has a parameter's optimizer state; all ranks have those of frozen parameters."""
        return self.owners.get(parameter, self.group.rank()) == self.group.rank()

    def reducer(self, model: nn.Module, num_passes: int, overlap: bool) -> GradientReducer:
        """Return the reduction of gradients to their owners.

        Args:
            model: in its final precision.
            num_passes: backward passes of an optimizer step.
            overlap: whether each block waits for its own weights in a forward pass; otherwise `before_forward` waits
                for all of them, which a compiled model needs.
        """
        # Not each layer: some of timm's read the weights of a layer within them without calling it.
        blocks = find_blocks(model) if overlap else []
        in_blocks = {parameter: None for block in blocks for parameter in block.parameters()}
        outside = [parameter for parameter in model.parameters() if parameter not in in_blocks]
        self.buckets = make_buckets(in_blocks, self.group, self.owners)
        bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for block in blocks:
            own = dict.fromkeys(bucket_of[p] for p in block.parameters() if p in bucket_of)
            block.register_forward_pre_hook(partial(self._receive, own))
        self._outside = make_buckets(outside, self.group, self.owners)
        self.buckets += self._outside
        return GradientReducer(self.buckets, 1 if self.stage == 2 else num_passes)

    def send_weights(self) -> None:
        """Start to broadcast the weights from their owners: those outside of blocks first, then the first blocks'.

        At most `IN_FLIGHT_BYTES` are on their way at a time; as they are received, more are sent.
        """
        self.receive_weights()  # some layers may not have been used in the last forward pass
        self._unsent = deque(reversed(self.buckets))
        self._send_more()

    def _send_more(self) -> None:
        while self._unsent and sum(b.nbytes for b in self._in_flight) < IN_FLIGHT_BYTES:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._unsent.popleft()
        self._in_flight[bucket] = WeightBroadcast(bucket)

    def _receive(self, buckets: Iterable[GradientBucket], *forward: Any) -> None:
        """Wait for the weights of some buckets; also the hook before the forward pass of a block that has them."""
        for bucket in buckets:
            while bucket in self._unsent:
                self._send_next()
            if bucket in self._in_flight:
                self._in_flight.pop(bucket).wait()
                self._send_more()

    def receive_weights(self) -> None:
        """Wait for all weights."""
        self._receive(reversed(self.buckets))

    def before_forward(self) -> None:
        """Wait for the weights for which no block waits; they are sent first."""
        self._receive(reversed(self._outside))

    def broadcast_weights(self) -> None:
        """Bring the owners' weights to all ranks now."""
        self.send_weights()
        self.receive_weights()
