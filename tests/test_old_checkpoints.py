"""Run directories that commit bce6eda has written resume, and their next steps are those that it made itself."""

import json
import shutil

import pytest
from colossal_vit.results import read_metrics

import fork_ranks
import training

OLD = fork_ranks.ROOT / "tests/old_checkpoints"
SMALL = dict(IMG_SIZE=8, PATCH_SIZE=4, HIDDEN_SIZE=16, DEPTH=2, NUM_HEADS=2, WARMUP_EPOCHS=0, DROP_RATE=0.0)
SMALL |= {"NUM_EPOCHS": 2, "BATCH_SIZE": 64, "checkpoint.keep": 1}
PIPELINE = dict(fp16=None, NUM_MICRO_BATCHES=2, SEQ_LENGTH=5, TENSOR_SHAPE=(32, 5, 16))
NAIVE = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "SEQ_LENGTH": 5, "TENSOR_SHAPE": (64, 5, 16)}
NAIVE["OPTIMIZER"] = "lamb"
ONCE = dict(gradient_accumulation=1)
RUNS = {  # ranks, script, config (None for the usual one), values
    "hybrid": (2, training.HYBRID, None, PIPELINE),
    "naive": (1, training.HYBRID, None, NAIVE),
    "dp": (2, training.DATA_PARALLEL, None, dict(ONCE, BATCH_SIZE=32)),
    "caltech101": (1, training.CALTECH101, "config/config_AMP_torch.py", dict(ONCE, NUM_CLASSES=10, CACHE_SIZE=9)),
    "imagenet": (1, training.IMAGENET, None, ONCE | {"dali.mixup_alpha": 0}),
}
# The files were written on another CPU. In bf16 its kernels round differently, by up to half a unit in the last place.
TOLERANCES = dict.fromkeys(RUNS, 1e-5) | dict.fromkeys(("naive", "dp"), 2**-9)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_before_resumes(name, tmp_path, monkeypatch):
    """Three steps were made then, and three are made now; `expected.jsonl` has what they were then.

    ImageNet's go on at the same place, but with other images: their order and augmentation were DALI's own then.
    """
    monkeypatch.delenv("DATA", raising=False)
    ranks, script, config, values = RUNS[name]
    run = shutil.copytree(OLD / name, tmp_path / "run")
    options = dict(script=script, config=config, small=False, **{**SMALL, **values})
    steps = training.train(run, ranks, steps=6, **options).steps
    assert steps[:3] == read_metrics(OLD / name)[0]
    expected = [json.loads(line) for line in (OLD / name / "expected.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps[3:]] == [step["step"] for step in expected] == [4, 5, 6]
    for here, there in zip(steps[3:], expected, strict=True):
        assert here["lr"] == pytest.approx(there["lr"], rel=1e-12)
        for key in () if name == "imagenet" else ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=TOLERANCES[name]), (here, there)
