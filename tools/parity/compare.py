"""What the ranks of a layout have recorded, compared with what one process has."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tools.parity.record_tensors import Record
from tools.parity.records import Key, Recorded


class Difference(NamedTuple):
    """How a tensor differs.

    Attributes:
        key: which tensor it is.
        error: the largest difference, relative to the largest value of the tensor. Of weights, their gradients, moments
            and averages it is relative to the largest of all of a kind: some gradients are 0 but for rounding, and
            Adam's updates then are rounding made large. NaN, which no limit allows, if one side has no such tensor, or
            one of other shape.
        text: where that is, with both values.
    """

    key: Key
    error: float
    text: str


def _whole(pieces: Iterable[tuple[int, Record]]) -> np.ndarray:
    """Return the tensor that one process has recorded, its samples in the order of the global batch."""
    *_, last = records = [record for _, record in pieces]
    if last.places is None:
        return last.values
    return np.concatenate([record.values for record in records])[
        np.argsort(np.concatenate([r.places for r in records]))
    ]


def _part(record: Record) -> tuple:
    """Return the index of a record's part in the whole tensor."""
    if record.places is None:
        return (...,)
    if record.values.ndim == 1:
        return (record.places,)
    return record.places, ..., slice(record.column, record.column + record.values.shape[-1])


def largest_of(values: Mapping[Key, float], one: Recorded) -> dict[Key, float]:
    """Return the values of tensors; of those that are whole, such as parameters, the largest of all of a kind in a
    step.
    """
    groups = {key: key[:2] if one[key][0][1].places is None else key for key in values}
    largest: dict[tuple, float] = {}
    for key, group in groups.items():
        largest[group] = max(largest.get(group, 0.0), values[key])
    return {key: largest[group] for key, group in groups.items()}


def compare(one: Recorded, several: Recorded) -> list[Difference]:
    """Return how each tensor differs, in the order of computation.

    Args:
        one: of one process, which is right.
        several: of the ranks of a layout.
    """
    right = {key: _whole(pieces) for key, pieces in one.items()}
    largest = largest_of({key: float(np.abs(tensor).max()) for key, tensor in right.items()}, one)
    found = [_difference(key, tensor, several.get(key, []), largest[key] or 1.0) for key, tensor in right.items()]
    for before, (key, pieces) in zip([None, *several], several.items(), strict=False):
        if key not in right:
            place = next((number for number, other in enumerate(found) if other.key == before), -1) + 1
            text = f"rank {pieces[0][0]} has this, one process does not"
            found.insert(place, Difference(key, math.nan, text))
    return found


def _difference(key: Key, right: np.ndarray, pieces: Sequence[tuple[int, Record]], unit: float) -> Difference:
    missing = np.ones(right.shape, bool)
    worst, text = 0.0, ""
    if not pieces:
        return Difference(key, math.nan, "no rank has this, one process does")
    for rank, record in pieces:
        part, values = _part(record), record.values
        try:
            expected = right[part]
        except IndexError:
            expected = None
        if expected is None or expected.shape != values.shape:
            text = f"the part of rank {rank}, of shape {values.shape}, does not fit the whole, of shape {right.shape}"
            return Difference(key, math.nan, text)
        missing[part] = False
        errors = np.nan_to_num(np.abs(values - expected) / unit, nan=math.inf)
        if errors.max() > worst:
            worst = errors.max()
            index = np.unravel_index(errors.argmax(), errors.shape)
            place = [int(i) for i in index]
            if record.places is not None:
                place = [int(record.places[place[0]]), *place[1:]]
                place[-1] += record.column if len(place) > 1 else 0
            at = f" at {place}" if place else ""
            text = f"rank {rank} has {values[index]:.10g}{at}, one process {expected[index]:.10g}"
    if missing.any():
        return Difference(key, math.nan, f"no rank has {missing.sum()} of its {missing.size} values")
    return Difference(key, float(worst), text)
