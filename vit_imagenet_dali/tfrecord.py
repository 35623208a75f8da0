"""TFRecords without TensorFlow: their format, the shards and index files of a data set, and the faults in them.

A record:           length (uint64), masked CRC of it (uint32), data, masked CRC of it (uint32); little-endian
tf.train.Example:   a map from names to lists of bytes, of floats or of integers; a message of Protocol Buffers

The package protobuf would copy each image twice, and return the process's freed memory to the system every few thousand
images. Building TFRecords waits neither for numpy nor for torch: both are imported only where a run needs them.
"""

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import google_crc32c
from colossal_vit.data.folders import INDEX_FILES, SYSTEM_FOLDERS, refuse_run
from colossal_vit.errors import UserError, oserror_as_user_error
from colossal_vit.files import write_text

from image_files import prepare_image
from worker_pool import run_all, worker_pool

if TYPE_CHECKING:
    from colossal_vit.parallel.collectives import RankLogger
    from numpy import ndarray

IMAGE, LABEL = b"image/encoded", b"image/class/label"
INTEGER, FIXED_64, CONTENT, FIXED_32 = 0, 1, 2, 5  # types of fields; a content is bytes, a message or packed integers
FIRST, SECOND, THIRD = (number << 3 | CONTENT for number in (1, 2, 3))  # keys of fields: number and type
NUM_SHARDS = {"train": 1024, "validation": 128}
NUM_CLASSES = 1000  # where no classes.txt says it
INDEX_LINE = re.compile(r"(\d{1,19})[ \t]+(\d{1,19})[ \t]*", re.ASCII)
EMPTY_RECORD = 16  # bytes

# ---------------------------------------------------------------------------------------------------------------------
# A record
# ---------------------------------------------------------------------------------------------------------------------


def masked_crc(data: "bytes | ndarray") -> int:
    """Return the masked CRC-32C of TFRecords: rotated, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def wrap(data: bytes) -> bytes:
    """Return a TFRecord with this data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def read_data(file: int, offset: int, record: "ndarray") -> "ndarray":
    """Read a record into `record`, uint8 and as long, from an open file, which other threads may read, too.

    Returns:
        Its data, a part of `record`.

    Raises:
        ValueError: if there is no such record, it is cut off, or a CRC is wrong.
    """
    length, size = struct.pack("<Q", len(record) - 16), os.preadv(file, [record], offset)
    if size < 12 or record[:12].tobytes() != length + struct.pack("<I", masked_crc(length)):
        raise ValueError("the record's length or its CRC is wrong")
    data = record[12:-4]
    if size < len(record) or record[-4:].tobytes() != struct.pack("<I", masked_crc(data)):
        raise ValueError("the CRC of the record's data is wrong; cut off?")
    return data


def _varint(number: int) -> bytes:
    """Encode a number in groups of 7 bits, the lowest first, each in a byte whose highest bit says if one follows."""
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _field(key: int, content: bytes) -> bytes:
    return _varint(key) + _varint(len(content)) + content


def encode_record(image: bytes, label: int) -> bytes:
    """Return a TFRecord with the tf.train.Example of an image: `image/encoded` and `image/class/label`."""
    lists = (LABEL, THIRD, _varint(label)), (IMAGE, FIRST, image)
    features = [(name, _field(kind, _field(FIRST, content))) for name, kind, content in lists]
    entries = [_field(FIRST, _field(FIRST, name) + _field(SECOND, feature)) for name, feature in features]
    return wrap(_field(FIRST, b"".join(entries)))


