"""`--plan here`: parts, messages and speeds are measured and saved; calibrations of other machines are refused."""

import functools
import json
import math
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from colossal_vit.config.settings import HYBRID
from colossal_vit.errors import UserError
from colossal_vit.plan import calibration
from colossal_vit.plan.calibration import Here
from colossal_vit.plan.enumeration import enumerate_layouts
from colossal_vit.plan.machines import RESERVED_GB
from colossal_vit.plan.memory import rank_memory
from colossal_vit.plan.meter import SENT_SHARE
from colossal_vit.plan.request import request_of
from colossal_vit.plan.trace import KINDS, PARTS, Message

import fork_ranks
import train_hybrid
import training

ONE = (None, 1, None)
REMOVED = object()
SIZE = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=48, DEPTH=2, NUM_HEADS=4, NUM_CLASSES=10, BATCH_SIZE=8)
SIZE |= {"NUM_MICRO_BATCHES": 2}


@pytest.fixture(scope="module")
def made():
    return calibration.origin(4, {"HIDDEN_SIZE": 48})


@pytest.fixture
def here(made):
    points = [(2, 0.1), (4, 0.2), (8, 0.6)]
    messages = {f"{kind} {size}": (0.001 * size, 1e-9 * size) for kind in SENT_SHARE for size in (2, 4)}
    return Here(
        dict(made),
        memory_gb=4.0,
        reserved_gb=0.5,
        busy=0.02,
        spread=0.03,
        parts={f"{ONE} {part} {kind}": points for part in PARTS for kind in KINDS},
        updates={str(ONE): (1e-9, 0.01)},
        messages={**messages, "send 2": (0.003, 0.0)},
        speeds={1: 1.0, 2: 0.8, 4: 0.4},
    )


def test_times_between_measurements_are_on_lines(here):
    def seconds(images):
        return here.compute((ONE, "block", "forward", images), None)

    assert [seconds(images) for images in (2, 3, 8)] == pytest.approx([0.1, 0.15, 0.6])
    assert here.update(ONE, 0, 1e6) == pytest.approx(0.011)
    assert here.send(Message("all_reduce", 2, 1e6), 8) == pytest.approx(0.004)
    assert here.send(Message("all_reduce", 4, 1e6), 8) == pytest.approx(0.008)
    assert here.send(Message("all_reduce", 1, 1e6), 8) == 0.0
    # 2 processes do 1.6 times as much as one, 4 do it, too: 3 at 1.6 / 3 each.
    assert [here.speed(count) for count in (1, 2, 3, 4)] == pytest.approx([1.0, 0.8, 1.6 / 3, 0.4])


def test_a_saved_calibration_is_the_same(here, tmp_path):
    calibration.save(here, tmp_path / "run/calibration.json")
    assert calibration.load(tmp_path / "run/calibration.json", here.made, [ONE]) == here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": "another"}, "was made with host = 'another', here it is "),
        ({"torch": "1.12"}, "was made with torch = '1.12', here it is "),
        ({"ranks": 8}, "was made with ranks = 8, here it is 4: use --plan here"),
        ({"model": {"HIDDEN_SIZE": 64}}, "was made with model = {'HIDDEN_SIZE': 64}, here it is {'HIDDEN_SIZE': 48}"),
        ({"date": datetime.now(UTC) - timedelta(days=8)}, "over 7 days ago: use --plan here"),
        ({"date": datetime.now(UTC) + timedelta(days=36500)}, " is in the future: use --plan here"),
    ],
)
def test_foreign_old_and_future_calibrations_are_refused(here, made, tmp_path, change, words):
    here.made |= change
    path = tmp_path / "calibration.json"
    calibration.save(here, path)
    with pytest.raises(UserError, match=re.escape(words)):
        calibration.load(path, made, [ONE])


