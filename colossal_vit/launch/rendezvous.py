"""Rendezvous of the ranks: network addresses, the shared store, and the check that all are of one run."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from colossal_vit.errors import UserError, end_process, error_line
from colossal_vit.launch.agreement import describe_difference
from colossal_vit.launch.launchers import Rendezvous

DOCUMENTATION_ADDRESS = "192.0.2.1"  # RFC 5737: assigned to no host, so its route is the default route
FOREIGN_GRACE = 6.0  # seconds after which a rank that has not joined checks whether rank 0 holds the port


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_local(host: str) -> bool:
    """Return whether `host` is itself a loopback address or `localhost`, not a host name that resolves to one."""
    return _is_loopback(host) or host == "localhost"


def is_own(host: str) -> bool:
    """Return whether `host` is an address of this machine, and not of a router, say, that forwards to it."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` only, if other machines reach this one at that address; else at all
    addresses.

    The latter is so if `host` is no address of this machine, or is its name and resolves locally to 127.0.1.1, as on
    Debian, but to another address elsewhere.

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
    """Return the network interface that routes to `host`, such as `eth0`; None if there is none."""
    for target in (host, DOCUMENTATION_ADDRESS):
        with suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                own = probe.getsockname()[0]
            if _is_loopback(own) and not _is_local(host):
                continue  # `host` is this machine's own name, see `listen`
            for name, addresses in psutil.net_if_addrs().items():
                if any(entry.address.split("%")[0] == own for entry in addresses):
                    return name
    return None


def _agent_has_store() -> bool:
    """Return whether torchrun keeps a store for its workers, which stays when it starts them again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _prefix(run: str) -> str:
    """Return the prefix of a run's keys in the store, which agents of several runs may share.

    It is another one after each restart if the store stays. Otherwise it is always the same: an agent of torchrun that
    joined later has counted fewer restarts.
    """
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if _agent_has_store() else "ranks"
    return f"{run}/{attempt}"


def _wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Wait until something listens there: torch's store would wait too, and end with C++ stack frames on stderr."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing listens there (--timeout {timeout:g})") from None
        time.sleep(0.1)


def _connect(rendezvous: Rendezvous, timeout: float, common: Mapping[str, Any]) -> dist.Store:
    """`join_store`, but errors of torch and of the operating system are not converted."""
    rank, place = rendezvous.rank, (rendezvous.host, rendezvous.port)
    common = {"--world_size": rendezvous.world_size, **common}
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    from_agent = rendezvous.launcher == "torch" and _agent_has_store()
    if rank == 0 and not from_agent:
        listener = listen(*place).detach()  # the store closes it
        store = dist.TCPStore(*place, is_master=True, master_listen_fd=listener, **options)
        store.set("run", rendezvous.run)
    else:
        _wait_for_listener(*place, timeout)
        store = dist.TCPStore(*place, is_master=False, **options)
        if not from_agent and (found := store.get("run").decode()) != rendezvous.run:
            of_others, own = (run or "started by hand" for run in (found, rendezvous.run))
            raise UserError(
                f"rank {rank} of this run ({own}) has met another run ({of_others}) at {place[0]}:{place[1]}: give "
                f"each a --port of its own",
                own=True,
            )
    store = dist.PrefixStore(_prefix(rendezvous.run), store)
    twice = store.add(f"rank-{rank}", 1) > 1
    if twice:
        store.set("problem", f"rank {rank} is there twice: give each process a --rank of its own")
    else:
        store.set(f"common-{rank}", json.dumps(common))
        if rank == 0:
            store.set("verdict", _verdict(store, rendezvous.world_size, timeout, common))
    if verdict := store.get("verdict").decode():
        if rank == 0:
            time.sleep(1.0)  # time for the others to read it, since the store ends with this process
        raise UserError(verdict, own=False)
    # Whoever comes after the verdict judges itself.
    late = f"rank {rank} is there twice" if twice else describe_difference(_common(store, 0), common, rank)
    if late:
        raise UserError(f"{late}; the run has started without this process", own=True)
    return store


def _common(store: dist.Store, rank: int) -> dict[str, Any]:
    return json.loads(store.get(f"common-{rank}"))


def _verdict(store: dist.Store, world_size: int, timeout: float, common: Mapping[str, Any]) -> str:
    """Rank 0's check that all ranks have joined once, and have the same in common: the error, or an empty string."""
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout
    while True:
        if store.check(["problem"]):
            return store.get("problem").decode()
        for rank in [rank for rank in missing if store.check([f"common-{rank}"])]:
            missing.remove(rank)
            if difference := describe_difference(common, _common(store, rank), rank):
                return difference
        if not missing:
            return ""
        if time.monotonic() > deadline:
            said = ", ".join(map(str, missing))
            return f"rank {said} of {world_size} did not come within {timeout:g} s (--timeout)"
        time.sleep(0.01)


def _end_at_foreign_listener(rendezvous: Rendezvous, joined: threading.Event) -> None:
    """End this process if it has not joined after `FOREIGN_GRACE` seconds because another program has the port.

    Without this check, joining would take the whole timeout to fail.
    """
    if joined.wait(timeout=FOREIGN_GRACE):
        return
    try:
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=2).close()
    except OSError:
        return  # nothing listens there yet

    def ask() -> None:
        with suppress(dist.DistError, RuntimeError):
            dist.TCPStore(rendezvous.host, rendezvous.port, timeout=timedelta(seconds=4), wait_for_workers=False)
            is_rank_0.set()

    is_rank_0 = threading.Event()
    threading.Thread(target=ask, daemon=True).start()  # in a thread, since a program that never answers blocks it
    if not is_rank_0.wait(timeout=4) and not joined.is_set():
        error = UserError(
            f"rank {rendezvous.rank} cannot reach rank 0 at {rendezvous.host}:{rendezvous.port}: the port is in use by "
            f"something else; choose another --port"
        )
        end_process(error.exit_code, error_line(error))


def join_store(rendezvous: Rendezvous, timeout: float, common: Mapping[str, Any]) -> dist.Store:
    """Wait until all ranks have joined, and check that they are of one run.

    Also sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, unless they are set, to the interface that routes to rank 0.

    Args:
        rendezvous: this process, and where rank 0 listens.
        timeout: seconds to wait.
        common: what all ranks must have in common, see `agreement.common`.

    Returns:
        The store that the ranks share.

    Raises:
        UserError: on all ranks, if one does not join in time, joins twice, or differs in `common`; on this one alone,
            if it meets another run, comes too late, or does not reach rank 0.
    """
    place = f"{rendezvous.host}:{rendezvous.port}"
    if (interface := interface_towards(rendezvous.host)) is not None:
        for library in ("GLOO", "NCCL"):  # default: the first interface, or that of the machine's name
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    joined = threading.Event()
    if rendezvous.rank > 0 and rendezvous.launcher != "torch":  # torchrun hosts the store itself
        threading.Thread(target=_end_at_foreign_listener, args=(rendezvous, joined), daemon=True).start()
    try:
        return _connect(rendezvous, timeout, common)
    except dist.DistNetworkError as error:
        reason = str(error).splitlines()[0]
    except dist.DistStoreError as error:
        reason = f"{str(error).splitlines()[0]} (--timeout {timeout:g})"
    except OSError as error:
        reason = (
            "the port is already in use; choose another --port" if error.errno == errno.EADDRINUSE else error.strerror
        )
    finally:
        joined.set()
    raise UserError(
        f"rank {rendezvous.rank} of {rendezvous.world_size} cannot reach the others at {place}: {reason}", own=True
    )
