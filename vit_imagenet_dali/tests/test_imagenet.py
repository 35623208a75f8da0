"""The published recipe is the one that the configs have, and it trains."""

import json
import re

import pytest
from colossal_vit.errors import UserError
from colossal_vit.results import read_metrics
from colossalai.legacy.amp import AMP_TYPE

import fork_ranks
import planning
import schemas
import training
from tfrecord import index_path

FOLDER = fork_ranks.ROOT / "vit_imagenet_dali"
load = schemas.script(schemas.IMAGENET).load
SAMPLE = dict(script=training.IMAGENET, small=False)  # the sample's config as it is
# The published split is 256 × 32. Larger micro-batches are faster, as far as 40 GB of memory allow.
SPLITS = {"config.py": (512, 16), "config_vit_b32.py": (1024, 8), "config_vit_l32.py": (512, 16)}
RECIPES = {"config.py": "B/16 78.58 h", "config_vit_b32.py": "B/32 14.58 h", "config_vit_l32.py": "L/32 37.83 h"}


@pytest.mark.parametrize("name", RECIPES)
def test_configs_are_the_recipe_of_the_readme(name):
    config = load(FOLDER / name)
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    readme = {what: (published, here) for what, published, here in rows}
    assert config.BATCH_SIZE * config.gradient_accumulation * 4 == config.GLOBAL_BATCH == 32_768
    assert readme["global batch"] == ("32K: 256 per GPU × 32 accumulation × 4 GPUs", "32,768")
    assert (config.BATCH_SIZE, config.gradient_accumulation) == SPLITS[name]
    rate, decay = re.fullmatch(r"LAMB, learning rate (\S+), weight decay (\S+)", readme["optimizer"][0]).groups()
    assert (float(rate), float(decay)) == (config.LEARNING_RATE, config.WEIGHT_DECAY)
    assert f"for {config.WARMUP_EPOCHS} of {config.NUM_EPOCHS} epochs" in readme["schedule"][0]
    assert float(readme["clipping"][0]) == config.clip_grad_norm
    assert readme["Mixup"][0] == f"alpha {config.mix.mixup}"
    assert float(readme["dropout"][0]) == config.DROP_RATE
    assert config.fp16 == {"mode": AMP_TYPE.TORCH, "half_residual": True}
    assert RECIPES[name] in readme["time on 4 A100s"][0]
    model, hours = RECIPES[name].split()[:2]
    size, patch = model.split("/")
    assert f"vit_{dict(B='base', L='large')[size]}_patch{patch}_224" == config.MODEL
    assert planning.PUBLISHED_HOURS[config.MODEL] == float(hours)
    assert f"{hours} h" in (FOLDER / name).read_text()


@pytest.mark.parametrize(("num_gpus", "expected"), [(4, (256, 32)), (64, (256, 2)), (1024, (32, 1)), (3, None)])
def test_plan_keeps_the_global_batch(num_gpus, expected):
    assert planning.batch_and_accumulation(num_gpus, 256, 32_768) == expected


def test_plan_has_pairs_of_images_for_mix():
    assert planning.batch_and_accumulation(2, 15, 60) == (15, 2)
    assert planning.batch_and_accumulation(2, 15, 60, even=True) == (10, 3)
    assert planning.batch_and_accumulation(4, 15, 60, even=True) is None


def test_plan_says_that_the_gpus_cannot_share_the_global_batch(tmp_path):
    config = load(FOLDER / "config_vit_b32.py", ["GLOBAL_BATCH=32768"])
    *rows, last = planning.schedule(config, tmp_path, 3)
    assert [row.split()[0] for row in rows[2:]] == ["4", "64", "1024"]
    assert last == "as it is, the config makes a global batch of 24,576 on 3 GPU(s): 3 cannot make 32,768"


def test_plan_has_the_published_hours_for_any_number_of_gpus(tmp_path):
    """And for the number of GPUs at hand."""
    header, _, *rows = planning.schedule(load(FOLDER / "config_vit_b32.py"), tmp_path, 8)
    assert "published, for an A100" in header
    assert [" ".join(row.split()) for row in rows[:2]] == ["4 1024 8 11,700 14.58", "8 1024 4 11,700 7.29"]


def test_plan_takes_its_hours_from_an_earlier_run_without_damaged_records(tmp_path):
    """Damaged records do not count; without a config nothing is known of a run."""
    (tmp_path / "metrics.jsonl").write_text(
        "null\n" + "".join(f'{{"step": {n}, "epoch": 0, "loss": 1.0, "step_s": {s}}}\n' for n, s in ((1, 0.5), (2, 0)))
    )
    config = load(FOLDER / "config_vit_b32.py")
    for content, words in (
        ('{"BATCH_SIZE": 64, "gradient_accumulation": 2}', None),
        ("{}", "config.json: lacks BATCH_SIZE, gradient_accumulation"),
        ('{"BATCH_SIZE": "x", "gradient_accumulation": 2}', "config.json: BATCH_SIZE = 'x'"),
    ):
        (tmp_path / "config.json").write_text(content)
        if words:
            with pytest.raises(UserError, match=words):
                planning.schedule(config, tmp_path, 8)
        else:
            assert "256 images/s a GPU (the median of the run in" in planning.schedule(config, tmp_path, 8)[0]


