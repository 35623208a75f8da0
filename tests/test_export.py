"""`python -m colossal_vit.checkpoint export`: what is written is proven to compute what was trained, and described."""

import json
import re
import shutil

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from colossal_vit.checkpoint import __main__, onnx_model, proof, storage
from colossal_vit.checkpoint import export as exporting
from colossal_vit.data import loaders
from PIL import Image
from safetensors.torch import load_file, save_file

import cifar10
import fork_ranks
import test_checkpoint
import training
from conftest import photograph


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two pipeline stages with an average of its weights, and its export with ONNX, of the weights."""
    folder = tmp_path_factory.mktemp("run")
    training.train(folder / "run", 2, steps=40, **{"parallel.pipeline": 2, "ema.decay": 0.5, "DEPTH": 2})
    assert __main__.main(["export", str(folder / "run"), str(folder / "exported"), "--onnx"]) == 0
    return folder


def export(capsys, *argv):
    """Exit code, and what was printed on stdout and stderr."""
    capsys.readouterr()
    code = __main__.main(["export", *map(str, argv)])
    return code, *capsys.readouterr()


def copy_with(run, tmp_path, **changes):
    """A copy of the run's newest checkpoint whose state.json has other values."""
    newest = storage.open_named(run / "run").path
    path = shutil.copytree(newest, tmp_path / newest.name)
    state = {**storage.Checkpoint(newest).state, **changes}
    test_checkpoint.forge(path, storage.STATE, json.dumps(state).encode())
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The proof
# ---------------------------------------------------------------------------------------------------------------------


def test_proof_of_a_run_is_on_all_its_test_images(run):
    """Its accuracy is the one that the run recorded in another layout."""
    found = json.loads((run / "exported" / exporting.PROOF).read_text())
    last = training.Run([], [], [], run / "run").evaluations[-1]
    assert (found["of"], found["images"]) == ("test images of the run", last["eval_images"])
    assert found["accuracy"] == last["eval_accuracy"]
    assert found["largest_difference"].keys() == {"timm", "transformers", "onnxruntime"}
    assert 0 < found["largest_difference"]["onnxruntime"] < 1e-5, "other rounding, and so another program"
    assert found["versions"]["timm"] == timm.__version__


