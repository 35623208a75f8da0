"""`python -m colossal_vit.predict`: answers about images, prepared as the run's test images were."""

import csv
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from colossal_vit import config as configs
from colossal_vit import predict
from colossal_vit.checkpoint import __main__ as checkpoint
from colossal_vit.checkpoint import storage, timm_model
from colossal_vit.data import class_images, image_folder
from colossal_vit.data.image_folder import MEAN, STD
from colossal_vit.data.samplers import EvalSampler
from colossal_vit.model.rollout import attention_rollout
from colossal_vit.model.timm_vit import build_timm_vit
from colossalai.context import Config
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms import v2

import cifar10
import fork_ranks
import schemas
import training
import vit
from conftest import encode, photograph
from layouts import tensor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two pipeline stages with an average of its weights, and its test images as files, in one folder."""
    folder = tmp_path_factory.mktemp("run")
    values = {"parallel.pipeline": 2, "ema.decay": 0.5, "DEPTH": 2}
    training.train(folder / "run", 2, steps=60, **values)
    images, labels, _ = cifar10.read(cifar10.write_images(folder / "data").parent, train=False)
    (folder / "images").mkdir()
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{number:03d} {label}.png")
    assert checkpoint.main(["export", str(folder / "run"), str(folder / "exported")]) == 0
    return folder


def ask(capsys, *argv):
    """Exit code, the lines on stdout, and what is on stderr."""
    code = predict.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def table(capsys, folder, *argv):
    """The answers in the CSV file, class and probability by file and class."""
    assert ask(capsys, *argv, "--top", 10, "--output", folder / "answers.csv")[0] == 0
    with open(folder / "answers.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:4] == ["image", "class_1", "probability_1", "class_2"]
    return {name: dict(zip(cells[::2], map(float, cells[1::2]), strict=True)) for name, *cells in rows}


def test_predictions_are_those_of_the_evaluation(run, tmp_path, capsys):
    """The same images through the loader and the model of train_hybrid.py; and the accuracy that it recorded."""
    answers = table(capsys, tmp_path, run / "run", run / "images")
    state = storage.open_named(run / "run").state
    model = vit.full_vit(Config(state["config"])).eval()
    model.load_state_dict(load_file(storage.open_named(run / "run").path / storage.MODEL))
    images, labels, _ = cifar10.read(run / "data", train=False)
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (cifar10.MEAN, cifar10.STD))
    with torch.inference_mode():
        expected = model((images.float() - mean) / std).softmax(dim=1)
    found = torch.tensor([[named[str(digit)] for digit in range(10)] for named in answers.values()])
    assert torch.allclose(found, expected, atol=2e-6)
    assert expected.std() > 0.01
    correct = sum(max(named, key=named.get) == name.split()[-1][0] for name, named in answers.items())
    records = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    (*_, accuracy) = (record["eval_accuracy"] for record in records if "eval_accuracy" in record)
    assert correct / len(labels) == pytest.approx(accuracy)


@pytest.mark.parametrize("size", [(96, 64), (64, 96)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_photograph_is_predicted_upright_and_in_its_colours(size, orientation, run, tmp_path):
    """Resized to 32 pixels and cut in the middle by hand; turned or with swapped colours it is answered otherwise."""
    picture = photograph(*size)
    (tmp_path / "a.png").write_bytes(encode(picture, orientation))
    model = predict.open_model(run / "run", ema=False)
    (answer,) = predict.predict(model, [tmp_path / "a.png"], 10, torch.device("cpu"))
    resized = picture.resize([side // 2 for side in size], Image.Resampling.BILINEAR)
    left, top = ((side - 32) // 2 for side in resized.size)
    pixels = torch.from_numpy(np.array(resized.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1) / 255
    shown = torch.stack([pixels, pixels.flip(0), pixels.rot90(1, (1, 2)), pixels.flip(1), pixels.flip(2)])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar10.MEAN, cifar10.STD))
    with torch.inference_mode():
        expected, *others = model((shown - mean) / std).softmax(dim=1)
    found = dict(zip(answer.classes, answer.probabilities, strict=True))
    torch.testing.assert_close(torch.tensor([found[str(digit)] for digit in range(10)]), expected, atol=1e-5, rtol=0)
    assert answer.probabilities == sorted(answer.probabilities, reverse=True)
    assert all((other - expected).abs().max() > 1e-3 for other in others)


@pytest.mark.parametrize("images", ["class folders", "Caltech101", "CIFAR-10"])
def test_exported_preprocessing_makes_the_pixels_of_the_evaluation(images, tmp_path):
    """Of wide and high coloured images, normalised otherwise in each channel; test_dali.py has ImageNet's."""
    sizes = [(32, 32)] * 2 if images == "CIFAR-10" else [(192, 128), (128, 192)]
    pictures = [photograph(*size, number) for number, size in enumerate(sizes)]
    own = dict(IMG_SIZE=32, CACHE_SIZE=64, MEAN=(0.1, 0.5, 0.7), STD=(0.2, 0.4, 0.8))
    config = Config(configs.complete(own, schemas.schema(schemas.CALTECH101)))
    labels, sampler, cpu = torch.arange(2), EvalSampler(2, 2), torch.device("cpu")
    if images == "CIFAR-10":
        pixels = torch.stack(list(map(v2.functional.pil_to_tensor, pictures)))
        batches = cifar10.Cifar10Loader(pixels, labels, sampler, config, cpu)
    else:
        (tmp_path / "a").mkdir()
        for number, picture in enumerate(pictures):
            picture.save(tmp_path / "a" / f"{number}.png")
        pixels = class_images.Decoded(class_images.find_images(tmp_path, tmp_path), 64, 32)
        batches = image_folder.ClassFolderLoader(pixels, labels, labels, sampler, config, cpu)
    state = {"data": {"images": images}, "normalization": batches.normalization}
    transform = timm.data.create_transform(**timm_model._preprocessing(state, config))
    ((evaluated, _),) = batches
    torch.testing.assert_close(evaluated, torch.stack(list(map(transform, pictures))))


