"""Image files of any kind as upright RGB images of 8 bits a channel."""

import re
from pathlib import Path

from PIL import Image, ImageOps

# Formats of still photographs. Pillow reads more, some of them with other programs: EPS is run by Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
WHITE_16_BITS = 65535
BITS, PHOTOMETRIC, BLACK_IS_ZERO = 258, 262, 1  # tags of TIFF


def endings() -> set[str]:
    """How names of files of `FORMATS` end, in lower case."""
    return {ending for ending, of in Image.registered_extensions().items() if of in FORMATS}


def _to_8_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits in 8, rounded; Pillow's own conversion makes every value above 255 white.

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


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame of an image file, upright according to its EXIF orientation; what is transparent becomes white.

    Args:
        image: as `Image.open` returns it.

    Raises:
        ValueError: if its pixels are of a kind that cannot be converted. For a damaged file nearly any exception.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def read_rgb(path: Path) -> Image.Image:
    """An image file, see `to_rgb`."""
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
