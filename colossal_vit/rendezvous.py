"""Who started this process, which one it is, and where the processes meet."""

import argparse
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from colossal_vit.errors import UserError

DEFAULT_PORT = 29500


@dataclass
class Rendezvous:
    """This process among the others: what the launcher told it."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int


def _environ(*names: str) -> list[int]:
    try:
        return [int(os.environ[name]) for name in names]
    except (KeyError, ValueError):
        raise UserError(f"--launcher: the environment lacks a number in one of {', '.join(names)}", own=True) from None


def first_slurm_host(node_list: str) -> str:
    """The first host name of a SLURM node list: `gpu[03-05,9],login` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    if not match:
        raise UserError(f"SLURM_NODELIST = {node_list!r}: no host name in it; give --host")
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def _from_torch(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, port = _environ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    return Rendezvous("torch", rank, local_rank, world_size, os.environ.get("MASTER_ADDR", "localhost"), port)


def _from_slurm(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, job = _environ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
    name = os.environ.get("HOST") or first_slurm_host(os.environ.get("SLURM_NODELIST", "localhost"))
    return Rendezvous("slurm", rank, local_rank, world_size, name, 20000 + job % 20000)


def _from_openmpi(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, local_size = _environ(
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
    )
    if local_size < world_size and not args.host:
        raise UserError("--launcher openmpi on several nodes needs --host, the node of rank 0")
    return Rendezvous("openmpi", rank, local_rank, world_size, "localhost", DEFAULT_PORT)


def _from_flags(args: argparse.Namespace) -> Rendezvous:
    given = {key: getattr(args, key) for key in ("rank", "world_size", "host", "port")}
    missing = [f"--{key}" for key, value in given.items() if value is None]
    if args.world_size in (None, 1) and args.rank in (None, 0):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return Rendezvous("none", 0, args.local_rank or 0, 1, "localhost", free.getsockname()[1])
    if missing:
        raise UserError(f"starting processes by hand needs {' '.join(missing)} too", own=True)
    if not 0 <= args.rank < args.world_size:
        raise UserError(
            f"--rank {args.rank} does not fit --world_size {args.world_size}: it must be 0 to {args.world_size - 1}",
            own=True,
        )
    local_rank = args.local_rank if args.local_rank is not None else args.rank % max(torch.cuda.device_count(), 1)
    return Rendezvous("none", args.rank, local_rank, args.world_size, args.host, args.port)


LAUNCHERS: dict[str, tuple[str | None, Callable[[argparse.Namespace], Rendezvous]]] = {
    # name: (environment variable that gives it away, reader)
    "torch": ("LOCAL_RANK", _from_torch),
    "slurm": ("SLURM_STEP_ID", _from_slurm),
    "openmpi": ("OMPI_COMM_WORLD_RANK", _from_openmpi),
    "none": (None, _from_flags),
}


def find_rendezvous(args: argparse.Namespace) -> Rendezvous:
    """Read the launcher's word for this process; `--host` and `--port` override it.

    Raises:
        UserError: if it is incomplete, or the host is unknown.
    """
    name = args.launcher
    if name == "auto":
        name = next(key for key, (sign, _) in LAUNCHERS.items() if sign is None or sign in os.environ)
    meeting = LAUNCHERS[name][1](args)
    meeting.host = args.host or meeting.host
    meeting.port = args.port or meeting.port
    if not 0 < meeting.port < 65536:
        raise UserError(f"--port {meeting.port}: a port is a number from 1 to 65535")
    try:
        socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {meeting.host}: {getattr(error, 'strerror', None) or error}") from None
    return meeting


def own_place() -> tuple[int, str | None, str | None]:
    """Rank, host and port of this process, as far as they can be told when the command line is wrong."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("rank", "host", "port"):
        flags.add_argument(f"--{name}")
    given = flags.parse_known_args()[0]
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    rank = next((r for r in (given.rank, *ranks) if r and r.isdigit()), "0")
    return int(rank), given.host or os.environ.get("MASTER_ADDR"), given.port or os.environ.get("MASTER_PORT")


def stranger_at(meeting: Rendezvous) -> UserError | None:
    """The error to end with if a program other than rank 0 holds the port; None if nothing does, or rank 0.

    Joining a process group there would wait out the whole timeout.
    """
    try:
        socket.create_connection((meeting.host, meeting.port), timeout=2).close()
    except OSError:
        return None

    def join() -> None:
        with suppress(dist.DistError, RuntimeError):
            dist.TCPStore(meeting.host, meeting.port, timeout=timedelta(seconds=4), wait_for_workers=False)
            joined.set()

    joined = threading.Event()
    threading.Thread(target=join, daemon=True).start()  # a program that never answers would block it for good
    if joined.wait(timeout=4):
        return None
    return UserError(
        f"rank {meeting.rank} cannot meet rank 0 at {meeting.host}:{meeting.port}: the port is in use by something "
        f"else; choose another --port",
        own=True,
    )
