"""A slip: a defect that is planted to see whether the tests notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slip:
    """A defect that every layout shares.

    Attributes:
        defect: what is wrong, in a few words; unique.
        path: of the file, from the root.
        old, new: the text, there exactly once, and what replaces it.
        tests: pytest node ids (file or file::test) that should notice; the fewest and fastest.
    """

    defect: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
