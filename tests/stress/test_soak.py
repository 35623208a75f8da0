"""Disturb elastic runs under torchrun again and again: they must go on, and be what an undisturbed process makes.

    python -m pytest tests/stress/test_soak.py --cases 50 --seed 1 --result results/elastic

A run each with data parallelism, two pipeline stages, 1D tensor parallelism, and both or one of them, of up to four
agents with two ranks each, on the digits, in float64, with dropout, drop path, mixing, EMA and ZeRO; --cases says how
many events it has. An agent joins, gets SIGTERM, is killed, is frozen with its ranks, or loses its network; or a rank
is killed. The first agent keeps the rendezvous: only its ranks are killed. After each event the run must make steps
with all processes that are left. In the end each step must be on record once, and losses, weights and averages those of
one process.

With --cases each agent has a network namespace of its own, like a machine. That takes Linux, root and iproute2.

The time to come back is that from an event to the next step, in four parts: until torchrun has started the ranks; until
they have imported everything and are connected; until they have data, model and checkpoint; until the step.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.results import read_metrics

import fork_ranks
import launchers
import training
from launchers import ip
from layouts import ANY_STEP, LAYOUTS, errors

KINDS = {"DP": {}, "PP 2": LAYOUTS["PP 2"][1], "1D 2": LAYOUTS["1D 2"][1]}
OTHERS = [dict(tensor=dict(mode="1d", size=2))]
KINDS["PP 2 × 1D 2 or 1D 2"] = {**LAYOUTS["PP 2 × 1D 2"][1], "ELASTIC_LAYOUTS": OTHERS}
MOST, RANKS = 4, 2  # agents, ranks of an agent
BATCH = 48  # images of a step, which any number of agents can share, in pairs that are mixed
VALUES = {
    **training.RANDOM,
    "DEPTH": 2,
    "DTYPE": "float64",
    "NUM_EPOCHS": 10_000,
    "ELASTIC": True,
    "GLOBAL_BATCH": BATCH,
}
VALUES |= {"BATCH_SIZE": BATCH, "ema.decay": 0.9, "zero.stage": 1, "checkpoint.every_steps": 10}
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
UNDISTURBED = {"parallel.pipeline": 1, "parallel.tensor.mode": None, "parallel.tensor.size": 1}
LOST = ("stopped", "killed", "frozen", "cut off")  # what becomes of an agent
STEPS = 3  # between two events, at least
MARKS = ("started by torchrun", "resuming from")


class OneHost:
    """All agents on localhost."""

    address = "localhost"

    def add(self) -> tuple[list[str], list[str], dict[str, str]]:
        """A place for an agent: what its command begins with, flags of torchrun, environment variables."""
        return [], [], {}

    def close(self) -> None:
        pass


class Hosts:
    """A network namespace for each agent, all on one bridge."""

    address = "10.98.0.1"  # of the first agent

    def __init__(self):
        self.number = 0
        self.close()  # what an aborted test has left
        ip("link", "add", "soak", "type", "bridge")
        ip("link", "set", "soak", "up")

    def add(self) -> tuple[list[str], list[str], dict[str, str]]:
        self.number += 1
        name, address = f"soak{self.number}", f"10.98.0.{self.number}"
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", "soak", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for end in ("lo", "eth0"):
            ip("-n", name, "link", "set", end, "up")
        return ["ip", "netns", "exec", name], ["--local-addr", address], {"GLOO_SOCKET_IFNAME": "eth0"}

    def cut(self, prefix: list[str]) -> None:
        """Let no packet of an agent through any more; nobody is told."""
        ip("link", "set", prefix[-1], "down")

    def close(self) -> None:
        for kind, key in (("link", "ifname"), ("netns", "name")):
            for each in json.loads(ip("-json", kind) or "[]"):
                if each[key].startswith("soak"):
                    ip(kind, "delete", each[key])


class Agents:
    """The agents of torchrun that train in a run directory; the first one keeps the rendezvous."""

    def __init__(self, output: Path, values: dict, hosts: OneHost | Hosts):
        self.output, self.log, self.hosts = output, output.with_suffix(".log"), hosts
        self.torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{MOST}"]
        self.torchrun += ["--nproc_per_node", str(RANKS), "--max-restarts", "1000", "--monitor-interval", "0.5"]
        self.torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{hosts.address}:{fork_ranks.free_port()}"]
        self.script = ["train_hybrid.py", *training.flags(**values), "--output", str(output), "--timeout", "30"]
        self.running: list[subprocess.Popen] = []
        self.gone: list[subprocess.Popen] = []
        self.frozen: list[int] = []  # process IDs

    def __len__(self) -> int:
        return len(self.running)

    def join(self) -> None:
        enter, flags, variables = self.hosts.add()
        variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DATA": os.environ["DATA"]}
        keeper = ["--rdzv_conf", f"{QUICK},is_host={not self.running}"]
        command = [*enter, *self.torchrun, *keeper, *flags, *self.script]
        with open(self.log, "a") as log:
            options = dict(cwd=launchers.FOLDER, stdout=log, stderr=log, start_new_session=True)
            self.running.append(subprocess.Popen(command, env=launchers.environment(**variables), **options))

    def ranks(self, agent: subprocess.Popen) -> list[int]:
        """The process IDs of an agent's ranks."""
        with suppress(psutil.NoSuchProcess):
            return [rank.pid for rank in psutil.Process(agent.pid).children()]
        return []

    def disturb(self, event: str, number: int, draw: random.Random) -> None:
        """Let an event happen to an agent."""
        if event == "joined":
            self.join()
            return
        agent = self.running[number]
        if event == "rank killed":
            os.kill(draw.choice(self.ranks(agent)), signal.SIGKILL)
            return
        del self.running[number]
        if event == "stopped":
            agent.send_signal(signal.SIGTERM)
        elif event == "cut off":
            self.hosts.cut(agent.args[:4])
        elif event == "killed":
            agent.kill()
        else:
            self.frozen = [*self.ranks(agent), agent.pid]
            for pid in self.frozen:
                os.kill(pid, signal.SIGSTOP)
        self.gone += [agent]

    def bury(self) -> None:
        """End what an event has left of an agent."""
        for pid in [*self.frozen, *(agent.pid for agent in self.gone)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.gone:
            agent.wait()
        self.gone.clear()
        self.frozen.clear()

    def stop(self) -> None:
        """Tell all to stop with a checkpoint."""
        for agent in self.running:
            agent.send_signal(signal.SIGTERM)
        self.gone += self.running
        for agent in self.gone:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=fork_ranks.PATIENCE)
        self.bury()

    def members(self) -> list[dict]:
        return training.lines_of(self.output / "members.jsonl")

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        """The last step on record, or 0."""
        return training.last_step(self.output)

    def come_back(self, event: Callable[[], object]) -> list[float]:
        """Let something happen, and wait until all that are there make new steps; the time of it, in four parts."""
        seen, groups = self._counts(), len(self.members())
        began = time.monotonic()
        at = [began] * len(seen)
        event()

        def back() -> bool:
            nonlocal seen
            now, counts = time.monotonic(), self._counts()
            at[:] = [now if new != old else before for new, old, before in zip(counts, seen, at, strict=True)]
            seen = counts
            assert all(agent.poll() is None for agent in self.running), self.said()[-5000:]
            newest = self.members()[groups:][-1:]
            size = sum(sum(member["hosts"].values()) for member in newest)
            return size == RANKS * len(self.running) and self.step() > newest[0]["step"]

        launchers.wait_until(back, lambda: self.said()[-5000:])
        ends = [began, *(max(each, began) for each in at), time.monotonic()]
        return [after - before for before, after in pairwise(ends)]

    def _counts(self) -> list:
        return [{rank for agent in self.running for rank in self.ranks(agent)}, *map(self.said().count, MARKS)]


