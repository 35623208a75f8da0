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
from colossal_vit.engine.loop import Trainer
from colossal_vit.errors import UserError
from safetensors.torch import load_file
from sklearn.metrics import top_k_accuracy_score
from timm.utils import ModelEmaV3

import conftest
import fork_ranks
import training
from layouts import LAYOUTS

VALUES = {"ema.decay": 0.9, "BATCH_SIZE": 128, "NUM_EPOCHS": 2, "DEPTH": 2}
SGD = {"OPTIMIZER": "sgd", "LEARNING_RATE": 1.0}  # does not blow rounding up where a gradient is nearly zero

pytestmark = pytest.mark.usefixtures("few_test_images")


def newest(run):
    checkpoint, faults = storage.newest(run / storage.FOLDER)
    assert not faults
    return checkpoint.path


@pytest.mark.parametrize("warmup", [False, True])
def test_average_equals_timms_over_50_steps(warmup):
    """Long enough for the decay to grow to its full value, in 32 steps."""

    def function():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        theirs = ModelEmaV3(copy.deepcopy(model), decay=0.9, use_warmup=warmup)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss())
        for step in range(1, 51):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(torch.randn(4, 6)), torch.randint(3, (4,))))
            engine.step()
            theirs.update(model, step=step)
        expected = dict(theirs.module.named_parameters())
        weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with engine.ema.swapped_in():
            found = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
            assert not torch.equal(found[name], weights[name])
            assert torch.equal(parameter, weights[name]), "the weights are back"
        return True

    assert fork_ranks.call(function, ema=dict(decay=0.9, warmup=warmup)) == [True]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_sample, curves):
    """A run of one process: 22 steps, 2 epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(small_sample))
        conftest.random_start(patch)
        return training.train(tmp_path_factory.mktemp("ema") / "run", steps=50, **VALUES, **SGD)


@pytest.mark.parametrize("layout", ["DP 2", "PP 2", "1D 2", "2.5D 4", "3D 8"])
def test_every_layout_has_the_same_average(layout, whole, tmp_path, random_weights):
    """After the first of the two epochs."""
    world_size, values = LAYOUTS[layout]
    values = {**values, "BATCH_SIZE": VALUES["BATCH_SIZE"] // (2 if layout == "DP 2" else 1)}
    run = training.train(tmp_path, world_size, steps=11, **{**VALUES, **SGD, **values})
    expected, found = (load_file(path / "checkpoints/step-00000011" / storage.EMA) for path in (whole.output, tmp_path))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    (here,), there = run.evaluations, whole.evaluations[0]
    assert here["ema_loss"] == pytest.approx(there["ema_loss"], rel=1e-5)
    assert here["ema_loss"] != pytest.approx(here["eval_loss"], rel=1e-4)


def test_resumed_run_has_its_average_to_the_bit(whole, tmp_path, random_weights):
    for steps in (7, 20, 50):
        run = training.train(tmp_path, steps=steps, **VALUES, **SGD)
    for name in (storage.EMA, storage.MODEL):
        assert (newest(tmp_path) / name).read_bytes() == (newest(whole.output) / name).read_bytes()
    assert run.records == whole.records


def test_evaluations_are_those_of_timms_model_with_each(whole, small_sample):
    """With the weights, and with their average, after the last epoch; the last test batch is a part of one."""
    last = whole.evaluations[-1]
    for kind, name in (("eval", storage.MODEL), ("ema", storage.EMA)):
        logits, labels = training.timms_logits(newest(whole.output) / name, small_sample, depth=2)
        loss, right = torch.nn.functional.cross_entropy(logits, labels).item(), logits.argmax(1) == labels
        assert last[f"{kind}_loss"] == pytest.approx(loss, rel=1e-5)
        assert last[f"{kind}_accuracy"] == right.double().mean().item()
        assert last[f"{kind}_top5"] == pytest.approx(top_k_accuracy_score(labels, logits.numpy(), k=5), rel=1e-9)


@pytest.mark.parametrize("layout", ["one process", "2D 4"])
def test_evaluation_alone_is_of_both_in_every_layout(layout, whole):
    world_size, values = LAYOUTS.get(layout, (1, {}))
    run = training.train(whole.output, world_size, "--eval-only", steps=None, **{**VALUES, **SGD, **values})
    said = next(text for text in run.stdout if "test accuracy" in text)
    found = re.search(r"test accuracy (\S+)% .*loss (\S+); EMA (\S+)%, top-5 .*, loss (\S+)", said).groups()
    last = whole.evaluations[-1]
    expected = [100 * last["eval_accuracy"], last["eval_loss"], 100 * last["ema_accuracy"], last["ema_loss"]]
    assert [float(number) for number in found] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("flags", "name"), [(["--ema"], storage.EMA), ([], storage.MODEL)])
def test_export_is_of_averages_or_weights(flags, name, whole, tmp_path, capsys):
    assert cli.main(["export", str(whole.output), str(tmp_path / "exported"), *flags]) == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True)
    expected = load_file(newest(whole.output) / name)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("act", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_checkpoint_with_damaged_average_is_not_valid(act, whole, tmp_path):
    path = shutil.copytree(newest(whole.output), tmp_path / newest(whole.output).name)
    act(path / storage.EMA)
    newest_valid, (fault,) = storage.newest(tmp_path)
    assert newest_valid is None
    assert str(path / storage.EMA) in fault


def test_average_that_begins_later_begins_with_the_weights(tmp_path, capsys):
    """Which is another config, and so accepted by name only. Before, there is none to export."""
    training.train(tmp_path / "run", steps=3, DEPTH=1)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "there"), "--ema"]) == 2
    assert "has no ema.safetensors, which a run with the block ema writes" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()
    later = {"steps": 4, "DEPTH": 1, "ema.decay": 0.5}
    evaluated = training.train(tmp_path / "run", 1, "--eval-only", **{**later, "steps": None})
    assert "test accuracy" in evaluated.said
    assert "EMA" not in evaluated.said
    assert "ema" in training.refused(tmp_path / "run", **later)
    before = load_file(newest(tmp_path / "run") / storage.MODEL)
    training.train(tmp_path / "run", 1, "--accept-changes", **later)
    after, average = (load_file(newest(tmp_path / "run") / name) for name in (storage.MODEL, storage.EMA))
    for name, weights in after.items():
        torch.testing.assert_close(average[name], (before[name] + weights) / 2)


def test_an_error_of_one_rank_in_the_evaluation_of_the_average_ends_all_with_one_line(tmp_path, few_test_images):
    def enter(rank):
        test = Trainer._test

        def fail(trainer, *args):
            if rank == 1 and trainer.evaluating_ema:
                raise UserError("of rank 1", own=True)
            test(trainer, *args)

        Trainer._test = fail

    values = {"DEPTH": 1, "NUM_EPOCHS": 1, "BATCH_SIZE": 128, "ema.decay": 0.9, "zero.stage": 1}
    argv = [*training.flags(**values), "--output", str(tmp_path), "--timeout", "60"]
    result = fork_ranks.start(training.HYBRID, argv, fork_ranks.by_torchrun(2), enter=enter).wait()
    assert result.codes == [2, 2], str(result)
    assert "".join(result.stderr).count("\n") == 1


def test_weights_in_half_precision_have_no_average(tmp_path):
    values = {"DEPTH": 1, "fp16.opt_level": "O3", "fp16.dtype": "bf16", "ema.decay": 0.9}
    line = training.refused(tmp_path / "run", amp="APEX", script=training.DATA_PARALLEL, **values)
    assert "ema needs weights in fp32, which fp16.opt_level = 'O3' has not" in line
