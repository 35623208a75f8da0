"""Caltech101: found, split, decoded once, augmented as torchvision would, and learnt."""

import hashlib
import http.server
import os
import shutil
import tarfile
import threading

import numpy as np
import pytest
import torch
import torchvision
from colossal_vit.data.digits import write_caltech101
from colossal_vit.data.samplers import EvalSampler, GlobalBatchSampler
from colossal_vit.parallel.ranks import RankLogger
from colossal_vit.results import read_metrics
from PIL import Image
from torchvision.transforms import v2

import caltech101
import fork_ranks

FOLDER = fork_ranks.ROOT / "vit_caltech101_amp"
CONFIGS = sorted((FOLDER / "config").glob("config_*.py"))
# A rate at which runs that differ by a rounding stay together, and yet learn to read.
SMALL = dict(
    IMG_SIZE=16, CACHE_SIZE=16, PATCH_SIZE=8, HIDDEN_SIZE=128, DEPTH=2, NUM_HEADS=4, BATCH_SIZE=32, DROP_RATE=0.0
)
SMALL |= dict(OPTIMIZER="adamw", LEARNING_RATE=5e-4, WEIGHT_DECAY=0.05, CROP_AREA=(0.7, 1.0), FLIP=False)
SMALL |= dict(NUM_EPOCHS=12, TRAIN_PER_CLASS=110)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("sample")
    write_caltech101(root)
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


def train(output, *argv, world_size=1, **values):
    flags = [part for key, value in {**SMALL, **values}.items() for part in ("--set", f"{key}={value!r}")]
    result = fork_ranks.run("vit_caltech101_amp/train.py", [*argv, "--output", str(output), *flags], world_size)
    assert result.codes == [0] * world_size, str(result)
    return (*read_metrics(output), result.stdout[0])


def test_images_are_found_in_order_without_the_background(few):
    shutil.copytree(few / caltech101.FOLDER / "0", few / caltech101.FOLDER / caltech101.NO_CLASS)
    (few / caltech101.FOLDER / "1" / ".hidden.jpg").write_bytes(b"")
    images = caltech101.find_images(few)
    assert images.classes == ["0", "1", "2"]
    assert images.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert images.paths[5] == "1/image_0001.jpg"


@pytest.mark.parametrize(("per_class", "expected"), [(None, [8, 40]), (30, [30, 30])])
def test_split_is_stratified_and_always_the_same(per_class, expected):
    labels = np.array([0] * 10 + [1] * 50) if per_class is None else np.array([0] * 31 + [1] * 60)
    train, test = caltech101.split(labels, per_class)
    assert np.bincount(labels[train]).tolist() == expected
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(labels)))
    assert all(torch.equal(a, b) for a, b in zip(caltech101.split(labels, per_class), (train, test), strict=True))


def test_cache_has_what_pillow_decodes_and_is_made_anew_when_a_file_changes(few, capsys):
    images, log = caltech101.find_images(few), RankLogger()
    caltech101.fill_cache(images, 48, log)
    folder = caltech101.cache_folder(images, 48)
    pixels = np.load(folder / "images.npy")
    assert pixels.shape == (15, 48, 48, 3)
    for number in (0, 14):
        with Image.open(images.root / images.paths[number]) as image:
            expected = image.convert("RGB").resize((48, 48), Image.Resampling.BILINEAR)
        assert np.array_equal(pixels[number], np.asarray(expected))
    capsys.readouterr()
    caltech101.fill_cache(images, 48, log)
    assert capsys.readouterr().out == "", "once is enough"
    os.utime(images.root / images.paths[3], ns=(1, 1))
    caltech101.fill_cache(images, 48, log)
    assert caltech101.cache_folder(images, 48).is_dir()
    assert not folder.exists(), "what nobody will read any more goes"
    assert caltech101.cache_folder(images, 32) != caltech101.cache_folder(images, 48)


def test_a_wide_image_is_cut_in_the_middle(tmp_path):
    part = tmp_path / caltech101.FOLDER / "a"
    part.mkdir(parents=True)
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 255
    Image.fromarray(wide).save(part / "1.jpg", quality=100)
    pixels = caltech101.decode(caltech101.find_images(tmp_path), 20, 0)
    assert pixels.shape == (20, 20, 3)
    assert pixels[:, 2:-2].min() > 240