def draw_events(number: int, draw: random.Random) -> list[str]:
    """So many events, which leave one to four agents."""
    events: list[str] = []
    for _ in range(number):
        agents = 1 + events.count("joined") - sum(event in LOST for event in events)
        kinds = ["rank killed", *(["joined"] * len(LOST) if agents < MOST else [])]
        events.append(draw.choice([*kinds, *(LOST if agents > 1 else [])]))
    return events


def soak(
    name: str, output: Path, events: list[str], hosts: OneHost | Hosts, draw: random.Random, report: Callable
) -> None:
    """Disturb a run, and compare it with one process."""
    values = {**VALUES, **KINDS[name]}
    agents = Agents(output, values, hosts)
    try:
        agents.come_back(agents.join)
        for number, event in enumerate(events, 1):
            target = agents.step() + STEPS  # and a checkpoint, without which the run would begin again elsewhere
            launchers.wait_until(
                lambda target=target: agents.step() >= target and storage.list_steps(output / storage.FOLDER),
                agents.said,
            )
            who = len(agents) if event == "joined" else draw.randrange(event in LOST, len(agents))
            step = agents.step()
            times = agents.come_back(partial(agents.disturb, event, who, draw))
            agents.bury()
            parts = " + ".join(f"{part:.1f}" for part in times)
            report(
                f"{name}, event {number}, step {step}: agent {who}: {event}; {RANKS * len(agents)} ranks have made "
                f"the next step {sum(times):.1f} s later = {parts}"
            )
    finally:
        agents.stop()
    steps = [record["step"] for record in training.records(output) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1)), "each step is on record once"
    values = {key: value for key, value in values.items() if not key.startswith("ELASTIC")} | UNDISTURBED
    alone = training.train(output.with_name(f"{output.name} alone"), steps=len(steps), **values)
    worst = max(errors(read_metrics(output)[0], alone.steps))
    assert worst < ANY_STEP
    found, expected = (storage.newest(each / storage.FOLDER)[0] for each in (output, alone.output))
    assert found.path.name == expected.path.name == f"step-{len(steps):08d}", "no step is lost by the last stop"
    for file in (storage.MODEL, storage.EMA):
        weights, those = found.tensors(file), expected.tensors(file)
        assert weights.keys() == those.keys()
        for key, tensor in those.items():
            torch.testing.assert_close(weights[key], tensor, rtol=ANY_STEP, atol=ANY_STEP, msg=f"{file}, {key}")
    report(
        f"{name}: {len(events)} events, {len(steps)} steps, each on record once: losses {worst:.1e} from one process"
    )