def test_another_global_batch_is_kept_and_said(tmp_path):
    """What the config makes on the GPUs at hand, unless it names another one. No published hours for other models."""
    config = load(FOLDER / "config_vit_b32.py", ["GLOBAL_BATCH=1024", "DEPTH=6"])
    header, _, *rows, last = planning.schedule(config, tmp_path, 8)
    assert header == "a global batch of 1,024, 1,281,167 images an epoch; set IMAGES_PER_S for hours"
    assert [" ".join(row.split()[:3]) for row in rows] == ["4 256 1", "8 128 1", "64 16 1"]  # mix needs pairs
    assert last == "as it is, the config makes a global batch of 65,536 on 8 GPU(s): --set what is above"
    del config["GLOBAL_BATCH"]
    header, *_, last = planning.schedule(config, tmp_path, 8)
    assert header.startswith("a global batch of 65,536, ")
    assert last.startswith("1024 ")


def test_plan_takes_its_hours_from_a_rate_that_is_given(tmp_path):
    config = load(FOLDER / "config_vit_l32.py", ["IMAGES_PER_S=4300"])
    assert re.fullmatch(r"64 +512 +1 +11,700 +0\.39", planning.schedule(config, tmp_path, 4)[3])


def test_steps_and_hours_of_other_tfrecords(tmp_path):
    for shard in range(2):
        index = index_path(tmp_path, "train", f"train-{shard:05d}-of-00002")
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text("0 9\n9 9\n" * 32_768)
    config = load(FOLDER / "config_vit_l32.py", ["IMAGES_PER_S=4096", f"DATA={str(tmp_path)!r}"])
    header, _, row, *_ = planning.schedule(config, tmp_path, 4)
    assert header.startswith("a global batch of 32,768, 131,072 images an epoch; ")
    assert " ".join(row.split()) == "4 512 16 1,200 0.67"


@pytest.mark.parametrize(("made", "count"), [(["train/a", "train/b", "val/a"], 40), (["a", "b"], 32)])
def test_an_epoch_of_other_data_has_their_images(made, count, tmp_path):
    """Class folders, split or not; what is no image does not count."""
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
        for name in ("notes.txt", *(f"{number}.jpg" for number in range(20))):
            (tmp_path / folder / name).touch()
    config = load(FOLDER / "config_vit_l32.py", ["GLOBAL_BATCH=8", f"DATA={str(tmp_path)!r}"])
    assert planning.schedule(config, tmp_path, 4)[0].startswith(f"a global batch of 8, {count:,} images an epoch; ")


def test_sample_trains_on_two_processes(tmp_path):
    """DALI, Mixup, LAMB, 32 micro-batches per step; every image of the validation set counts once."""
    run = training.train(tmp_path, 2, steps=3, **SAMPLE)
    assert [record["step"] for record in run.steps] == [1, 2, 3]
    assert [record["lr"] for record in run.steps] == pytest.approx([1.8e-2 * k / 56 for k in (1, 2, 3)])  # 11 steps × 5
    assert run.evaluations[-1]["eval_images"] == 360


def test_what_an_epoch_says_of_its_speed(tmp_path):
    run = training.train(tmp_path, 2, steps=2, SYNTHETIC=True, **SAMPLE)
    line = (
        r"epoch 0 of \d+: total batch 128, ([\d,]+) images/s \(([\d,]+) a process\), peak memory \S+ GB, waited for d"
    )
    rate, own = (int(number.replace(",", "")) for number in re.search(line, run.said).groups())
    rates = [record["images_per_s"] for record in run.steps]
    assert rate == pytest.approx(sum(rates) / 2, abs=0.51), "in whole images"
    assert own == pytest.approx(rate / 2, abs=1)
    assert "MFU" not in run.said, "the peak of a CPU is not known"


def test_numbers_of_the_readme_are_those_of_the_results():
    def result(name):
        return json.loads((fork_ranks.ROOT / "results" / name).read_text())

    evaluations = read_metrics(fork_ranks.ROOT / "results" / "imagenet_sample")[1]
    [on_gpu] = result("1x_NVIDIA_H200/imagenet/imagenet.json")["rounds"].values()
    random, dali = (on_gpu[f"training with {name}"][0]["images/s"] for name in ("random data", "DALI"))
    expected = {
        "imagenet_sample": f"{evaluations[-1]['eval_accuracy']:.2%}".replace("%", " % of 360 test images"),
        "1x_NVIDIA_H200": f"{random:,.0f} images/s on random images, {dali:,.0f} with DALI, which decodes generated "
        "JPEGs on the same GPU",
    }
    rows = re.findall(r"^\|.*\| (.+?) \| \[results/(\w+)\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {name: said for said, name in rows} == expected
