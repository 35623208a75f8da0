"""Check that dropout masks are random numbers: 3 × 10^8 draws, beside as many of torch's dropout.

    python -m tools.parity.mask_statistics [--small] [--result results/mask_statistics]

Draws masks as training does, for several layers, optimizer steps, samples and seeds of a ViT-Ti, with three rates. Each
line of the table is a question whose answer is a p-value; the same is asked of torch's dropout. Exit code 1 if the
smallest p-value of ours, times the number of questions, is below 1 % (C. Bonferroni's correction). What is drawn is the
same in every run of this script. Takes two minutes on 2 cores.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.provenance import ResultFolder
from colossal_vit.rng import dropout, philox
from scipy import stats

RATES = (0.02, 0.1, 0.5)
SEED = 1024  # of the first rate; the next ones have the next seeds
ALARM = 0.01  # the probability that one of good masks' p-values is too small
OFTEN = 10  # a bin of a χ² test has at least so many expected


class Size(NamedTuple):
    """How much is drawn: (steps, layers, samples, tokens, channels) with one seed, (seeds, samples, tokens, channels)
    of one layer, and (layers, samples) of drop paths."""

    steps: int = 9
    blocks: int = 4  # with three dropout layers and two drop paths each
    samples: int = 16
    tokens: int = 197
    channels: int = 192
    seeds: int = 64
    paths: int = 50_000


Draw = Callable[[int, str, np.ndarray, int, int, float], np.ndarray]  # what is dropped, bool (B, tokens, channels)


def ours(seed: int, layer: str, samples: np.ndarray, tokens: int, channels: int, rate: float) -> np.ndarray:
    key = torch.tensor([seed, philox.word(layer), round(rate * philox.ONE)])
    ones = torch.ones(len(samples), tokens, channels)
    return dropout.drop(ones, torch.from_numpy(samples), key, 0, channels, False).numpy() == 0


def torchs(seed: int, layer: str, samples: np.ndarray, tokens: int, channels: int, rate: float) -> np.ndarray:
    """Draw as in training: with one generator, which draws on and on."""
    return F.dropout(torch.ones(len(samples), tokens, channels), rate).numpy() == 0


def both_sides(value: float) -> float:
    """Return the p-value of a statistic that may be too small or too large, from one side's."""
    return min(1.0, 2 * min(value, 1 - value))


def binomial(count: float, number: int, rate: float) -> float:
    """Return the p-value of a count of what happens with this rate."""
    return min(1.0, 2 * min(stats.binom.cdf(count, number, rate), stats.binom.sf(count - 1, number, rate)))


def distribution(values: np.ndarray, expected: stats.rv_discrete) -> float:
    """χ² of how often each value occurs, rare ones together with the next."""
    if len(values) < OFTEN:
        return 0.0  # almost nothing is dropped
    ends, together = [], 0.0  # the largest values of bins
    for value, share in enumerate(expected.pmf(np.arange(values.max() + 1))):
        together += share * len(values)
        if together >= OFTEN:
            ends, together = [*ends, value], 0.0
    shares = np.diff([0, *expected.cdf(ends[:-1]), 1])
    observed = np.bincount(np.searchsorted(ends[:-1], values), minlength=len(shares))
    return both_sides(stats.chisquare(observed, shares * len(values)).pvalue)


