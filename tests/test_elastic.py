"""ELASTIC: any number of processes on one loss curve. Agents of torchrun come and go in stress/test_soak.py."""

import ast
import os
import signal
import time

import pytest
from colossal_vit.checkpoint import lock
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.errors import UserError
from colossal_vit.launch import elastic
from colossalai.context import Config

import fork_ranks
import launchers
import training
from layouts import ANY_STEP, errors

ELASTIC = {**training.RANDOM, "DEPTH": 2, "ELASTIC": True, "GLOBAL_BATCH": 32, "BATCH_SIZE": 12}


def parallel(pipeline):
    return dict(pipeline=pipeline, tensor=dict(mode=None, size=1))


def fit(world_size, model, global_batch, check=None, others=(), **values):
    """What is made of batches of 8 images on so many processes, of which a replica has `model`, or one of `others`."""
    values |= dict(GLOBAL_BATCH=global_batch, BATCH_SIZE=8, gradient_accumulation=4, parallel=parallel(model))
    values["ELASTIC_LAYOUTS"] = [parallel(other) for other in others]

    def load(overrides):
        given = (text.split("=") for text in overrides)
        return Config({**values, **{key: ast.literal_eval(value) for key, value in given}})

    return elastic.fit(Config(values), world_size, load, check)


@pytest.mark.parametrize(
    ("world_size", "model", "global_batch", "expected"),
    [
        (1, 1, 32, (1, 8, 4)),
        (2, 1, 32, (2, 8, 2)),
        (3, 1, 32, (2, 8, 2)),  # three replicas cannot share 32 images
        (3, 1, 36, (3, 6, 2)),
        (5, 2, 32, (2, 8, 2)),
        (9, 1, 6, (6, 1, 1)),
        (7, 1, 7, (7, 1, 1)),
        (4, 4, 10, (1, 5, 2)),
    ],
)
def test_replicas_share_the_global_batch_evenly(world_size, model, global_batch, expected):
    fitted, layout = fit(world_size, model, global_batch)
    assert (layout.data, fitted.BATCH_SIZE, fitted.gradient_accumulation) == expected
    assert layout.global_batch(fitted) == global_batch


@pytest.mark.parametrize(("global_batch", "expected"), [(30, (1, 6, 5)), (60, (2, 6, 5)), (32, (2, 8, 2))])
def test_images_are_mixed_in_pairs(global_batch, expected):
    fitted, layout = fit(2, 1, global_batch, mix=dict(mixup=0.8))
    assert (layout.data, fitted.BATCH_SIZE, fitted.gradient_accumulation) == expected
    with pytest.raises(UserError, match="cannot be kept on 2 processes: mix needs an even BATCH_SIZE"):
        fit(2, 1, 15, mix=dict(mixup=0.8))


def test_a_way_to_share_that_the_layout_refuses_is_not_taken():
    def three_at_most(config, layout):
        if config.BATCH_SIZE > 3:
            raise UserError("only three")

    fitted, layout = fit(3, 1, 32, three_at_most)
    assert (layout.data, fitted.BATCH_SIZE, fitted.gradient_accumulation) == (2, 2, 8)


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [(8, (2, 4)), (7, (3, 2)), (6, (3, 2)), (5, (5, 1)), (4, (1, 4)), (3, (3, 1)), (1, (1, 1))],
)
def test_the_first_layout_with_work_for_most_processes_is_taken(world_size, expected):
    _, layout = fit(world_size, 4, 60, others=(2, 1))
    assert (layout.data, layout.pipeline) == expected


def test_a_run_stays_on_its_curve_whatever_the_number_of_processes(tmp_path, few_test_images):
    """Five and three processes, of which one has no work; eight; then one. The layouts are other ones, too."""
    expected = training.train(tmp_path / "undisturbed", steps=12, **{**ELASTIC, "ELASTIC": False, "BATCH_SIZE": 32})
    output = tmp_path / "run"
    values = {**ELASTIC, "parallel.pipeline": 2, "zero.stage": 2, "ema.decay": 0.9}
    said = training.train(output, 5, steps=4, **values).said
    assert "ELASTIC: 5 processes, 1 of them without work; global batch 32 with BATCH_SIZE 12 → 8" in said
    split = dict(mode="1d", size=2)
    values |= {"parallel.tensor": split, "ELASTIC_LAYOUTS": [dict(tensor=split), {}]}
    training.train(output, 3, steps=6, **values)
    training.train(output, 8, steps=9, **values)
    run = training.train(output, 1, steps=12, **values)
    assert max(errors(run.steps, expected.steps)) < ANY_STEP
    members = training.lines_of(output / "members.jsonl")
    assert [member | {"hosts": sum(member["hosts"].values())} for member in members] == [
        {"step": 0, "layout": "DP 2 × PP 2", "hosts": 4},
        {"step": 4, "layout": "1D 2", "hosts": 2},
        {"step": 6, "layout": "DP 2 × PP 2 × 1D 2", "hosts": 8},
        {"step": 9, "layout": "one process", "hosts": 1},
    ]