@pytest.mark.parametrize("batch", [1, 5, 360])
def test_onnx_of_any_batch_size_computes_timms_logits_from_8_bit_pixels(batch, run, tmp_path):
    """Against timm's model on images normalised in another way."""
    data = cifar10.write_images(tmp_path).parent
    path = storage.open_named(run / "run").path
    expected, _ = training.timms_logits(path / storage.MODEL, data, depth=2)
    images, *_ = cifar10.read(data, train=False)
    session = onnxruntime.InferenceSession(run / "exported" / "model.onnx")
    pixels = images.permute(0, 2, 3, 1).numpy()
    found = [session.run(["logits"], {"pixels": part})[0] for part in np.split(pixels, len(pixels) // batch)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    assert expected.std() > 0.05


def test_onnx_takes_red_for_red_and_normalises_each_channel():
    """Of a model that hands on one pixel, by hand."""

    class OnePixel(torch.nn.Module):
        def forward(self, images):
            return images[:, :, 1, 4]

    pixels = torch.randint(0, 256, (3, 4, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (model := OnePixel()).pretrained_cfg = dict(input_size=(3, 4, 6), mean=(0.1, 0.5, 0.7), std=(0.2, 0.4, 0.8))
    found = onnx_model._FromPixels(model)(pixels)
    red, green, blue = pixels[2, 1, 4].tolist()
    expected = [(red / 255 - 0.1) / 0.2, (green / 255 - 0.5) / 0.4, (blue / 255 - 0.7) / 0.8]
    assert found[2].tolist() == pytest.approx(expected, abs=1e-5)


def spoil_weights(monkeypatch):
    """Write one weight other than it was trained."""
    write = exporting.write_timm

    def spoiled(model, folder):
        write(model, folder)
        weights = load_file(folder / storage.MODEL)
        weights["head.bias"][3] += 3e-4
        save_file(weights, folder / storage.MODEL, metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "write_timm", spoiled)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_that_computes_something_else_is_refused_and_leaves_nothing(dtype, run, tmp_path, capsys, monkeypatch):
    spoil_weights(monkeypatch)
    code, said, line = export(capsys, run / "run", tmp_path / "new", "--dtype", dtype)
    assert (code, said, line.count("\n")) == (2, "", 1)
    assert re.search(r"the export is not written: in timm a logit of test images 0 to 31 differs by (0\.\d+)", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [float("nan"), 1.1e-4, -1.1e-4])
def test_proof_of_one_wrong_logit_in_the_last_batch_fails(wrong):
    """Or of one that is no number; of 8-bit pixels, too."""
    model = timm.create_model("test_vit", num_classes=5).eval()
    images = torch.rand(6, 3, 160, 160)
    batches = [(images[:4], None), (images[4:], None)]
    mean, std = (torch.tensor([0.5] * 3).view(3, 1, 1) for _ in range(2))
    change = torch.zeros(2, 5)
    change[1, 4] = wrong

    def other(images):
        return model(images) + (change if len(images) == 2 else 0)

    def other_of_pixels(pixels):
        return other((pixels.permute(0, 3, 1, 2) / 255 - mean) / std)

    cpu = torch.device("cpu")
    model.pretrained_cfg |= dict(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert proof.prove(model, {"torch": model}, {}, batches, cpu)["largest_difference"] == {"torch": 0.0}
    for given in ([{"torch": other}, {}], [{}, {"torch": other_of_pixels}]):
        with pytest.raises(proof.UserError, match="in torch a logit of test images 4 to 5 differs by"):
            proof.prove(model, *given, batches, cpu)


def test_export_without_its_data_says_that_it_is_not_proven(run, tmp_path, capsys, monkeypatch):
    """In the folder, too; other images prove it."""
    monkeypatch.delenv("DATA", raising=False)
    path = copy_with(run, tmp_path, source={"loader": "vit_cifar10_hybrid/cifar10.py", "folder": f"{tmp_path}/gone"})
    code, said, _ = export(capsys, path, tmp_path / "new")
    why = f"{tmp_path}/gone: no such folder any more"
    assert (code, f"compute what was trained was not proven: {why}.\n" in said) == (0, True)
    assert json.loads((tmp_path / "new/proof.json").read_text()) == {"images": 0, "not_proven": why}
    assert f"not proven: {why}" in (tmp_path / "new/README.md").read_text()
    (tmp_path / "images" / "below").mkdir(parents=True)
    for name in ("a.png", "below/b.jpg"):
        photograph(60, 40).save(tmp_path / "images" / name)
    code, said, _ = export(capsys, path, tmp_path / "other", "--images", tmp_path / "images")
    assert (code, "On 2 images of a folder the logits differ" in said) == (0, True)
    assert "accuracy" not in json.loads((tmp_path / "other/proof.json").read_text())


def test_export_with_other_data_in_place_of_the_runs_is_not_proven(run, tmp_path, capsys, monkeypatch):
    folder = cifar10.write_images(tmp_path / "data")
    content = (folder / "test_batch.bin").read_bytes()
    (folder / "test_batch.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    path = copy_with(run, tmp_path, source={"loader": "vit_cifar10_hybrid/cifar10.py"})
    code, said, _ = export(capsys, path, tmp_path / "new")
    assert (code, f"not proven: {tmp_path}/data: has other data than the run had (content)" in said) == (0, True)


@pytest.mark.parametrize("name", ["{folder}/evil.py", "runs/x/evil.py", "../{name}/evil.py", "evil.py"])
def test_loader_that_a_checkpoint_names_elsewhere_is_not_run(name, run, tmp_path, capsys, monkeypatch):
    """Reading a checkpoint executes nothing that came with it."""
    monkeypatch.setattr(loaders, "ROOT", tmp_path / "root")
    for folder in ("root/runs/x", "root"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "evil.py").write_text("raise SystemExit('it ran')")
    name = name.format(folder=tmp_path / "root", name="root")
    path = copy_with(run, tmp_path, source={"loader": name, "folder": str(tmp_path)})
    code, said, _ = export(capsys, path, tmp_path / "new")
    assert (code, f"not proven: {name} has read the run's data: is no loader" in said) == (0, True)


@pytest.mark.parametrize("script", [training.CALTECH101, training.IMAGENET])
def test_proof_is_of_the_data_of_every_example(script, tmp_path):
    training.train(tmp_path / "run", script=script, steps=2)

    def write():  # in a fork, since DALI leaves threads behind
        return __main__.main(["export", str(tmp_path / "run"), str(tmp_path / "new")])

    assert fork_ranks.call(write, launched=False) == [0]
    found = json.loads((tmp_path / "new" / exporting.PROOF).read_text())
    last = training.Run([], [], [], tmp_path / "run").evaluations[-1]
    assert (found["images"], found["accuracy"]) == (last["eval_images"], last["eval_accuracy"])


def test_proof_of_class_folders_is_on_those_that_the_run_has_not_trained_on(tmp_path, capsys, monkeypatch):
    """Found again from any working directory, without DATA."""
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(25):
            colours = photograph(20 + number, 30, number)
            colours.save(tmp_path / "data" / label / f"{number}.png")
    values = dict(training.SMALL[training.CALTECH101], BATCH_SIZE=8)
    del values["NUM_CLASSES"]
    options = dict(script=training.CALTECH101, small=False, DATA=str(tmp_path / "data"), **values)
    training.train(tmp_path / "run", steps=3, **options)
    monkeypatch.chdir("/")
    assert export(capsys, tmp_path / "run", tmp_path / "new")[0] == 0
    found = json.loads((tmp_path / "new" / exporting.PROOF).read_text())
    assert (found["of"], found["images"]) == ("test images of the run", 10)


# ---------------------------------------------------------------------------------------------------------------------
# The model card
# ---------------------------------------------------------------------------------------------------------------------


def test_card_says_what_the_runs_files_say(run):
    card = (run / "exported" / exporting.CARD).read_text()
    last = training.Run([], [], [], run / "run").evaluations[-1]
    assert card.startswith("---\nlicense: unknown  # fill in")
    assert "**Licence: not filled in yet.**" in card
    assert f"as the run has recorded it: {last['eval_accuracy']:.2%} (360 images)" in card
    assert "1,437 images for training and 360 for testing, read as\nCIFAR-10" in card
    assert "Classes, in the order of the logits: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9." in card
    (config,) = re.findall(r"```json\n(.*?)```", card, re.DOTALL)
    recorded = json.loads((run / "run" / "config.json").read_text())
    assert json.loads(config) == recorded
    assert str(fork_ranks.ROOT) not in card


def test_card_of_averages_has_their_accuracy(run, tmp_path, capsys):
    assert export(capsys, run / "run", tmp_path / "new", "--ema")[0] == 0
    last = training.Run([], [], [], run / "run").evaluations[-1]
    card = (tmp_path / "new" / exporting.CARD).read_text()
    assert "the moving averages of the weights (decay 0.5)" in card
    assert f"as the run has recorded it: {last['ema_accuracy']:.2%}" in card
    assert json.loads((tmp_path / "new" / exporting.PROOF).read_text())["accuracy"] == last["ema_accuracy"]


def test_programs_of_a_card_name_one_class(run, tmp_path, capsys, monkeypatch):
    """They run in the folder as they are, on a photograph that is higher than wide, resized and cropped; and give the
    logits of predict's pixels."""
    folder = shutil.copytree(run / "exported", tmp_path / "exported")
    photograph(70, 121).save(folder / "photo.jpg", quality=95)
    monkeypatch.chdir(folder)
    programs = re.findall(r"```python\n(.*?)```", (folder / exporting.CARD).read_text(), re.DOTALL)
    assert len(programs) == 3
    found = []
    for program in programs:
        variables = {}
        exec(program, variables)
        found.append(torch.as_tensor(variables["logits"]).detach().flatten())
    names = capsys.readouterr().out.split()
    assert len(set(names)) == 1
    assert len(names) == 3
    torch.testing.assert_close(found[1], found[0], atol=1e-2, rtol=0)  # torchvision resizes 8 bits in another way
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=0)
    other = Image.open("photo.jpg").transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    other.save("photo.jpg", quality=95)
    exec(programs[0], variables)
    assert (variables["logits"].detach().flatten() - found[0]).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def test_onnx_without_its_packages_says_what_to_install(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(onnx_model.importlib.util, "find_spec", lambda name: None if name != "onnx" else name)
    code, said, line = export(capsys, run / "run", tmp_path / "new", "--onnx")
    assert (code, said) == (2, "")
    needs = "--onnx needs onnxruntime, onnxscript: pip install onnx onnxruntime onnxscript"
    assert line == f"checkpoint: error: {needs}\n"
    assert list(tmp_path.iterdir()) == []


def test_export_has_these_flags_and_no_others():
    actions = __main__._get_parser()._subparsers._group_actions[0].choices["export"]._actions
    flags = {flag for action in actions for flag in action.option_strings}
    assert flags == {"-h", "--help", "--dtype", "--ema", "--onnx", "--images"}


def test_images_that_cannot_be_read_are_one_line_and_nothing_is_written(run, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"no image")
    for named, words in (("images", "images/a.png: cannot be decoded: "), ("none", "none: no such file")):
        code, said, line = export(capsys, run / "run", tmp_path / "new", "--images", tmp_path / named)
        assert (code, said, line.count("\n")) == (2, "", 1)
        assert words in line
        assert not (tmp_path / "new").exists()
