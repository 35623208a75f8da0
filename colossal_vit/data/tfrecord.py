"""The format of TFRecords and of the tf.train.Example in each, without TensorFlow.

A record:           length (uint64), masked CRC of it (uint32), data, masked CRC of it (uint32); little-endian
tf.train.Example:   a map from names to lists of bytes, of floats or of integers
"""

import os
import struct
from typing import BinaryIO

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

# TensorFlow's example.proto and feature.proto in one, without lists of floats, which protobuf then ignores.
EXAMPLE = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
    name: "Feature"
    field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" }
    field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" }
}
message_type {
    name: "Features"
    field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "FeatureEntry" }
    nested_type {
        name: "FeatureEntry" options { map_entry: true }
        field { name: "key" number: 1 type: TYPE_STRING }
        field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" }
    }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
Example = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tensorflow.Example"))


def masked_crc(data: bytes) -> int:
    """The masked CRC-32C of TFRecords: rotated, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def wrap(data: bytes) -> bytes:
    """A TFRecord with this data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def read_data(file: int, offset: int, size: int) -> bytes:
    """The data of a record of `size` bytes in an open file, which other threads may read, too.

    Raises:
        ValueError: if there is no such record, it is cut off, or a CRC is wrong.
    """
    length = struct.pack("<Q", size - 16)
    if os.pread(file, 12, offset) != length + struct.pack("<I", masked_crc(length)):
        raise ValueError("the record's length or its CRC is wrong")
    data = os.pread(file, size - 16, offset + 12)
    if os.pread(file, 4, offset + size - 4) != struct.pack("<I", masked_crc(data)):
        raise ValueError("the CRC of the record's data is wrong; cut off?")
    return data


def encode_record(image: bytes, label: int) -> bytes:
    """A TFRecord with the tf.train.Example of an image: `image/encoded` and `image/class/label`."""
    example = Example()
    example.features.feature["image/encoded"].bytes_list.value.append(image)
    example.features.feature["image/class/label"].int64_list.value.append(label)
    return wrap(example.SerializeToString(deterministic=True))


def parse_example(data: bytes) -> tuple[bytes | None, int | None]:
    """The image and the label of a serialised tf.train.Example, each None if it has none.

    Raises:
        ValueError: if `data` is no tf.train.Example.
    """
    try:
        features = Example.FromString(data).features.feature
    except DecodeError:
        raise ValueError("the record's data is not a tf.train.Example") from None
    images, labels = features["image/encoded"].bytes_list.value, features["image/class/label"].int64_list.value
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
