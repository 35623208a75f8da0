"""Which data-parallel rank owns a parameter, if the optimizer state is split over them."""

from collections.abc import Iterable

from torch import Tensor


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