def _read_varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it."""
    number = message[place]
    if number < 0x80:
        return number, place + 1
    number &= 0x7F
    for shift in range(7, 64, 7):
        place += 1
        number |= (message[place] & 0x7F) << shift
        if message[place] < 0x80:
            return number, place + 1
    raise ValueError("an integer of more than 64 bits")


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview | None]]:
    """Key and value of each field; None for a number of fixed size."""
    place, end = 0, len(message)
    while place < end:
        key, place = _read_varint(message, place)
        value, kind = None, key & 7
        if kind == CONTENT:
            length, start = _read_varint(message, place)
            place = start + length
            value = message[start:place]
        elif kind == INTEGER:
            value, place = _read_varint(message, place)
        elif kind in (FIXED_32, FIXED_64):
            place += 4 if kind == FIXED_32 else 8
        else:
            raise ValueError(f"a field of type {kind}")
        if place > end:
            raise ValueError("a field that is cut off")
        yield key, value


def _contents(messages: Iterable[memoryview], key: int) -> list[memoryview]:
    """Return what the messages have under a key."""
    return [value for message in messages for found, value in _fields(message) if found == key]


def _integers(values: memoryview) -> Iterator[int]:
    """Yield the signed integers of a list, which may be packed."""
    for key, value in _fields(values):
        if key == 1 << 3 | INTEGER:
            yield value - (value >> 63 << 64)
        place = 0
        while key == FIRST and place < len(value):
            number, place = _read_varint(value, place)
            yield number - (number >> 63 << 64)


def parse_example(data: "bytes | ndarray") -> tuple[memoryview | None, int | None]:
    """Return the image, a part of `data`, and the label of a serialised tf.train.Example, each None if it has none.

    Raises:
        ValueError: if `data` is no tf.train.Example.
    """
    empty = memoryview(b"")
    try:
        entries = map(dict, map(_fields, _contents(_contents([memoryview(data)], FIRST), FIRST)))
        features = {bytes(entry.get(FIRST, empty)): entry.get(SECOND, empty) for entry in entries}
        images = _contents(_contents([features.get(IMAGE, empty)], FIRST), FIRST)
        labels = [label for values in _contents([features.get(LABEL, empty)], THIRD) for label in _integers(values)]
    except (ValueError, IndexError):
        raise ValueError("the record's data is not a tf.train.Example") from None
    return next(iter(images), None), next(iter(labels), None)


def record_size(file: BinaryIO, offset: int, end: int) -> int:
    """Size in bytes of the record at an offset, length and CRCs included; moves the file position to its data.

    Raises:
        ValueError: if the CRC of the length is wrong, or the record is longer than the file of `end` bytes.
    """
    file.seek(offset)
    header = file.read(12)
    if len(header) < 12:
        raise ValueError(f"cut off after {len(header)} bytes of a record")
    length, crc = struct.unpack("<QI", header)
    if crc != masked_crc(header[:8]):
        raise ValueError("the CRC of the record's length is wrong")
    if offset + length + 16 > end:
        raise ValueError(f"cut off after {end - offset} of {length + 16} bytes of a record")
    return length + 16


# ---------------------------------------------------------------------------------------------------------------------
# Shards and their index files
# ---------------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file with names, which need not be UTF-8; only a line break ends one."""
    with oserror_as_user_error(path):
        text = os.fsdecode(path.read_bytes()).replace("\r\n", "\n").rstrip("\n")
    return text.split("\n") if text else []


def class_names(output: Path) -> list[str]:
    """Return the names in `classes.txt`, in the order of their labels; empty if there is no such file."""
    path = output / "classes.txt"
    return read_lines(path) if path.exists() else []


def index_path(output: Path, split: str, name: str) -> Path:
    """Return the path of a shard's index file."""
    return output / INDEX_FILES / split / f"{name}.idx"


def find_shards(output: Path, split: str) -> list[Path]:
    """Return all files in a split's folder and its subfolders, sorted, hidden ones and `SYSTEM_FOLDERS` omitted."""
    files = (path for path in (output / split).rglob("[!.]*") if path.is_file())
    return sorted(path for path in files if SYSTEM_FOLDERS.isdisjoint(str(path.relative_to(output)).lower().split("/")))


