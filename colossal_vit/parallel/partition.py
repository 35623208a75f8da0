"""Which transformer blocks a pipeline stage has."""

import itertools

from colossalai.context import Config


def partition_blocks(config: Config, num_parts: int) -> list[range]:
    """Split the blocks into consecutive parts of nearly equal cost; the embedding adds to the first part's cost, the
    head to the last one's.

    Costs are multiplications per image, relative to a block's 12 D² N + 2 D N² for width D and N tokens (with an MLP
    ratio of 4). Every part gets one block; then each further block goes to the part with the lowest cost so far, which
    is optimal if all blocks cost the same. The last one, which may compute the class token only, is taken for another.
    """
    if num_parts == 1:  # the config of a timm model need not have the sizes
        return [range(config.DEPTH)]
    width, patches = config.HIDDEN_SIZE, (config.IMG_SIZE // config.PATCH_SIZE) ** 2
    tokens = patches + 1
    block = (4 + 2 * config.MLP_RATIO) * width**2 * tokens + 2 * width * tokens**2
    costs, sizes = [1.0] * num_parts, [1] * num_parts
    costs[0] += patches * width * 3 * config.PATCH_SIZE**2 / block
    costs[-1] += width * config.NUM_CLASSES / block
    for _ in range(config.DEPTH - num_parts):
        cheapest = costs.index(min(costs))
        costs[cheapest] += 1.0
        sizes[cheapest] += 1
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
