"""Pictures of Debian's packages in class folders: photographs of things, and drawings. `scripts/sample_data.py` writes
them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from colossal_vit.data.decoding import read_rgb
from colossal_vit.errors import UserError, oserror_as_user_error
from colossal_vit.files import atomic_folder

SIDE = 512  # pixels: the longest that a picture is written with; one of Open Clip Art has 169 million pixels


class Pictures(NamedTuple):
    """Pictures of a package.

    Attributes:
        package: of Debian.
        folder: where the package has its files.
        licence: what may be done with them.
        classes: patterns of files in the folder by the name of the class.
    """

    package: str
    folder: Path
    licence: str
    classes: dict[str, Sequence[str]]


TUX_PAINT = Pictures(
    "tuxpaint-stamps-default",
    Path("/usr/share/tuxpaint/stamps"),
    "GPL-2",
    {
        "bird": ["animals/birds/*.png"],
        "bovine": ["animals/mammals/bovines/*.png"],
        "coin": ["symbols/money/*/coins/*.png"],
        "fish": ["animals/fish/*.png"],
        "flower": ["plants/flowers/*.png"],
        "fruit": ["food/fruit/*.png"],
        "hand sign": ["symbols/alphabets/asl/*.png"],
        "insect": ["animals/insects/*.png"],
        "musical instrument": ["hobbies/music/*/*.png"],
        "other mammal": ["animals/mammals/*.png"],
        "planet": ["space/planets/*.png"],
        "road sign": ["town/roadsigns/*.png"],
        "tool": ["household/tools/*.png"],
        "vegetable": ["food/vegetables/*.png"],
    },
)
OPEN_CLIP_ART = Pictures(
    "openclipart-png",
    Path("/usr/share/openclipart/png"),
    "public domain",
    {
        name: [f"{name}/**/*.png"]
        for name in (
            *("animals", "computer", "food", "geography", "office", "people"),
            *("plants", "recreation", "shapes", "signs_and_symbols", "tools", "transportation"),
        )
    },
)
PACKAGES = {"tuxpaint": TUX_PAINT, "openclipart": OPEN_CLIP_ART}


def write_class_folders(folder: Path, pictures: Pictures, source: Path) -> Path:
    """Write pictures as `<class>/<number>.png`, RGB on white and at most `SIDE` pixels long, unless the folder exists.

    Args:
        folder: to write.
        pictures: which.
        source: the folder with the files of the package.

    Raises:
        UserError: if a class has no pictures there, or one of them cannot be read.
    """
    if folder.is_dir():
        return folder
    with atomic_folder(folder) as scratch:
        for name, patterns in pictures.classes.items():
            paths = sorted(path for pattern in patterns for path in source.glob(pattern))
            if not paths:
                raise UserError(f"{source}: has no {' or '.join(patterns)}, as {pictures.package} of Debian has")
            (scratch / name).mkdir()
            for number, path in enumerate(paths):
                with oserror_as_user_error(path):
                    image = read_rgb(path)
                image.thumbnail((SIDE, SIDE))
                image.save(scratch / name / f"{number:04d}.png")
    return folder