@pytest.mark.parametrize("model", ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224"])
def test_models_with_rotary_positions_predict_as_they_were_trained(model, tmp_path):
    """Their tables of sines and cosines are in no checkpoint."""
    training.train(tmp_path / "run", script=training.DATA_PARALLEL, steps=2, MODEL=model)
    checkpoint = storage.open_named(tmp_path / "run")
    trained = build_timm_vit(Config(checkpoint.state["config"])).eval()
    trained.load_state_dict(load_file(checkpoint.path / storage.MODEL))
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(predict.open_model(tmp_path / "run", ema=False)(images), trained(images))


@pytest.mark.parametrize("more", [{}, {"CACHE_SIZE": 1024}, {"CACHE_SIZE": 1500}])
def test_class_folders_are_resized_as_for_the_evaluation(more):
    """Which decodes at `CACHE_SIZE`; timm rounds down what it computes from the exported share."""
    state = {"data": {"images": "class folders"}, "normalization": (MEAN, STD)}
    for size in range(1, 1025):
        config = timm_model._preprocessing(state, {"IMG_SIZE": size, **more})
        resize, *_ = timm.data.create_transform(**config).transforms
        assert resize.size == more.get("CACHE_SIZE", round(size * 8 / 7)), size


def test_run_checkpoint_and_export_predict_alike(run, tmp_path, capsys):
    """The averages of the weights answer otherwise."""
    image = sorted((run / "images").iterdir())[0]
    named = [run / "run", storage.open_named(run / "run").path, run / "exported"]
    first, *others = [table(capsys, tmp_path, path, image) for path in named]
    assert others == [first] * 2
    average = table(capsys, tmp_path, run / "run", image, "--ema")
    assert average.keys() == first.keys()
    assert average != first


def test_images_that_cannot_be_decoded_are_named_and_the_others_predicted(run, tmp_path, capsys):
    """And files that are no images are counted; nothing is left out without a line."""
    folder = tmp_path / "some"
    (folder / "in").mkdir(parents=True)
    good = sorted((run / "images").iterdir())[0]
    shutil.copy(good, folder / "in" / "a b.png")
    Image.open(good).convert("L").save(folder / "grey.WEBP")
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    code, lines, said = ask(capsys, run / "run", folder, "--top", 2)
    assert code == 1
    assert [line.rpartition(": ")[0] for line in lines] == [f"{folder}/grey.WEBP", f"{folder}/in/a b.png"]
    assert all(line.count("%") == 2 for line in lines)
    broken, others = said.splitlines()
    assert broken.startswith(f"{folder}/broken.jpg: cannot be decoded: cannot identify image file")
    assert others == "1 files that are no images are left out"


@pytest.mark.parametrize("stdout", ["1", "os.open('/dev/full', os.O_WRONLY)", "closed_pipe()"])
def test_any_file_name_is_predicted_on_any_stdout(stdout, run, tmp_path):
    """Of the images in a folder that training would take: linked ones, but no hidden ones."""
    good = sorted((run / "images").iterdir())[0]
    for name in ("some", "some/.hidden", "linked"):
        (tmp_path / name).mkdir()
    for name in ("some/b\udce4r.png", "some/.hidden/a.png", "linked/c.png"):
        shutil.copy(good, tmp_path / name)
    (tmp_path / "some" / "z").symlink_to(tmp_path / "linked")
    (tmp_path / "script.py").write_text(f"""
import os, sys
from colossal_vit import predict

def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return write

os.dup2({stdout}, 1)
sys.exit(predict.main())
""")
    argv = [str(run / "run"), str(tmp_path / "some"), "--top", "1", "--output", str(tmp_path / "answers.csv")]
    result = fork_ranks.run(tmp_path / "script.py", argv)
    assert (result.codes, result.stderr) == ([0], [""]), str(result)
    if stdout == "1":
        names = [line.rpartition(": ")[0] for line in result.stdout[0].splitlines()]
        assert names == [f"{tmp_path}/some/b\\udce4r.png", f"{tmp_path}/some/z/c.png"]
    with open(tmp_path / "answers.csv", newline="", errors="surrogateescape") as file:
        _, *rows = csv.reader(file)
    assert [name for name, *_ in rows] == [f"{tmp_path}/some/b\udce4r.png", f"{tmp_path}/some/z/c.png"]


def test_a_link_to_nothing_is_named(run, tmp_path, capsys):
    (tmp_path / "a.png").symlink_to("nowhere")
    code, lines, said = ask(capsys, run / "run", tmp_path)
    assert (code, lines) == (2, [])
    assert said == f"predict: error: {tmp_path}/a.png: No such file or directory; repair or remove it\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["{run}/run", "none.jpg"], "none.jpg: no such file or directory"),
        (["{run}/run", "long" * 100], f"{'long' * 100}: "),
        (["{run}/run", "{run}/exported"], "{run}/exported: has no images (.apng, "),
        (["{run}/run", "{run}/images", "--top", "0"], "--top 0: must be at least 1"),
        (["{run}/run", "{run}/images", "--output", "{run}"], "{run}: Is a directory"),
        (["{run}/run", "{run}/images", "--output", "{run}/a.JPG"], "--output {run}/a.JPG: is the name of an image"),
        (["{run}/run"], "the following arguments are required: IMAGE"),
        (["{run}/images", "{run}/images"], "{run}/images: "),
        (["{run}/exported", "{run}/images", "--ema"], "{run}/exported: is an exported folder, which has one set"),
    ],
)
def test_predict_with_a_mistake_ends_in_one_line(argv, line, run, capsys):
    code, lines, said = ask(capsys, *(arg.format(run=run) for arg in argv))
    assert (code, lines, said.count("\n")) == (2, [], 1)
    assert said.startswith(f"predict: error: {line.format(run=run)}")


