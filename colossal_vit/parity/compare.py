"""What the ranks of a layout have recorded, compared with what one process has."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from colossal_vit.hooks.record_tensors import GRADIENT, WEIGHT, Record

Key = tuple[int, str, str]  # step, kind, name
Recorded = dict[Key, list[tuple[int, Record]]]  # with the rank


class Difference(NamedTuple):
    """How a tensor differs.

    Attributes:
        key: which tensor it is.
        error: the largest difference. It is relative to the largest value of the tensor, or for a parameter to that of
            all parameters: some gradients are 0 but for rounding, and Adam's updates then are rounding made large.
        text: where that is, with both values.
    """

    key: Key
    error: float
    text: str


def by_key(ranks: Sequence[Iterable[Record]]) -> Recorded:
    """The records of all ranks, in the order of the first one that has a tensor."""
    found: Recorded = {}
    for rank, records in enumerate(ranks):
        for record in records:
            found.setdefault(record.key, []).append((rank, record))
    return found


def _whole(pieces: Iterable[tuple[int, Record]]) -> np.ndarray:
    """The tensor that one process has recorded, its samples in the order of the global batch."""
    *_, last = records = [record for _, record in pieces]
    if last.places is None:
        return last.values
    return np.concatenate([record.values for record in records])[
        np.argsort(np.concatenate([r.places for r in records]))
    ]


def _part(record: Record) -> tuple:
    """The index of a record's part in the whole tensor."""
    if record.places is None:
        return (...,)
    if record.values.ndim == 1:
        return (record.places,)
    return record.places, ..., slice(record.column, record.column + record.values.shape[-1])


def compare(one: Mapping, several: Mapping) -> list[Difference]:
    """Of every tensor in the order of computation, how it differs.

    Args:
        one: of one process, which is right; see `by_key`.
        several: of the ranks of a layout.
    """
    right = {key: _whole(pieces) for key, pieces in one.items()}
    units = {key: np.abs(tensor).max() for key, tensor in right.items()}
    largest: dict[tuple[int, str], float] = {}
    for (step, kind, _), unit in units.items():
        largest[step, kind] = max(largest.get((step, kind), 0.0), unit)
    for key in units:
        if key[1] in (GRADIENT, WEIGHT):
            units[key] = largest[key[:2]]
    return [_difference(key, tensor, several.get(key, []), units[key] or 1.0) for key, tensor in right.items()]


def _difference(key: Key, right: np.ndarray, pieces: Iterable[tuple[int, Record]], unit: float) -> Difference:
    missing = np.ones(right.shape, bool)
    worst, text = 0.0, ""
    for rank, record in pieces:
        part = _part(record)
        expected, values = right[part], record.values
        if expected.shape != values.shape:
            return Difference(key, math.inf, f"rank {rank} has the shape {values.shape} in place of {expected.shape}")
        missing[part] = False
        errors = np.nan_to_num(np.abs(values - expected) / unit, nan=math.inf)
        if errors.max() > worst:
            worst = errors.max()
            index = np.unravel_index(errors.argmax(), errors.shape)
            place = [int(i) for i in index]
            if record.places is not None:
                place = [int(record.places[place[0]]), *place[1:]]
                place[-1] += record.column if len(place) > 1 else 0
            text = f"rank {rank} has {values[index]:.10g} at {place}, one process {expected[index]:.10g}"
    if missing.any():
        return Difference(key, math.inf, f"no rank has {missing.sum()} of its {missing.size} values")
    return Difference(key, float(worst), text)