def test_crops_are_distributed_as_torchvisions():
    """Area and aspect ratio, up to those that torchvision draws again because they do not fit."""
    maps = caltech101.draw_crops(20_000, (0.3, 0.6), True, torch.Generator().manual_seed(0))
    width, height = maps[:, 0, 0].abs(), maps[:, 1, 1]
    transform, image = v2.RandomResizedCrop(8, scale=(0.3, 0.6)), torch.empty(3, 999, 999)
    drawn = torch.tensor([transform.make_params([image])["width"] for _ in range(4_000)]) / 999
    assert width.mean().item() == pytest.approx(drawn.mean().item(), abs=0.01)
    assert width.std().item() == pytest.approx(drawn.std().item(), abs=0.01)
    assert (width * height).min() > 0.29
    assert (width * height).max() < 0.61
    assert (maps[:, 0, 0] < 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (maps[:, 0, 2].abs() + width).max() <= 1.0001
    assert (maps[:, 1, 2].abs() + height).max() <= 1.0001


def test_flip_mirrors_and_changes_nothing_else(tmp_path):
    """In what is drawn, and from the config on."""
    mirrored, plain = (
        caltech101.draw_crops(100, (0.3, 0.6), flip, torch.Generator().manual_seed(0)) for flip in (True, False)
    )
    assert (mirrored[:, 0, 0] < 0).any()
    mirrored[:, 0, 0].abs_()
    assert torch.equal(mirrored, plain)
    config = str(FOLDER / "config" / "config_fp32.py")
    losses = [
        train(tmp_path / str(flip), "--config", config, "--max-steps", "2", FLIP=flip)[0][1]["loss"]
        for flip in (True, False)
    ]
    assert losses[0] != losses[1]


def test_batches_are_what_torchvision_makes_of_the_same_crops():
    """A crop by the affine map equals cutting it out and resizing it, to the interpolation at the edges."""
    pixels = torch.randint(0, 256, (6, 5, 5, 3), dtype=torch.uint8)
    pixels = v2.functional.resize(pixels.permute(0, 3, 1, 2), [64, 64]).permute(0, 2, 3, 1).contiguous()
    sampler = EvalSampler(6, 6, rank=0, num_ranks=1)
    batches = caltech101.Batches(pixels, torch.arange(6), torch.arange(6), sampler, 32, torch.device("cpu"))
    maps = torch.zeros(6, 2, 3)
    maps[:, 0, 0], maps[:, 1, 1], maps[:, 0, 2], maps[:, 1, 2] = -0.5, 0.5, 0.25, -0.25  # 32 px at (24, 8), mirrored
    images = pixels.permute(0, 3, 1, 2).float()
    expected = images[:, :, 8:40, 24:56].flip(-1)
    torch.testing.assert_close(batches._crop(images, maps), expected, atol=1e-2, rtol=0)
    (evaluated, labels), *_ = list(batches)
    torch.testing.assert_close(evaluated, (images[:, :, 16:48, 16:48] / 255 - 0.5) / 0.5)
    assert labels.tolist() == list(range(6))


def test_an_epoch_has_every_image_once_and_another_augmentation_each_time():
    pixels = torch.arange(16, dtype=torch.uint8).view(16, 1, 1, 1).expand(16, 32, 32, 3).contiguous()
    sampler = GlobalBatchSampler(16, 4, seed=3, rank=0, num_ranks=1)
    batches = caltech101.Batches(pixels, torch.arange(16), torch.arange(16), sampler, 32, torch.device("cpu"))
    for _ in range(2):
        values = torch.cat([images.mean((1, 2, 3)) for images, _ in batches])
        seen = ((values * 0.5 + 0.5) * 255).round().int()
        assert sorted(seen.tolist()) == list(range(16))


SAME_ON_A_CPU = {"config_AMP_apex": "config_AMP_torch", "config_AMP_bf16": "config_AMP_torch"}
SAME_ON_A_CPU["config_AMP_naive_bf16"] = "config_AMP_naive"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every shipped config on the sample, with a small model: steps, evaluations, log.

    fp32 to the end, and the others, slow on a CPU, for three epochs. On a CPU fp16 modes run in bf16, so that some are
    the same; of those a few steps will do.
    """

    def run(path):
        steps = "3" if path.stem in SAME_ON_A_CPU else "408" if path.stem == "config_fp32" else "102"
        return train(tmp_path_factory.mktemp(path.stem), "--config", str(path), "--max-steps", steps)

    return {path.stem: run(path) for path in CONFIGS}


def test_every_config_trains_and_half_precision_follows_fp32(trained):
    assert trained.keys() == {"config_fp32", "config_AMP_torch", "config_AMP_naive", *SAME_ON_A_CPU}
    expected, tested, _ = trained["config_fp32"]
    assert tested[-1]["eval_accuracy"] > 0.93
    assert expected[99]["loss"] < expected[0]["loss"] - 3, "equality of what learns nothing says little"
    for name in trained.keys() - SAME_ON_A_CPU.keys() - {"config_fp32"}:
        steps, evaluations, _ = trained[name]
        assert steps[99]["loss"] == pytest.approx(expected[99]["loss"], rel=0.02), name
        assert steps[99]["loss"] != expected[99]["loss"], "the mode must be in effect"
        assert evaluations[-1]["step"] == tested[len(evaluations) - 1]["step"] == 102
        assert evaluations[-1]["eval_accuracy"] == pytest.approx(tested[2]["eval_accuracy"], abs=0.01), name
        assert evaluations[-1]["eval_images"] == 697
    for name, same in SAME_ON_A_CPU.items():
        assert [r["loss"] for r in trained[name][0]] == [r["loss"] for r in trained[same][0][:3]], name


def test_the_log_says_who_does_what_apex_did(trained):
    assert trained["config_AMP_apex"][2].count("AMP_TYPE.APEX O1 by torch in bfloat16") == 1


@pytest.mark.parametrize(
    ("name", "first", "later"), [("fp32", 1e-5, 1e-4), ("AMP_torch", 1e-4, 1e-2), ("AMP_naive", 1e-4, 1e-2)]
)
def test_two_processes_are_one(tmp_path, name, first, later):
    """In fp32 to the tolerances of the contract; in bf16, 8 bits, sums in another order differ more."""
    argv = ["--config", str(FOLDER / "config" / f"config_{name}.py"), "--max-steps", "20"]
    expected, _, _ = train(tmp_path / "1", *argv, BATCH_SIZE=64)
    steps, evaluations, _ = train(tmp_path / "2", *argv, world_size=2)
    for here, there in zip(steps, expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=first if here["step"] == 1 else later)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=first if here["step"] == 1 else later)
    assert len(steps) == 20
    assert evaluations[-1]["eval_images"] == 697


COMPILED = dict(DEPTH=1, CACHE_SIZE=32, HIDDEN_SIZE=32, FLIP=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where compiled programs go: in one place, since they share a header that takes long to compile."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize(("name", "world_size"), [("fp32", 2), ("AMP_torch", 1), ("AMP_naive", 1)])
def test_compiled_is_the_same(tmp_path, monkeypatch, compiled, name, world_size):
    """With gradient accumulation, so that DDP reduces in every second backward pass."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    argv = ["--config", str(FOLDER / "config" / f"config_{name}.py"), "--max-steps", "3"]
    values = dict(COMPILED, BATCH_SIZE=16, gradient_accumulation=2)
    programs = set(compiled.rglob("*.so"))
    expected, _, _ = train(tmp_path / "eager", *argv, world_size=world_size, **values)
    assert set(compiled.rglob("*.so")) == programs
    steps, evaluations, _ = train(tmp_path / "compiled", *argv, "--compile", world_size=world_size, **values)
    assert set(compiled.rglob("*.so")) > programs, "it must have been compiled"
    tolerance = 1e-5 if name == "fp32" else 1e-3
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in steps] == pytest.approx([r[key] for r in expected], rel=tolerance)
    assert evaluations[-1]["eval_images"] == 697


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compile"], "COMPILE = True needs a C++ compiler, and 'no-such' is not on PATH"),
        (["--compile", "--debug-nan"], "--debug-nan looks into the model, which COMPILE merges"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(tmp_path, monkeypatch, flags, words):
    monkeypatch.setenv("CXX", "no-such")
    argv = ["--config", str(CONFIGS[-1]), "--output", str(tmp_path), "--set", "SYNTHETIC=True", "--set", "DEPTH=1"]
    result = fork_ranks.run("vit_caltech101_amp/train.py", [*argv, *flags])
    assert result.codes == [2], str(result)
    assert words in result.stderr[0]
    assert result.stderr[0].count("\n") == 1


# ---- faults: one line, nothing lost, and the second run recovers ----


def once(data, *more, monkeypatch, world_size=2):
    """A training step on the images in `data`: exit code and the lines on stderr."""
    monkeypatch.setenv("DATA", str(data))
    flags = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value!r}")]
    small = ["--set", "BATCH_SIZE=2", "--set", "TRAIN_PER_CLASS=4", "--set", "DEPTH=1", *more]
    argv = ["--config", str(CONFIGS[-1]), "--output", str(data / "run"), "--max-steps", "1", *flags, *small]
    result = fork_ranks.run("vit_caltech101_amp/train.py", argv, world_size)
    assert len(set(result.codes)) == 1, str(result)
    return result.codes[0], "".join(result.stderr).splitlines()


