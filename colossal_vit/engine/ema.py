"""An exponential moving average of the weights, of which each rank keeps its own piece."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """The average of the weights over optimizer steps, exact in every layout, since it is one of each element.

    Equals timm's `ModelEmaV3`: the first step's average is its weights, and the decay may grow to its full value, as
    1 - step^(-2/3). Buffers are not averaged.

    Args:
        pairs: of each parameter the model's own and the one that the optimizer updates, mostly the same.
        decay: share of the average so far in that after a step.
        warmup: whether the decay grows to that.
        publish: brings changed weights to the ranks that do not own them; None if every rank averages all its weights.

    Attributes:
        averages: by what the optimizer updates.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        decay: float,
        warmup: bool,
        publish: Callable[[], None] | None,
    ):
        self.pairs, self.publish = pairs, publish
        self.decay, self.warmup = decay, warmup
        self.averages = {master: master.detach().clone() for _, master in pairs}

    def decay_at(self, step: int) -> float:
        """Share of the average so far in that after optimizer step number `step`, from 1 on."""
        if step <= 1:
            return 0.0
        return min(self.decay, 1 - step ** (-2 / 3)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step number `step`."""
        if self.averages:  # else this rank owns no weights
            torch._foreach_lerp_(list(self.averages.values()), list(self.averages), 1 - self.decay_at(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are now."""
        for master, average in self.averages.items():
            average.copy_(master)

    @torch.no_grad()
    def _swap(self) -> None:
        for working, master in self.pairs:
            weights = master.clone()
            master.copy_(self.averages[master])
            self.averages[master].copy_(weights)
            if working is not master:
                working.copy_(master)
        if self.publish:
            self.publish()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block the model has the averages in place of its weights; an error in it leaves them there.

        Swapping is collective, and other ranks may have no error.
        """
        self._swap()
        yield
        self._swap()
