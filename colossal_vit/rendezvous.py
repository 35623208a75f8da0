"""Who started this process, which one it is, and where the processes meet."""

import argparse
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil  # comes with Colossal-AI
import torch
import torch.distributed as dist
from colossal_vit.errors import UserError

DEFAULT_PORT = 29500
DOCUMENTATION_ADDRESS = "192.0.2.1"  # RFC 5737: nobody's; the way to it is the way out of this machine
SLURM_NO_STEP = 0xFFFFFFF0  # SLURM's step numbers from here on are shells and scripts, not what srun started


@dataclass
class Rendezvous:
    """This process among the others: what the launcher told it.

    Attributes:
        launcher: a key of `LAUNCHERS`.
        rank, world_size: this process, and how many there are.
        local_rank: this process among those of this machine.
        host, port: where rank 0 listens.
        found: the launcher, in words.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    found: str = "nobody"


def _environ(*names: str) -> list[int]:
    try:
        return [int(os.environ[name]) for name in names]
    except (KeyError, ValueError):
        raise UserError(f"--launcher: the environment lacks a number in one of {', '.join(names)}", own=True) from None


def _slurm_step() -> int | None:
    """The number of the job step that srun started this process in; None where srun did not."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return int(step) if step.isdigit() and int(step) < SLURM_NO_STEP else None


def first_slurm_host(node_list: str) -> str:
    """The first host name of a SLURM node list: `gpu[03-05,9],login` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    if not match:
        raise UserError(f"SLURM_NODELIST = {node_list!r}: no host name in it; give --host")
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def _from_torch(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, port = _environ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    where = " in a SLURM job" if "SLURM_JOB_ID" in os.environ else ""
    host = os.environ.get("MASTER_ADDR", "localhost")
    return Rendezvous("torch", rank, local_rank, world_size, host, port, f"torchrun{where}")


def _from_slurm(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, job = _environ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")
    if world_size > 1 and "SLURM_PTY_PORT" in os.environ:
        raise UserError(
            f"this is the shell of an `srun --pty` of {world_size} tasks, only one of which runs it: leave the shell "
            f"and type `srun --ntasks {world_size} bash ./scripts/train_slurm.sh`, or add --launcher none",
            own=True,
        )
    name = os.environ.get("HOST") or first_slurm_host(os.environ.get("SLURM_NODELIST", "localhost"))
    return Rendezvous("slurm", rank, local_rank, world_size, name, 20000 + job % 20000, f"srun in job {job}")


def _from_openmpi(args: argparse.Namespace) -> Rendezvous:
    rank, local_rank, world_size, local_size = _environ(
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
    )
    host = args.host or ("localhost" if local_size == world_size else os.environ.get("MASTER_ADDR"))
    if not host and (nodes := os.environ.get("SLURM_NODELIST")):
        host = first_slurm_host(nodes)  # mpirun starts rank 0 on the first node of the job
    if not host:
        raise UserError("mpirun on several nodes needs --host, the node of rank 0")
    return Rendezvous("openmpi", rank, local_rank, world_size, host, DEFAULT_PORT, "mpirun")


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
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        return Rendezvous("none", 0, args.local_rank or 0, 1, "localhost", port, "nobody, so this is the only process")
    if missing:
        raise UserError(f"starting processes by hand needs {' '.join(missing)} too", own=True)
    if not 0 <= args.rank < args.world_size:
        raise UserError(
            f"--rank {args.rank} does not fit --world_size {args.world_size}: it must be 0 to {args.world_size - 1}",
            own=True,
        )
    local_rank = args.local_rank if args.local_rank is not None else args.rank % max(torch.cuda.device_count(), 1)
    return Rendezvous("none", args.rank, local_rank, args.world_size, args.host, args.port, "hand")


@dataclass(frozen=True)
class Launcher:
    """How to see that a launcher started this process, and how to read what it says."""

    started: Callable[[], bool]
    read: Callable[[argparse.Namespace], Rendezvous]


# The innermost first: srun may start torchrun or mpirun's daemons, and mpirun may start torchrun, but not the reverse.
LAUNCHERS = {
    "torch": Launcher(lambda: "LOCAL_RANK" in os.environ, _from_torch),
    "openmpi": Launcher(lambda: "OMPI_COMM_WORLD_RANK" in os.environ, _from_openmpi),
    "slurm": Launcher(lambda: _slurm_step() is not None, _from_slurm),
    "none": Launcher(lambda: True, _from_flags),
}


def find_rendezvous(args: argparse.Namespace) -> Rendezvous:
    """Read the launcher's word for this process; `--host` and `--port` override it.

    Raises:
        UserError: if it is incomplete, or the host is unknown.
    """
    name = args.launcher
    if name == "auto":
        name = next(key for key, launcher in LAUNCHERS.items() if launcher.started())
    meeting = LAUNCHERS[name].read(args)
    meeting.host = args.host or meeting.host
    meeting.port = args.port or meeting.port
    if not 0 < meeting.port < 65536:
        raise UserError(f"--port {meeting.port}: a port is a number from 1 to 65535")
    try:
        socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {meeting.host}: {getattr(error, 'strerror', None) or error}") from None
    return meeting


# ---------------------------------------------------------------------------------------------------------------------
# Meeting
# ---------------------------------------------------------------------------------------------------------------------


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_local(host: str) -> bool:
    """Whether `host` means this machine whoever asks, unlike a name that happens to lead to a loopback address."""
    return _is_loopback(host) or host == "localhost"


def is_own(host: str) -> bool:
    """Whether `host` is an address of this machine's, not a router's, say, that leads to it."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` as the others see it, and at no other address where that can be told.

    It cannot where `host` is no address of this machine's, nor where it is this machine's name and means 127.0.1.1 to
    itself, as Debian has it, and something else to the others.

    Raises:
        OSError: if the port is in use.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if is_own(host) and (_is_local(host) or not _is_loopback(address[0])):
        return socket.create_server(address[:2], family=family, backlog=4096)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=4096)


