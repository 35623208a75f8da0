"""The format of TFRecords and of the tf.train.Example in each, without TensorFlow.

A record:           length (uint64), masked CRC of it (uint32), data, masked CRC of it (uint32); little-endian
tf.train.Example:   {1: Features {1: entry {1: key, 2: Feature {1: BytesList or 2: FloatList or 3: Int64List}}, ...}}
each of the lists:  {1: values}
"""

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO

import google_crc32c

VARINT = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")  # seven bits a byte, lowest first


def masked_crc(data: bytes) -> int:
    """The masked CRC-32C of TFRecords: rotated, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def _field(number: int, content: bytes) -> bytes:
    return b"".join((bytes((number << 3 | 2,)), _varint(len(content)), content))


def encode_record(image: bytes, label: int) -> bytes:
    """A TFRecord with the tf.train.Example of an image: `image/encoded` and `image/class/label`."""
    labels, images = _field(3, _field(1, _varint(label))), _field(1, _field(1, image))
    entries = {b"image/class/label": labels, b"image/encoded": images}
    data = _field(1, b"".join(_field(1, _field(1, key) + _field(2, value)) for key, value in entries.items()))
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def _number(varint: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message: an int, or the bytes of any other type."""
    position = 0

    def next_varint() -> int:
        nonlocal position
        if not (varint := VARINT.match(message, position)):
            raise ValueError
        position = varint.end()
        return _number(varint[0])

    while position < len(message):
        number, kind = divmod(next_varint(), 8)
        if kind == 0:
            yield number, next_varint()
            continue
        size = next_varint() if kind == 2 else {1: 8, 5: 4}[kind]
        position += size
        if position > len(message):
            raise ValueError
        yield number, message[position - size : position]


def parse_example(data: bytes) -> dict[str, list[bytes] | list[int]]:
    """The features of a serialised tf.train.Example by name; float features are left out.

    Raises:
        ValueError: if `data` is no tf.train.Example.
    """
    features = {}
    try:
        for _, message in _fields(data):
            for _, entry in _fields(message):
                pair = dict(_fields(entry))
                values = features[str(pair[1], "utf-8")] = []
                for kind, items in _fields(pair.get(2, b"")):
                    for _, item in _fields(items):
                        if kind == 1:
                            values.append(item)
                        elif kind == 3:  # packed or not
                            numbers = [item] if isinstance(item, int) else map(_number, VARINT.findall(item))
                            values += (number - (number >> 63 << 64) for number in numbers)
    except (KeyError, TypeError, ValueError):
        raise ValueError("the record's data is not a tf.train.Example") from None
    return features


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
