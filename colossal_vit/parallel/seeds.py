"""Seeds of the random number generators of each rank."""

from colossalai.legacy.context import ParallelMode
from colossalai.legacy.context.random import add_seed, reset_seeds, set_mode
from colossalai.legacy.core import global_context as gpc


def seed_ranks(seed: int) -> None:
    """Seed this rank's generators, on CPU or CUDA.

    Colossal-AI has two random streams: DATA for activations replicated on the tensor-parallel ranks, TENSOR for those
    split over them. Both differ between data-parallel ranks and pipeline stages. In 2.5D, activations are split over
    the ranks of one depth and replicated over depths, so ranks that differ only in depth have the same TENSOR stream.
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