def test_a_corrupt_image(few, monkeypatch):
    path = few / caltech101.FOLDER / "1" / "image_0003.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    code, lines = once(few, monkeypatch=monkeypatch)
    assert code == 2
    assert len(lines) == 1, lines
    assert f"{path}: cannot be decoded: image file is truncated" in lines[0]
    assert [entry.name for entry in path.parents[2].iterdir()] == ["101_ObjectCategories"]
    path.write_bytes(whole)
    assert once(few, monkeypatch=monkeypatch) == (0, [])


def test_an_empty_class(few, monkeypatch):
    (few / caltech101.FOLDER / "3").mkdir()
    code, (line,) = once(few, monkeypatch=monkeypatch)
    assert code == 2
    assert line.endswith(f"{caltech101.FOLDER}/3: has no .jpg files")
    (few / caltech101.FOLDER / "3").rmdir()
    assert once(few, monkeypatch=monkeypatch) == (0, [])


def test_a_truncated_cache_is_made_anew(few, monkeypatch):
    assert once(few, monkeypatch=monkeypatch) == (0, [])
    images = caltech101.find_images(few)
    pixels = caltech101.cache_folder(images, SMALL["CACHE_SIZE"]) / "images.npy"
    whole = pixels.read_bytes()
    os.truncate(pixels, len(whole) // 2)
    assert once(few, monkeypatch=monkeypatch) == (0, [])
    assert pixels.read_bytes() == whole


def test_a_full_disk(few, small_disk, monkeypatch):
    shutil.copytree(few / "caltech101", small_disk.path / "caltech101")
    size = ["--set", "CACHE_SIZE=512"]  # 12 MB
    code, (line,) = once(small_disk.path, *size, monkeypatch=monkeypatch)
    assert code == 2
    assert line.endswith("cannot be written: No space left on device")
    assert [entry.name for entry in (small_disk.path / "caltech101").iterdir()] == ["101_ObjectCategories"]
    small_disk.resize("32m")
    assert once(small_disk.path, *size, monkeypatch=monkeypatch) == (0, [])


@pytest.fixture
def archive_server(few, tmp_path, monkeypatch):
    """An archive packed as the official one, on a server of its own, which torchvision is pointed to.

    Yields:
        A dict whose "bytes" are what the server sends; None sends nothing.
    """
    (few / caltech101.FOLDER / caltech101.NO_CLASS).mkdir()
    inner = tmp_path / "caltech-101"
    inner.mkdir()
    with tarfile.open(inner / "101_ObjectCategories.tar.gz", "w:gz") as tar:
        tar.add(few / caltech101.FOLDER, "101_ObjectCategories")
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "caltech-101")
    whole = (tmp_path / "archive.zip").read_bytes()
    sent = {"bytes": whole, "whole": whole}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", len(sent["bytes"]))
            self.end_headers()
            self.wfile.write(sent["bytes"])

        def log_message(self, *args):
            pass

    original = torchvision.datasets.caltech.download_and_extract_archive

    def download(url, md5, **options):
        port = server.server_address[1]
        original(f"http://localhost:{port}/archive.zip", md5=hashlib.md5(whole).hexdigest(), **options)

    monkeypatch.setattr(torchvision.datasets.caltech, "download_and_extract_archive", download)
    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield sent
    server.shutdown()
    server.server_close()


def test_half_an_archive(archive_server, tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    archive_server["bytes"] = archive_server["whole"][: len(archive_server["whole"]) // 2]
    code, lines = once(data, monkeypatch=monkeypatch)
    assert code == 2
    errors = [line for line in lines if "error: " in line]
    assert len(errors) == 1, lines
    assert "cannot be downloaded (File not found or corrupted.)" in errors[0]
    assert "unpack the archive of https://data.caltech.edu/records/mzrjq-6wc02 there by hand" in errors[0]
    assert not any(data.iterdir())
    archive_server["bytes"] = archive_server["whole"]
    code, lines = once(data, monkeypatch=monkeypatch)
    assert code == 0, lines
    assert sorted(entry.name for entry in data.iterdir()) == ["caltech101", "run"]
