"""Detects the launcher (torchrun, srun, mpirun or none), and reads this process's rank and world size from it."""

import argparse
import os
import random
import re
import socket
import zlib
from contextlib import suppress
from dataclasses import dataclass

import torch
from colossal_vit.errors import UserError
from colossalai.context import Config

DEFAULT_PORT = 29500
FIRST_PORT, NUM_PORTS = 20_000, 20_000  # of runs that a launcher tells apart
SLURM_NO_STEP = 0xFFFFFFF0  # from here on, SLURM's step numbers mean batch scripts and shells, not steps of srun


@dataclass
class Rendezvous:
    """This process's place among the ranks, and where they rendezvous, according to the launcher.

    Attributes:
        launcher: a key of `LAUNCHERS`.
        rank, world_size: this process's rank, and the number of processes.
        local_rank: the rank among the processes on this machine.
        host, port: where rank 0 listens.
        found: the launcher's name for the log.
        run: what tells this run from others of the launcher, the same on all its ranks; empty if nothing does.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    found: str = "nobody"
    run: str = ""


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UserError(
            f"--rank {rank} does not fit --world_size {world_size}: it must be 0 to {world_size - 1}", own=True
        )


def _environ(*names: str) -> list[int]:
    try:
        return [int(os.environ[name]) for name in names]
    except (KeyError, ValueError):
        raise UserError(f"--launcher: the environment lacks a number in one of {', '.join(names)}", own=True) from None


def first_slurm_host(node_list: str) -> str:
    """Return the first host name of a SLURM node list: `rack[1-2]gpu[03-05,9],login` gives `rack1gpu03`.

    Raises:
        UserError: if there is none.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)  # commas inside brackets separate numbers
    if not first:
        raise UserError(f"SLURM_NODELIST = {node_list!r}: no host name in it; give --host")
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group())