BLOCK = f"{ONE} block forward"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("made date", "yesterday", "made.date = 'yesterday': "),
        ("made date", "2026-11-24T08:00:00", "made.date = '2026-11-24T08:00:00': should have timezone info"),
        ("memory_gb", -4.0, "memory_gb = -4.0: "),
        ("memory_gb", 0, "memory_gb = 0: "),
        ("memory_gb", math.nan, "memory_gb = nan: "),
        ("memory_gb", math.inf, "memory_gb = inf: "),
        ("memory_gb", REMOVED, "lacks memory_gb"),
        ("spread", -0.1, "spread = -0.1: "),
        ("parts", REMOVED, "lacks parts"),
        (f"parts {BLOCK}", REMOVED, f"parts lacks {BLOCK!r}"),
        (f"parts {BLOCK}", [], f"parts.{BLOCK} = []: "),
        (f"parts {BLOCK}", [[2, -0.1]], f"parts.{BLOCK}.0.1 = -0.1: "),
        (f"parts {BLOCK}", [[2, 0.0]], f"parts.{BLOCK}.0.1 = 0.0: "),
        (f"parts {BLOCK}", [[2, 0.1, 3]], f"parts.{BLOCK}.0 = [2, 0.1, 3]: "),
        (f"parts {BLOCK}", [[4, 0.1], [2, 0.2]], "numbers of images must grow"),
        ("updates", REMOVED, "lacks updates"),
        (f"updates {ONE}", [-1e-9, 0.01], f"updates.{ONE}.0 = -1e-09: "),
        ("messages", REMOVED, "lacks messages"),
        ("messages all_gather 2", REMOVED, "messages lacks 'all_gather 2'"),
        ("messages all_reduce", [0.1, 0.1], "messages.all_reduce.[key] = 'all_reduce': "),
        ("messages send 2", 0.003, "messages.send 2 = 0.003: "),
        ("messages send 2", [0.003, math.nan], "messages.send 2.1 = nan: "),
        ("speeds", REMOVED, "lacks speeds"),
        ("speeds 4", REMOVED, "speeds lacks 4"),
        ("speeds 2", 0.0, "speeds.2 = 0.0: "),
        ("speeds two", 0.8, "two"),
    ],
)
def test_an_edited_calibration_is_one_line_that_names_the_field(here, tmp_path, place, value, words):
    path = tmp_path / "calibration.json"
    calibration.save(here, path)
    values = json.loads(path.read_text())
    block, _, key = place.partition(" ")
    holder, name = (values[block], key) if key else (values, block)
    if value is REMOVED:
        del holder[name]
    else:
        holder[name] = value
    path.write_text(json.dumps(values))
    with pytest.raises(UserError) as refused:
        calibration.load(path, here.made, [ONE])
    said = str(refused.value)
    assert said.startswith(f"--plan {path}: ")
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[1]", "should be a dict"),
        ("[" * 100_000, "deeply"),
        ("\udcff", "is no JSON"),
    ],
)
def test_what_is_no_calibration_is_refused(made, tmp_path, text, words):
    path = tmp_path / "calibration.json"
    if text:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=re.escape(words)):
        calibration.load(path, made, [ONE])


