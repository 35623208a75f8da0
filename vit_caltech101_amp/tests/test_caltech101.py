"""Caltech101: found, split, decoded once, augmented as torchvision would, and learnt."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.data import class_images, image_folder
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import RankLogger
from colossalai.context import Config
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import v2

import caltech101
import fork_ranks
import schemas
import training
from conftest import encode, photograph

MODES = (fork_ranks.ROOT / "vit_caltech101_amp" / "config").glob("config_AMP_*.py")
CONFIGS = {"config_fp32", *(path.stem for path in MODES)}
# A rate at which runs that differ by a rounding stay together, and yet learn to read.
SMALL = dict(
    IMG_SIZE=16, CACHE_SIZE=16, PATCH_SIZE=8, HIDDEN_SIZE=128, DEPTH=2, NUM_HEADS=4, BATCH_SIZE=32, DROP_RATE=0.0
)
SMALL |= dict(OPTIMIZER="adamw", LEARNING_RATE=5e-4, WEIGHT_DECAY=0.05, CROP_AREA=(0.7, 1.0), FLIP=False)
SMALL |= dict(NUM_EPOCHS=12, TRAIN_PER_CLASS=110, NUM_CLASSES=101)
SETTINGS = Config(configs.complete(dict(IMG_SIZE=32, SEED=0), schemas.schema(schemas.CALTECH101)))


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("sample")
    caltech101.write_sample(root)
    return root


@pytest.fixture
def few(sample, tmp_path):
    """Five images of each of three classes."""
    for label in "012":
        part = tmp_path / caltech101.FOLDER / label
        part.mkdir(parents=True)
        for path in sorted((sample / caltech101.FOLDER / label).iterdir())[:5]:
            shutil.copy2(path, part)
    return tmp_path


def train(output, config, world_size=1, *more, **values):
    """Train a small model by one of the shipped configs."""
    options = dict(script=training.CALTECH101, config=f"config/{config}.py", small=False)
    return training.train(output, world_size, *more, **options, **{**SMALL, **values})


def test_images_are_found_in_order_without_the_background(few):
    shutil.copytree(few / caltech101.FOLDER / "0", few / caltech101.FOLDER / caltech101.NO_CLASS)
    (few / caltech101.FOLDER / "1" / ".hidden.jpg").write_bytes(b"")
    images = caltech101.find_images(few)
    assert images.classes == ["0", "1", "2"]
    assert images.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert images.paths[5] == "1/image_0001.jpg"
    assert images.left_out == []


def test_images_of_every_format_are_read_and_what_is_none_is_said(few):
    root = few / caltech101.FOLDER
    (root / "1").rename(root / "_one")
    for number, name in enumerate(("UPPER.JPG", "b.jpeg", "c.Png", "d.webp", "e.TIFF", "f.gif", "g.bmp", "h.pgm")):
        Image.new("L", (20, 20), number).save(root / "0" / name)
    for name in ("0/notes.txt", "0/movie.mp4", "2/notes.TXT", "2/no_ending", "readme.txt"):
        (root / name).touch()
    images = caltech101.find_images(few)
    assert images.classes == ["0", "2", "_one"]
    assert np.bincount(images.labels).tolist() == [13, 5, 5]
    assert images.left_out == [
        f"5 files that are no images are left out (.txt 3, .mp4 1, no ending 1), the first is {root}/readme.txt"
    ]


@pytest.mark.parametrize(("mode", "ending"), [("F", "tif"), ("I", "tif"), ("F", "pfm")])
def test_pixels_without_a_known_white_are_refused(few, mode, ending):
    path = few / caltech101.FOLDER / "0" / f"a.{ending}"
    Image.new(mode, (20, 20)).save(path)
    images = caltech101.find_images(few)
    with pytest.raises(UserError, match=f"{path}: cannot be decoded: which grey is white is not known; save it with"):
        class_images.decode(images, 16, 16, images.paths.index(f"0/a.{ending}"))


def test_no_other_program_decodes_an_image(few, monkeypatch):
    """EPS under the name of a JPEG would be run by Ghostscript."""
    path = few / caltech101.FOLDER / "0" / "image_0001.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with Image.open(path) as image:
        assert image.format == "EPS"
    with pytest.raises(UserError, match=f"{path}: cannot be decoded: cannot identify image file"):
        class_images.decode(caltech101.find_images(few), 16, 16, 0)


def test_class_without_images_is_refused_by_name(few):
    (few / caltech101.FOLDER / "3").mkdir()
    words = rf"^{few / caltech101.FOLDER}/3: has no images \(\.apng, \.bmp, .*\); "
    with pytest.raises(UserError, match=rf"{words}fill it or remove it$"):
        caltech101.find_images(few)
    (few / caltech101.FOLDER / "3" / ".notes").touch()
    with pytest.raises(UserError, match=rf"{words}put images in it or move it out of the data$"):
        caltech101.find_images(few)


def test_links_to_images_and_to_classes_are_followed(few):
    root = few / caltech101.FOLDER
    (root / "2").rename(few / "elsewhere")
    (root / "2").symlink_to(few / "elsewhere")
    (root / "0" / "link.jpg").symlink_to(few / "elsewhere" / "image_0001.jpg")
    images = caltech101.find_images(few)
    assert np.bincount(images.labels).tolist() == [6, 5, 5]
    assert np.array_equal(class_images.decode(images, 16, 16, 5), class_images.decode(images, 16, 16, 11))


def of_sizes(*sizes):
    """Images, of which only names and labels are known; class a has `sizes[0]`."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return class_images.Images(Path("root"), Path("root"), list("abc"[: len(sizes)]), [], [], [], labels, [])


