"""The moving average of the weights equals timm's, in every layout, resumes to the bit, is evaluated and exported."""

import copy
import re
import shutil

import pytest
import timm
import torch
from colossal_vit.checkpoint import __main__ as cli
from colossal_vit.checkpoint import storage
from colossal_vit.engine import initialize
from colossal_vit.engine.ema import Ema
from colossal_vit.results import read_metrics
from safetensors.torch import load_file
from timm.utils import ModelEmaV3

import conftest
import fork_ranks
import recipes
from layouts import LAYOUTS

VALUES = {"ema.decay": 0.9, "BATCH_SIZE": 128, "NUM_EPOCHS": 2, "DEPTH": 2}
SGD = {"OPTIMIZER": "sgd", "LEARNING_RATE": 1.0}  # does not blow rounding up where a gradient is nearly zero

pytestmark = pytest.mark.usefixtures("few_test_images")


def newest(run):
    checkpoint, faults = storage.newest(run / storage.FOLDER)
    assert not faults
    return checkpoint.path


@pytest.mark.parametrize("warmup", [False, True])
def test_it_equals_timms_over_50_steps(warmup):
    def function():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        theirs = ModelEmaV3(copy.deepcopy(model), decay=0.95, use_warmup=warmup)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss())
        for step in range(1, 51):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(torch.randn(4, 6)), torch.randint(3, (4,))))
            engine.step()
            theirs.update(model, step=step)
        expected = dict(theirs.module.named_parameters())
        weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with engine.ema.in_the_model():
            found = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
            assert not torch.equal(found[name], weights[name])
            assert torch.equal(parameter, weights[name]), "the weights are back"
        return True

    assert fork_ranks.call(function, ema=dict(decay=0.95, warmup=warmup)) == [True]


def test_the_decay_grows_as_timms():
    ours = Ema([], dict(decay=0.99, warmup=True))
    theirs = ModelEmaV3(torch.nn.Linear(1, 1), decay=0.99, use_warmup=True)
    assert [ours.decay_at(step) for step in range(1, 2000)] == pytest.approx(
        [theirs.get_decay(step) for step in range(1, 2000)]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_sample):
    """A run of one process: 22 steps, 2 epochs."""
    output = tmp_path_factory.mktemp("ema") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(small_sample))
        conftest.random_start(patch)
        recipes.train(output, steps=50, **VALUES, **SGD)
    return output


@pytest.mark.parametrize("layout", ["DP 2", "PP 2", "1D 2", "2D 4", "2.5D 4", "3D 8"])
def test_every_layout_has_the_same_average(layout, whole, tmp_path, random_weights):
    world_size, values = LAYOUTS[layout]
    values = {**values, "BATCH_SIZE": VALUES["BATCH_SIZE"] // (2 if layout == "DP 2" else 1)}
    recipes.train(tmp_path, world_size, steps=50, **{**VALUES, **SGD, **values})
    expected, found = (load_file(newest(run) / storage.EMA) for run in (whole, tmp_path))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    for here, there in zip(read_metrics(tmp_path)[1], read_metrics(whole)[1], strict=True):
        assert here["ema_loss"] == pytest.approx(there["ema_loss"], rel=1e-5)
        assert here["ema_loss"] != pytest.approx(here["eval_loss"], rel=1e-4)


def test_a_run_that_stopped_resumes_its_average_to_the_bit(whole, tmp_path, random_weights):
    for steps in (7, 20, 50):
        recipes.train(tmp_path, steps=steps, **VALUES, **SGD)
    for name in (storage.EMA, storage.MODEL):
        assert (newest(tmp_path) / name).read_bytes() == (newest(whole) / name).read_bytes()
    assert recipes.record(tmp_path) == recipes.record(whole)


def evaluated(run, world_size=1, **values):
    """What an evaluation of both says."""
    argv = [*recipes.flags(**VALUES, **SGD, **values), "--output", str(run), "--eval-only"]
    result = fork_ranks.run(recipes.HYBRID, argv, world_size)
    assert result.codes == [0] * world_size, str(result)
    said = next(text for text in result.stdout if "test accuracy" in text)
    numbers = re.search(r"test accuracy (\S+)% .*loss (\S+); EMA (\S+)%, loss (\S+)", said).groups()
    return [float(number) for number in numbers]


def test_another_layout_evaluates_the_same_average(whole):
    last = read_metrics(whole)[1][-1]
    expected = [100 * last["eval_accuracy"], last["eval_loss"], 100 * last["ema_accuracy"], last["ema_loss"]]
    world_size, values = LAYOUTS["2D 4"]
    assert evaluated(whole) == pytest.approx(expected, abs=0.01)
    assert evaluated(whole, world_size, **values) == pytest.approx(expected, abs=0.01)


def test_the_average_is_exported_by_choice(whole, tmp_path, capsys):
    assert cli.main(["export", str(whole), str(tmp_path / "averages"), "--ema"]) == 0
    assert cli.main(["export", str(whole), str(tmp_path / "weights")]) == 0
    for folder, name in (("averages", storage.EMA), ("weights", storage.MODEL)):
        model = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True)
        expected = load_file(newest(whole) / name)
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


def test_a_run_without_averages_has_none_to_export(tmp_path, capsys):
    recipes.train(tmp_path / "run", steps=1, DEPTH=1)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "there"), "--ema"]) == 2
    assert "has no ema.safetensors, which a run with the block ema writes" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("act", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_a_checkpoint_whose_average_is_damaged_is_not_valid(act, whole, tmp_path):
    path = shutil.copytree(newest(whole), tmp_path / newest(whole).name)
    act(path / storage.EMA)
    newest_valid, (fault,) = storage.newest(tmp_path)
    assert newest_valid is None
    assert str(path / storage.EMA) in fault


def test_an_average_that_begins_later_begins_with_the_weights(tmp_path):
    """Which is another config, and so accepted by name only."""
    recipes.train(tmp_path, steps=3, DEPTH=1)
    argv = [*recipes.flags(DEPTH=1, **{"ema.decay": 0.5}), "--output", str(tmp_path), "--max-steps", "4"]
    refused = fork_ranks.run(recipes.HYBRID, argv)
    assert refused.codes == [2]
    assert "ema" in refused.stderr[0]
    before = load_file(newest(tmp_path) / storage.MODEL)
    assert fork_ranks.run(recipes.HYBRID, [*argv, "--accept-changes"]).codes == [0]
    after, average = (load_file(newest(tmp_path) / name) for name in (storage.MODEL, storage.EMA))
    for name, weights in after.items():
        torch.testing.assert_close(average[name], (before[name] + weights) / 2)
