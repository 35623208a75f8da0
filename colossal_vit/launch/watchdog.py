"""Ends all ranks when one ends, through a TCP connection from every rank to rank 0 that is open during training.

The kernel closes the connections of a process that dies, however it dies, so that the others notice immediately, under
any launcher. (In a collective operation, gloo soon reports a dead rank, but NCCL only after minutes.) Messages are
lines of text: `hello <rank> <host> <pid>` to rank 0; then, from either side, the exit code with which a rank ends.
"""

import os
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from colossal_vit.checkpoint import lock
from colossal_vit.errors import end_process
from colossal_vit.launch.rendezvous import is_own, listen

CONNECT_TIMEOUT = 10.0  # seconds
END_TIMEOUT = 2.0  # seconds that rank 0 waits for each of the others to end

current: "Watchdog | None" = None  # this process's, once the process groups exist


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


class Watchdog:
    """This rank's side of the connections, watched by a background thread.

    Args:
        rank: of this process.
        world_size: number of processes.
        host: rank 0's host, as the other ranks address it.

    Attributes:
        leaving: set when this rank ends by itself; other ranks' messages are ignored from then on.
        connections: to rank 0, or on rank 0 to all others; and who is there, for messages.
    """

    def __init__(self, rank: int, world_size: int, host: str):
        self.rank = rank
        self.leaving = threading.Event()
        self.connections: dict[socket.socket, str] = {}
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self._accept(store, world_size, host) if rank == 0 else self._connect(store, host)
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def _accept(self, store: dist.Store, world_size: int, host: str) -> None:
        """Accept the connections of the others (rank 0); of none if `host` is no address of this machine."""
        if not is_own(host):
            store.set("watchdog-port", "0")
            return
        listener = listen(host, 0)
        store.set("watchdog-port", str(listener.getsockname()[1]))
        listener.settimeout(CONNECT_TIMEOUT)
        with listener, suppress(TimeoutError):  # a rank that cannot connect is not watched
            for _ in range(world_size - 1):
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_TIMEOUT)
                hello = connection.makefile("r").readline().split()
                connection.settimeout(None)
                self.connections[connection] = f"rank {hello[1]} ({hello[2]}, process {hello[3]})"

    def _connect(self, store: dist.Store, host: str) -> None:
        """Connect to rank 0 (other ranks), if that is possible."""
        port = int(store.get("watchdog-port"))
        if port == 0:
            return
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        except OSError:
            return
        connection.settimeout(None)
        connection.sendall(f"hello {self.rank} {socket.gethostname()} {os.getpid()}\n".encode())
        self.connections[connection] = "rank 0"

    def _watch(self) -> None:
        """Wait until another rank ends; unless all is well with it, end this one, and on rank 0 all the others."""
        selector = selectors.DefaultSelector()
        for connection in self.connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                said = b""
                with suppress(OSError):
                    said = connection.recv(64)
                if self.leaving.is_set():
                    return
                selector.unregister(connection)
                code = int(said.split()[0]) if said else 1
                if code:
                    lock.remove_unused()  # held by rank 0, while the error is another's
                    self._tell(code)
                    prints = not said and self.rank <= 1  # that rank 0 died, all others know
                    end_process(code, f"{self.connections[connection]} died; the other ranks end too" * prints)

    def _tell(self, code: int) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.sendall(f"{code}\n".encode())

    def leave(self, code: int = 0) -> None:
        """Announce that this rank ends, before it does.

        If it ends the others, rank 0 then waits for them, because they may still use the store that it hosts.

        Args:
            code: exit code; with 0 the other ranks continue, with any other they end too, with this code.
        """
        self.leaving.set()
        self._tell(code)
        if code and self.rank == 0:
            for connection in self.connections:
                with suppress(OSError):
                    connection.settimeout(END_TIMEOUT)
                    while connection.recv(64):
                        pass
