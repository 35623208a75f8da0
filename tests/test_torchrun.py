"""`python -m colossal_vit.launch.torchrun`: how it ends, around scripts that do no more than end."""

import os
import signal
import sys

import pytest
from colossal_vit.launch import torchrun

import fork_ranks
import launchers

# Each rank does its own part of `parts`; one that waits is ended by torchrun once the other one has failed.
SCRIPT = """
import os, signal, sys, time
rank = os.environ["RANK"]

def fail(code):
    print("train.py: the last line", file=sys.stderr)
    sys.exit(code)

def wait():
    open(sys.argv[1] + rank, "w").close()
    time.sleep(1000)

def wait_for_a_signal():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(75))
    wait()

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

[{parts}][int(rank)]()
"""


def start(tmp_path, parts, *flags):
    """Start two ranks under torchrun in a fork; returns its process."""
    (tmp_path / "train.py").write_text(SCRIPT.format(parts=parts))
    words = ["--standalone", "--nproc_per_node", "2", str(tmp_path / "train.py"), str(tmp_path / "ready"), *flags]
    if not (pid := os.fork()):
        code = 99
        try:
            code = torchrun.main(words)
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("parts", "code", "last"),
    [
        ("lambda: fail(2), wait", 2, ["train.py: the last line"]),
        ("wait, lambda: fail(75)", 75, ["train.py: the last line"]),
        ("wait, killed", 137, ["torchrun: error: rank 1 ended by SIGKILL"]),
        ("int, int", 0, []),
    ],
    ids=["a mistake", "a stop", "a rank is killed", "the end"],
)
def test_torchrun_ends_with_the_exit_code_and_the_last_line_of_its_ranks(parts, code, last, tmp_path, capfd):
    assert exit_code(start(tmp_path, parts)) == code
    assert capfd.readouterr().err.splitlines() == last


@pytest.mark.parametrize(
    ("number", "flags", "code"),
    [(signal.SIGINT, [], 130), (signal.SIGTERM, [], 75), (signal.SIGTERM, ["--exit-code-stopped", "143"], 143)],
)
def test_torchrun_that_is_told_to_stop_ends_with_the_exit_code_of_a_stop(number, flags, code, tmp_path, capfd):
    pid = start(tmp_path, "wait_for_a_signal, wait_for_a_signal", *flags)
    launchers.wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "the ranks have not started")
    os.kill(pid, number)
    assert exit_code(pid) == code
    assert capfd.readouterr().err == ""


def test_torchrun_with_a_wrong_flag_is_one_line(capfd):
    words = ["--nproc_per_node", "many", "train.py"]
    assert fork_ranks.call(lambda: torchrun.main(words), launched=False) == [2]
    assert capfd.readouterr().err == "torchrun: error: Unsupported nproc_per_node value: many\n"