def test_predict_interrupted_ends_in_one_line(run, capsys, monkeypatch):
    """While images are read, whoever does."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", interrupt)
    code, lines, said = ask(capsys, run / "run", run / "images")
    assert (code, lines, said) == (130, [], "predict: interrupted\n")


# ---------------------------------------------------------------------------------------------------------------------
# What a model looks at
# ---------------------------------------------------------------------------------------------------------------------


def rollout_by_hand(model, image, seen):
    """Shares of the patches of one image, (rows, columns), in NumPy, from the weights alone.

    Args:
        model: a VisionTransformer of two heads on 2 x 3 patches.
        image: (3, H, W).
        seen: the rows of the product that the head sees.
    """

    def normalize(tokens, norm):
        centred = tokens - tokens.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
        return scaled * norm.weight.numpy() + norm.bias.numpy()

    def linear(tokens, layer):
        return tokens @ layer.weight.numpy().T + layer.bias.numpy()

    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(image[None]))[0].numpy()
        product = np.eye(len(tokens))
        for block in model.blocks:
            query, key, value = np.split(linear(normalize(tokens, block.norm1), block.attn.qkv), 3, axis=1)
            heads, outputs = [], []
            for head in (slice(0, 4), slice(4, 8)):
                exponentials = np.exp(query[:, head] @ key[:, head].T / 2)  # the root of 4 channels
                heads.append(exponentials / exponentials.sum(1, keepdims=True))
                outputs.append(heads[-1] @ value[:, head])
            product = (np.eye(len(tokens)) / 2 + (heads[0] + heads[1]) / 4) @ product
            tokens = tokens + linear(np.concatenate(outputs, axis=1), block.attn.proj)
            hidden = torch.from_numpy(linear(normalize(tokens, block.norm2), block.mlp.fc1))
            tokens = tokens + linear(torch.nn.functional.gelu(hidden).numpy(), block.mlp.fc2)
    return product[seen].mean(0)[-6:].reshape(2, 3)


ROLLOUTS = {  # how the model is built, and which tokens its head sees
    "class token": ({}, [0]),
    "class token and registers": (dict(reg_tokens=2), [0]),
    "mean of the patches": (dict(global_pool="avg"), range(1, 7)),
    "no class token": (dict(global_pool="avg", class_token=False), range(6)),
    "mean of all tokens": (dict(global_pool="avg", pool_include_prefix=True), range(7)),
}


@pytest.mark.parametrize("case", ROLLOUTS)
def test_rollout_of_any_pooling_is_the_product_worked_out_by_hand(case):
    """Of attention that prefers some tokens by far, in three blocks and on images that are wider than high."""
    more, seen = ROLLOUTS[case]
    torch.manual_seed(0)
    sizes = dict(img_size=(8, 12), patch_size=4, embed_dim=8, depth=3, num_heads=2, num_classes=5)
    model = VisionTransformer(**sizes, **more).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    fused = [block.attn.fused_attn for block in model.blocks]
    with torch.inference_mode():
        logits, shares = attention_rollout(model, images)
        torch.testing.assert_close(logits, model(images))
    expected = np.stack([rollout_by_hand(model, image, list(seen)) for image in images])
    np.testing.assert_allclose(shares.numpy(), expected, atol=1e-6)
    assert expected.std() > 0.02
    assert np.abs(expected[0] - expected[1]).max() > 0.02
    assert [block.attn.fused_attn for block in model.blocks] == fused, "the model is as it was"


def test_pictures_of_attention_are_one_for_each_image_that_is_answered(run, tmp_path, capsys):
    """Of a run on two pipeline stages: the image as the model sees it, and it under colours; its answers stay."""
    (tmp_path / "in" / "b").mkdir(parents=True)
    image = sorted((run / "images").iterdir())[3]
    for name in ("a.png", "b/a.png"):
        shutil.copy(image, tmp_path / "in" / name)
    (tmp_path / "in" / "aa.png").write_bytes(b"no image")
    _, without, _ = ask(capsys, run / "run", tmp_path / "in")
    code, lines, _ = ask(capsys, run / "run", tmp_path / "in", "--attention", tmp_path / "out")
    assert (code, lines) == (1, without)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1-a.png", "3-a.png"]
    picture = np.asarray(Image.open(tmp_path / "out" / "3-a.png")).astype(int)
    pixels = np.asarray(Image.open(image)).astype(int)
    assert picture.shape == (224, 448, 3)
    assert np.array_equal(picture[:, :224], pixels.repeat(7, axis=0).repeat(7, axis=1))
    colours = (picture[:, 224:] - 0.4 * picture[:, :224]) / 0.6
    model = predict.open_model(run / "run", ema=False)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.inference_mode():
        _, shares = attention_rollout(model, transform(Image.open(image))[None])
    most, least = (divmod(int(index), 4) for index in (shares[0].argmax(), shares[0].argmin()))
    brightness = colours.sum(-1).reshape(4, 56, 4, 56).mean((1, 3))
    assert brightness[most] == brightness.max() > 1.5 * brightness[least]


def test_attention_of_a_mean_of_tokens_says_so_and_of_a_learned_pooling_is_refused(tmp_path, capsys):
    image = tmp_path / "a.png"
    photograph(20, 20).save(image)
    small = dict(embed_dim=32, depth=1, num_heads=4, img_size=16, patch_size=8, num_classes=3)
    for name, pool in (("mean", "avg"), ("learned", "map")):
        model = timm.create_model("vit_base_patch16_224", **small, global_pool=pool, class_token=False)
        model.pretrained_cfg |= dict(input_size=(3, 16, 16))
        (tmp_path / name).mkdir()
        timm_model.write_timm(model, tmp_path / name)
    code, lines, said = ask(capsys, tmp_path / "mean", image, "--attention", tmp_path / "out")
    assert (code, len(lines)) == (0, 1)
    assert said == "no class token: attention is that of all patches' tokens, on average, which the head sees\n"
    code, lines, said = ask(capsys, tmp_path / "learned", image, "--attention", tmp_path / "other")
    assert (code, lines, said.count("\n")) == (2, [], 1)
    assert "attention cannot be followed to a head that sees global_pool = 'map', not 'token' or 'avg'" in said
    code, _, said = ask(capsys, tmp_path / "mean", image, "--attention", tmp_path / "out")
    assert (code, said) == (2, f"predict: error: --attention {tmp_path}/out: is not empty: give another folder\n")


# ---------------------------------------------------------------------------------------------------------------------
# Exports
# ---------------------------------------------------------------------------------------------------------------------


def test_an_export_has_the_names_of_the_classes(run):
    model = timm.create_model(f"local-dir:{run / 'exported'}", pretrained=True)
    assert list(model.pretrained_cfg["label_names"]) == list(map(str, range(10)))


EXPORTS = {  # what is trained, on how many ranks; flags of the export
    "two stages": ({"parallel.pipeline": 2, "DEPTH": 2}, 2, []),
    "average": ({"ema.decay": 0.5}, 1, ["--ema"]),
    "2D, another size, fp16": ({"IMG_SIZE": 48, "PATCH_SIZE": 12, **tensor("2d", 4)}, 4, ["--dtype", "fp16"]),
    "pooling": ({"POOL": "avg", "script": training.DATA_PARALLEL, "MODEL": "vit_tiny_patch16_224"}, 1, []),
    "registers": ({"script": training.DATA_PARALLEL, "MODEL": "vit_small_patch14_reg4_dinov2"}, 1, []),
    "rotary": ({"script": training.DATA_PARALLEL, "MODEL": "vit_small_patch16_rope_224"}, 1, []),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_transformers_opens_an_export_and_answers_like_the_model_that_was_trained(case, run, tmp_path):
    """The pixels are those of the evaluation, too."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    values, ranks, flags = EXPORTS[case]
    training.train(tmp_path / "run", ranks, steps=3, **values)
    folder = tmp_path / "exported"
    assert checkpoint.main(["export", str(tmp_path / "run"), str(folder), *flags]) == 0
    model = AutoModelForImageClassification.from_pretrained(folder).float().eval()
    paths = sorted((run / "images").iterdir())[:4]
    pixels = AutoImageProcessor.from_pretrained(folder)([Image.open(path) for path in paths], return_tensors="pt")
    config = Config(storage.open_named(tmp_path / "run").state["config"])
    images, labels, _ = cifar10.read(run / "data", train=False)
    seen, _ = next(iter(cifar10.Cifar10Loader(images, labels, EvalSampler(4, 4), config, torch.device("cpu"))))
    torch.testing.assert_close(pixels["pixel_values"], seen, atol=0.02 if config.IMG_SIZE != 32 else 1e-6, rtol=0)
    trained = (build_timm_vit if "MODEL" in config else vit.full_vit)(config).eval()
    saved = storage.open_named(tmp_path / "run")
    trained.load_state_dict(saved.tensors(storage.MODEL) | (saved.tensors(storage.EMA) if "--ema" in flags else {}))
    half = "fp16" in flags
    with torch.inference_mode():
        expected = trained(seen)
        torch.testing.assert_close(model(pixel_values=seen).logits, expected, atol=1e-3 if half else 1e-5, rtol=0)
    assert expected.std() > 1e-3
    assert list(model.config.id2label.values()) == list(map(str, range(10)))
    answers = pipeline("image-classification", model=str(folder))(str(paths[0]), top_k=1)
    assert answers[0]["label"] == str(expected[0].argmax().item())
