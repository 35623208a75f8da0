"""What scripts that measure have in common; the table of AMP modes, a mode that fails, the largest batch that fits."""

import argparse
import csv
import json
import os
import sys

import pytest
from colossal_vit.provenance import ResultFolder

import fork_ranks
from turns import in_turns, spread

FOLDER = fork_ranks.ROOT / "vit_caltech101_amp"


@pytest.fixture
def benchmark(monkeypatch):
    """The script as a module; its `train` is the folder's, not another example's."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    import benchmark

    return benchmark


def test_a_result_is_kept_when_nobody_reads_what_is_said(monkeypatch, tmp_path):
    """As after `| head -1`. Without a folder nothing is kept."""

    def measure():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 as a new process has it
        for folder in (None, tmp_path / "kept"):
            measured = ResultFolder(folder, changes_allowed=True)
            measured.print(f"first line, in {fork_ranks.ROOT}/runs")
            measured.print("second line")
            measured.finish("speed", ["| a |", "| --- |"], {"a": 1})

    monkeypatch.setattr("sys.argv", ["bench.py", "--set", "a b"])
    fork_ranks.call(measure, launched=False)
    kept = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    assert json.loads(kept.pop("provenance.json"))["command"] == "python bench.py --set 'a b'"
    assert kept == {
        "speed.md": "| a |\n| --- |\n",
        "speed.json": '{\n  "a": 1\n}\n',
        "log.txt": "first line, in ./runs\nsecond line\n",
    }


def test_turns_and_spread():
    assert [in_turns(["ours", "torch"], number) for number in range(2)] == [["ours", "torch"], ["torch", "ours"]]
    assert spread([3, 1, 2.5], ".1f") == ["2.5", "1.0", "3.0"]


def records(memory, seconds, count=7):
    """Steps of 64 images; the first two are slow."""
    return [
        dict(step_s=s, images_per_s=64 / s, memory_gb=memory, data_s=0.01, loss=2.0 - 0.1 * k)
        for k, s in enumerate([9.0, 9.0, *[seconds] * (count - 2)])
    ]


def test_files_and_a_mode_that_fails(benchmark, monkeypatch, tmp_path, capsys):
    def train(mode, args, batch_size):
        assert batch_size == 64
        if "naive" in mode.name:
            raise benchmark.Failed("out of memory")
        memory, seconds = (4.0, 2.0) if "fp32" in mode.name else (2.5, 1.0)
        return records(memory, seconds / 2 if "COMPILE=True" in mode.overrides else seconds), [], ""

    monkeypatch.setattr(benchmark, "train", train)
    argv = ["benchmark.py", "--steps", "5", "--warm-up", "2", "--batch-size", "64", "--compile"]
    monkeypatch.setattr("sys.argv", [*argv, "--output", str(tmp_path), "--set", "MODEL='vit_tiny_patch16_224'"])
    assert benchmark.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("amp.md", "amp.csv", "amp.json", "amp.png", "log.txt", "provenance.json")
    }
    rows = {row["config"]: row for row in csv.DictReader((tmp_path / "amp.csv").open())}
    assert next(iter(rows)) == "config_fp32"
    assert len(rows) == 12
    assert rows["config_AMP_naive"]["failed"] == "out of memory"
    torch_row = rows["config_AMP_torch"]
    assert float(torch_row["images_per_s"]) == 64
    assert float(torch_row["it_per_s"]) == 1
    assert float(torch_row["relative_memory"]) == pytest.approx(-0.375)
    assert float(torch_row["relative_throughput"]) == pytest.approx(1.0)
    assert float(torch_row["loss"]) == pytest.approx(1.4)
    assert float(rows["config_fp32, compiled"]["relative_throughput"]) == pytest.approx(1.0)
    said = (tmp_path / "amp.md").read_text()
    assert (
        "| config_AMP_torch | AMP_TYPE.TORCH in bfloat16 | 64 | 2.50 | 1 | 64.0 | -37.5% | +100.0% | 1.0% | 1.4000 |"
        in said
    )
    assert said in capsys.readouterr().out + "\n"
    assert json.loads((tmp_path / "provenance.json").read_text())["command"].startswith("python benchmark.py")


@pytest.mark.parametrize(("limit", "start", "most"), [(100, 16, 4096), (7, 64, 4096), (4096, 128, 512), (1, 1, 4096)])
def test_the_largest_batch_that_fits(benchmark, monkeypatch, limit, start, most):
    tried = []

    def train(mode, args, batch_size):
        tried.append(batch_size)
        if batch_size > limit:
            raise benchmark.Failed("out of memory")

    monkeypatch.setattr(benchmark, "train", train)
    found = benchmark.find_batch_size(None, argparse.Namespace(max_batch_size=most), start)
    largest = min(limit, most)
    assert largest - max(1, largest // 8) <= found <= largest
    assert max(tried) <= most
    assert len(tried) == len(set(tried)) < 16


def test_a_failed_run_says_why(benchmark):
    args = argparse.Namespace(nproc_per_node=1, warm_up=1, steps=1, set=["HIDDEN_SIZE=7"], synthetic=True)
    with pytest.raises(benchmark.Failed, match=r"train\.py: error: MODEL = 'vit_base_patch16_224' cannot be built"):
        benchmark.train(benchmark.Mode("fp32", FOLDER / "config" / "config_fp32.py", []), args, None)


def test_the_readme_has_the_measured_table():
    measured = (fork_ranks.ROOT / "results" / "caltech101_amp_cpu" / "amp.md").read_text()
    assert measured in (FOLDER / "README.md").read_text()
