"""The recipes with a published accuracy: what their files say holds, they can be planned, and they train."""

import re

import pytest
from colossal_vit import config as configs
from colossal_vit.models import build_timm_vit
from colossal_vit.plan import __main__ as tables
from colossal_vit.results import read_metrics
from safetensors.torch import save_file

import fork_ranks
from training import set_flags

FOLDER = fork_ranks.ROOT / "vit_imagenet_dali"
NAMES = sorted(path.stem.removeprefix("config_") for path in (FOLDER / "configs").glob("config_*.py"))
TRAIN = "vit_imagenet_dali/train.py"
# A batch of 8 of the sample's digits; the parts of the recipe stay as they are.
TINY = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=16, DEPTH=2, NUM_HEADS=2, NUM_CLASSES=10, BATCH_SIZE=8)
TINY |= {"fp16": None, "gradient_accumulation": 2, "NUM_EPOCHS": 9}


def recipe(name, *overrides):
    return configs.load(FOLDER / "configs" / f"config_{name}.py", overrides, "imagenet")


@pytest.mark.parametrize("name", NAMES)
def test_global_batch_on_eight_and_on_four_gpus(name):
    """As it is, and with what the docstring says."""
    config, text = recipe(name), (FOLDER / "configs" / f"config_{name}.py").read_text()
    assert config.BATCH_SIZE * config.gradient_accumulation * 8 == config.GLOBAL_BATCH
    (flag,) = re.findall(r"on 4 with\s+`--set (\S+)`", text)
    four = recipe(name, flag)
    assert four.BATCH_SIZE * four.gradient_accumulation * 4 == config.GLOBAL_BATCH
    path = FOLDER / "configs" / f"config_{name}.py"
    assert f"gradient_accumulation={tables.accumulation_of(path, 4)}" == flag
    assert tables.accumulation_of(path, 8) == config.gradient_accumulation


def test_every_recipe_is_planned_and_on_the_page():
    assert set(NAMES) == set(tables.TIMED)
    page = (fork_ranks.ROOT / "docs" / "recipes.md").read_text()
    plan = (fork_ranks.ROOT / "results" / "recipes_plan" / "plan.md").read_text()
    for name in NAMES:
        (row,) = re.findall(rf"^\|.*\(\.\./vit_imagenet_dali/configs/config_{name}\.py\) \|(.+)\|$", page, re.MULTILINE)
        epochs, published, memory, hours = (cell.strip() for cell in row.split("|")[-4:])
        assert int(epochs) == recipe(name).NUM_EPOCHS
        text = (FOLDER / "configs" / f"config_{name}.py").read_text()
        assert f"{published} %" in re.sub(r"\s+", " ", text), name
        rows = re.findall(rf"^\| {name} \| (\d+) \| .+? \| (\S+) \| (\S+) \|", plan, re.MULTILINE)
        assert [(f"{a} / {b}") for a, b in zip(*rows, strict=True)] == ["4 / 8", memory, hours]


def test_a_recipe_is_planned_with_its_own_global_batch():
    argv = [
        "--config",
        "configs/config_deit3_s16.py",
        *set_flags(TINY),
        "--set",
        "GLOBAL_BATCH=64",
        "--world_size",
        "8",
    ]
    result = fork_ranks.run(TRAIN, [*argv, "--dry-run"])
    assert result.codes == [0], str(result)
    assert re.search(r"^a global batch of 64; .*\nGPUs .*\n4 +8 +2 .*\n8 +8 +1 ", result.stdout[0], re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_trains_as_the_recipe_says(name, tmp_path, monkeypatch):
    """Two steps on the sample, with everything on; what is fine-tuned starts from the weights of a file."""
    monkeypatch.delenv("DATA", raising=False)
    values, weights = dict(TINY), tmp_path / "weights.safetensors"
    if recipe(name).get("finetune"):
        values["finetune.weights"] = str(weights)
        before = recipe(name, *(f"{key}={value!r}" for key, value in TINY.items()), "POOL='token'", "SEED=7")
        save_file(build_timm_vit(before).state_dict(), weights)
    argv = ["--config", f"configs/config_{name}.py", *set_flags(values), "--max-steps", "2"]
    result = fork_ranks.run(TRAIN, [*argv, "--output", str(tmp_path / "run")])
    assert result.codes == [0], str(result)
    assert (f"starting from the weights of {weights}" in result.stdout[0]) == weights.exists()
    steps, evaluations = read_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert 0 < steps[0]["lr"] < steps[1]["lr"] < recipe(name).LEARNING_RATE
    assert evaluations[-1]["eval_images"] == 360
