"""Parity: layouts agree with one process in float64, and the first tensor that a defect changes is named."""

import os
import re
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from colossal_vit.checkpoint import full_tensors, tensors
from colossal_vit.data.samplers import EvalSampler
from colossal_vit.engine import amp_optimizer
from colossal_vit.errors import UserError
from colossal_vit.parallel.sharding import global_norm
from colossal_vit.rng.dropout import DropPath
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from safetensors.torch import save_file

import fork_ranks
import train_hybrid
import training
import vit
from conftest import random_start
from tools.parity import command
from tools.parity.compare import compare
from tools.parity.record_tensors import Record
from tools.parity.records import by_key

COMMAND = "tools/parity/__main__.py"  # as `python -m tools.parity` in the root

VALUES = {"DEPTH": 2, "IMG_SIZE": 16, "DROP_RATE": 0.1, "DROP_PATH_RATE": 0.1, "ema.decay": 0.9}
FULL_VIT = vit.full_vit


@pytest.fixture(scope="module", autouse=True)
def small_and_random(small_sample):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(small_sample))
        random_start(patch)
        yield


def arguments(*words, amp=None, **values):
    """What a command line with these layouts and flags says, but for its `build`."""
    _, args = command.parse([training.HYBRID, *training.flags(amp, **{**VALUES, **values}), *words])
    return args


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Compares layouts with one process, which has trained once."""
    args = arguments()
    comparison = command.Comparison(
        train_hybrid.build, args, command.read_config(args)[0], tmp_path_factory.mktemp("one")
    )
    return lambda name: comparison.outcome(command.parse_layout(name))


@pytest.mark.parametrize("layout", ["PP 2 × 1D 2", "DP 2 × zero 1 × accumulation 2", "DP 2 × 1D 2 × zero 3"])
def test_a_layout_agrees(layout, outcome):
    """In layer outputs, gradients, moments, weights, averages and metrics; and after a resume in either direction."""
    agrees, text = outcome(layout)
    assert agrees, text
    assert re.fullmatch(r"all 1\d\d\d tensors of 3 steps agree to \de-1[2-6]", text)


def test_in_the_config_s_own_precision_rounding_is_no_difference(capsys, monkeypatch):
    """Weights start as usual here: those of the head are zeros, so that gradients are small, and Adam enlarges them."""
    monkeypatch.setattr(vit, "full_vit", FULL_VIT)
    args = arguments("1D 2", "--own-precision", "2D 9", amp="NAIVE", **{"fp16.dtype": "fp16"})
    command.run(train_hybrid.build, args)
    agreeing, refused = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"1D 2: all 1\d\d\d tensors of 3 steps agree to \de-0\d, at most \d\.\d times as far .*", agreeing
    )
    assert refused.startswith("2D 9: not tried: MLP_RATIO = 4")


def test_a_command_that_trains_nothing_is_refused():
    with pytest.raises(UserError, match="leave out --dry-run and --eval-only"):
        arguments("--dry-run")


@pytest.mark.parametrize(("path", "words"), [("none.py", "no such train script"), ("own.py", "has no SCRIPT = ")])
def test_what_is_no_train_script_is_refused(path, words, tmp_path):
    (tmp_path / "own.py").write_text("")
    with pytest.raises(UserError, match=f"{path}: {words}"):
        command.parse([str(tmp_path / path)])


@pytest.mark.parametrize("name", ["PP", "PP 2 × PP 2", "4D 2", "1D 2 × 2D 4", "DP 0"])
def test_what_is_no_layout_is_refused(name):
    with pytest.raises(UserError, match=re.escape(f"layout {name!r}: ")):
        command.run(train_hybrid.build, arguments("PP 2", name))


# ---- Defects ----


def in_layouts(function, wrong):
    """`wrong(*arguments)` with several ranks, `function(*arguments)` with one."""
    return lambda *arguments: (wrong if dist.get_world_size() > 1 else function)(*arguments)


def forget_a_token(patch):
    """On rank 1 only."""
    forward = DropPath.forward

    def with_defect(self, x, samples):
        y = forward(self, x, samples)
        if dist.get_rank() == 1 and not self.is_off:
            y = y * (torch.arange(y.shape[1]) != 0)[:, None]
        return y

    patch.setattr(DropPath, "forward", with_defect)


def load_no_moments(patch):
    patch.setattr(tensors, "scatter_moments", in_layouts(tensors.scatter_moments, lambda *_: None))


def save_other_moments(patch):
    pieces = full_tensors._pieces

    def with_defect(engine, slot):
        found = pieces(engine, slot)
        if dist.get_rank() == 1 and slot.shard.name == "blocks.1.mlp.fc1.weight":
            found["exp_avg_sq"] = torch.zeros_like(found["exp_avg_sq"])
        return found

    patch.setattr(full_tensors, "_pieces", with_defect)


def take_the_local_norm(patch):
    local = lambda grads, parameters, group: global_norm(grads, parameters, ParallelMode.PARALLEL_2D_ROW)  # noqa: E731
    patch.setattr(amp_optimizer, "global_norm", in_layouts(global_norm, local))


def evaluate_images_twice(patch):
    batches = EvalSampler.__iter__
    patch.setattr(EvalSampler, "__iter__", in_layouts(batches, lambda self: iter([next(batches(self))] * len(self))))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (forget_a_token, r"step 1, output blocks\.1\.drop_path1: rank 1 has "),
        (save_other_moments, r"step 1, exp_avg_sq of blocks\.1\.mlp\.fc1\.weight: rank 0 has 0 at "),
        (load_no_moments, "step 3, exp_avg of .*: resumed from the checkpoint of one process, rank 0 has "),
        (take_the_local_norm, "step 1, grad_norm: rank 0 has "),
        (evaluate_images_twice, "step 3, eval_loss: rank 0 has "),
    ],
)
def test_the_first_tensor_that_a_defect_changes_is_named(plant, found, outcome, monkeypatch):
    plant(monkeypatch)
    agrees, text = outcome("1D 2")
    assert agrees is False
    assert re.match(f"differs first in {found}", text), text


def test_layouts_are_compared_on_random_images_too(capsys):
    command.run(train_hybrid.build, arguments("DP 2", SYNTHETIC=True))
    assert capsys.readouterr().out.startswith("DP 2: all ")


def test_a_rank_that_raises_is_named_with_the_place(outcome, monkeypatch):
    """The innermost outside of installed packages. The other rank waits meanwhile."""

    def reshape(self, x, samples):
        return x.reshape(3, -1) if dist.get_rank() == 1 else self.fc2(self.fc1(x))

    monkeypatch.setattr(vit.MLP, "forward", reshape)
    line = reshape.__code__.co_firstlineno + 1
    agrees, text = outcome("1D 2")
    assert agrees is False
    assert re.fullmatch(rf"fails on rank 1: RuntimeError: .*\(\S*tests/test_parity\.py:{line}\)", text), text


def test_a_rank_that_dies_is_named(outcome, monkeypatch):
    def die(self, x, samples):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.fc2(self.fc1(x))

    monkeypatch.setattr(vit.MLP, "forward", die)
    assert outcome("1D 2") == (False, "fails on rank 1: died of signal 9")


def test_what_one_side_has_or_another_shape_is_named():
    """A layer, and a part of a tensor."""

    def recorded(**tensors):
        return by_key([[Record((1, "output", name), np.arange(4), 0, value) for name, value in tensors.items()]])

    one = recorded(a=np.ones((4, 6)), only_one=np.ones((4, 6)), b=np.ones((4, 6)), c=np.ones((4, 6)))
    several = recorded(a=np.ones((4, 6)), only_several=np.ones((4, 6)), b=np.ones((4, 7)), c=np.ones((4, 2, 6)))
    agreeing, *different = found = compare(one, several)
    assert agreeing.error == 0
    assert not any(difference.error <= np.inf for difference in different)  # whatever the limit
    assert [(difference.key[2], difference.text) for difference in found] == [
        ("a", ""),
        ("only_several", "rank 0 has this, one process does not"),
        ("only_one", "no rank has this, one process does"),
        ("b", "the part of rank 0, of shape (4, 7), does not fit the whole, of shape (4, 6)"),
        ("c", "the part of rank 0, of shape (4, 2, 6), does not fit the whole, of shape (4, 6)"),
    ]


@pytest.mark.parametrize("values", [{"finetune.frozen_blocks": 3}, {"finetune.linear_probe": True}])
def test_what_is_behind_frozen_blocks_is_compared(values, tmp_path, capsys):
    """A later stage of a pipeline has gradients at the outputs of its frozen blocks, one process has none."""
    start = tmp_path / "start.safetensors"
    save_file(vit.full_vit(training.config_of(training.flags(**{**VALUES, "DEPTH": 4}))).state_dict(), start)
    values = {"DEPTH": 4, "finetune.weights": str(start), "finetune.head": "keep", **values}
    command.run(train_hybrid.build, arguments("PP 2", **values))
    assert capsys.readouterr().out.startswith("PP 2: all ")


# ---- Under a launcher ----


def test_launched_ranks_train_together(monkeypatch):
    """Rank 1's processes do: a model that fails there in one layout is named by rank 0, and the next one is tried."""
    forward = vit.MLP.forward

    def fail(self, x, samples):
        if dist.get_rank() == 1 and gpc.is_initialized(ParallelMode.PIPELINE):
            raise ValueError("a defect\nwith details")
        return forward(self, x, samples)

    monkeypatch.setattr(vit.MLP, "forward", fail)
    layouts = ["PP 2", "DP 2", "1D 4"]
    words = [training.HYBRID, *training.flags(**VALUES), *layouts]
    done = fork_ranks.run(COMMAND, words, 2, cwd=fork_ranks.ROOT)
    assert done.codes == [1, 1], str(done)
    failing, agreeing, other = done.stdout[0].splitlines()
    assert re.fullmatch(r"PP 2: fails on rank 1: ValueError: a defect \(\S*tests/test_parity\.py:\d+\)", failing)
    assert re.fullmatch(r"DP 2: all \d{4} tensors of 3 steps agree to \de-1\d", agreeing)
    assert other == "1D 4: not tried: has 4 processes, but 2 were started"
    assert done.stderr == ["parity: error: not what one process computes: PP 2\n", ""]
    assert done.stdout[1] == ""