def test_a_busy_machine_is_told_from_ones_own_work(monkeypatch):
    """In 10 s, two cores of three were at work for 15 s, 10 s of them for this process."""
    times = iter([0.0, 10.0])

    def cores(percpu):
        work = 7.5 * (clock > 0)
        return [SimpleNamespace(user=work, nice=0, system=0, irq=0, softirq=0, steal=0)] * 3

    def monotonic():
        nonlocal clock
        clock = next(times)
        return clock

    clock = 0.0
    monkeypatch.setattr(calibration.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(calibration.psutil, "cpu_times", lambda percpu: (monotonic(), cores(percpu))[1])
    monkeypatch.setattr(calibration.time, "monotonic", lambda: clock)
    monkeypatch.setattr(calibration.os, "times", lambda: (clock / 2, clock / 4, clock / 8, clock / 8, clock))
    assert calibration._busy(calibration._cpu_seconds()) == pytest.approx(0.25)


def test_messages_are_timed_in_groups_of_every_size(monkeypatch):
    """Also of three ranks, into whose parts the messages' sizes do not divide."""
    monkeypatch.setattr(calibration, "MESSAGE_CALLS", 1)
    ranks = calibration._messages(3, [])
    assert [found.keys() for found in ranks] == [{f"{kind} 3" for kind in SENT_SHARE}] * 3
    assert all(latency >= 0 and per_byte >= 0 for found in ranks for latency, per_byte in found.values())


def test_gpus_are_asked_for_in_forks_and_each_process_has_its_own(tmp_path):
    """With two GPUs that are fakes: models run on the CPU, and rates say on which GPU they would have been."""
    names = ["NVIDIA H100 80GB HBM3"] * 2
    flags = [*training.flags(**SIZE), "--plan", "here", "--world_size", "2", "--output", str(tmp_path)]

    def measure():
        parent, chosen = os.getpid(), []

        def only_in_forks(answer):
            def ask(*args):
                assert os.getpid() != parent, "no fork can use CUDA once this process has"
                return answer(*args)

            return ask

        def choose(rendezvous):
            chosen.append(rendezvous.local_rank)
            return torch.device("cpu")

        torch.cuda.is_available = only_in_forks(lambda: False)
        torch.cuda.mem_get_info = only_in_forks(lambda index: (80e9 - index * 1e9, 85e9))
        calibration.hardware = lambda: {"gpus": names}
        sys.modules["colossal_vit.launch.groups"].choose_device = choose
        calibration.work = lambda engine, batches, barrier: 1.0 + chosen.pop()
        calibration._messages = lambda *_: []
        calibration.ROUNDS, calibration.QUIET_WAIT_S = 1, 0.0
        request = request_of(train_hybrid.build, training.arguments(train_hybrid.main, flags))
        choices = [choice for choice in enumerate_layouts(request.config, 2, 16, HYBRID, None) if choice.tensor == ONE]
        trace = functools.cache(request.trace)
        here = calibration.measured(request, choices, trace)
        request = request._replace(world_size=3)
        with pytest.raises(UserError) as refused:
            calibration.measured(request, choices, trace)
        return here, str(refused.value)

    here, refusal = fork_ranks.call(measure, launched=False)[0]
    assert here.speeds == {1: 1.0, 2: 1.5}
    assert (here.memory_gb, here.reserved_gb, here.overlap) == (79.0, RESERVED_GB, True)
    assert here.made["gpus"] == names
    assert "--world_size 3, but this machine has 2 GPU(s)" in refusal


def test_layouts_that_do_not_fit_are_not_timed(tmp_path):
    """Which would end for want of memory."""
    flags = [*training.flags(**SIZE), "--plan", "here", "--world_size", "1", "--output", str(tmp_path)]

    def timed():
        request = request_of(train_hybrid.build, training.arguments(train_hybrid.main, flags))
        choices, trace = request.choices(), functools.cache(request.trace)
        sizes = {choice: rank_memory(request.config, choice, trace(choice.tensor)) for choice in choices}
        limit = sorted(sizes.values())[len(sizes) // 2]
        calibration._memory = lambda *_: (1.001 * limit / 1e9 + 1, 1)
        calibration.calibrate = lambda request, images, made: images
        calibration.save = lambda *_: None
        images = calibration.measured(request, choices, trace)[ONE]
        calibration._memory = lambda *_: (1, 1)
        with pytest.raises(UserError) as refused:
            calibration.measured(request, choices, trace)
        return images, {choice.images for choice, size in sizes.items() if size <= limit}, str(refused.value)

    images, expected, refusal = fork_ranks.call(timed, launched=False)[0]
    assert images == expected
    assert max(images) < SIZE["BATCH_SIZE"]
    assert refusal == "--plan here: no layout fits the memory of a rank, 0.0 GB"


def test_plans_this_machine_and_again_from_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    monkeypatch.setattr(calibration, "BESIDE_S", 0.1)
    monkeypatch.setattr(calibration, "LOOK_S", 0.0)
    monkeypatch.setattr(calibration, "QUIET_WAIT_S", 0.1)
    monkeypatch.setattr(calibration, "_busy", lambda _: 9.0)
    flags = [*training.flags(**SIZE), "--world_size", "2", "--output", str(tmp_path)]
    said, tables = [], []
    for machine in ("here", str(tmp_path / "calibration.json")):
        result = fork_ranks.run(training.HYBRID, [*flags, "--plan", machine], 1)
        assert result.codes == [0], str(result)
        said.append(result.stdout[0])
        tables.append(said[-1].partition("predicted, not measured\n")[2])
    assert tables[0] == tables[1]
    assert "other processes use 900% of this machine's cores: waiting up to" in said[0]
    assert "waiting" not in said[1]
    for line in ("warning: on 20", "other processes used 900% of its cores", "are equal within the noise of 900.0%"):
        assert line in tables[0]
    rates = re.findall(r"^data .*  ([\d,]+)  +[\d.]+  +\d+%  +\d+%  +\d+%$", tables[0], re.MULTILINE)
    assert len(rates) == 10, tables[0]
    assert re.search("^data 2 × pipeline 1 × tensor 1  ", tables[0].splitlines()[4]), "the simplest of equals"
    assert (tmp_path / "plan.png").stat().st_size > 0
    made = json.loads((tmp_path / "calibration.json").read_text())
    assert made["made"]["ranks"] == 2
    assert {key.split(") ")[1] for key in made["parts"]} >= {"embed forward", "block backward", "head backward"}
    assert set(made["speeds"]) == {"1", "2"}
