"""Evaluation of features by k nearest neighbours, in any layout.

A test image gets the class that most of its nearest training images have, each with the weight exp(s / τ) for the
cosine s of the two images' features; k = 20 and τ = 0.07 are those of Z. Wu et al., "Unsupervised Feature Learning via
Non-Parametric Instance Discrimination", arXiv:1805.01978. Features are what the head sees.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from colossal_vit.data.batches import IGNORED, Loader
from colossal_vit.data.samplers import own_outputs
from colossal_vit.engine.engine import Engine
from colossal_vit.parallel.ranks import RankLogger, gather_object, run_on_rank_0
from torch import Tensor, nn

NUM_NEIGHBOURS, TEMPERATURE = 20, 0.07
CHUNK = 1024  # test images that are compared with all training images at a time


class FeatureShard(NamedTuple):
    """What a rank has of the features of some images."""

    rows: Tensor  # places of the images in the data set (n,)
    labels: Tensor  # (n,)
    features: Tensor  # (n, elements), all of them or those of this tensor-parallel rank


@contextmanager
def _inputs_of_head(engine: Engine) -> Iterator[list[Tensor]]:
    """Inside the block the list receives what goes into the head, a tensor for each micro-batch."""
    seen: list[Tensor] = []
    heads = [m.head for m in engine.bare_model.modules() if isinstance(getattr(m, "head", None), nn.Module)]
    hooks = [head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float().cpu())) for head in heads]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _own_shard(engine: Engine, loader: Loader) -> FeatureShard | None:
    """This rank's features of all batches; None on ranks without the head."""
    shards = []
    engine.eval()
    batches = iter(loader)
    with torch.no_grad(), _inputs_of_head(engine) as seen:
        for number in range(len(loader)):
            _, labels, _ = engine.execute_schedule(batches, forward_only=True, return_loss=False)
            if seen:
                own, rows = own_outputs(number, len(labels), len(seen))
                shards.append((rows, labels.cpu()[own], torch.cat(seen)))
                seen.clear()
    return FeatureShard(*map(torch.cat, zip(*shards, strict=True))) if shards else None


def _join(shards: Iterable[FeatureShard | None]) -> tuple[Tensor, Tensor]:
    """Features and labels of all images, from the shards of all ranks in the order of the ranks.

    Ranks with the same rows have parts of the features, or copies; which of them, is the same for all images. The order
    and the number of copies of a feature's elements make no difference to cosines.
    """
    same_rows: dict[bytes, list[FeatureShard]] = {}
    for shard in filter(None, shards):
        same_rows.setdefault(shard.rows.numpy().tobytes(), []).append(shard)
    rows, labels = (torch.cat([getattr(same[0], key) for same in same_rows.values()]) for key in ("rows", "labels"))
    features = torch.cat([torch.cat([shard.features for shard in same], dim=1) for same in same_rows.values()])
    order = rows.argsort()
    order = order[labels[order] != IGNORED]
    return features[order], labels[order]


def gather_features(engine: Engine, loader: Loader) -> tuple[Tensor, Tensor] | None:
    """The features of all images of a loader, and their labels, on rank 0; None elsewhere. Collective.

    Args:
        engine: has the model.
        loader: for evaluation, see `Loader.in_order`.

    Returns:
        Features (N, elements), the order of whose elements depends on the layout, and labels (N,), on the CPU.
    """
    everyone = gather_object(_own_shard(engine, loader))
    return everyone and _join(everyone)


def classify(features: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The classes (Q,) of queries (Q, elements) by their nearest neighbours among features (N, elements)."""
    known, votes = F.normalize(features), F.one_hot(labels).float()
    found = []
    for chunk in F.normalize(queries).split(CHUNK):
        cosines, nearest = (chunk @ known.T).topk(min(NUM_NEIGHBOURS, len(known)))
        weights = (cosines / TEMPERATURE).exp()
        found.append((votes[nearest] * weights.unsqueeze(-1)).sum(1).argmax(1))
    return torch.cat(found)


def evaluate_knn(engine: Engine, train: Loader, test: Loader, log: RankLogger) -> None:
    """Say how many test images their nearest training images classify right; the averaged weights, too. Collective.

    Args:
        engine: has the model.
        train: the loader of the training, whose images are taken unaugmented.
        test: the loader of the test images.
        log: what says it.

    Raises:
        UserError: if the training images cannot be had unaugmented.
    """
    device = next(engine.bare_model.parameters()).device

    def evaluate(whose: str) -> None:
        known, asked = gather_features(engine, train.in_order()), gather_features(engine, test)

        def compare() -> None:
            found = classify(*(tensor.to(device) for tensor in known), asked[0].to(device)).cpu()
            correct, count = int((found == asked[1]).sum()), len(found)
            log.info(
                f"k-NN accuracy{whose} {correct / count:.2%} ({correct} of {count} images), "
                f"{min(NUM_NEIGHBOURS, len(known[0]))} neighbours of {len(known[0])} training images"
            )

        run_on_rank_0(compare)

    evaluate("")
    if engine.ema:
        with engine.ema.in_the_model():
            evaluate(" of the EMA")
