"""The format of TFRecords and of the tf.train.Example in each, without TensorFlow.

A record:           length (uint64), masked CRC of it (uint32), data, masked CRC of it (uint32); little-endian
tf.train.Example:   a map from names to lists of bytes, of floats or of integers; a message of Protocol Buffers

The package protobuf would copy each image twice, and return the process's freed memory to the system every few thousand
images.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import google_crc32c

if TYPE_CHECKING:
    from numpy import ndarray  # which building TFRecords does not wait for

IMAGE, LABEL = b"image/encoded", b"image/class/label"
INTEGER, FIXED_64, CONTENT, FIXED_32 = 0, 1, 2, 5  # types of fields; a content is bytes, a message or packed integers
FIRST, SECOND, THIRD = (number << 3 | CONTENT for number in (1, 2, 3))  # keys of fields: number and type


def masked_crc(data: "bytes | ndarray") -> int:
    """The masked CRC-32C of TFRecords: rotated, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def wrap(data: bytes) -> bytes:
    """A TFRecord with this data."""
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
    """A number in groups of 7 bits, the lowest first, each in a byte whose highest bit says whether one follows."""
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _field(key: int, content: bytes) -> bytes:
    return _varint(key) + _varint(len(content)) + content


def encode_record(image: bytes, label: int) -> bytes:
    """A TFRecord with the tf.train.Example of an image: `image/encoded` and `image/class/label`."""
    lists = (LABEL, THIRD, _varint(label)), (IMAGE, FIRST, image)
    features = [(name, _field(kind, _field(FIRST, content))) for name, kind, content in lists]
    entries = [_field(FIRST, _field(FIRST, name) + _field(SECOND, feature)) for name, feature in features]
    return wrap(_field(FIRST, b"".join(entries)))


def _read_varint(message: memoryview, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
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
    """What the messages have under a key."""
    return [value for message in messages for found, value in _fields(message) if found == key]


def _integers(values: memoryview) -> Iterator[int]:
    """The signed integers of a list, which may be packed."""
    for key, value in _fields(values):
        if key == 1 << 3 | INTEGER:
            yield value - (value >> 63 << 64)
        place = 0
        while key == FIRST and place < len(value):
            number, place = _read_varint(value, place)
            yield number - (number >> 63 << 64)


def parse_example(data: "bytes | ndarray") -> tuple[memoryview | None, int | None]:
    """The image, a part of `data`, and the label of a serialised tf.train.Example, each None if it has none.

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
