"""Turns of the sides of a benchmark, and their spread."""

import statistics
from collections.abc import Iterable


def in_turns(sides: Iterable[str], number: int) -> list[str]:
    """The order of the contenders in round `number`: as given in even rounds, reversed in odd ones."""
    return list(sides)[:: -1 if number % 2 else 1]


def spread(values: Iterable[float], form: str) -> list[str]:
    """Median, minimum and maximum, each formatted with the format specification `form`, for example `.2f`."""
    values = list(values)
    return [format(value, form) for value in (statistics.median(values), min(values), max(values))]
