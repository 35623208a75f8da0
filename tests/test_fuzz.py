"""Random models in random layouts, and random commands on shared run directories: new ones each time."""

import json
import random
import shutil

import pytest
from colossal_vit.checkpoint import storage

import fuzz_layouts
import fuzz_runs
import recipes


def test_new_cases_agree_with_one_process(capsys):
    """The seed is printed, and with it the cases are the same again."""
    seed = random.randrange(10**9)
    code = fuzz_layouts.main([str(seed), "15", "--max-ranks", "4", "--fp32", "--no-shrink"])
    said = capsys.readouterr().out
    assert code == 0, f"python scripts/fuzz_layouts.py {seed} 15 --max-ranks 4 --fp32\n{said}"
    assert f"Seed {seed}: 15 cases, 0 failed" in said


def test_a_case_that_disagrees_is_found(monkeypatch, capsys):
    """Another learning rate in the second layout."""
    command = fuzz_layouts.command

    def wrong(case, layout):
        ranks, flags = command(case, layout)
        return ranks, [*flags, "--set", "LEARNING_RATE=0.5", "--accept-changes"] if layout is case["second"] else flags

    alone = {"mode": None, "size": 1, **fuzz_layouts.SIMPLE_LAYOUT}
    monkeypatch.setattr(fuzz_layouts, "draw_layout", lambda draw, max_ranks: dict(alone))
    monkeypatch.setattr(fuzz_layouts, "shrink", lambda case: case)
    case = fuzz_layouts.draw_case(1, 0)
    monkeypatch.setattr(fuzz_layouts, "draw_case", lambda *_: case)
    monkeypatch.setattr(fuzz_layouts, "command", wrong)
    assert fuzz_layouts.main(["1", "1"]) == 1
    said = capsys.readouterr().out
    assert "off by " in said
    assert "torchrun --standalone --nproc_per_node 1 train_hybrid.py --config configs/config_pipeline" in said


def test_what_fails_is_made_simpler(monkeypatch):
    """Down to the one thing that matters."""
    monkeypatch.setattr(
        fuzz_layouts, "deviation", lambda case: (0, 0, "wrong" if case["first"]["mode"] == "1d" else None)
    )
    number = next(n for n in range(100) if fuzz_layouts.draw_case(1, n)["first"]["mode"] == "1d")
    simple = fuzz_layouts.shrink(fuzz_layouts.draw_case(1, number))
    assert simple["second"]["mode"] in (None, "1d")
    assert simple["first"]["mode"] == "1d"
    assert {key: simple["first"][key] for key in fuzz_layouts.SIMPLE_LAYOUT} == fuzz_layouts.SIMPLE_LAYOUT
    assert simple["optimizer"] == "sgd"
    assert simple["DEPTH"] == 2


def test_a_case_is_what_its_number_says():
    assert fuzz_layouts.draw_case(3, 7) == fuzz_layouts.draw_case(3, 7) != fuzz_layouts.draw_case(3, 8)
    ranks, flags = fuzz_layouts.command(fuzz_layouts.draw_case(3, 7), None)
    assert ranks == 1
    assert recipes.config(flags).gradient_accumulation == 1


def test_new_pairs_of_commands_leave_valid_runs(capsys):
    seed = random.randrange(10**9)
    code = fuzz_runs.main([str(seed), "20"])
    said = capsys.readouterr().out
    assert code == 0, f"python scripts/fuzz_runs.py {seed} 20\n{said}"
    assert f"Seed {seed}: 20 pairs, 0 failed" in said


def test_pairs_that_were_run_are_not_run_again(tmp_path, monkeypatch, capsys):
    """The same command goes on where it was interrupted."""
    monkeypatch.setenv("REHEARSE", "1")
    checked = []

    def check(seed, number, data):
        if number == 2 and 2 not in checked:
            checked.append(number)
            raise KeyboardInterrupt
        checked.append(number)
        return [], ["a fault"] if number == 1 else []

    monkeypatch.setattr(fuzz_runs, "check", check)
    with pytest.raises(KeyboardInterrupt):
        fuzz_runs.main(["5", "4", "--output", str(tmp_path)])
    assert fuzz_runs.main(["5", "4", "--output", str(tmp_path)]) == 1
    assert checked == [0, 1, 2, 2, 3]
    assert "Seed 5: 4 pairs, 1 failed: [1]." in capsys.readouterr().out
    assert (tmp_path / "log.txt").read_text().splitlines() == ["0:", "1:", "  a fault", "2:", "3:"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of five steps with two checkpoints."""
    output = tmp_path_factory.mktemp("five") / "run"
    values = {"DEPTH": 1, "BATCH_SIZE": 64, "checkpoint.every_steps": 2, "checkpoint.keep": 2}
    recipes.train(output, 1, steps=5, **values)
    return output


def drop_a_step(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))


def repeat_a_record(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines, lines[-1]]))


def drop_the_first_steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[2:]))


def change_the_config(run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "LEARNING_RATE": 7.0}))


def damage_a_checkpoint(run):
    storage.list_steps(run / storage.FOLDER)[0].joinpath(storage.MODEL).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_a_step, "steps on record: "),
        (repeat_a_record, "a record twice"),
        (drop_the_first_steps, "begins with step 3"),
        (change_the_config, "'LEARNING_RATE'} is not the run's"),
        (damage_a_checkpoint, "model.safetensors"),
        (lambda run: (run / "config.json").unlink(), "no config.json"),
    ],
)
def test_what_is_no_valid_run_is_found(run, tmp_path, damage, words):
    assert fuzz_runs.faults_of_directory(run) == []
    copy = shutil.copytree(run, tmp_path / "run")
    damage(copy)
    assert any(words in fault for fault in fuzz_runs.faults_of_directory(copy))
