"""LOADER: which file it names, what becomes of a wrong one, and that the one in docs/data.md trains."""

import json
from types import SimpleNamespace

import pytest
from colossal_vit.checkpoint import storage
from colossal_vit.data.loaders import expected_classes, expected_images, find_loader, import_file
from colossal_vit.errors import UserError
from colossal_vit.launch.agreement import _code
from colossal_vit.launch.flags import parse
from colossalai.context import Config

import cifar10
import fork_ranks
import train_hybrid
import training
from layouts import ANY_STEP, LAYOUTS

ONE_PROCESS = {"BATCH_SIZE": 32, "parallel.pipeline": 1}
LAYOUTS = {"one process": (1, {}), **{name: LAYOUTS[name] for name in ("DP 2", "PP 2")}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loader_of_ones_own_trains_resumes_and_is_evaluated(layout, own, tmp_path):
    world_size, values = LAYOUTS[layout]
    values = {**values, "LOADER": str(own / "arrays.py"), "DATA": str(own), "NUM_EPOCHS": 2}
    straight = training.train(tmp_path / "straight", world_size, steps=6, **values)
    assert f"1437 training and 90 test images from {own}/images.npz" in straight.said
    training.train(tmp_path / "run", world_size, steps=4, **values)
    run = training.train(tmp_path / "run", world_size, steps=6, **values)
    assert "resuming from" in run.said
    assert run.steps[-1]["step"] == 6
    losses = {record["step"]: record["loss"] for record in straight.steps}
    assert {record["step"]: record["loss"] for record in run.steps} == losses
    evaluated = training.train(tmp_path / "run", world_size, "--eval-only", steps=None, **values)
    assert any("of 90 images" in said for said in evaluated.stdout)
    if world_size > 1:
        alone = training.train(tmp_path / "alone", steps=6, **{**values, **ONE_PROCESS}).steps
        assert list(losses.values()) == pytest.approx([record["loss"] for record in alone], rel=ANY_STEP)


def test_a_loader_is_recorded_only_if_it_is_given_and_another_one_is_no_resume(own, few_test_images, tmp_path):
    def recorded():
        return storage.open_named(tmp_path / "run").state["config"]

    training.train(tmp_path / "run", steps=1)
    assert "LOADER" not in recorded()
    assert "LOADER" in training.refused(tmp_path / "run", LOADER=str(own / "arrays.py"), DATA=str(own))
    training.train(tmp_path / "run", 1, "--accept-changes", steps=2, LOADER=str(own / "arrays.py"), DATA=str(own))
    assert recorded()["LOADER"] == str(own / "arrays.py")


def arguments(folder, loader):
    """Of a script and a config in two folders."""
    for name in ("script", "config/deep", "here"):
        (folder / name).mkdir(parents=True)
    return SimpleNamespace(config=folder / "config/deep/config.py", loader=loader and folder / "script" / loader)


def test_a_loader_is_looked_for_beside_the_config_then_the_script_then_in_the_working_directory(tmp_path, monkeypatch):
    args = arguments(tmp_path, "own.py")
    monkeypatch.chdir(tmp_path / "here")
    assert find_loader(args, Config({})) == tmp_path / "script/own.py"
    looked = f"{tmp_path}/config/deep, {tmp_path}/script, {tmp_path}/here"
    with pytest.raises(UserError, match=rf"^LOADER = \.\./other\.py: no such file in {looked}$"):
        find_loader(args, Config({"LOADER": "../other.py"}))
    found = []
    for place in ("here/../other.py", "script/../other.py", "config/other.py"):
        (tmp_path / place).resolve().touch()
        found.append(find_loader(args, Config({"LOADER": "../other.py"})))
    assert found == [tmp_path / "other.py", tmp_path / "other.py", tmp_path / "config/other.py"]
    assert find_loader(arguments(tmp_path / "none", None), Config({})) is None


MISTAKES = {
    "no file": (None, "LOADER = {path}: no such file in "),
    "no build": ("NUM_CLASSES = 3\n", "{path}: has no function build(run), which a LOADER needs"),
    "no sample": (
        "from colossal_vit.data.loaders import data_folder\nbuild = data_folder\n",
        "DATA is not set, and this LOADER has no sample: set DATA to the folder with the data",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_loader_is_one_line(name, tmp_path):
    source, words = MISTAKES[name]
    if source:
        (tmp_path / "mine.py").write_text(source)
    line = training.refused(tmp_path / "run", 2, LOADER=str(tmp_path / "mine.py"), BATCH_SIZE=16)
    assert words.format(path=tmp_path / "mine.py") in line


def test_a_file_is_imported_once_and_shadows_no_other_module(tmp_path):
    assert import_file(fork_ranks.ROOT / "vit_cifar10_hybrid/cifar10.py") is cifar10
    for name in ("json.py", "beside.py"):
        (tmp_path / name).write_text("value = 7\n")
    (tmp_path / "mine_only.py").write_text("import beside\nimport json\nvalue = beside.value, json.loads('8')\n")
    assert import_file(tmp_path / "json.py") is import_file(tmp_path / "json.py") is not json
    assert import_file(tmp_path / "mine_only.py").value == (7, 8)
    (tmp_path / "json.py").rename(tmp_path / "string.py")
    (tmp_path / "string.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            import_file(tmp_path / "string.py")


def test_classes_and_images_are_expected_as_the_loader_says(tmp_path):
    config, says_nothing = Config({}), SimpleNamespace(__file__="a/mine.py")
    assert (expected_classes(config, cifar10), expected_images(config, cifar10)) == (10, 50_000)
    with pytest.raises(UserError, match=r"^NUM_CLASSES is missing: where no data are read, mine\.py does not say it$"):
        expected_classes(config, says_nothing)
    counts = SimpleNamespace(count_images=lambda folder: len(folder.name), NUM_IMAGES=50)
    assert expected_images(Config({"DATA": str(tmp_path)}), counts) == len(tmp_path.name)
    assert expected_images(config, counts) == 50


def test_ranks_with_different_loaders_notice(tmp_path):
    (tmp_path / "arrays_of_a_rank.py").write_text("def build(run): pass\n")
    import_file(tmp_path / "arrays_of_a_rank.py")
    before = _code(tmp_path / "arrays_of_a_rank.py")
    (tmp_path / "arrays_of_a_rank.py").write_text("def build(run): return 1\n")
    assert _code(tmp_path / "arrays_of_a_rank.py") != before
    assert _code() == _code() != before


def test_a_script_names_the_loader_beside_it():
    args = train_hybrid.SCRIPT.parse(["--config", "config.py"])
    assert args.loader == fork_ranks.ROOT / "vit_cifar10_hybrid/cifar10.py"
    assert parse([]).loader is None
