"""Run train scripts as from the command line, without 7 seconds of imports per process.

The test process imports everything once; each rank is a fork of it with its own command line, environment and output.
"""

import faulthandler
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from colossal_vit import config as configs
from colossal_vit.compat import cpu, patches
from colossal_vit.launch import groups
from colossal_vit.launch.launchers import Rendezvous, free_port
from colossal_vit.launch.rendezvous import join_store
from colossalai.context import Config

import schemas

ROOT = Path(__file__).resolve().parents[1]
# Seconds after which a process counts as hanging. Generous, since it is no speed limit: tests of runs that end by
# themselves use a longer --timeout, so that the timeout cannot be what ends them.
PATIENCE = 600
FOREVER = ["--timeout", str(10 * PATIENCE)]
running: set[int] = set()  # process ids of ranks that have not been waited for
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Result:
    """Exit codes and output of ended ranks, by rank."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n" + "\n".join(self.stdout + self.stderr)


def own_lines(text: str) -> str:
    """What a process has printed, without what Gloo does in torch 2.10, at any time."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def by_torchrun(world_size: int) -> list[dict[str, str]]:
    """The environment variables that torchrun sets, for each rank."""
    port = str(free_port())
    return [
        dict(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=port)
        for r in range(world_size)
    ]


def end_as(program: Callable[[], object]) -> NoReturn:
    """Run `program` in a forked process, on its file descriptors 0 to 2, and exit with Python's exit code for it."""
    code = 1
    try:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 stays open as long as the process runs
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        program()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(script: Path, argv: Sequence[str], env: Mapping[str, str | None], cwd: Path, out: Path, err: Path) -> None:
    """Run `python script argv...` in a newly forked process; never returns."""
    os.setsid()
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)

    def program() -> None:
        for key in LAUNCHER_VARIABLES:
            os.environ.pop(key, None)
        for key, value in env.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        os.chdir(cwd)
        sys.argv, sys.path[:0] = [str(script), *argv], [str(script.parent)]
        runpy.run_path(str(script), run_name="__main__")

    end_as(program)


def start(
    script: Path | str,
    argv: Sequence[str] | Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str | None]],
    cwd: Path | None = None,
    enter: Callable[[int], None] = lambda rank: None,
) -> "World":
    """Fork one rank per environment, which calls `enter(rank)` and runs the script; `argv` may be one list per rank."""
    script = ROOT / script
    shared = not argv or isinstance(argv[0], str)
    directory = Path(tempfile.mkdtemp(prefix="world-"))
    world = World([], directory)
    for rank, env in enumerate(environments):
        pid = os.fork()
        if pid == 0:
            enter(rank)
            own = argv if shared else argv[rank]
            _become(script, own, env, cwd or script.parent, directory / f"{rank}.out", directory / f"{rank}.err")
        world.pids.append(pid)
        running.add(pid)
    return world


@dataclass
class World:
    """Running ranks."""

    pids: list[int]
    directory: Path

    def output(self, rank: int, stream: str = "out") -> str:
        path = self.directory / f"{rank}.{stream}"
        return own_lines(path.read_text()) if path.exists() else ""

    def wait(self, timeout: float = PATIENCE) -> Result:
        """Wait up to `timeout` seconds for all ranks to end; the others are killed, with code -9."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        while len(codes) < len(self.pids):
            for pid in set(self.pids) - codes.keys():
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    running.discard(pid)
            if time.monotonic() > deadline:
                for pid in set(self.pids) - codes.keys():
                    os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
        ranks = range(len(self.pids))
        outputs = [[self.output(rank, stream) for rank in ranks] for stream in ("out", "err")]
        shutil.rmtree(self.directory)
        return Result([codes[pid] for pid in self.pids], *outputs)


def end_all() -> None:
    """Kill the ranks that a test has left running."""
    for pid in list(running):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        running.discard(pid)


def run(script: Path | str, argv: Sequence[str], world_size: int = 1, **start_args) -> Result:
    """Run a script on `world_size` ranks as under torchrun, or for 1 as a process without launcher."""
    environments = by_torchrun(world_size) if world_size > 1 else [{}]
    return start(script, argv, environments, **start_args).wait()


def _launch(rank: int, world_size: int, port: int, config: Mapping) -> None:
    cpu.enable()
    patches.apply()
    layout = {"pipeline": 1, "tensor": {"mode": None, "size": 1}}
    always = {"SEED": 0, "parallel": layout, "fp16": None, "gradient_accumulation": 1, "clip_grad_norm": 0.0}
    settings = Config(configs.complete({**always, **config}, schemas.schema_for(config)))
    rendezvous = Rendezvous("none", rank, rank, world_size, "localhost", port)
    store = join_store(rendezvous, PATIENCE, {})
    groups.launch_groups(settings, rendezvous, "gloo", store, PATIENCE, torch.device("cpu"))


def call(function, world_size: int = 1, launched: bool = True, **config) -> list:
    """Call `function()` on every rank; returns the results by rank, or raises if one raised.

    Args:
        function: called in a fork of this process.
        world_size: number of ranks.
        launched: whether to patch and launch Colossal-AI before.
        config: config values, such as `parallel`.
    """
    pipes, pids = [], []
    port = free_port()
    for rank in range(world_size):
        receive, send = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.dump_traceback_later(PATIENCE, exit=True)
                if launched:
                    _launch(rank, world_size, port, config)
                send.send_bytes(pickle.dumps((True, function())))
            except BaseException as error:
                text = "".join(traceback.format_exception(error))
                send.send_bytes(pickle.dumps((False, f"rank {rank}: {text}")))
            finally:
                os._exit(0)
        send.close()
        pipes.append(receive)
        pids.append(pid)
    answers = []
    for rank, receive in enumerate(pipes):
        try:
            answers.append(pickle.loads(receive.recv_bytes()))  # tensors by value, since the rank may have ended
        except EOFError:
            answers.append((False, f"rank {rank} ended without an answer"))
    for pid in pids:
        os.waitpid(pid, 0)
    failures = [text for good, text in answers if not good]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]
