"""The recipes with a published accuracy: what their files say holds, they can be planned, and they train."""

import json
import re

import pytest
from colossal_vit.checkpoint import storage
from colossal_vit.model.timm_vit import build_timm_vit
from safetensors.torch import save_file

import fork_ranks
import schemas
import training

FOLDER = fork_ranks.ROOT / "vit_imagenet_dali"
NAMES = sorted(path.stem.removeprefix("config_") for path in (FOLDER / "configs").glob("config_*.py"))
# A batch of 8 of the sample's digits; the parts of the recipe stay as they are.
TINY = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=16, DEPTH=2, NUM_HEADS=2, NUM_CLASSES=10, BATCH_SIZE=8)
TINY |= {"fp16": None, "gradient_accumulation": 2, "NUM_EPOCHS": 9}


def recipe(name, *overrides):
    return schemas.script(schemas.IMAGENET).load(FOLDER / "configs" / f"config_{name}.py", overrides)


@pytest.mark.parametrize("name", NAMES)
def test_global_batch_on_eight_and_on_four_gpus(name):
    """As it is, and with what the docstring says."""
    config, text = recipe(name), (FOLDER / "configs" / f"config_{name}.py").read_text()
    assert config.BATCH_SIZE * config.gradient_accumulation * 8 == config.GLOBAL_BATCH
    (flag,) = re.findall(r"on 4 with\s+`--set (\S+)`", text)
    four = recipe(name, flag)
    assert four.BATCH_SIZE * four.gradient_accumulation * 4 == config.GLOBAL_BATCH


def test_every_recipe_is_planned_and_on_the_page():
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


def train(name, output, *more, steps=None, **values):
    """Train a small model by a recipe."""
    options = dict(script=training.IMAGENET, config=f"configs/config_{name}.py", small=False)
    return training.train(output, 1, *more, steps=steps, **options, **TINY, **values)


def test_a_recipe_is_planned_with_its_own_global_batch(tmp_path):
    run = train("deit3_s16", tmp_path, "--dry-run", "--world_size", "8", GLOBAL_BATCH=64)
    table = r"^a global batch of 64, 1,281,167 images an epoch; .*\nGPUs .*\n4 +8 +2 .*\n8 +8 +1 "
    assert re.search(table, run.said, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_trains_as_the_recipe_says(name, tmp_path):
    """Two steps on the sample, with everything on; what is fine-tuned starts from the weights of a file."""
    values, weights = {}, tmp_path / "weights.safetensors"
    if recipe(name).get("finetune"):
        values["finetune.weights"] = str(weights)
        before = recipe(name, *(f"{key}={value!r}" for key, value in TINY.items()), "POOL='token'", "SEED=7")
        save_file(build_timm_vit(before).state_dict(), weights)
    run = train(name, tmp_path / "run", steps=2, **values)
    assert (f"starting from the weights of {weights}" in run.said) == weights.exists()
    assert [step["step"] for step in run.steps] == [1, 2]
    assert 0 < run.steps[0]["lr"] < run.steps[1]["lr"] < recipe(name).LEARNING_RATE
    assert run.evaluations[-1]["eval_images"] == 360
    trained = storage.open_named(run.output).state["config"]
    for key, value in recipe(name, *(f"{key}={value!r}" for key, value in {**TINY, **values}.items())).items():
        assert trained[key] == json.loads(json.dumps(value)), key
