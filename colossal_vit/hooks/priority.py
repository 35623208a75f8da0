"""The order in which hooks run at an event of the trainer."""

from enum import IntEnum


class Priority(IntEnum):
    """First to last, as `BaseHook` takes it."""

    METRICS = 1  # the others read its records
    READER = 3  # of the metrics: shows, sums up or checks them
    SCHEDULER = 5  # once the rate of the step is on record
    CHECKPOINT = 9  # once the step is on record and the schedule has moved
