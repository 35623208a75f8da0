"""Checks image files, and converts them to the bytes that TFRecords store."""

import io
import re
import struct
import warnings
from collections.abc import Collection, Iterator

from colossal_vit.data.decoding import EXIF, ORIENTATION, SHORT, UPRIGHT, check_scan, exif_orientation, to_rgb
from colossal_vit.errors import reason
from PIL import Image, UnidentifiedImageError

QUALITY = 95  # for JPEGs that are encoded again
JPEG_START, PNG_START = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
STORED = ("JPEG", "PNG")  # formats that DALI reads from TFRecords
JPEG_MARKER = re.compile(rb"\xff+([^\xff\x00])")  # searched for, since decoders skip bytes between segments
MAX_PIXELS = 2 * Image.MAX_IMAGE_PIXELS  # as many as Pillow decodes
APP1, START_OF_SCAN, FRAME_HEADERS = 0xE1, 0xDA, {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Marker, start (of the length) and end of each segment of a JPEG, up to the first scan."""
    code, end = None, 2
    while code != START_OF_SCAN and (marker := JPEG_MARKER.search(data, end)):
        code, start = marker[1][0], marker.end()
        end = start + int.from_bytes(data[start : start + 2])
        yield code, start, end


def jpeg_components(data: bytes) -> int:
    """Return the number of colour components of a JPEG, read from its headers: 1 for grey, 3 for colour, 4 for CMYK.

    Raises:
        ValueError: if its start, frame header, scan or end is missing.
    """
    if not data.startswith(JPEG_START):
        raise ValueError("neither JPEG nor PNG: convert it" if data else "an image of 0 bytes")
    segments, components = list(_segments(data)), 0
    for code, start, _ in segments:
        if code in FRAME_HEADERS and start + 8 <= len(data):
            bits, height, width, components = struct.unpack_from(">BHHB", data, start + 2)
            if bits != 8:
                raise ValueError(f"JPEG of {bits} bits a channel: save it with 8")
            if not 0 < height * width <= MAX_PIXELS:
                raise ValueError(f"JPEG of {width} x {height} pixels")
    code, _, end = segments[-1] if segments else (None, 0, 0)
    if code != START_OF_SCAN:
        raise ValueError("JPEG without image data; cut off?")
    if not components:
        raise ValueError("JPEG without a frame header")
    if data.rfind(b"\xff\xd9", end) < 0:
        raise ValueError("JPEG without an end marker; cut off?")
    return components


def is_plain(data: bytes | memoryview) -> bool:
    """Return whether DALI decodes an image file as `to_rgb` does.

    It does not if that is a PNG with an alpha channel or a transparent colour, whose colours beneath DALI would show,
    or with EXIF data.
    """
    if data[:8] != PNG_START:
        return True
    alpha = data[25:26] in (b"\4", b"\6")  # the colour type: grey or RGB with alpha
    return not (alpha or b"eXIf" in bytes(data) or b"tRNS" in bytes(data).partition(b"IDAT")[0])


def simplify_exif(data: memoryview) -> None:
    """Reduce the EXIF data of a JPEG to its orientation as `exif_orientation` reads it, in place.

    DALI 2.4.0 takes the tag with any type, but not behind an odd field; of two EXIF segments it takes the orientation
    of one for the size of the image and that of the other for its pixels, and the process may crash.
    """
    if data[:2] != JPEG_START:
        return
    segments = [(start + 2, end) for code, start, end in _segments(data) if code == APP1]
    segments = [(start, end) for start, end in segments if data[start : start + len(EXIF)] == EXIF]
    for start, _ in segments:
        data[start : start + len(EXIF)] = bytes(len(EXIF))
    if segments:
        start, end = segments[0]
        orientation = exif_orientation(data[start + len(EXIF) : end])
        if orientation != UPRIGHT:
            entry = struct.pack("<HHIHH", ORIENTATION, SHORT, 1, orientation, 0)
            simple = EXIF + struct.pack("<4sIH", b"II*\0", 8, 1) + entry + bytes(4)
            end = min(start + len(simple), end)
            data[start:end] = simple[: end - start]


def prepare_image(
    data: bytes,
    resize: int | None = None,
    quality: int | None = None,
    check: str = "header",
    formats: Collection[str] = STORED,
) -> bytes:
    """Return the bytes to store for an image file: its own, or a re-encoded RGB JPEG for what is no grey or RGB JPEG.

    A re-encoded image is upright, since its EXIF data is lost, and what was transparent is white.

    Args:
        data: the file's contents.
        resize: reduce the shorter side to this, in pixels.
        quality: re-encode every image with this JPEG quality, from 1 to 100.
        check: "header", or "decode" to also decode images that are not re-encoded, see `check_scan`.
        formats: that it may have, as Pillow calls them.

    Raises:
        ValueError: if it has none of them, or is damaged, with the reason.
    """
    other = data.startswith(PNG_START) or (formats != STORED and data and not data.startswith(JPEG_START))
    components = 0 if other else jpeg_components(data)
    kept = components in (1, 3)
    if kept and not resize and not quality and check == "header":
        return data
    try:
        if components:
            check_scan(data, cmyk=components == 4)
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=formats) as image:
            scale = min(1.0, resize / min(image.size)) if resize else 1.0
            if kept and not quality and scale == 1.0:
                return data
            image = to_rgb(image)
            if scale < 1.0:
                image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
            image.save(encoded := io.BytesIO(), "JPEG", quality=quality or QUALITY)
    except UnidentifiedImageError:
        raise ValueError(f"none of {', '.join(formats)}") from None
    except Exception as error:  # decoders raise nearly any exception for a broken file
        raise ValueError(f"cannot be decoded: {reason(error)}") from None
    return encoded.getvalue()
