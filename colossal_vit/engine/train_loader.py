"""The engine's view of a data loader."""

import time
from collections.abc import Iterator

from colossal_vit.data.batches import Loader, LoaderWrapper
from colossal_vit.errors import UserError
from torch.profiler import record_function


class TrainLoader(LoaderWrapper):
    """A data loader cut to whole optimizer steps, which measures the time spent waiting for data.

    Args:
        loader: yields micro-batches.
        accumulation: micro-batches per optimizer step.

    Attributes:
        data_s: total seconds spent waiting for batches.
        start: the first micro-batch of the next epoch, see `seek`.
        taken: micro-batches of the current epoch delivered so far, skipped ones included.

    Raises:
        UserError: if an epoch has less than one optimizer step.
    """

    def __init__(self, loader: Loader, accumulation: int):
        super().__init__(loader)
        self.num_micro_batches = len(loader) // accumulation * accumulation
        if not self.num_micro_batches:
            if not len(loader):
                raise UserError(
                    "an epoch has no batch of BATCH_SIZE for each rank: start fewer processes or lower BATCH_SIZE"
                )
            raise UserError(
                f"gradient_accumulation = {accumulation}, but an epoch has only {len(loader)} batches on each rank: "
                f"lower gradient_accumulation or BATCH_SIZE"
            )
        self.data_s, self.start, self.taken = 0.0, 0, 0

    def __len__(self) -> int:
        return self.num_micro_batches

    def seek(self, epoch: int, start: int) -> None:
        self.start = start
        if start < self.num_micro_batches:
            super().seek(epoch, start)
        else:  # nothing is left of the epoch but its evaluation, so that the loader's next batches are the next one's
            super().seek(epoch + 1, 0)

    def __iter__(self) -> Iterator:
        self.taken, self.start = self.start, 0
        return self._batches()

    def _batches(self) -> Iterator:
        batches = iter(self.loader)
        while self.taken < self.num_micro_batches:
            started = time.perf_counter()
            with record_function("data"):
                batch = next(batches)
            self.data_s += time.perf_counter() - started
            self.taken += 1
            yield batch
