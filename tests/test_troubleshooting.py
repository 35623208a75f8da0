"""docs/troubleshooting.md: each line that it shows is what a user sees, reproduced here."""

import os
import re
import signal
import socket

import pytest
from colossal_vit.checkpoint import lock
from PIL import Image

import fork_ranks
import launchers
import training
from training import CONFIG, DATA_PARALLEL, HYBRID

PAGE = (fork_ranks.ROOT / "docs" / "troubleshooting.md").read_text()
SHOWN = re.findall(r"^## ([^\n]+)\n\n```text\n(.+?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = {title: text.replace("\n", " ") for title, text in SHOWN}  # broken on the page, whole in the terminal

pytestmark = pytest.mark.usefixtures("few_test_images")


def said(*argv, script=HYBRID, code=2):
    """What one process writes to stderr before it ends with this exit code."""
    result = fork_ranks.run(script, [*map(str, argv)])
    assert result.codes == [code], str(result)
    return result.stderr[0]


def by_hand(rank, port, *more, host="localhost"):
    return said("--config", CONFIG, "--rank", rank, "--world_size", 2, "--host", host, "--port", port, *more)


def small(tmp_path, *more, **values):
    return [*training.flags(**{"DEPTH": 1, "BATCH_SIZE": 128, **values}), "--output", tmp_path / "run", *more]


def other_values(tmp_path, monkeypatch):
    said(*small(tmp_path, "--max-steps", 1), code=0)
    return said(*small(tmp_path, "--max-steps", 2, "--set", "LEARNING_RATE=1e-3"))


def damaged(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(4):
            path = tmp_path / "data" / name / f"{number}.jpg"
            Image.new("L", (400, 400), 9 * number).save(path)
        (path.parent / "0.jpg").write_bytes(path.read_bytes()[:2000])
    return said(*small(tmp_path, DATA=str(tmp_path / "data"), BATCH_SIZE=4, NUM_CLASSES=2))


def locked(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.5)
    assert lock.DirectoryLock().acquire(tmp_path / "run") is None
    return said(*small(tmp_path))


def taken_port(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        return by_hand(0, other.getsockname()[1], host="127.0.0.1")


def killed(tmp_path, monkeypatch):
    argv = small(tmp_path, *fork_ranks.FOREVER, BATCH_SIZE=16, NUM_EPOCHS=1000)
    ranks = fork_ranks.start(HYBRID, [*map(str, argv)], fork_ranks.by_torchrun(2))
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") >= 2, lambda: ranks.output(0, "err"))
    os.kill(ranks.pids[1], signal.SIGKILL)
    result = ranks.wait()
    assert result.codes == [1, -signal.SIGKILL], str(result)
    return result.stderr[0]


def not_finite(tmp_path, monkeypatch):
    return said(*small(tmp_path, "--max-steps", 9, LEARNING_RATE=1e30, clip_grad_norm=0.0), code=1)


REPRODUCED = {
    "Why does the number of processes not fit?": lambda *_: said("--config", "configs/config_hybrid_parallel.py"),
    "Why is the batch larger than the data set?": lambda *_: said(
        "--config", "configs/config_data_parallel.py", script=DATA_PARALLEL
    ),
    "Why is a key unknown?": lambda *_: said("--config", CONFIG, "--set", "LERNING_RATE=1e-3"),
    "Why does my run not resume?": other_values,
    "What about images that cannot be decoded?": damaged,
    "Who is writing to my run directory?": locked,
    "Why does a rank not come?": lambda *_: by_hand(0, fork_ranks.free_port(), "--timeout", 3),
    "Why is the port in use?": taken_port,
    "Why did a rank die?": killed,
    "Why is the gradient not finite?": not_finite,
    "Why does AMP_TYPE.TORCH not work with a pipeline?": lambda *_: by_torchrun_stage(
        "--set", "fp16.mode=AMP_TYPE.TORCH"
    ),
}


def by_torchrun_stage(*more):
    """What the first of two pipeline stages says."""
    result = fork_ranks.run(HYBRID, ["--config", CONFIG, *more], 2)
    assert result.codes == [2, 2], str(result)
    return "".join(result.stderr)


def test_the_page_has_the_lines_that_are_reproduced():
    assert LINES.keys() == REPRODUCED.keys()


@pytest.mark.parametrize("title", REPRODUCED)
def test_the_line_of_the_page_is_what_the_user_sees(title, tmp_path, monkeypatch):
    """Word for word, but for `...`, which stands for what differs."""
    monkeypatch.delenv("DATA", raising=False)
    pattern = ".+".join(map(re.escape, LINES[title].split("...")))
    seen = REPRODUCED[title](tmp_path, monkeypatch).splitlines()
    assert any(re.fullmatch(pattern, line) for line in seen), (LINES[title], seen)