@pytest.mark.parametrize(
    ("world_size", "values", "words"),
    [
        (1, {"parallel.pipeline": 2}, "world size 1 does not fit parallel.pipeline = 2"),
        (1, {"GLOBAL_BATCH": None}, "set GLOBAL_BATCH"),
        (2, {"parallel.pipeline": 2, "GLOBAL_BATCH": 1}, "GLOBAL_BATCH = 1 cannot be kept on 2 processes: "),
        (1, {"ELASTIC_LAYOUTS": [dict(pipe=1)]}, "ELASTIC_LAYOUTS: --set: unknown key parallel.pipe"),
        (1, {"ELASTIC": False, "ELASTIC_LAYOUTS": [{}]}, "does nothing with ELASTIC = False"),
        (1, {"torch_ddp.static_graph": True}, "torch_ddp.static_graph = True does not work with ELASTIC"),
    ],
)
def test_what_is_impossible_is_one_line(world_size, values, words, tmp_path):
    values = {key: value for key, value in {**ELASTIC, **values}.items() if value is not None}
    assert words in training.refused(tmp_path / "run", world_size, **values)


def test_who_was_there_is_told_with_the_steps_made_and_never_ends_a_run(tmp_path, few_test_images):
    training.train(tmp_path, steps=2, **ELASTIC)
    values = {**ELASTIC, "GLOBAL_BATCH": 16}
    training.train(tmp_path, 1, "--accept-changes", steps=3, **values)
    file = tmp_path / "members.jsonl"
    assert [line["step"] for line in training.lines_of(file)] == [0, 2]
    file.unlink()
    file.mkdir()
    assert f"{file}: cannot be written: Is a directory" in training.train(tmp_path, steps=4, **values).said


def test_a_machine_that_joins_may_not_start_the_run_from_scratch(tmp_path):
    line = training.refused(tmp_path / "run", 2, "--resume", "never", **ELASTIC)
    assert "--resume never would start from scratch whenever a machine joins: give another --output instead" in line


def test_a_process_without_work_finds_a_mistake_as_the_ranks_do(tmp_path):
    line = training.refused(tmp_path / "run", 3, "--backend", "nccl", "--timeout", "20", **ELASTIC)
    assert "--backend nccl needs CUDA" in line


@pytest.mark.parametrize("last", [0, 1], ids="rank {} is the last to fail".format)
@pytest.mark.parametrize(("values", "code"), [({"NUM_CLASSES": 5}, 2), ({"LEARNING_RATE": 1e30}, 1)])
def test_a_process_without_work_ends_as_the_ranks_that_fail(values, code, last, tmp_path, few_test_images):
    def enter(rank):
        remove = lock.remove_unused
        if rank == last:
            lock.remove_unused = lambda: (time.sleep(1), remove())

    argv = [*training.flags(**{**ELASTIC, **values}), "--output", str(tmp_path / "run")]
    run = fork_ranks.start(training.HYBRID, argv, fork_ranks.by_torchrun(3), enter=enter).wait()
    assert run.codes == [code] * 3, str(run)
    assert len("".join(run.stderr).splitlines()) == 1, str(run)


def make_rank_0_the_last(rank):
    """To notice that the last checkpoint is written: a rank that has ended must not end it."""
    finish = Checkpointer.finish

    def finish_late(self):
        failure = finish(self)
        time.sleep(1)
        return failure

    if rank == 0:
        Checkpointer.finish = finish_late


@pytest.mark.parametrize("victims", [[0, 1, 2], [0]])
def test_a_process_without_work_stops_when_the_ranks_have(victims, tmp_path, few_test_images):
    """As mpirun starts them, which would kill the ranks before they have saved."""
    values = {**ELASTIC, "BATCH_SIZE": 16, "NUM_EPOCHS": 1000}
    argv = [*training.flags(**values), "--output", str(tmp_path / "run"), "--host", "localhost"]
    argv += ["--port", str(fork_ranks.free_port())]
    places = [dict(RANK=rank, LOCAL_RANK=rank, SIZE=3, LOCAL_SIZE=3) for rank in range(3)]
    environments = [{f"OMPI_COMM_WORLD_{key}": str(value) for key, value in place.items()} for place in places]
    ranks = fork_ranks.start(training.HYBRID, argv, environments, enter=make_rank_0_the_last)
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 3, lambda: ranks.output(0, "err"))
    for victim in victims:
        os.kill(ranks.pids[victim], signal.SIGUSR1)
    result = ranks.wait()
    assert result.codes == [75] * 3, str(result)


def test_torchrun_need_not_wait_for_a_process_without_work(tmp_path, few_test_images):
    """It ends all processes to start them again."""
    values = {**ELASTIC, "BATCH_SIZE": 16, "NUM_EPOCHS": 1000}
    argv = [*training.flags(**values), "--output", str(tmp_path / "run")]
    ranks = fork_ranks.start(training.HYBRID, argv, fork_ranks.by_torchrun(3))
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 3, lambda: ranks.output(0, "err"))
    os.kill(ranks.pids[2], signal.SIGTERM)
    launchers.wait_until(lambda: launchers.has_ended(ranks.pids[2]), "it keeps waiting")
    os.kill(ranks.pids[0], signal.SIGTERM)
    result = ranks.wait()
    assert result.codes == [75, 75, -signal.SIGTERM], str(result)
