"""The order in which hooks run at an event of the trainer."""

from enum import IntEnum


class Priority(IntEnum):
    """The `priority` of `BaseHook`; the lowest runs first."""

    METRICS = 1  # first, since other hooks read its records
    READER = 3  # hooks that show, summarise or check the metrics
    CHECKPOINT = 9  # after the step is recorded