def wrong_index(index: Path, fault: str) -> UserError:
    """Return an error about an index file: its fault, and what writes it again."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The records of a data set
# ---------------------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """The non-empty shards of a split, the index file of each, and the offset and size of its records, (n, 2)."""

    shards: list[Path]
    indices: list[Path]
    places: list["ndarray"]

    @property
    def counts(self) -> list[int]:
        return list(map(len, self.places))

    @property
    def num_images(self) -> int:
        return sum(self.counts)

    def digest(self) -> str:
        """Return a digest of the position of each record in its shard. It needs no image data, and nearly any change
        shows.
        """
        digest = hashlib.sha256()
        for shard, index in zip(self.shards, self.indices, strict=True):
            digest.update(f"{shard.name}\n{index.read_text()}".encode())
        return digest.hexdigest()


def find_records(data: Path, split: str) -> Records:
    """Return the records in `data/train` or `data/validation`.

    Raises:
        UserError: if there are none, shards are missing or from two sets, an index is missing or does not match, or
            `data` is a run directory.
    """
    shards = find_shards(data, split)
    if not shards:
        refuse_run(data)  # which has index files where bad records were left out
        if (data / split).is_dir():
            with oserror_as_user_error(data / split):
                os.listdir(data / split)
        raise UserError(f"DATA = {data}: has no TFRecords in {split}/; build_tfrecords.py makes them from the images")
    for fault in name_faults(data, split, shards):
        raise UserError(fault)
    indices = [index_path(data, split, shard.name) for shard in shards]
    return list_records(shards, indices, whole=True)


def list_records(shards: list[Path], indices: list[Path], whole: bool) -> Records:
    """Count the records; with `whole`, check that each index covers its shard from the first byte to the last."""
    import numpy as np

    found = []
    for shard, index in zip(shards, indices, strict=True):
        lines, size, end = parse_index(index), shard.stat().st_size, 0
        for number, (offset, length) in enumerate(lines if whole else [], start=1):
            if offset != end or length <= EMPTY_RECORD:
                fault = f"{index}: line {number} is '{offset} {length}', but a record begins at byte {end}"
                raise wrong_index(index, fault)
            end += length
        if whole and end != size:
            raise wrong_index(index, f"{index}: ends at byte {end}, but {shard} has {size}")
        if lines:
            found.append((shard, index, np.array(lines)))
    return Records(*map(list, zip(*found, strict=True))) if found else Records([], [], [])


def find_bad(shard: Path, index: Path, num_classes: int, check: str) -> list[tuple[int, str]]:
    """Offset of each unusable record, and the reason; for `check` see `prepare_image`."""
    bad, end = [], shard.stat().st_size
    with open(shard, "rb") as file:
        for offset, _ in parse_index(index):
            try:
                length = record_size(file, offset, end) - 16
                faults = record_faults(file.read(length), file.read(4), num_classes, check)
                bad += [(offset, fault) for fault in faults][:1]
            except ValueError as error:
                bad.append((offset, str(error)))
    return bad


def leave_out(splits: list[Records], output: Path, num_classes: int, max_bad: int, log: "RankLogger") -> None:
    """Check every record, and write index files without the bad ones to `output/idx_files`.

    Raises:
        UserError: if more than `max_bad` records are bad, or `output` has the data's own index files or cannot be
            written.
    """
    indices = {shard: index for records in splits for shard, index, _ in zip(*records, strict=True)}
    if any(filtered_index(output, index) == index.resolve() for index in indices.values()):
        raise UserError(f"--output {output}: is the data's folder, whose index files a run would replace: give another")
    tasks = [(shard, index, num_classes, "decode") for shard, index in indices.items()]
    bad = []
    with worker_pool(len(os.sched_getaffinity(0))) as pool:
        sizes = [shard.stat().st_size for shard in indices]
        for (shard, index, *_), found in run_all(pool, find_bad, tasks, sizes, "B"):
            offsets = {offset for offset, _ in found}
            bad += [f"{shard} at byte {offset}: {reason}" for offset, reason in found]
            filtered = filtered_index(output, index)
            kept = [f"{offset} {size}\n" for offset, size in parse_index(index) if offset not in offsets]
            with oserror_as_user_error(filtered):
                filtered.parent.mkdir(parents=True, exist_ok=True)
                write_text(filtered, "".join(kept))  # atomically: a run that is being evaluated reads it again
    for line in sorted(bad)[: max_bad + 1]:
        log.info(f"left out: {line}")
    if len(bad) > max_bad:
        raise UserError(f"dali.max_bad = {max_bad}, but {len(bad)} records are bad; {min(bad)}")
    log.info(f"{len(bad)} bad records of {sum(records.num_images for records in splits)} are left out")


def filtered_index(output: Path, index: Path) -> Path:
    """Return the path, in the run directory, of the copy of an index file without bad records."""
    return index_path(output, index.parent.name, index.stem)
