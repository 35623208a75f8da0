"""Run directories that commit bce6eda has written resume, and their next steps are those that it made itself."""

import json
import shutil

import pytest
from colossal_vit.results import read_metrics

import fork_ranks
import recipes

OLD = fork_ranks.ROOT / "tests/old_checkpoints"
SMALL = dict(
    IMG_SIZE=8, PATCH_SIZE=4, HIDDEN_SIZE=16, DEPTH=2, NUM_HEADS=2, WARMUP_EPOCHS=0, DROP_RATE=0.0, NUM_EPOCHS=2
)
SMALL |= {"checkpoint.keep": 1, "BATCH_SIZE": 64}
RUNS = {
    "hybrid": (2, recipes.HYBRID, recipes.PIPELINE_CONFIG, dict(fp16=None, NUM_MICRO_BATCHES=2, SEQ_LENGTH=5)),
    "naive": (1, recipes.HYBRID, recipes.PIPELINE_CONFIG, {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1}),
    "dp": (2, recipes.DATA_PARALLEL, "configs/config_data_parallel.py", dict(BATCH_SIZE=32)),
    "caltech101": (1, "vit_caltech101_amp/train.py", "config/config_AMP_torch.py", dict(NUM_CLASSES=10, CACHE_SIZE=9)),
    "imagenet": (1, "vit_imagenet_dali/train.py", "config_sample.py", {}),
}
RUNS["hybrid"][3]["TENSOR_SHAPE"] = (32, 5, 16)
RUNS["naive"][3].update({"OPTIMIZER": "lamb", "TENSOR_SHAPE": (64, 5, 16), "SEQ_LENGTH": 5})
for name in ("dp", "caltech101", "imagenet"):
    RUNS[name][3]["gradient_accumulation"] = 1
# The files were written on another CPU. In bf16 its kernels round differently, by up to half a unit in the last place.
TOLERANCES = dict.fromkeys(RUNS, 1e-5) | dict.fromkeys(("naive", "dp"), 2**-9)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_before_resumes(name, tmp_path, monkeypatch):
    """Three steps were made then, and three are made now; `expected.jsonl` has what they were then."""
    monkeypatch.delenv("DATA", raising=False)
    ranks, script, config, values = RUNS[name]
    run = shutil.copytree(OLD / name, tmp_path / "run")
    argv = ["--config", config, *recipes.set_flags({**SMALL, **values}), "--output", str(run), "--max-steps", "6"]
    result = fork_ranks.run(script, argv, ranks)
    assert result.codes == [0] * ranks, str(result)
    steps = read_metrics(run)[0]
    assert steps[:3] == read_metrics(OLD / name)[0]
    expected = [json.loads(line) for line in (OLD / name / "expected.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps[3:]] == [step["step"] for step in expected] == [4, 5, 6]
    for here, there in zip(steps[3:], expected, strict=True):
        assert here["lr"] == pytest.approx(there["lr"], rel=1e-12)
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=TOLERANCES[name]), (here, there)