def times_to_come_back(log: str) -> Iterator[str]:
    """Their median and worst by the kind of event, from what `soak` has reported."""
    by_event = defaultdict(list)
    for event, parts in re.findall(r": ([a-z ]+); .* s later = (.*)", log):
        by_event[event].append([float(part) for part in parts.split(" + ")])
    for event, times in by_event.items():
        totals = sorted(map(sum, times))
        parts = " + ".join(f"{statistics.median(part):.1f}" for part in zip(*times, strict=True))
        yield (
            f"{event}, {len(times)} times: the next step after {statistics.median(totals):.1f} s (median), "
            f"{totals[-1]:.1f} s (worst); medians of the parts: {parts}"
        )


@pytest.mark.timeout(0)  # each wait has its own
def test_elastic_runs_resume_and_come_to_the_losses_of_one_process(pytestconfig, few_test_images, tmp_path, report):
    """Two events in one kind of layout, or --cases random ones in each."""
    option = pytestconfig.option
    number, draw, lines = option.cases, random.Random(option.seed), []

    def note(line: str) -> None:
        lines.append(line)
        report(line)

    for name in KINDS if number else [draw.choice(list(KINDS))]:
        events = draw_events(number, draw) if number else ["joined", "killed"]
        with closing(Hosts() if number else OneHost()) as hosts:
            soak(name, tmp_path / name, events, hosts, draw, note)
    for line in times_to_come_back((option.result / "log.txt").read_text() if option.result else "\n".join(lines)):
        report(line)