def _from_torch(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, port = _environ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    where = " in a SLURM job" if "SLURM_JOB_ID" in os.environ else ""
    host = os.environ.get("MASTER_ADDR", "localhost")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Rendezvous("torch", rank, local_rank, world_size, host, port, f"torchrun{where}", run)


def _from_slurm(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, job = _environ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
    if world_size > 1 and "SLURM_PTY_PORT" in os.environ:
        raise UserError(
            f"this is the shell of an `srun --pty` of {world_size} tasks, only one of which runs it: leave the shell "
            f"and type `srun --nodes {os.environ.get('SLURM_NNODES', 1)} --ntasks {world_size} bash "
            f"./scripts/train_slurm.sh`, or add --launcher none",
            own=True,
        )
    host = os.environ.get("HOST", "")
    if not host or host.split(".")[0] == os.environ.get("SLURM_SUBMIT_HOST", "").split(".")[0]:  # tcsh exports HOST
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST")
        host = first_slurm_host(nodes or "localhost")
    # Each task of an array is a job of its own. So is each component of a heterogeneous job, whose first one counts.
    job = _first_number("SLURM_JOB_ID_HET_GROUP_0") or job
    step = _first_number("SLURM_STEP_ID") or 0
    port = FIRST_PORT + (job + 7919 * step) % NUM_PORTS  # a prime, so that steps of nearby jobs do not share ports
    run = f"job {job}, step {step}"
    return Rendezvous("slurm", rank, local_rank, world_size, host, port, f"srun in {run}", f"SLURM {run}")


def _from_openmpi(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, local_size = _environ(
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
    )
    host = args.host or ("localhost" if local_size == world_size else os.environ.get("MASTER_ADDR"))
    if not host and (nodes := os.environ.get("SLURM_NODELIST")):
        host = first_slurm_host(nodes)  # mpirun starts rank 0 on the first node of the job
    if not host:
        raise UserError("mpirun on several nodes needs --host, the node of rank 0")
    job = os.environ.get("PMIX_NAMESPACE", "")  # of OpenMPI 4 and 5
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS if job else DEFAULT_PORT
    return Rendezvous("openmpi", rank, local_rank, world_size, host, port, "mpirun", f"mpirun {job}".strip())


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on, below those that the system hands out: another
    program could get one of these before this process listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, FIRST_PORT)
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port


def _from_flags(args: argparse.Namespace) -> Rendezvous:
    given = {key: getattr(args, key) for key in ("rank", "world_size", "host", "port")}
    missing = [f"--{key}" for key, value in given.items() if value is None]
    if args.world_size in (None, 1) and args.rank in (None, 0):
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if args.launcher == "auto" and "SLURM_JOB_ID" in os.environ and tasks != "1":
            raise UserError(
                f"this is a SLURM job of {tasks} tasks, but srun did not start this process: type `srun bash "
                f"./scripts/train_slurm.sh`, or add --launcher none for a single process"
            )
        return Rendezvous("none", 0, args.local_rank or 0, 1, "localhost", free_port(), "hand, as the only process")
    if missing:
        raise UserError(f"starting processes by hand needs {' '.join(missing)} too", own=True)
    local_rank = args.local_rank if args.local_rank is not None else args.rank % max(torch.cuda.device_count(), 1)
    return Rendezvous("none", args.rank, local_rank, args.world_size, args.host, args.port, "hand")


LAUNCHERS = {"torch": _from_torch, "openmpi": _from_openmpi, "slurm": _from_slurm, "none": _from_flags}


def _find_launcher() -> str:
    """Who started this process. The innermost: srun may start torchrun or mpirun's daemons, and mpirun torchrun."""
    if "LOCAL_RANK" in os.environ:
        return "torch"
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return "openmpi"
    step = os.environ.get("SLURM_STEP_ID", "")
    return "slurm" if step.isdigit() and int(step) < SLURM_NO_STEP else "none"


def find_rendezvous(args: argparse.Namespace) -> Rendezvous:
    """Detect the launcher, or take `--launcher`, and read its `Rendezvous`; `--host` and `--port` override that.

    They do not under torchrun, which has made the rendezvous already.

    Raises:
        UserError: if it is incomplete or contradictory, or the host cannot be resolved.
    """
    name = _find_launcher() if args.launcher == "auto" else args.launcher
    rendezvous = LAUNCHERS[name](args)
    _check_rank(rendezvous.rank, rendezvous.world_size)
    if name != "torch":
        rendezvous.host = args.host or rendezvous.host
        rendezvous.port = args.port or rendezvous.port
    if not 0 < rendezvous.port < 65536:
        raise UserError(f"--port {rendezvous.port}: a port is a number from 1 to 65535")
    try:
        socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {rendezvous.host}: {getattr(error, 'strerror', None) or error}") from None
    return rendezvous


def ignored_flags(args: argparse.Namespace, rendezvous: Rendezvous) -> list[str]:
    """Return the flags of a command line that do not count, because the launcher has said the same."""
    settled = {"none": (), "torch": ("rank", "world_size", "host", "port")}
    names = settled.get(rendezvous.launcher, ("rank", "world_size"))
    return [f"--{name}" for name in names if getattr(args, name) is not None]


def _first_number(*names: str) -> int | None:
    """Return the first of these environment variables that is a number."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def launched_rank() -> int:
    """Return the rank that a launcher gave this process, or 0."""
    return _first_number("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") or 0


def rank_host_port() -> tuple[int, str | None, str | None]:
    """Rank, host and port of this process as far as they can be determined, even if the command line is wrong."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("rank", "host", "port"):
        flags.add_argument(f"--{name}", nargs="?")
    given = flags.parse_known_args()[0]
    if _find_launcher() == "torch":
        return launched_rank(), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    rank = int(given.rank) if given.rank and given.rank.isdecimal() else launched_rank()
    return rank, given.host or os.environ.get("MASTER_ADDR"), given.port or os.environ.get("MASTER_PORT")


def planned_rendezvous(args: argparse.Namespace, config: Config, rank: int = 0) -> Rendezvous:
    """Return the place of a process that plays a rank: `--dry-run` starts no others.

    The world size is `--world_size`, or the launcher's, or the smallest that the layout allows.

    Raises:
        UserError: if `--rank`, which does not matter otherwise, does not fit the world size.
    """
    launched = _first_number("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    world_size = args.world_size or launched or config.parallel.pipeline * config.parallel.tensor.size
    _check_rank(args.rank or 0, world_size)
    return Rendezvous("none", rank, args.local_rank or 0, world_size, "nowhere", 0)
