"""Process groups on GPUs: whether ranks create them in an order in which none waits forever.

With a device bound to the default group, torch creates a group's communicator by ncclCommSplit of the default one, in
which all ranks take part: those that are no members call it without a color. They do so for groups of gloo as well,
whose members do not split anything but wait for each other. So the calls of ranks fit together only if all of them are
members equally often, and in the right order; if not, a run on GPUs hangs while it starts, and one on CPUs does not.
"""

from collections import deque

import pytest
import torch
import torch.distributed as dist
from colossal_vit.compat import cpu, patches
from colossal_vit.launch import groups
from colossal_vit.launch.launchers import Rendezvous
from colossalai.context import Config
from colossalai.legacy.core import global_context as gpc

import fake_gpu
import fork_ranks
import training
from layouts import LAYOUTS, PIPELINE, tensor

# By name: processes and overrides.
CHECKED = {name: LAYOUTS[name] for name in ("DP 4", "PP 4", "1D 2", "2D 4", "2.5D 8", "3D 8", "PP 2 × 2D 4")}
CHECKED |= {
    "PP 2 × 2.5D 4": LAYOUTS["PP 2 × 2.5D 4"],
    "DP 2 × PP 2 × 1D 2": LAYOUTS["DP 2 × PP 2 × 1D 2"],
    "DP 4 × PP 2 × 1D 2": (16, {**PIPELINE, **tensor("1d", 2)}),
    "DP 2 × PP 2 × 2D 4": (16, {**PIPELINE, **tensor("2d", 4)}),
    "DP 2 × 3D 8": (16, tensor("3d", 8)),
}
Calls = list[tuple[tuple[int, ...], str]]  # members and backend of the groups that a rank creates, in order


def calls_of_ranks(world_size: int, values: dict) -> list[Calls]:
    """The groups that each rank creates in a layout on GPUs; changes this process."""
    cpu.enable()
    patches.apply()
    fake_gpu.without_peers()
    calls: Calls = []

    def new_group(ranks, backend="nccl", **_):
        calls.append((tuple(ranks), backend))
        return dist.group.WORLD

    dist.new_group, dist.get_backend = new_group, lambda *_: "nccl"
    parallel = training.config_of(training.flags(**values)).parallel
    found = []
    for rank in range(world_size):
        rendezvous = Rendezvous("none", rank, rank, world_size, "localhost", 29500)
        settings = Config({"parallel": parallel, "SEED": 0})
        groups.launch_groups(settings, rendezvous, "nccl", dist.HashStore(), 10.0, torch.device("cpu"))
        found.append(calls.copy())
        calls.clear()
        dist.destroy_process_group()
        gpc.__init__()
    return found


def split(ranks: list[Calls]) -> list[tuple[int, ...]]:
    """Let ranks create their groups as torch does with NCCL.

    Returns:
        The members of each communicator, in order.

    Raises:
        AssertionError: if ranks wait for each other forever, or a communicator lacks members.
    """
    waiting = [deque() for _ in ranks]
    for rank, calls in enumerate(ranks):
        for number, (members, backend) in enumerate(calls):
            if rank not in members:
                waiting[rank].append(("split", None))
            elif backend == "nccl":
                waiting[rank].append(("split", members))
            else:
                waiting[rank].append(("meet", members, number))
    made = []
    while any(waiting):
        heads = [queue[0] if queue else None for queue in waiting]
        meeting = {
            rank
            for rank, head in enumerate(heads)
            if head and head[0] == "meet" and all(heads[member] == head for member in head[1])
        }
        if not meeting:
            assert all(head and head[0] == "split" for head in heads), f"ranks wait forever: {heads}"
            colors = [members for _, members in heads]
            for members in dict.fromkeys(filter(None, colors)):
                assert [colors[member] for member in members] == [members] * len(members), f"incomplete: {colors}"
                made.append(members)
        for rank in meeting or range(len(ranks)):
            waiting[rank].popleft()
    return made


@pytest.mark.parametrize("name", CHECKED)
def test_groups_are_created_without_a_deadlock(name):
    world_size, values = CHECKED[name]
    (ranks,) = fork_ranks.call(lambda: calls_of_ranks(world_size, values), launched=False)
    expected = [members for members, backend in ranks[0] if backend == "nccl"]
    assert all([members for members, backend in calls if backend == "nccl"] == expected for calls in ranks)
    assert sorted(split(ranks)) == sorted(expected)


def test_ranks_that_are_members_unequally_often_wait_forever():
    """So that the test above can fail."""
    calls = [((0, 1), "nccl"), ((0, 1), "gloo")]
    with pytest.raises(AssertionError, match="ranks wait forever"):
        split([calls] * 3)
    assert split([[*calls, ((2, 3), "nccl"), ((2, 3), "gloo")]] * 4) == [(0, 1), (2, 3)]
    other_order = [calls, calls[::-1]]
    with pytest.raises(AssertionError, match="ranks wait forever"):
        split(other_order)
