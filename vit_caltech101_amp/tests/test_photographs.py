"""Pictures of Debian's packages as class folders, from small files in the places where the packages have theirs."""

import numpy as np
import pytest
from colossal_vit.errors import UserError
from PIL import Image

import photographs
from photographs import OPEN_CLIP_ART, TUX_PAINT


def save(path, colour, size=(6, 4)):
    """Save a picture of one colour, RGBA, whose left column is transparent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 4), colour, np.uint8)
    pixels[:, 0, 3] = 0
    Image.fromarray(pixels).save(path)


def fill(source, pictures):
    """Save two pictures for each class where a pattern finds them."""
    for number, patterns in enumerate(pictures.classes.values()):
        for name in ("b", "a"):
            path = patterns[0].replace("**", "part/of/it").replace("/*/", "/some/").replace("*", name)
            save(source / path, (number, 10 * (name == "b"), 0, 255))
    return source


@pytest.mark.parametrize(
    ("pictures", "classes"), [(TUX_PAINT, 14), (OPEN_CLIP_ART, 12)], ids=["tuxpaint", "openclipart"]
)
def test_write_class_folders_has_each_class_on_white(pictures, classes, tmp_path):
    source = fill(tmp_path / "source", pictures)
    folder = photographs.write_class_folders(tmp_path / "written", pictures, source)
    assert sorted(path.name for path in folder.iterdir()) == sorted(pictures.classes)
    assert len(pictures.classes) == classes
    for number, name in enumerate(pictures.classes):
        first, second = (np.asarray(Image.open(folder / name / f"{place:04d}.png")) for place in range(2))
        assert first.shape == (4, 6, 3)
        assert (first[:, 0] == 255).all(), "what was transparent"
        assert (first[:, 1:] == (number, 0, 0)).all()
        assert (second[:, 1:] == (number, 10, 0)).all()


def test_write_class_folders_leaves_out_what_is_beside_photographs(tmp_path):
    source = fill(tmp_path / "source", TUX_PAINT)
    save(source / "animals/birds/cartoon/c.png", (255, 0, 0, 255))
    (source / "animals/birds/c.txt").touch()
    folder = photographs.write_class_folders(tmp_path / "written", TUX_PAINT, source)
    assert len(list((folder / "bird").iterdir())) == 2


def test_write_class_folders_shrinks_long_pictures(tmp_path):
    source = fill(tmp_path / "source", TUX_PAINT)
    save(source / "animals/fish/c.png", (0, 0, 0, 255), (1024, 256))
    folder = photographs.write_class_folders(tmp_path / "written", TUX_PAINT, source)
    assert Image.open(folder / "fish" / "0002.png").size == (512, 128)


def test_write_class_folders_without_a_class_is_one_line(tmp_path):
    source = fill(tmp_path / "source", TUX_PAINT)
    for path in (source / "space/planets").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"source: has no space/planets/\*\.png, as tuxpaint-stamps-default of Debian"):
        photographs.write_class_folders(tmp_path / "written", TUX_PAINT, source)
    assert not (tmp_path / "written").exists()