@pytest.mark.parametrize(("per_class", "expected"), [(None, [8, 40]), (30, [30, 30])])
def test_split_is_stratified_and_always_the_same(per_class, expected):
    images = of_sizes(10, 50) if per_class is None else of_sizes(31, 60)
    labels = images.labels
    train, test = caltech101.split(images, per_class)
    assert np.bincount(labels[train]).tolist() == expected
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    assert all(torch.equal(a, b) for a, b in zip(caltech101.split(images, per_class), (train, test), strict=True))


@pytest.mark.parametrize(
    ("sizes", "per_class", "words"),
    [
        ((3, 1), None, "root/b: has 1 image, but 3 are the fewest to train and to test on: add some, or leave it out"),
        ((2, 3), None, "root/a: has 2 images, but 3 are the fewest to train and to test on: add some, or leave it out"),
        ((9, 5), 5, "root/b: has 5 images, but TRAIN_PER_CLASS = 5 needs 6, so that one is left to test: lower"),
    ],
)
def test_classes_that_are_too_small_to_split_are_named_with_a_remedy(sizes, per_class, words):
    with pytest.raises(UserError, match=f"^{words}"):
        caltech101.split(of_sizes(*sizes), per_class)


def fill_cache(folder, size):
    """The images of Caltech101 in a folder, the folder of the cache that is made of them, and whether it was."""
    images, log = caltech101.find_images(folder), RankLogger()
    digests = class_images.digest_contents(images, log)
    made = class_images.fill_cache(images, digests, size, size, log)
    return images, class_images.cache_folder(images, digests, size, size), made