def interface_towards(host: str) -> str | None:
    """The network interface of this machine that leads to `host`, such as `eth0`; None where none does."""
    for target in (host, DOCUMENTATION_ADDRESS):
        with suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                own = probe.getsockname()[0]
            if _is_loopback(own) and not _is_local(host):
                continue  # this machine's own name, see `listen`
            for name, addresses in psutil.net_if_addrs().items():
                if any(entry.address.split("%")[0] == own for entry in addresses):
                    return name
    return None


def meet(meeting: Rendezvous, timeout: float) -> dist.Store:
    """Wait until all ranks are there, and make sure that they mean the same world.

    Args:
        meeting: this process and the place.
        timeout: seconds to wait.

    Returns:
        The store that the ranks share.

    Raises:
        UserError: if two ranks say different world sizes, or one rank is there twice.
        torch.distributed.DistNetworkError, torch.distributed.DistStoreError: if not all come.
        OSError: if the port is in use.
    """
    patience = timedelta(seconds=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps a store for its workers
    options = {"world_size": meeting.world_size, "timeout": patience}
    if meeting.rank == 0 and not (meeting.launcher == "torch" and by_agent):
        listener = listen(meeting.host, meeting.port).detach()  # the store closes it
        store = dist.TCPStore(meeting.host, meeting.port, is_master=True, master_listen_fd=listener, **options)
    else:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, **options)
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    store.set(f"world-size-{meeting.rank}", str(meeting.world_size))
    if store.add(f"rank-{meeting.rank}", 1) > 1:
        store.set("problem", f"rank {meeting.rank} is there twice: give each process a --rank of its own")
    if meeting.rank == 0:
        store.set("verdict", _verdict(store, meeting.world_size, timeout))
    if verdict := store.get("verdict").decode():
        if meeting.rank == 0:
            time.sleep(1.0)  # the store ends with this process, and the others are to read it
        raise UserError(verdict)
    return store


def _verdict(store: dist.Store, world_size: int, timeout: float) -> str:
    """What is wrong with the world, in rank 0's eyes; empty if nothing is."""
    keys = [f"world-size-{rank}" for rank in range(world_size)]
    deadline = time.monotonic() + timeout
    while not store.check(keys) and not store.check(["problem"]):
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            return f"rank {missing} of {world_size} did not come within {timeout:g} s (--timeout)"
        time.sleep(0.01)
    if store.check(["problem"]):
        return store.get("problem").decode()
    for rank, key in enumerate(keys):
        if (said := int(store.get(key))) != world_size:
            return (
                f"rank 0 was started for a world of {world_size} processes, rank {rank} for one of {said}: give all "
                f"the same --world_size"
            )
    return ""


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
