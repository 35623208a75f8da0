"""Ends all ranks when one ends, through a TCP connection from every rank to rank 0 that is open during training.

The kernel closes the connections of a process that dies, however it dies, so that the others notice immediately, under
any launcher. (In a collective operation, gloo soon reports a dead rank, but NCCL only after minutes.) Messages are
lines of text: `hello <rank> <host> <pid>`, then `bye` or `end <code>` from a rank; `bye` or `end <code>` from rank 0.
"""

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist
from colossal_vit.errors import end_process
from colossal_vit.launch.rendezvous import is_own, listen

CONNECT_TIMEOUT = 10.0  # seconds
END_TIMEOUT = 2.0  # seconds that rank 0 waits for each of the others to end


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this process with one line if the block, which creates process groups, takes longer.

    Timeouts alone notice a rank that dies before the watchdogs exist, and gloo waits for it several times in a row.
    """
    line = f"the process groups do not exist after {seconds:g} s: a rank died or cannot be reached; see --timeout"
    timer = threading.Timer(seconds, end_process, (1, line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _receive(connection: socket.socket) -> tuple[str, int]:
    """Return the next message's word and exit code; "died" if the connection ends without one."""
    try:
        word, *code = connection.recv(64).decode().split() or ["died"]
    except OSError:
        word, code = "died", []
    return word, int(code[0]) if code else 1


class Watchdog:
    """This rank's side of the connections, watched by a background thread.

    Args:
        rank: of this process.
        world_size: number of processes.
        host: rank 0's host, as the other ranks address it.
        end: ends this process with an exit code and, unless it is None, a line: another rank has ended.

    Attributes:
        leaving: set when this rank ends by itself; other ranks' messages are ignored from then on.
        connections: to rank 0, or on rank 0 to all others.
    """

    def __init__(self, rank: int, world_size: int, host: str, end: Callable[[int, str | None], NoReturn]):
        self.rank, self._end = rank, end
        self.leaving = threading.Event()
        self.connections: list[socket.socket] = []
        if world_size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        watch = self._accept(store, world_size, host) if rank == 0 else self._connect(store, host)
        if watch is not None:
            threading.Thread(target=watch, daemon=True, name="watchdog").start()

    def _accept(self, store: dist.Store, world_size: int, host: str) -> Callable[[], None] | None:
        """Accept the connections of the others (rank 0); None if `host` is no address of this machine."""
        if not is_own(host):
            store.set("watchdog-port", "0")
            return None
        listener = listen(host, 0)
        store.set("watchdog-port", str(listener.getsockname()[1]))
        listener.settimeout(CONNECT_TIMEOUT)
        names = {}
        with listener, suppress(TimeoutError):  # a rank that cannot connect is not watched
            for _ in range(world_size - 1):
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_TIMEOUT)
                hello = connection.makefile("r").readline().split()
                connection.settimeout(None)
                names[connection] = f"rank {hello[1]} ({hello[2]}, process {hello[3]})"
        self.connections = list(names)
        return lambda: self._watch_all(names)

    def _connect(self, store: dist.Store, host: str) -> Callable[[], None] | None:
        """Connect to rank 0 (other ranks); None if that is not possible."""
        port = int(store.get("watchdog-port"))
        if port == 0:
            return None
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        except OSError:
            return None
        connection.settimeout(None)
        connection.sendall(f"hello {self.rank} {socket.gethostname()} {os.getpid()}\n".encode())
        self.connections = [connection]
        return self._watch_first

    def _watch_all(self, names: dict[socket.socket, str]) -> None:
        """Wait until a rank ends, then end all others (rank 0)."""
        selector = selectors.DefaultSelector()
        for connection in names:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                word, code = _receive(connection)
                if self.leaving.is_set():
                    return
                selector.unregister(connection)
                if word == "bye":
                    continue
                self._tell(f"end {code}")
                self._end(code, None if word == "end" else f"{names[connection]} died; the other ranks end too")

    def _watch_first(self) -> None:
        """Wait for a message from rank 0, or for its end (other ranks)."""
        word, code = _receive(self.connections[0])
        if self.leaving.is_set() or word == "bye":
            return
        said = "rank 0 died; the other ranks end too" if word == "died" and self.rank == 1 else None
        self._end(code, said)

    def _tell(self, message: str) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.sendall(f"{message}\n".encode())

    def leave(self, code: int = 0, all_leave: bool = False) -> None:
        """Announce that this rank ends, before it does.

        If the others end too, rank 0 then waits for them, because they may still use the store that it hosts.

        Args:
            code: exit code; with 0 the other ranks continue, with any other they end too, with this code.
            all_leave: every rank ends by itself, with this code, and may have something to do before.
        """
        self.leaving.set()
        self._tell(f"end {code}" if code and not all_leave else "bye")
        if code and self.rank == 0:
            for connection in self.connections:
                with suppress(OSError):
                    connection.settimeout(END_TIMEOUT)
                    while connection.recv(64):
                        pass
