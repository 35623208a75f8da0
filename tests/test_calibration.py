"""`--plan here`: parts, messages and speeds are measured and saved; calibrations of other machines are refused."""

import json
import re
from datetime import datetime, timedelta

import pytest
from colossal_vit.errors import UserError
from colossal_vit.plan import calibration
from colossal_vit.plan.calibration import Here
from colossal_vit.plan.trace import Message

import fork_ranks
import recipes

ONE = (None, 1, None)
SIZE = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=48, DEPTH=2, NUM_HEADS=4, NUM_CLASSES=10, BATCH_SIZE=8)
SIZE |= {"NUM_MICRO_BATCHES": 2}


@pytest.fixture
def here():
    made = calibration.origin(4, {"HIDDEN_SIZE": 48})
    return Here(
        made,
        memory_gb=4.0,
        parts={f"{ONE} block forward": [(2, 0.1), (4, 0.2), (8, 0.6)]},
        updates={str(ONE): (1e-9, 0.01)},
        messages={"all_reduce 2": (0.001, 1e-9), "all_reduce 4": (0.002, 2e-9), "send 2": (0.003, 0.0)},
        speeds={1: 1.0, 2: 0.8, 4: 0.4},
    )


def test_times_between_measurements_are_on_lines(here):
    def seconds(images):
        return here.compute((ONE, "block", "forward", images), None)

    assert [seconds(images) for images in (2, 3, 8)] == pytest.approx([0.1, 0.15, 0.6])
    assert here.update((ONE, 5), 0, 1e6) == pytest.approx(0.011)
    assert here.send(Message("all_reduce", 2, 1e6), 8) == pytest.approx(0.002)
    assert here.send(Message("all_reduce", 4, 1e6), 8) == pytest.approx(0.004)
    assert here.send(Message("all_reduce", 1, 1e6), 8) == 0.0
    # 2 processes do 1.6 times as much as one, 4 do it, too: 3 at 1.6 / 3 each.
    assert [here.speed(count) for count in (1, 2, 3, 4)] == pytest.approx([1.0, 0.8, 1.6 / 3, 0.4])


def test_a_saved_calibration_is_the_same(here, tmp_path):
    calibration.save(here, tmp_path / "run/calibration.json")
    wanted = calibration.origin(4, {"HIDDEN_SIZE": 48})
    loaded = calibration.load(tmp_path / "run/calibration.json", wanted)
    assert loaded.speeds == here.speeds
    part = (ONE, "block", "forward", 5)
    assert loaded.compute(part, None) == here.compute(part, None)
    assert loaded.send(Message("send", 2, 5), 8) == here.send(Message("send", 2, 5), 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": "another"}, "was made with host = 'another', here it is "),
        ({"torch": "1.12"}, "was made with torch = '1.12', here it is "),
        ({"ranks": 8}, "was made with ranks = 8, here it is 4: use --plan here"),
        ({"model": {"HIDDEN_SIZE": 64}}, "was made with model = {'HIDDEN_SIZE': 64}, here it is {'HIDDEN_SIZE': 48}"),
        ({"date": (datetime.now() - timedelta(days=8)).isoformat()}, "over 7 days ago: use --plan here"),
        ({"date": "yesterday"}, "is not a calibration"),
    ],
)
def test_foreign_and_old_calibrations_are_refused(here, tmp_path, change, words):
    here.made |= change
    path = tmp_path / "calibration.json"
    calibration.save(here, path)
    with pytest.raises(UserError, match=re.escape(words)):
        calibration.load(path, calibration.origin(4, {"HIDDEN_SIZE": 48}))


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("{", "is not a"), ("[1]", "is not a")])
def test_what_is_no_calibration_is_refused(tmp_path, text, words):
    path = tmp_path / "calibration.json"
    if text:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        calibration.load(path, calibration.origin(4, {}))


def test_plans_this_machine_and_again_from_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    monkeypatch.setattr(calibration, "BESIDE_S", 0.1)
    flags = [*recipes.flags(**SIZE), "--world_size", "2", "--output", str(tmp_path)]
    tables = []
    for machine in ("here", str(tmp_path / "calibration.json")):
        result = fork_ranks.run(recipes.HYBRID, [*flags, "--plan", machine], 1)
        assert result.codes == [0], str(result)
        tables.append(result.stdout[0].partition("predicted, not measured\n")[2])
    assert tables[0] == tables[1]
    rates = re.findall(r"^data .*  ([\d,]+)  +[\d.]+  +\d+%  +\d+%  +\d+%$", tables[0], re.MULTILINE)
    assert len(rates) == 10, tables[0]
    assert (tmp_path / "plan.png").stat().st_size > 0
    made = json.loads((tmp_path / "calibration.json").read_text())
    assert made["made"]["ranks"] == 2
    assert {key.split(") ")[1] for key in made["parts"]} >= {"embed forward", "block backward", "head backward"}
    assert set(made["speeds"]) == {"1", "2"}
