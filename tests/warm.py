"""`python` and `torchrun` without start-up time: each process is a fork of this one, which has imported everything.

`Warm(folder)` puts both programs into `folder/bin`, and a file that makes bash use them even if an activated
environment comes first on PATH. A fork takes over the caller's arguments, environment, working directory and open
files, and imports the modules of this repository again, from the caller's paths; all others it finds imported.
"""

import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import colossal_vit.compat  # noqa: F401 like those marked so below: no process has to import it
import torch.distributed.launcher.api  # noqa: F401
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import fork_ranks

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(sys.prefix)

CLIENT = """#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect({address!r})
    call = json.dumps([{prefix!r} + sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [call], [0, 1, 2])
    code = int(server.recv(16) or b"1")
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""


def _forget_own_modules() -> None:
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(ROOT) and not path.is_relative_to(ENVIRONMENT):
            del sys.modules[name]


def _become(argv: list[str]) -> None:
    """Run `python argv...` in a forked process."""
    sys.executable = os.environ.get("WARM_EXECUTABLE", sys.executable)
    if argv[0] == "-u":
        argv = argv[1:]
    kept = [path for path in sys.path if not Path(path).is_relative_to(ROOT) or Path(path).is_relative_to(ENVIRONMENT)]
    given = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:] = ["", *filter(None, given), *kept]
    sys.dont_write_bytecode = False  # cache bytecode for the next process
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(argv[1], {"__name__": "__main__"})
    elif argv[0] == "-":
        sys.argv = argv
        exec(sys.stdin.read(), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _run(argv: list[str], environment: dict[str, str], cwd: str, files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)

    def program() -> None:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        _become(argv)

    fork_ranks.end_as(program)


def _answer(connection: socket.socket) -> None:
    """Run a client's command and send it the exit code; if the client ends first, kill the command."""
    call, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        _run(*json.loads(call), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:  # the client has ended
        os.kill(pid, signal.SIGKILL)
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _serve(listener: socket.socket) -> None:
    def reap(*_: object) -> None:
        with suppress(ChildProcessError):  # one signal may mean several children, and may interrupt this function
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)
    _forget_own_modules()
    # torchrun names each event by a walk through all modules, of which this process has thousands: a second of work.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            try:
                _answer(connection)
            finally:
                os._exit(0)
        connection.close()


class Warm:
    """Provides the two programs inside a `with` block.

    Attributes:
        environment: environment variables with which a shell uses them.
        throughout: the same, with which the programs in turn start Python at once, by `sys.executable`. Not for those
            that hand other files than 0 to 2 to it, as torch.compile's workers need.
    """

    def __init__(self, folder: Path):
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.address = str(folder / "socket")
        functions = []
        for name, prefix in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
            program = self.bin / name
            program.write_text(CLIENT.format(python=sys.executable, address=self.address, prefix=prefix))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            functions.append(f'{name}() {{ "{program}" "$@"; }}\n')
        (folder / "functions").write_text("".join(functions))
        self.environment = {"BASH_ENV": str(folder / "functions"), "PYTHON_EXEC": str(self.bin / "python")}
        self.throughout = {**self.environment, "WARM_EXECUTABLE": str(self.bin / "python")}

    def __enter__(self) -> "Warm":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.address)
        listener.listen(64)
        self.pid = os.fork()
        if self.pid == 0:
            fork_ranks.end_as(lambda: _serve(listener))
        listener.close()
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
