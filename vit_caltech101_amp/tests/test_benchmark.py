"""The table of AMP modes: what it makes of its runs."""

import json
import os
import re
import shutil

import pytest
import torch

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

    def run(*flags, gpu="", **variables):
        def enter(rank):
            os.environ.update(variables)
            torch.cuda.is_available, torch.cuda.get_device_name = lambda: bool(gpu), lambda *_: gpu

        argv = [*flags, "--output", str(tmp_path / "amp")]
        done = fork_ranks.start(folder / "benchmark.py", argv, [{}], cwd=tmp_path, enter=enter).wait()
        assert done.codes == [0], str(done)
        document = json.loads((tmp_path / "amp/amp.json").read_text())
        return document["rounds"]["AMP"], done.stdout[0]

    return run


def test_the_modes_of_amp_are_compared_with_fp32(amp):
    """Those that a CPU can do; one that is named is measured, too."""
    modes = ("fp32", "AMP_torch", "AMP_naive_bf16")
    configs = ["--configs", *(f"vit_caltech101_amp/config/config_{mode}.py" for mode in modes)]
    rounds, said = amp("--steps", "5", "--warm-up", "2", "--batch-size", "64", "--compile", *configs)
    assert list(rounds)[:3] == ["config_fp32", "config_AMP_torch", "config_AMP_naive_bf16"]
    assert len(rounds) == 6
    assert "\nvit_base_patch16_224 at 224 px, dropout 0.1, sgd; 5 steps after 2.\n\n|  | side |" in said
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


ON_GPU = ["fp32", "fp32, TF32", "AMP_torch", "AMP_bf16", "AMP_naive", "AMP_naive_bf16", "AMP_apex"]


@pytest.mark.parametrize(("gpu", "modes"), [("", ["fp32", "AMP_bf16", "AMP_naive_bf16"]), ("NVIDIA H200", ON_GPU)])
def test_rows_are_what_the_device_can_do(amp, gpu, modes):
    """A CPU has no TensorFloat-32, and no mode in fp16 unless asked for it."""
    rounds, _ = amp("--steps", "3", "--warm-up", "2", gpu=gpu)
    assert list(rounds) == [f"config_{mode}" for mode in modes]


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
