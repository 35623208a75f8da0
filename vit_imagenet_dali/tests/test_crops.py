"""Whatever reads an image for evaluation takes the same pixels of it: those of timm's transform for the export."""

import io
import resource

import numpy as np
import pytest
import timm
import torch
from colossal_vit import config as configs
from colossal_vit import predict
from colossal_vit.checkpoint import timm_model
from colossal_vit.data import class_images, image_folder
from colossal_vit.data.class_images import Decoded, Images
from colossal_vit.data.samplers import EvalSampler
from colossal_vit.errors import UserError
from colossalai.context import Config
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
from torchvision.transforms import v2

import fork_ranks
import image_files
import imagenet_dali_dataloader as loaders
import schemas
from build_tfrecords import index_shard
from tfrecord import encode_record, list_records

COUNT, BATCH = 200, 20
CPU = torch.device("cpu")


def picture(width, height, random):
    """Noise in each channel, so coarse that a pixel's shift changes an image by much more than rounding does."""
    noise = random.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def write_pictures(folder, seed):
    """Pictures of random sizes: wide, high and square ones, smaller and larger than what is evaluated of them."""
    random = np.random.default_rng(seed)
    sides = random.integers(9, 140, (COUNT, 2))
    sides[: COUNT // 10, 1] = sides[: COUNT // 10, 0]
    for number, (width, height) in enumerate(sides.tolist()):
        picture(width, height, random).save(folder / f"{number:03d}.png")
    return sorted(folder.iterdir())


def class_folders(paths):
    names = [path.name for path in paths]
    return Images(paths[0].parent, paths[0].parent, ["a"], names, [], [], np.zeros(len(names), int), "")


def records(paths, folder):
    shard, index = folder / "shard", folder / "index"
    shard.write_bytes(b"".join(encode_record(path.read_bytes(), 1) for path in paths))
    index_shard(shard, index)
    return list_records([shard], [index], whole=True)


def config_of(**values):
    always = dict(BATCH_SIZE=BATCH, NUM_CLASSES=1, SEED=0, MEAN=(0.5, 0.4, 0.3), STD=(0.2, 0.3, 0.4))
    return Config(configs.complete({**always, **values}, schemas.schema(schemas.IMAGENET)))


def pixels(images, config):
    """0 to 255 (B, 3, H, W), of images that were normalised."""
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("MEAN", "STD"))
    return ((images * std + mean) * 255).round().int()


def exported(kind, config):
    """timm's data config in the export of a run on images of this kind."""
    return timm_model._preprocessing({"data": {"images": kind}, "normalization": (config.MEAN, config.STD)}, config)


def expected(paths, kind, config):
    transform = timm.data.create_transform(**exported(kind, config), is_training=False, normalize=False)
    return torch.stack([transform(Image.open(path)) for path in paths]).int()


