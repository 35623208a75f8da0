"""Optimizer state split over the data-parallel ranks, known as ZeRO (S. Rajbhandari et al., arXiv:1910.02054)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from colossal_vit.engine.reduction import Bucket, GradientReducer, make_buckets
from colossal_vit.parallel.owners import assign_owners
from torch import nn
from torch.optim import Optimizer


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
            options["params"] = [p for p in options["params"] if self.has(p)]
        self.buckets: list[Bucket] = []

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has a parameter's optimizer state; all ranks have those of frozen parameters."""
        return self.owners.get(parameter, self.group.rank()) == self.group.rank()

    def reducer(self, model: nn.Module, num_passes: int, overlap: bool) -> GradientReducer:
        """The reduction of gradients to their owners.

        Args:
            model: in its final precision.
            num_passes: backward passes of an optimizer step.
            overlap: whether each layer waits for its own weights in a forward pass; otherwise `before_forward` waits
                for all of them, which a compiled model needs.
        """
        self.buckets = make_buckets(model.parameters(), self.group, self.owners)
        self.overlap = overlap
        if overlap:
            bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
            for module in model.modules():
                own = {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
                if own:
                    module.register_forward_pre_hook(_receive_first(own))
        return GradientReducer(self.buckets, 1 if self.stage == 2 else num_passes)

    def send_weights(self) -> None:
        """Start to broadcast all weights from their owners, those of the first layers first."""
        for bucket in reversed(self.buckets):
            bucket.send_weights()

    def receive_weights(self) -> None:
        """Wait for all weights."""
        for bucket in self.buckets:
            bucket.receive_weights()

    def before_forward(self) -> None:
        """Wait for all weights, unless each layer waits for its own."""
        if not self.overlap:
            self.receive_weights()

    def publish_weights(self) -> None:
        """Bring the owners' weights to all ranks now."""
        self.send_weights()
        self.receive_weights()


def _receive_first(buckets: Iterable[Bucket]) -> Callable[[nn.Module, Any], None]:
    def receive(module: nn.Module, inputs: Any) -> None:
        for bucket in buckets:
            bucket.receive_weights()

    return receive
