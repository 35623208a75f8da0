"""Shards of TFRecords on disk: how they are named and indexed, and what can be wrong with them."""

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from colossal_vit.data.folders import INDEX_FILES, SYSTEM_FOLDERS
from colossal_vit.data.image_files import prepare_image
from colossal_vit.data.tfrecord import masked_crc, parse_example
from colossal_vit.errors import UserError, blame

NUM_SHARDS = {"train": 1024, "validation": 128}
NUM_CLASSES = 1000  # where no classes.txt says it
INDEX_LINE = re.compile(r"(\d{1,19})[ \t]+(\d{1,19})[ \t]*", re.ASCII)


def read_lines(path: Path) -> list[str]:
    """The lines of a file with names, which need not be UTF-8; only a line break ends one."""
    with blame(path):
        text = os.fsdecode(path.read_bytes()).replace("\r\n", "\n").rstrip("\n")
    return text.split("\n") if text else []


def class_names(output: Path) -> list[str]:
    """The names in `classes.txt`, in the order of their labels; empty if there is no such file."""
    path = output / "classes.txt"
    return read_lines(path) if path.exists() else []


def index_path(output: Path, split: str, name: str) -> Path:
    """The path of a shard's index file."""
    return output / INDEX_FILES / split / f"{name}.idx"


def find_shards(output: Path, split: str) -> list[Path]:
    """All files in a split's folder and its subfolders, sorted, hidden ones and `SYSTEM_FOLDERS` omitted."""
    files = (path for path in (output / split).rglob("[!.]*") if path.is_file())
    return sorted(path for path in files if SYSTEM_FOLDERS.isdisjoint(str(path.relative_to(output)).lower().split("/")))


def wrong_index(index: Path, fault: str) -> UserError:
    """An error about an index file: its fault, and what writes it again."""
    return UserError(f"{fault}; run `python build_tfrecords.py --index-only {index.parents[2]}`")


def parse_index(index: Path) -> list[tuple[int, int]]:
    """Offset and size in bytes of each record that an index file lists.

    Raises:
        UserError: if it cannot be read, or a line is something else.
    """
    records = []
    try:
        lines = read_lines(index)
    except UserError as error:
        raise wrong_index(index, str(error)) from None
    for number, line in enumerate(lines, start=1):
        if not (found := INDEX_LINE.fullmatch(line)):
            raise wrong_index(index, f"{index}: line {number} is {line[:50]!r}, not offset and size of a record")
        records.append((int(found[1]), int(found[2])))
    return records


def name_faults(output: Path, split: str, shards: list[Path]) -> Iterator[str]:
    """Faults in the names of a split's shards, such as missing numbers."""
    if not shards:
        yield f"{output / split}: has no shards"
    numbers, first = {}, None
    for path in shards:
        if not (named := re.fullmatch(rf"{split}-(\d+)-of-(\d+)", path.name)):
            yield f"{path}: is not named like {split}-00000-of-{NUM_SHARDS[split]:05d}"
            continue
        number, total = map(int, named.groups())
        first = first or (total, path)
        if total != first[0]:
            yield f"{path}: is one of {total} shards, but {first[1]} is one of {first[0]}"
        if number >= total:
            yield f"{path}: has a number that is not below {total}"
        if numbers.setdefault(number, path) != path:
            yield f"{path}: has the number of {numbers[number]}"
    if first and (missing := first[0] - sum(number < first[0] for number in numbers)):
        least = next(number for number in count() if number not in numbers)  # a name may claim any number of shards
        yield f"{output / split}: {missing} of {first[0]} shards are missing, the first is number {least}"
    for index in sorted((output / INDEX_FILES / split).glob("[!.]*")):
        if index.stem not in {path.name for path in shards}:
            yield f"{index}: is the index of no shard"


def record_faults(data: bytes, crc: bytes, num_classes: int, check: str) -> Iterator[str]:
    """Faults in the data of a record and in the CRC after it."""
    if int.from_bytes(crc, "little") != masked_crc(data):
        yield "the CRC of the record's data is wrong"
        return
    try:
        image, label = parse_example(data)
        if label is None or not 1 <= label <= num_classes:
            yield f"image/class/label is {label}, not from 1 to {num_classes}"
        if image is None:
            raise ValueError("image/encoded is missing")
        prepare_image(bytes(image), check=check)
    except ValueError as error:
        yield str(error)
