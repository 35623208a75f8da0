"""Which sample goes where: the same in every layout, and each test image exactly once."""

from collections.abc import Iterator, Sequence

import torch
from colossal_vit.errors import UserError
from colossal_vit.parallel.sharding import split_batch
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from torch import Tensor


def data_place(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    """Data-parallel rank and size, as given or else of this process in the running layout; without one, the only."""
    if rank is not None:
        return rank, num_ranks
    if not gpc.is_initialized(ParallelMode.DATA):
        return 0, 1
    return gpc.get_local_rank(ParallelMode.DATA), gpc.get_world_size(ParallelMode.DATA)


class GlobalBatchSampler:
    """Indices of this rank's micro-batches, such that the k-th global batch is the same for every layout.

    The order of an epoch depends on the seed and the epoch only. Cut into global batches, it gives optimizer step k
    the same set of samples however many ranks share it and however many micro-batches it is made of. All ranks of one
    model (its pipeline stages and tensor-parallel ranks) get the same indices.

    Args:
        num_samples: size of the data set.
        batch_size: samples in a micro-batch of one data-parallel rank.
        accumulation: micro-batches of a rank in an optimizer step.
        seed: decides the order of every epoch.
        rank, num_ranks: see `data_place`.
        repeats: how often an image comes in an epoch, which has as many fewer images: repeated augmentation (M. Berman
            et al., arXiv:1902.05509). All its copies are in one global batch, but for those that the batch's end cuts
            off. Index i + c · num_samples is copy c of image i.
        shards: the samples in each file that they are in, one after the other; by default there is one.
        window: how many shards, in random order, are shuffled together before the next ones, so that a disk reads from
            few files at a time.

    Attributes:
        epoch: the next one.
        start: the micro-batch that it starts with.

    Raises:
        UserError: if the data set is smaller than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
        repeats: int = 1,
        shards: Sequence[int] | None = None,
        window: int = 1,
    ):
        self.num_samples, self.batch_size, self.accumulation, self.seed = num_samples, batch_size, accumulation, seed
        self.repeats, self.shards, self.window = repeats, shards or [num_samples], window
        self.rank, self.num_ranks = data_place(rank, num_ranks)
        self.global_batch_size = batch_size * accumulation * self.num_ranks
        self.epoch = self.start = 0
        if num_samples < self.global_batch_size:
            raise UserError(
                f"a global batch of {self.global_batch_size} (BATCH_SIZE {batch_size} × gradient_accumulation "
                f"{accumulation} × data parallel {self.num_ranks}) is larger than the training set of {num_samples}: "
                f"lower BATCH_SIZE or gradient_accumulation, or set DATA to a larger data set"
            )

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch; the last samples that fill no global batch are left out."""
        return self.num_samples // self.global_batch_size * self.accumulation

    def seek(self, epoch: int, start: int) -> None:
        """Go to micro-batch `start` of `epoch`."""
        self.epoch, self.start = epoch, start

    def generator(self, epoch: int) -> torch.Generator:
        """Return random numbers of an epoch, the same on every rank."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)

    def order(self, epoch: int) -> Tensor:
        """Return all samples in the order of an epoch, (num_samples,)."""
        generator = self.generator(epoch)
        if self.window >= len(self.shards):
            return torch.randperm(self.num_samples, generator=generator)
        shards = torch.arange(self.num_samples).split(self.shards)
        windows = torch.randperm(len(shards), generator=generator).split(self.window)
        together = (torch.cat([shards[number] for number in window]) for window in windows)
        return torch.cat([samples[torch.randperm(len(samples), generator=generator)] for samples in together])

    def __iter__(self) -> Iterator[Tensor]:
        """Index tensors of shape (batch_size,) of `self.epoch`, from number `self.start` on; the epoch moves on."""
        order = self.order(self.epoch)
        steps = self.num_samples // self.global_batch_size
        if self.repeats > 1:
            copies = torch.arange(self.repeats) * self.num_samples
            order = (order[:, None] + copies).flatten()[: steps * self.global_batch_size].view(steps, -1)
            # Neighbours, which may be mixed, are not copies of one image.
            order = torch.cat([order[:, copy :: self.repeats] for copy in range(self.repeats)], dim=1).flatten()
        order = order[: steps * self.global_batch_size].view(-1, self.num_ranks, self.batch_size)[self.start :]
        self.epoch, self.start = self.epoch + 1, 0
        return iter(order[:, self.rank])


class EvalSampler:
    """Indices of this rank's evaluation batches: every sample once over all ranks, every batch full.

    Full batches keep the shapes that a pipeline has agreed on; the places left over are filled with index -1, whose
    label is to be `IGNORED`.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int | None = None, num_ranks: int | None = None):
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.num_ranks = data_place(rank, num_ranks)

    def __len__(self) -> int:
        return -(-self.num_samples // (self.batch_size * self.num_ranks))

    def __iter__(self) -> Iterator[Tensor]:
        """Index tensors of shape (batch_size,)."""
        indices = torch.full((len(self) * self.num_ranks * self.batch_size,), -1)
        indices[: self.num_samples] = torch.arange(self.num_samples)
        return iter(indices.view(-1, self.num_ranks, self.batch_size)[:, self.rank])


def own_outputs(number: int, batch_size: int, micro_batches: int) -> tuple[Tensor, Tensor]:
    """For which images of batch `number` of an `EvalSampler` this rank computes outputs, in their order.

    2D, 2.5D and 3D split each micro-batch over the tensor-parallel ranks.

    Returns:
        Their places in this rank's batch, and in the data set; int64.
    """
    own = split_batch(torch.arange(batch_size).view(micro_batches, -1), dim=1).flatten()
    replica, replicas = data_place(None, None)
    return own, own + (number * replicas + replica) * batch_size