# What is cached: as much as is evaluated, or 1, 2, 3, 4, 5 or more pixels more.
CLASS_FOLDERS = [(32, {}), (64, {}), (56, {}), *[(30, {"CACHE_SIZE": size}) for size in (30, 31, 32, 33, 34, 47)]]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("img_size", "more"), CLASS_FOLDERS)
def test_class_folders_are_cropped_as_the_export_says(img_size, more, seed, tmp_path):
    paths, config = write_pictures(tmp_path, seed), config_of(IMG_SIZE=img_size, **more)
    images, config.KEEP_DECODED = class_folders(paths), False
    size = image_folder.cache_size(img_size) if not more else config.CACHE_SIZE
    numbers = torch.arange(COUNT)
    batches = image_folder.ClassFolderLoader(
        Decoded(images, size, img_size), numbers, numbers, EvalSampler(COUNT, BATCH), config, CPU
    )
    found = torch.cat([pixels(images, config) for images, _ in batches])
    assert torch.equal(found, expected(paths, "class folders", config))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("class folders", dict(IMG_SIZE=32)),
        ("class folders", dict(IMG_SIZE=48, CACHE_SIZE=53)),
        ("ImageNet", dict(IMG_SIZE=48, EVAL_CROP=0.9)),
        ("CIFAR-10", dict(IMG_SIZE=32)),
    ],
)
def test_predict_crops_as_the_run_whose_export_it_reads(kind, values, seed, tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    paths, config, seen = write_pictures(tmp_path / "images", seed), config_of(**values), []
    model = timm.create_model("test_vit", img_size=values["IMG_SIZE"], num_classes=1)
    model.pretrained_cfg |= exported(kind, config)
    (tmp_path / "export").mkdir()
    timm_model.write_timm(model, tmp_path / "export")
    model = predict.open_model(tmp_path / "export", ema=False)
    monkeypatch.setattr(model, "forward", lambda images: seen.append(images) or torch.zeros(len(images), 1))
    assert len(list(predict.predict(model, paths, 1, CPU))) == COUNT
    assert torch.equal(pixels(torch.cat(seen), config), expected(paths, kind, config))


TFRECORDS = [dict(IMG_SIZE=48), dict(IMG_SIZE=48, EVAL_CROP=0.9), dict(IMG_SIZE=31, EVAL_CROP=0.8)]
TFRECORDS += [dict(IMG_SIZE=40, EVAL_CROP=1.0), dict(IMG_SIZE=24, EVAL_CROP=0.3)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("values", TFRECORDS)
def test_dali_crops_as_the_export_says(values, seed, tmp_path):
    (tmp_path / "images").mkdir()
    paths, config = write_pictures(tmp_path / "images", seed), config_of(**values)
    of_paths = records(paths, tmp_path)

    def read():  # in a fork: once DALI has run in a process, its forks hang in it
        batches = loaders.DaliLoader(of_paths, False, config, CPU, with_images=True, rank=0, num_ranks=1)
        return torch.cat([pixels(images, config) for images, _ in batches])

    [found] = fork_ranks.call(read, launched=False)
    assert (found - expected(paths, "ImageNet", config)).abs().max() < 3, "rounding"


@pytest.mark.cases(1)
@pytest.mark.parametrize("values", TFRECORDS)
def test_the_graph_for_gpus_crops_as_the_export_says(values, seed, tmp_path):
    """Its operators on a CPU."""
    (tmp_path / "images").mkdir()
    paths, config = write_pictures(tmp_path / "images", seed), config_of(**values)
    of_paths = records(paths, tmp_path)

    def read():
        loader = loaders.DaliLoader(of_paths, False, config, CPU, with_images=True, rank=0, num_ranks=1)
        loader.on_gpu = True

        @pipeline_def(batch_size=COUNT, num_threads=1, device_id=None)
        def graph():
            encoded = fn.external_source([[np.fromfile(path, np.uint8) for path in paths]], dtype=types.UINT8, ndim=1)
            images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
            return loader._resize(images, fn.peek_image_shape(encoded, dtype=types.FLOAT), 0)

        pipeline = graph()
        pipeline.build()
        return torch.from_numpy(pipeline.run()[0].as_array()).permute(0, 3, 1, 2).int()

    [found] = fork_ranks.call(read, launched=False)
    assert (found - expected(paths, "ImageNet", config)).abs().max() < 3, "rounding"


@pytest.mark.parametrize("size", [(60_000, 1), (2, 65_000), (65_001, 2)])
@pytest.mark.parametrize("reader", ["class folders", "predict", "DALI"])
def test_a_strip_is_not_resized_whole(reader, size, tmp_path):
    """Which would take 70 to 170 MB here, and gigabytes at 224 pixels."""
    (tmp_path / "images").mkdir()
    config, seen = config_of(IMG_SIZE=24, CACHE_SIZE=27), []
    paths = [tmp_path / "images" / name for name in ("ordinary.png", "strip.png")]
    for path, sides in zip(paths, [(90, 70), size], strict=True):
        picture(*sides, np.random.default_rng(0)).save(path)
    model = torch.nn.Identity()
    model.pretrained_cfg, model.num_classes = exported("class folders", config), 1
    model.forward = lambda images: seen.append(images) or torch.zeros(len(images), 1)

    def read(path):
        if reader == "predict":
            list(predict.predict(model, [path], 1, CPU))
            return pixels(seen.pop(), config)
        if reader == "DALI":
            of_path = records([path], tmp_path)
            loader = loaders.DaliLoader(of_path, False, config, CPU, with_images=True, rank=0, num_ranks=1)
            return pixels(next(iter(loader))[0], config)
        decoded = Decoded(class_folders([path]), 27, 24)[torch.tensor([0])]
        return v2.functional.center_crop(decoded.permute(0, 3, 1, 2), 24).int()

    def measure():
        read(paths[0])  # which loads libraries
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return read(paths[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    [(found, grown)] = fork_ranks.call(measure, launched=False)
    assert (found - expected(paths[1:], "class folders", config)).abs().max() < 3, "rounding"
    assert grown < 40_000, "in KiB"


def decode(path):
    Decoded(class_folders([path]), 27, 24)[torch.tensor([0])]


def answer(path):
    model = timm.create_model("test_vit", num_classes=1)
    [said] = predict.predict(model, [path], 1, CPU)
    raise ValueError(said)


def pack(path):
    image_files.prepare_image(path.read_bytes())


@pytest.mark.parametrize("read", [decode, answer, pack])
def test_too_little_memory_is_named(read, tmp_path, monkeypatch):
    """Pillow's MemoryError has no text."""

    def exhausted(*_):
        raise MemoryError

    path = tmp_path / "a.png"
    Image.new("RGB", (30, 40)).save(path)
    monkeypatch.setattr(Image.Image, "convert", exhausted)
    with pytest.raises((UserError, ValueError), match="cannot be decoded: out of memory"):
        read(path)


def in_mode(image, mode):
    """A grey image in another mode; with alpha, black that shows where the image is light."""
    if mode == "I;16":
        return Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    if mode in ("RGBA", "LA"):
        return Image.merge("RGBA", [*Image.new("RGB", image.size).split(), image]).convert(mode)
    return image.convert(mode)


MODES = {"I;16": "png tif pgm", "RGBA": "png tif webp", "LA": "png", "CMYK": "jpg tif", "1": "png gif bmp pbm"}
MODES |= {"P": "png", "L": "png tif"}


@pytest.mark.parametrize(("mode", "ending"), [(mode, ending) for mode in MODES for ending in MODES[mode].split()])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_an_image_of_any_kind_is_the_same_in_all_scripts(tmp_path, mode, ending, orientation):
    """Upright and with all its shades, as Pillow shows its pixels; and as build_tfrecords.py packs what it takes."""
    rows, columns = (np.linspace(0, 255, side).round().astype(np.uint8) for side in (24, 36))
    image = Image.fromarray(np.add.outer(rows // 4, columns // 2))
    changed = in_mode(image, mode)
    expected = np.asarray(image if changed.mode not in ("1", "RGBA", "LA") else changed.convert("L")).astype(int)
    if changed.mode in ("RGBA", "LA"):
        expected = 255 - np.asarray(image).astype(int)
    turns = {1: 0, 3: 2, 6: 3}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = ending in ("jpg", "png", "tif", "webp")
    path = tmp_path / "a" / f"1.{ending}"
    path.parent.mkdir()
    options = {"webp": dict(lossless=True, exact=True), "jpg": dict(quality=100)}.get(ending, {})
    changed.save(path, **(options | dict(exif=exif) if turned else options))
    pixels = class_images.decode(class_images.find_images(tmp_path, tmp_path / ".decoded"), 24, 24, 0).astype(int)
    expected = np.rot90(expected, turns if turned else 0)
    top, left = ((side - 24) // 2 for side in expected.shape)
    middle = slice(top, top + 24), slice(left, left + 24)
    assert abs(pixels - expected[middle][..., None]).max() <= 3
    if ending in ("jpg", "png"):
        packed = Image.open(io.BytesIO(image_files.prepare_image(path.read_bytes(), quality=100)))
        assert abs(np.asarray(packed).astype(int)[middle] - pixels).max() <= 4
