"""Image files of any kind as upright RGB images of 8 bits a channel."""

import re
import struct
from pathlib import Path

from PIL import Image

# Formats of still photographs. Pillow reads more, some of them with other programs: EPS is run by Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
WHITE_16_BITS = 65535
BITS, PHOTOMETRIC, BLACK_IS_ZERO = 258, 262, 1  # tags of TIFF
EXTRA_SAMPLES, ALPHA = 338, (1, 2)  # what a channel beside the colours is; premultiplied with them or not
EXIF = b"Exif\0\0"  # what EXIF data in a JPEG begin with
ORIENTATION, SHORT = 0x112, 3  # tag and type of EXIF
UPRIGHT = 1
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def endings() -> set[str]:
    """Return how names of files of `FORMATS` end, in lower case."""
    return {ending for ending, of in Image.registered_extensions().items() if of in FORMATS}


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits in 8, rounded; Pillow's own conversion makes every value above 255 white.

    Raises:
        ValueError: if it is not known which value is white: it has 12 or 32 bits, or is in floating point.
    """
    if image.format == "TIFF":
        known = image.tag_v2.get(BITS) == (16,) and image.tag_v2.get(PHOTOMETRIC) == BLACK_IS_ZERO and image.mode != "I"
    else:
        known = image.format in ("PNG", "PPM") and image.mode != "F"
    if not known:
        raise ValueError("which grey is white is not known; save it with 8 bits a channel")
    grey = image.convert("I").point(lambda value: value * (255 / WHITE_16_BITS) + 0.5).convert("L")
    if "transparency" in image.info:
        grey.info["transparency"] = round(image.info["transparency"] * 255 / WHITE_16_BITS)
    return grey


def exif_orientation(exif: bytes | memoryview) -> int:
    """Return the orientation in EXIF data, from 1 to 8; 1 if there is none.

    Nothing else in them is read, as cameras and programs write much that is wrong; what is of another type than EXIF
    says is none.

    Args:
        exif: without `EXIF` before it.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(exif[:4]))
    if not order:
        return UPRIGHT
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for number in range(count):
            tag, *found, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * number)
            if tag == ORIENTATION:
                return value if found == [SHORT, 1] and value in TURNS else UPRIGHT
    except struct.error:  # it is cut off
        pass
    return UPRIGHT


def _alpha_is_unused(image: Image.Image) -> bool:
    """Return whether the fourth channel is 0 throughout, in a file that does not say what it is.

    Screen grabbers and Photoshop write such BMPs, and viewers show their colours.
    """
    if image.mode != "RGBA" or image.format not in ("BMP", "TIFF"):
        return False
    said = image.format == "TIFF" and set(image.tag_v2.get(EXTRA_SAMPLES, ())) & set(ALPHA)
    return not said and image.getchannel("A").getextrema() == (0, 0)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the first frame of an image file, upright according to its EXIF orientation; what is transparent becomes
    white.

    Args:
        image: as `Image.open` returns it.

    Raises:
        ValueError: if its pixels are of a kind that cannot be converted. For a damaged file nearly any exception.
    """
    image.load()  # turns a TIFF, and reads the EXIF data that a PNG has behind its pixels
    exif = image.info.get("exif")  # the text, if a PNG has one of this name
    turn = TURNS.get(exif_orientation(exif.removeprefix(EXIF))) if isinstance(exif, bytes) else None
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    elif _alpha_is_unused(image):
        image = image.convert("RGB")
    if turn is not None:
        image = image.transpose(turn)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def read_rgb(path: Path) -> Image.Image:
    """Return an image file, see `to_rgb`."""
    # Of a path Pillow maps raw TIFFs into memory, with the sides swapped if they are to be turned.
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
        return to_rgb(image)


def check_scan(data: bytes, cmyk: bool) -> None:
    """Decode a JPEG with all of libjpeg's checks; Pillow and DALI silently fill missing pixels with grey.

    Extraneous bytes between the image data and the end marker are allowed, since cameras write some, unless they are
    more than a quarter of the file: then the image was probably overwritten.

    Raises:
        ValueError: if pixels are missing or a code is not in the Huffman table.
    """
    import simplejpeg  # imports NumPy; packing without this check needs neither

    try:  # at an eighth of the size and in grey, which is fast: only the entropy coding can be damaged
        simplejpeg.decode_jpeg(data, "CMYK" if cmyk else "GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        extraneous = re.search(r"(\d+) extraneous bytes", str(error))
        if not extraneous or int(extraneous[1]) > len(data) / 4:
            raise
