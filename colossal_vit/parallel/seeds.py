"""The random numbers of each rank."""

from colossalai.legacy.context import ParallelMode
from colossalai.legacy.context.random import add_seed, reset_seeds, set_mode
from colossalai.legacy.core import global_context as gpc


def seed_ranks(seed: int) -> None:
    """Seed every rank, on CPU and CUDA alike.

    Two streams of random numbers: DATA for activations that the tensor-parallel ranks hold in common, TENSOR for those
    they split. Both differ between data-parallel ranks and pipeline stages. In 2.5D the ranks of one depth split the
    activations, and those of another depth hold the same once more.
    """
    tensor = gpc.config.parallel.tensor
    part = gpc.get_local_rank(ParallelMode.TENSOR) % (tensor.size // tensor.get("depth", 1))
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if gpc.is_initialized(ParallelMode.PIPELINE) else 0
    replica = gpc.get_local_rank(ParallelMode.DATA)
    reset_seeds()
    base = seed + 1_000_003 * (stage * gpc.get_world_size(ParallelMode.DATA) + replica)
    add_seed(ParallelMode.DATA, base)
    add_seed(ParallelMode.TENSOR, base + 1009 * (1 + part))
    set_mode(ParallelMode.DATA)
