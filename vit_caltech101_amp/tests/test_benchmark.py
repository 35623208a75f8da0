"""The table of AMP modes: what it makes of its runs."""

import json
import os
import re
import shutil

import pytest

import fork_ranks
from fork_ranks import ROOT

TRAIN = """
if __name__ != "__main__":
    from real_train import SCRIPT
else:
    import json, os, sys
    from pathlib import Path

    config, output = (Path(sys.argv[sys.argv.index(flag) + 1]) for flag in ("--config", "--output"))
    values = dict(flag.removeprefix("--set=").split("=", 1) for flag in sys.argv if flag.startswith("--set="))
    batch_size, steps = int(values["BATCH_SIZE"]), int(sys.argv[sys.argv.index("--max-steps") + 1])
    print(batch_size, file=open("tried.txt", "a"))
    if batch_size > int(os.environ.get("LIMIT", "1000")):
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    if "naive_bf16" in config.stem:
        sys.exit("a warning\\ntrain.py: error: MODEL cannot be built\\nmore")
    memory, seconds = (4.0, 2.0) if "fp32" in config.stem else (2.5, 1.0)
    seconds /= 2 if values["COMPILE"] == "True" else 1
    output.mkdir()
    with open(output / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            step_s = 9.0 if step <= 2 else seconds
            speed = dict(images_per_s=batch_size / step_s, data_s=0.01, step_s=step_s, memory_gb=memory)
            print(json.dumps(dict(step=step, epoch=0, loss=2.0 - 0.1 * step, **speed)), file=file)
"""


@pytest.fixture
def amp(tmp_path):
    """Run the benchmark of AMP with made-up training; returns its rounds by mode, and what it printed."""
    folder = tmp_path / "vit_caltech101_amp"
    shutil.copytree(ROOT / "scripts/benchmarks", tmp_path / "scripts/benchmarks")
    shutil.copytree(ROOT / "vit_caltech101_amp/config", folder / "config")
    shutil.copy(ROOT / "vit_caltech101_amp/benchmark.py", folder)
    shutil.copy(ROOT / "vit_caltech101_amp/caltech101.py", folder)
    shutil.copy(ROOT / "vit_caltech101_amp/train.py", folder / "real_train.py")
    (folder / "train.py").write_text(TRAIN)

    def run(*flags, **variables):
        argv, enter = [*flags, "--output", str(tmp_path / "amp")], lambda rank: os.environ.update(variables)
        done = fork_ranks.start(folder / "benchmark.py", argv, [{}], cwd=tmp_path, enter=enter).wait()
        assert done.codes == [0], str(done)
        document = json.loads((tmp_path / "amp/amp.json").read_text())
        return document["rounds"]["AMP"], done.stdout[0]

    return run


def test_the_modes_of_amp_are_compared_with_fp32(amp):
    rounds, said = amp("--steps", "5", "--warm-up", "2", "--batch-size", "64", "--compile")
    assert len(rounds) == 12
    assert next(iter(rounds)) == "config_fp32"
    (torch_mode,) = rounds["config_AMP_torch"]
    assert torch_mode["images/s"] == 64
    assert torch_mode["it/s"] == 1
    assert torch_mode["final loss"] == pytest.approx(1.3)
    (row,) = re.findall(r"^\| AMP \| config_AMP_torch \|.*$", said, re.MULTILINE)
    assert row == (
        "| AMP | config_AMP_torch | 64 | 2.5 | 1 | 1 | 1.3 | AMP_TYPE.TORCH in bfloat16 | 64 | 2.000 | 0.625 |"
    )
    assert "| AMP | config_fp32, compiled | 64 | 4 | 1 | 1 | 1.3 | fp32 | 64 | 2.000 | 1.000 |" in said
    assert "| AMP | config_AMP_naive_bf16 | train.py: error: MODEL cannot be built |" in said


@pytest.mark.parametrize(("limit", "start", "most"), [(100, 16, 4096), (7, 64, 4096), (4096, 128, 512), (1, 1, 4096)])
def test_the_largest_batch_that_fits_is_found(amp, tmp_path, limit, start, most):
    sizes = ["--find-batch-size", "--batch-size", str(start), "--max-batch-size", str(most)]
    rounds, _ = amp("--configs", "vit_caltech101_amp/config/config_fp32.py", "--steps", "5", *sizes, LIMIT=str(limit))
    found = rounds["config_fp32"][0]["batch size"]
    *tried, last = map(int, (tmp_path / "vit_caltech101_amp/tried.txt").read_text().split())
    assert last == found
    largest = min(limit, most)
    assert largest - max(1, largest // 8) <= found <= largest
    assert max(tried) <= most
    assert len(tried) == len(set(tried)) < 16