def test_split_is_that_of_earlier_versions():
    """Or a resumed run would train on images that it was tested on."""
    train, test = caltech101.split(of_sizes(10, 50))
    generator = np.random.default_rng(0)
    first, second = generator.permutation(10), 10 + generator.permutation(50)
    assert test.tolist() == sorted([*first[8:], *second[40:]])
    assert train.tolist() == sorted([*first[:8], *second[:40]])


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("size", [(96, 64), (64, 96), (64, 64)])
def test_a_photograph_is_decoded_as_pillow_shows_it(size, orientation, tmp_path):
    """Upright, in its colours, resized bilinearly with antialiasing, and cut in the middle."""
    path, picture = tmp_path / caltech101.FOLDER / "a" / "1.png", photograph(*size)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(picture, orientation))
    resized = picture.resize([side // 2 for side in size], Image.Resampling.BILINEAR)
    left, top = ((side - 32) // 2 for side in resized.size)
    expected = np.asarray(resized.crop((left, top, left + 32, top + 32)))
    assert np.array_equal(class_images.decode(caltech101.find_images(tmp_path), 32, 32, 0), expected)


def test_cache_has_what_pillow_decodes_and_is_made_anew_when_it_is_damaged_or_a_file_changes(few, capsys):
    images, folder, _ = fill_cache(few, 48)
    pixels = np.load(folder / "images.npy")
    assert pixels.shape == (15, 48, 48, 3)
    for number in (0, 14):
        with Image.open(images.root / images.paths[number]) as image:
            expected = image.convert("RGB").resize((48, 48), Image.Resampling.BILINEAR)
        assert np.array_equal(pixels[number], np.asarray(expected))
    capsys.readouterr()
    fill_cache(few, 48)
    assert capsys.readouterr().out == "", "once is enough"
    os.truncate(folder / "images.npy", pixels.size // 2)
    fill_cache(few, 48)
    assert np.array_equal(np.load(folder / "images.npy"), pixels)
    os.utime(images.root / images.paths[3], ns=(1, 1))
    assert fill_cache(few, 48)[1] == folder, "of the same content"
    shutil.copy(images.root / images.paths[3], images.root / images.paths[4])
    of_others = [folder.with_name(f"decoded-{name}-0123456789ab") for name in ("48px-42px", "55px-48px")]
    of_before = folder.with_name("decoded-48px-0123456789ab")  # before IMG_SIZE was in the name
    for path in (*of_others, of_before):
        path.mkdir()
    _, other, _ = fill_cache(few, 48)
    there = {path for path in folder.parent.iterdir() if path.name.startswith("decoded")}
    assert there == {other, *of_others}, "what nobody will read any more goes"
    assert fill_cache(few, 32)[1] != other


def test_few_images_are_decoded_before_they_are_written(few, monkeypatch):
    """Or those that a slow disk has not taken yet would fill the memory."""
    decoded, waiting, decode = [], [], class_images.decode

    def slowly(images, *_, **__):
        for number, image in enumerate(images):
            time.sleep(0.02)
            waiting.append(len(decoded) - number)
            yield image

    monkeypatch.setattr(class_images, "decode", lambda *args: decoded.append(args) or decode(*args))
    monkeypatch.setattr(class_images, "tqdm", slowly)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    fill_cache(few, 16)
    assert len(waiting) == 30  # digests, too
    waiting = waiting[15:]
    assert max(waiting) <= 3


def test_cache_on_a_full_disk_is_said_and_leaves_nothing(few, small_disk, capsys):
    shutil.copytree(few / "caltech101", small_disk.path / "caltech101")
    assert not fill_cache(small_disk.path, 512)[2]  # 12 MB
    said = capsys.readouterr().out
    assert said.endswith("cannot be written: No space left on device; images are decoded for each batch\n")
    assert sorted(os.listdir(small_disk.path / "caltech101")) == ["101_ObjectCategories", "contents.json"]
    small_disk.resize("32m")
    _, folder, made = fill_cache(small_disk.path, 512)
    assert made
    assert len(class_images.open_cache(folder)) == 15


def test_jpegs_whose_missing_pixels_become_grey_are_said(few, capsys):
    """Cut off, with an end marker behind it, so that Pillow decodes it without a word."""
    path = few / caltech101.FOLDER / "1" / "image_0002.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4] + b"\xff\xd9")
    images, log = caltech101.find_images(few), RankLogger()
    for _ in range(2):  # also if they were decoded before
        faults, odd = class_images.check_images(images, class_images.digest_contents(images, log), 16, 16, log)
        assert not faults
        (line,) = class_images.say_odd(images, odd)
        words = "1 images are damaged, and grey where pixels are missing; the first is"
        assert f"{words} {path}: Corrupt JPEG data: pre" in line


def test_a_wide_image_is_cut_in_the_middle(tmp_path):
    part = tmp_path / caltech101.FOLDER / "a"
    part.mkdir(parents=True)
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 255
    Image.fromarray(wide).save(part / "1.jpg", quality=100)
    pixels = class_images.decode(caltech101.find_images(tmp_path), 20, 20, 0)
    assert pixels.shape == (20, 20, 3)
    assert pixels[:, 2:-2].min() > 240


def test_crops_are_distributed_as_torchvisions(monkeypatch):
    """Widths ÷ heights over a range so wide, and to one side, that logarithms and directions count; and places."""
    area, aspect = (0.05, 0.3), (0.5, 3.0)
    monkeypatch.setattr(image_folder, "CROP_ASPECT", aspect)
    maps = image_folder.draw_crops(4000, area, True, torch.Generator().manual_seed(0)).double()
    mirrored, width, height = maps[:, 0, 0] < 0, maps[:, 0, 0].abs(), maps[:, 1, 1]
    left, top = (1 + maps[:, 0, 2] - width) / 2, (1 + maps[:, 1, 2] - height) / 2
    transform, image = v2.RandomResizedCrop(8, area, aspect), torch.empty(3, 999, 999)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [transform.make_params([image]) for _ in range(4000)]
    theirs = {key: torch.tensor([one[key] for one in drawn]) / 999 for key in ("top", "left", "height", "width")}
    for ours, other in (
        (width / height, theirs["width"] / theirs["height"]),
        (width * height, theirs["width"] * theirs["height"]),
        (left, theirs["left"]),
        (top, theirs["top"]),
        (left - top, theirs["left"] - theirs["top"]),
    ):
        assert ks_2samp(ours, other).statistic < 0.045, "below 0.043 in 999 of 1,000 cases"
    assert mirrored.double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert ks_2samp(left[mirrored], left[~mirrored]).pvalue > 0.001
    assert min(left.min(), top.min()) > -1e-6
    assert max((left + width).max(), (top + height).max()) < 1 + 1e-6


def batches_of(pixels, sampler, **values):
    """Batches of these images, whose labels count them."""
    numbers, config = torch.arange(len(pixels)), Config(SETTINGS | values)
    return image_folder.ClassFolderLoader(pixels, numbers, numbers, sampler, config, torch.device("cpu"))


def test_flip_mirrors_half_of_the_images_and_changes_nothing_else():
    pixels = torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8)

    def first(flip):
        sampler = GlobalBatchSampler(16, 16)
        return next(iter(batches_of(pixels, sampler, FLIP=flip)))[0]

    pairs = list(zip(first(False), first(True), strict=True))
    mirrored = [torch.allclose(plain.flip(-1), flipped, atol=1e-3) for plain, flipped in pairs]
    assert 2 < sum(mirrored) < 14
    assert mirrored == [not torch.equal(plain, flipped) for plain, flipped in pairs]


def test_batches_are_what_torchvision_makes_of_the_same_crops():
    """A crop by the affine map equals cutting it out and resizing it, to the interpolation at the edges."""
    pixels = torch.randint(0, 256, (6, 5, 5, 3), dtype=torch.uint8)
    pixels = v2.functional.resize(pixels.permute(0, 3, 1, 2), [64, 64]).permute(0, 2, 3, 1).contiguous()
    batches = batches_of(pixels, EvalSampler(6, 6))
    maps = torch.zeros(6, 2, 3)
    maps[:, 0, 0], maps[:, 1, 1], maps[:, 0, 2], maps[:, 1, 2] = -0.5, 0.5, 0.25, -0.25  # 32 px at (24, 8), mirrored
    images = pixels.permute(0, 3, 1, 2).float()
    expected = images[:, :, 8:40, 24:56].flip(-1)
    torch.testing.assert_close(batches._crop(images, maps), expected, atol=1e-2, rtol=0)
    (evaluated, labels), *_ = list(batches)
    torch.testing.assert_close(evaluated, (images[:, :, 16:48, 16:48] / 255 - 0.5) / 0.5)
    assert labels.tolist() == list(range(6))


def test_an_epoch_has_every_image_once_and_another_augmentation_each_time():
    """That of the seed, the epoch and the image, in its colours."""
    pixels = torch.from_numpy(np.stack([np.asarray(photograph(48, 48, number)) for number in range(16)]))
    values = dict(CROP_AREA=(0.3, 0.6), FLIP=True, MEAN=(0.1, 0.5, 0.7), STD=(0.2, 0.4, 0.8))
    batches, before = batches_of(pixels, GlobalBatchSampler(16, 4, seed=3), **values), None
    for epoch in range(3):
        generator = torch.Generator().manual_seed(3 * 1_000_003 - 1 - epoch)
        maps = image_folder.draw_crops(16, values["CROP_AREA"], True, generator)
        cropped = batches._crop(pixels.permute(0, 3, 1, 2) / 255, maps)
        expected = v2.functional.normalize(cropped, values["MEAN"], values["STD"])
        images, labels = map(torch.cat, zip(*batches, strict=True))
        assert sorted(labels.tolist()) == list(range(16))
        torch.testing.assert_close(images, expected[labels], atol=1e-4, rtol=0)
        if before is not None:
            assert ((expected - before).abs().amax((1, 2, 3)) > 0.5).all()
        before = expected


# On a CPU fp16 modes run in bf16, so that some are the same; of those a few steps will do.
SAME_ON_A_CPU = {"config_AMP_apex": "config_AMP_torch", "config_AMP_bf16": "config_AMP_torch"}
SAME_ON_A_CPU["config_AMP_naive_bf16"] = "config_AMP_naive"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of every shipped config on the sample: fp32 to the end, and the others, slow on a CPU, for three epochs."""
    steps = dict.fromkeys(CONFIGS, 102) | dict.fromkeys(SAME_ON_A_CPU, 3) | {"config_fp32": 408}
    return {name: train(tmp_path_factory.mktemp(name), name, steps=steps[name]) for name in sorted(CONFIGS)}


def test_every_config_trains_and_half_precision_follows_fp32(trained):
    assert trained.keys() == {"config_fp32", "config_AMP_torch", "config_AMP_naive", *SAME_ON_A_CPU}
    expected, tested = trained["config_fp32"].steps, trained["config_fp32"].evaluations
    assert tested[-1]["eval_accuracy"] > 0.93
    assert expected[99]["loss"] < expected[0]["loss"] - 3, "equality of what learns nothing says little"
    for name in ("config_AMP_torch", "config_AMP_naive"):
        steps, evaluations = trained[name].steps, trained[name].evaluations
        assert steps[99]["loss"] == pytest.approx(expected[99]["loss"], rel=0.02), name
        assert steps[99]["loss"] != expected[99]["loss"], "the mode must be in effect"
        assert evaluations[-1]["step"] == tested[len(evaluations) - 1]["step"] == 102
        assert evaluations[-1]["eval_accuracy"] == pytest.approx(tested[2]["eval_accuracy"], abs=0.01), name
        assert evaluations[-1]["eval_images"] == 697
    for name, same in SAME_ON_A_CPU.items():
        assert [r["loss"] for r in trained[name].steps] == [r["loss"] for r in trained[same].steps[:3]], name


def test_the_log_says_who_does_what_apex_did(trained):
    assert trained["config_AMP_apex"].said.count("AMP_TYPE.APEX O1 by torch in bfloat16") == 1


@pytest.mark.parametrize(
    ("name", "first", "later"), [("fp32", 1e-5, 1e-4), ("AMP_torch", 1e-4, 1e-2), ("AMP_naive", 1e-4, 1e-2)]
)
def test_two_processes_are_one(trained, tmp_path, name, first, later):
    """In fp32 to the tolerances of the contract; in bf16, 8 bits, sums in another order differ more."""
    two = train(tmp_path, f"config_{name}", 2, steps=20, BATCH_SIZE=16)
    expected = trained[f"config_{name}"].steps[:20]
    for here, there in zip(two.steps, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=first if here["step"] == 1 else later)
    assert two.evaluations[-1]["eval_images"] == 697


COMPILED = dict(DEPTH=1, CACHE_SIZE=32, HIDDEN_SIZE=32, FLIP=True)


@pytest.mark.parametrize(("name", "world_size"), [("fp32", 2), ("AMP_torch", 1)])
def test_compiled_is_the_same(compiler, monkeypatch, tmp_path, name, world_size):
    """With gradient accumulation, so that DDP reduces in every second backward pass; test_pairs.py compiles NAIVE."""
    programs = tmp_path / "programs"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(programs))
    values = COMPILED | dict(steps=3, BATCH_SIZE=16, gradient_accumulation=2)
    expected = train(tmp_path / "eager", f"config_{name}", world_size, **values).steps
    assert not any(programs.rglob("*.so"))
    if world_size > 1:  # so that its ranks find programs, which each would compile at once
        train(tmp_path / "alone", f"config_{name}", 1, "--compile", **values | dict(steps=1))
    run = train(tmp_path / "compiled", f"config_{name}", world_size, "--compile", **values)
    assert any(programs.rglob("*.so")), "it must have been compiled"
    tolerance = 1e-5 if name == "fp32" else 1e-3
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in run.steps] == pytest.approx([r[key] for r in expected], rel=tolerance)
    assert run.evaluations[-1]["eval_images"] == 697


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compile"], "COMPILE = True needs a C++ compiler, and 'no-such' is not on PATH"),
        (["--compile", "--debug-nan"], "--debug-nan looks into the model, which COMPILE merges"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(tmp_path, monkeypatch, flags, words):
    monkeypatch.setenv("CXX", "no-such")
    assert words in training.refused(tmp_path, 1, *flags, script=training.CALTECH101, SYNTHETIC=True)


# ---- faults: one line, nothing lost, and the second run recovers ----


def step_on(data, monkeypatch, steps=1, world_size=1, **options):
    """Train on a few images in `data`."""
    monkeypatch.setenv("DATA", str(data))
    output = data.with_name(f"{ascii(data.name)[1:-1]}-run".replace("\\", ""))
    small = dict(BATCH_SIZE=2, TRAIN_PER_CLASS=4, DEPTH=1)
    return train(output, "config_fp32", world_size, steps=steps, **small, **options)


def test_corrupt_image_ends_a_run_in_one_line_until_it_is_repaired(few, monkeypatch):
    path = few / caltech101.FOLDER / "1" / "two\nlines.jpg"
    path.with_name("image_0003.jpg").rename(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    (line,) = "".join(step_on(few, monkeypatch, world_size=2, code=2).stderr).splitlines()
    assert "/1/two\\nlines.jpg: cannot be decoded: image file is truncated" in line
    folder = path.parents[2]
    assert line.endswith(f"; repair or remove it. Images that cannot be decoded: 1, listed in {folder / 'damaged.txt'}")
    there = {entry.name for entry in folder.iterdir()}
    assert there == {"101_ObjectCategories", "contents.json", "checked.json", "damaged.txt"}, (
        "nothing is decoded in part"
    )
    path.write_bytes(whole)
    assert step_on(few, monkeypatch, world_size=2).stderr == ["", ""]


def test_names_that_are_not_utf8_are_kept_in_identity_and_log(few, monkeypatch):
    """Of DATA, a class and a file."""
    data = few / os.fsdecode(b"d\xe4ta")
    data.mkdir()
    (few / "caltech101").rename(data / "caltech101")
    root = data / caltech101.FOLDER
    (root / "0").rename(root / os.fsdecode(b"fl\xf6wer"))
    (root / "1" / "image_0001.jpg").rename(root / "1" / os.fsdecode(b"b\xe4r.jpg"))
    (root / "1" / os.fsdecode(b"\xff.txt")).touch()
    first = step_on(data, monkeypatch)
    assert first.stderr == [""]
    assert "1 files that are no images are left out (.txt 1), the first is " in first.stdout[0]
    assert "/1/\\udcff.txt\n" in first.stdout[0]
    assert step_on(data, monkeypatch, steps=2).stderr == [""], "resumed, with the same identity"
    (root / os.fsdecode(b"fl\xf6wer")).rename(root / "flower")
    (line,) = step_on(data, monkeypatch, steps=3, code=2).stderr[0].splitlines()
    assert r"without fl\udcf6wer with flower" in line