def both_dropped(rows: np.ndarray) -> np.ndarray:
    """For each pair of rows, how many elements both drop; rows (R, n) bool, n < 2^24 at a time in float32."""
    counts = np.zeros((len(rows), len(rows)))
    for part in np.array_split(rows, -(-rows.shape[1] // 4096), axis=1):
        part = torch.from_numpy(part.astype(np.float32))
        counts += (part @ part.T).numpy()
    return counts


def pairs(counts: np.ndarray, number: int, rate: float, which: np.ndarray) -> Iterator[tuple[str, int, float]]:
    """Yield whether pairs of rows of `number` elements are independent: χ² of all correlations, and the furthest pair.

    Args:
        counts: from `both_dropped`.
        number, rate: elements of a row, and how often one is dropped.
        which: of the pairs, bool like counts.
    """
    which = np.triu(which, 1)
    alone = np.diag(counts)
    covariance = counts - rate * (alone[:, None] + alone) + number * rate**2
    scores = covariance[which] / (np.sqrt(number) * rate * (1 - rate))
    yield "all correlations, χ²", len(scores), both_sides(stats.chi2.sf((scores**2).sum(), len(scores)))
    furthest = [binomial(extreme, number, rate**2) for extreme in (counts[which].min(), counts[which].max())]
    yield "furthest correlation", len(scores), min(1.0, 2 * len(scores) * min(furthest))


def questions(draw: Draw, rate: float, seed: int, size: Size) -> Iterator[tuple[str, int, float]]:
    """Yield what is asked, of how many numbers or pairs, and the p-value."""
    shape = size.samples, size.tokens, size.channels
    layers = [f"blocks.{n}.{part}" for n in range(size.blocks) for part in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")]
    if draw is ours:
        rate = round(rate * philox.ONE) / philox.ONE

    def samples(step: int, number: int) -> np.ndarray:
        return np.column_stack([np.full(number, step), np.arange(number)])

    dropped = np.empty((size.steps, len(layers), *shape), bool)
    for step, layer in product(range(size.steps), range(len(layers))):
        dropped[step, layer] = draw(seed, layers[layer], samples(step, size.samples), *shape[1:], rate)
    number, count = dropped.size, np.count_nonzero(dropped)
    yield "rate", number, binomial(count, number, rate)
    rows = dropped.reshape(-1, size.channels)
    yield "dropped channels of a token, χ²", len(rows), distribution(rows.sum(1), stats.binom(size.channels, rate))
    columns = dropped.sum(-2).ravel()
    yield "dropped tokens of a channel, χ²", columns.size, distribution(columns, stats.binom(size.tokens, rate))
    gaps = np.diff(np.flatnonzero(dropped))
    yield "runs of kept elements, χ²", gaps.size, distribution(gaps, stats.geom(rate))
    flat, lags = dropped.ravel(), range(1, 65)
    together = [np.count_nonzero(flat[lag:] & flat[:-lag]) for lag in lags]
    alone = [np.count_nonzero(flat[lag:]) + np.count_nonzero(flat[:-lag]) for lag in lags]
    sizes = flat.size - np.array(lags)
    covariance = np.array(together) - rate * np.array(alone) + sizes * rate**2
    square = (covariance**2 / sizes).sum() / (rate * (1 - rate)) ** 2
    yield "elements 1 to 64 apart, χ²", len(lags), both_sides(stats.chi2.sf(square, len(lags)))

    everything = np.ones((size.channels, size.channels), bool)
    for question, found, value in pairs(both_dropped(rows.T), len(rows), rate, everything):
        yield f"channels: {question}", found, value
    tokens = np.moveaxis(dropped, -2, 0).reshape(size.tokens, -1)
    for question, found, value in pairs(both_dropped(tokens), tokens.shape[1], rate, np.ones([size.tokens] * 2, bool)):
        yield f"tokens: {question}", found, value

    masks = dropped.reshape(-1, size.tokens * size.channels)
    counts, places = both_dropped(masks), np.indices(dropped.shape[:3]).reshape(3, -1)
    differ = places[:, :, None] != places[:, None]  # (step, layer, sample; masks; masks)
    names = {"steps": (1, 0, 0), "layers": (0, 1, 0), "samples": (0, 0, 1)}
    for name, only in names.items():
        which = (differ == np.array(only, bool)[:, None, None]).all(0)
        for question, found, value in pairs(counts, masks.shape[1], rate, which):
            yield f"{name}: {question}", found, value
    for question, found, value in pairs(counts, masks.shape[1], rate, differ.sum(0) > 1):
        yield f"two or three of these: {question}", found, value

    seeds = [*range(size.seeds // 2), *(2**32 - 1 - np.arange(size.seeds // 2))]
    masks = np.empty((len(seeds), *shape), bool)
    for row, other in enumerate(map(int, seeds)):
        torch.manual_seed(other)
        masks[row] = draw(other, layers[0], samples(0, size.samples), *shape[1:], rate)
    masks = masks.reshape(len(seeds), -1)
    yield "seeds: rate", masks.size, binomial(np.count_nonzero(masks), masks.size, rate)
    for question, found, value in pairs(both_dropped(masks), masks.shape[1], rate, np.ones([len(seeds)] * 2, bool)):
        yield f"seeds: {question}", found, value

    paths = [f"blocks.{n}.drop_path{which}" for n in range(size.blocks) for which in (1, 2)]
    masks = np.stack([draw(seed, path, samples(0, size.paths), 1, 1, rate).ravel() for path in paths])
    yield "drop paths: rate", masks.size, binomial(np.count_nonzero(masks), masks.size, rate)
    gaps = np.diff(np.flatnonzero(masks))
    yield "drop paths: runs of kept samples, χ²", gaps.size, distribution(gaps, stats.geom(rate))
    block = np.arange(len(paths)) // 2
    counts = both_dropped(masks)
    for name, which in {"the two of a block": block[:, None] == block, "of blocks": block[:, None] != block}.items():
        for question, found, value in pairs(counts, size.paths, rate, which):
            yield f"drop paths, {name}: {question}", found, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a hundredth of the draws, ours only")
    parser.add_argument("--result", type=Path, help="folder for the result (default: it is printed only)")
    args = parser.parse_args()
    result = ResultFolder(args.result)
    size = Size(3, 2, 4, 50, 48, 8, 2000) if args.small else Size()
    answers: dict[tuple[float, str], tuple[int, list[float]]] = {}
    for draw, (seed, rate) in product([ours] if args.small else [ours, torchs], enumerate(RATES, SEED)):
        torch.manual_seed(seed)
        for question, number, value in questions(draw, rate, seed, size):
            answers.setdefault((rate, question), (number, []))[1].append(value)
            result.print(f"{draw.__name__}, rate {rate}, {question}: p = {value:.4g}, of {number:,}")

    values = np.array([value for _, value in answers.values()]).T  # by draw
    smallest = {name: len(own) * own.min() for name, own in zip(("ours", "torch's"), values, strict=False)}
    draws = len(RATES) * (np.prod(size[:1]) * 3 * size.blocks + size.seeds) * np.prod(size[2:5])
    table = ["; ".join(f"{name}: {len(values[0])} × smallest p = {p:.3g}" for name, p in smallest.items())]
    table[0] = f"{draws:,} draws. {table[0]}"
    table += ["", "| rate | question | numbers or pairs | p, ours | p, torch's |", "| --- | --- | ---: | ---: | ---: |"]
    for (rate, question), (number, own) in answers.items():
        cells = [rate, question, f"{number:,}", *(f"{value:.3g}" for value in own), *[""] * (2 - len(own))]
        table.append(f"| {' | '.join(map(str, cells))} |")
    details = [dict(rate=rate, question=question, of=n, p=own) for (rate, question), (n, own) in answers.items()]
    result.finish("mask_statistics", table, details)
    return int(not smallest["ours"] >= ALARM)


if __name__ == "__main__":
    sys.exit(main())
