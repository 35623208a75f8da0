"""The pages as a reader types them: every command, in the order of the page, in one clone; and what they promise.

A block that cannot run here has the reason in a comment before it, and its flags are read as the program reads them.
Where a model is too large for a CPU, flags are appended to the command: those of `SMALLER`. Each process is a fork of
this one (`warm`), also what srun and mpirun start, except for the quickstart, which is the real one. Python as they
start it is in test_slurm.py and test_nodes.py.
"""

import fcntl
import itertools
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from colossal_vit import config as configs
from colossal_vit.checkpoint import storage
from colossal_vit.config.schema import setting_at
from colossal_vit.data.digits import digits
from colossal_vit.launch.flags import get_parser
from colossal_vit.results import read_metrics
from PIL import Image

import build_tfrecords
import checkout
import fork_ranks
import launchers
import schemas
import training
import warm
from checkout import PAGES
from fork_ranks import ROOT

FENCE = re.compile(
    r"(?:^<!-- not typed: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
HYBRID = {"IMG_SIZE": 32, "PATCH_SIZE": 8, "HIDDEN_SIZE": 32, "DEPTH": 4, "NUM_HEADS": 4, "BATCH_SIZE": 128}
TIMM = {"IMG_SIZE": 32, "PATCH_SIZE": 8, "HIDDEN_SIZE": 32, "DEPTH": 2, "NUM_HEADS": 4, "BATCH_SIZE": 64}


def flags(values, steps=1):
    return [*(f"--set {key}={value}" for key, value in values.items()), *([f"--max-steps {steps}"] if steps else [])]


# Appended to the first train command that holds the words, in this order.
SMALLER = {
    "tools.parity": [],  # small as it is
    "python -m tools.planner": flags(HYBRID, steps=None),
    "train_hybrid.py --config ./configs/config_hybrid_parallel.py --set IMG_SIZE=32": flags({}),
    "train_dp.py": flags(TIMM),
    "train_hybrid.py --config ./configs/config_hybrid_parallel.py --dry-run": [],
    "train.py --config ./config.py --dry-run": [],
    'train_hybrid.py --config "./configs/$2".py $SMALL': [],  # small as it is
    "train_hybrid.py --config ./configs/config_pipeline_parallel.py $DIGITS": flags({}),
    "train_hybrid.py": flags(HYBRID),
    "train_slurm.sh ./configs/config_pipeline_parallel.py": flags(HYBRID),
    "train.py --config ./config/config_finetune.py $SMALL": [],
    "train.py --config ./config/config_finetune.py $EIGHT --dry-run": [],
    "--output ../runs/eight --set gradient_accumulation=2": flags(
        {**TIMM, "BATCH_SIZE": 16, "finetune": None}, steps=2
    ),
    "--output ../runs/eight": flags({**TIMM, "BATCH_SIZE": 16, "finetune": None}),
    "config_sample.py --max-steps 6": [],
    "config_sample.py": flags({}),
    "--set finetune.weights=../runs/exported": flags({}),
    "config_finetune_photos.py": flags({"IMG_SIZE": 56}),
    "train.py --config ./config/config_AMP_bf16.py --set IMG_SIZE=32": flags({}),
    "train.py --config ./config/": flags(TIMM),
    "train_slurm.sh ./config/": flags(TIMM),
}


@dataclass
class Block:
    """Commands of a page, and the lines that the page says they print."""

    page: Path
    number: int
    reason: str | None
    text: str
    promise: list[str]


def blocks(page):
    """The command blocks of a page; what it says that each `walk` prints stands before the first one."""
    found, promise = [], []
    for fence in FENCE.finditer(page.read_text()):
        if fence["language"] == "text" and fence["text"].startswith("epoch "):
            promise = fence["text"].splitlines()
        elif fence["language"] == "bash":
            walks = fence["text"].startswith("walk ")
            found.append(Block(page, len(found), fence["reason"], fence["text"], promise if walks else []))
    return found


def commands(text):
    """Logical lines: continuations joined, comments cut off."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if bare:
            yield re.sub(r" +", " ", bare)


def placed(page):
    """Each command of a page with its block and the folder in which the page has left the reader.

    Pages of docs/ begin in the root of the repository, others in their own folder.
    """
    folder = ROOT if page.parent == ROOT / "docs" else page.parent
    for block in blocks(page):
        for command in commands(block.text):
            yield block, command, folder
            if command.startswith("cd "):
                folder = (folder / shlex.split(command)[1]).resolve()


def smaller(command):
    """The command with the flags that make its model fit a CPU."""
    if not re.search(r"train\w*\.(py|sh) ", command):
        return command
    more = next(more for words, more in SMALLER.items() if words in command)
    return re.sub(r'( "\$\{@:3\}")?(; \})?$', lambda end: " ".join(["", *more]) + end[0], command, count=1)


def type_page(page, clone, environment):
    """Type a page in one shell, of a block that cannot run here where it leads; returns what each printed."""
    lines = ["set -euo pipefail"]
    for block, typed in itertools.groupby(placed(page), key=lambda place: place[0]):
        lines.append(f"echo '@@ block {block.number}'")
        runs = block.reason is None and "quickstart.sh" not in block.text
        lines += [smaller(command) for _, command, _ in typed if runs or command.startswith("cd ")]
    folder = clone / next(placed(page))[2].relative_to(ROOT)
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    parts = re.split(r"^@@ block (\d+)\n", done.stdout, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


# The lines of an evaluation, and of the last step of a run. How many others of steps there are is a matter of time.
END_OF_EPOCH = r"\d\d:\d\d:\d\d epoch \d+ of \d+: (step (\d+) of \2,|test )"
NUMBERS = re.compile(r"(\d+\.\d\d%|\(\d+ of \d+ images\)|\d+\.\d{3,})")


def agrees(promised, printed):
    """Whether a line is what the page says: losses to 4 digits, accuracies to 2 images, the rest to the letter."""
    here, there = NUMBERS.split(promised), NUMBERS.split(printed)
    if here[::2] != there[::2]:
        return False
    for own, other in zip(here[1::2], there[1::2], strict=True):
        (left, *total), (right, *same) = ([float(n) for n in re.findall(r"[\d.]+", text)] for text in (own, other))
        tolerance = 2 if total else 0.6 if "%" in own else 1e-3 * left
        if total != same or abs(left - right) > tolerance:
            return False
    return True


def test_output_on_a_page_agrees_only_within_its_tolerance():
    line = "epoch 0: test accuracy 16.39% (59 of 360 images), loss 2.2644"
    assert agrees(line, "epoch 0: test accuracy 16.94% (61 of 360 images), loss 2.2650")
    for wrong in ("loss 2.2744", "(62 of 360 images)", "(59 of 361 images)", "17.39%", "epoch 1"):
        pattern = {"l": r"loss .*", "(": r"\(.*\)", "1": r"\d+\.\d+%", "e": r"epoch \d"}[wrong[0]]
        assert not agrees(line, re.sub(pattern, wrong, line)), wrong


# ---------------------------------------------------------------------------------------------------------------------
# Typed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tracked and new files in an empty folder whose name has a space, with this environment."""
    root = tmp_path_factory.mktemp("pages") / "a clone"
    checkout.copy(root)
    (root / ".venv").symlink_to(sys.prefix)
    write_own_images(root)
    return root


def write_own_images(root):
    """The folder of docs/own-images.md, of every format, and an image beside it."""
    images, endings = digits(48), itertools.cycle((".jpg", ".PNG", ".webp", ".bmp", ".tiff", ".gif", ".JPEG"))
    for label, name in ((0, "zero"), (1, "one"), (7, "seven")):
        folder = root / "my-images" / name
        folder.mkdir(parents=True)
        for number in np.flatnonzero(images.train_labels == label)[:67]:
            Image.fromarray(images.train_images[number]).save(folder / f"{number}{next(endings)}")
    Image.fromarray(images.test_images[np.flatnonzero(images.test_labels == 7)[0]]).save(root / "photo.png")


@pytest.fixture(scope="module")
def quickstart(clone):
    """The first command of README.md, at a terminal, in this checkout; its run is then the clone's. What it printed."""
    before = set((ROOT / "runs").glob("quickstart-*"))
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = ["bash", "scripts/quickstart.sh"]
    process = subprocess.Popen(command, cwd=ROOT, env=launchers.environment(), stdin=end, stdout=end, stderr=end)
    os.close(end)
    said = b""
    while process.poll() is None or said[-1:]:
        try:
            said += (part := os.read(terminal, 100_000))
        except OSError:  # Linux says so that the other end is closed
            break
        if not part:
            break
    os.close(terminal)
    text = said.decode().replace("\r\n", "\n")
    assert process.wait() == 0, text
    (run,) = set((ROOT / "runs").glob("quickstart-*")) - before
    shutil.move(run, clone / "runs" / "quickstart-1")
    return text, run.name


def test_quickstart_learns_the_digits_and_says_where_everything_is(quickstart, clone):
    """At least 97 % on images never trained on, a pipeline of two stages, curves, a bar with the time left."""
    said, name = quickstart
    output = clone / "runs" / "quickstart-1"
    last = read_metrics(output)[1][-1]
    assert last["eval_accuracy"] >= 0.97
    assert f"Test accuracy: {last['eval_accuracy']:.2%} of 360 images that were never trained on" in said
    assert f"Run directory: {ROOT / 'runs' / name} (metrics.jsonl, loss.png, accuracy.png, config.json)" in said
    assert "pipeline 2" in said
    assert all((output / name).exists() for name in ("loss.png", "accuracy.png", "config.json", "checkpoints"))
    bar = rf"\d+/{last['step']} \[\d\d:\d\d<\d\d:\d\d, [^\r]*step[^\r]*, loss \d\.\d+, \d+ images/s\]"
    assert re.search(bar, said)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = launchers.Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


TYPED = [page for page in PAGES if any(block.reason is None for block in blocks(page))]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page(page, clone, quickstart, slurm, tmp_path):
    launchers.need(["openmpi-bin"], "mpirun")
    launchers.need(["tuxpaint-stamps-default"], "/usr/share/tuxpaint/stamps")
    with warm.Warm(tmp_path / "warm") as programs:
        environment = launchers.environment(
            PYTHONPATH=str(clone),
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1",
            PATH=f"{programs.bin}:{launchers.environment()['PATH']}",  # for `exec python`, which calls no function
            **slurm.variables,
            **programs.environment,
        )
        printed = type_page(page, clone, environment)
    for block in filter(lambda block: block.promise, blocks(page)):
        lines = [line[9:] for line in printed[block.number].splitlines() if re.match(END_OF_EPOCH, line)]
        times, rest = divmod(len(lines), len(block.promise))
        assert rest == 0
        assert times > 0, printed[block.number]
        for promised, line in zip(block.promise * times, lines, strict=True):
            assert agrees(promised, re.sub(r", \d+ images/s$", "", line)), f"{line!r} is not {promised!r}"


# ---------------------------------------------------------------------------------------------------------------------
# Read only
# ---------------------------------------------------------------------------------------------------------------------

UNTYPED = [
    pytest.param(page, command, folder, id=f"{page.relative_to(ROOT)}: {command}")
    for page in PAGES
    for block, command, folder in placed(page)
    if block.reason is not None
]


@pytest.mark.parametrize(("page", "command", "folder"), UNTYPED)
def test_command_that_cannot_run_here_has_flags_that_exist(page, command, folder):
    """Every file is in the folder where the reader is, every flag is one, and every override fits its config."""
    words = shlex.split(command)
    scripts = [number for number, word in enumerate(words) if re.search(r"(^|/)\w+\.(py|sh|sbatch)$", word)]
    if not scripts:
        known = ("pip", "apt-get", "cd", "export", "source")
        assert words[0] in known, "a kind of command that this test does not know"
        for word in words:
            assert not word.endswith(".txt") or (folder / word).exists(), word
        assert words[0] != "cd" or (folder / words[1]).is_dir(), f"{words[1]} in {folder}"
        return
    script, argv = words[scripts[0]], words[scripts[0] + 1 :]
    if script.startswith("my_"):  # test_api.py runs it
        return
    assert (folder / script).exists(), f"{script} in {folder}"
    if script.endswith("train.sbatch"):
        folder = ROOT / Path(argv[0]).parent
        argv = ["--config", *argv[1:]]
    elif script.endswith("train_slurm.sh"):
        argv = ["--config", *argv]
    elif script == "scripts/sample_data.py":
        assert argv[0] == "fashion-mnist"  # test_sample_data.py runs it
        return
    elif script == "build_tfrecords.py":
        build_tfrecords.parse(argv)
        return
    elif "tools.planner" in words:
        argv = argv[: argv.index("--machine")]
    elif Path(script).name in ("bench.py", "benchmark.py", "gpu_check.sh"):
        program = (folder / script).with_suffix(".py").resolve()
        enter = partial(sys.path.insert, 0, str(ROOT / "scripts"))  # as python does
        done = fork_ranks.run(program, [*argv, "--list"], enter=lambda rank: enter())
        assert done.codes == [0], str(done)
        return
    elif not script.startswith("train"):
        assert script in ("scripts/setup.sh", "scripts/test.sh", "scripts/quickstart.sh")
        return
    given = get_parser().parse_args(argv)
    configs.load(folder / given.config, given.set, schemas.any_key())


def test_the_config_of_the_page_on_moving_is_valid_and_has_the_keys_of_its_table(tmp_path):
    page = (ROOT / "docs/moving.md").read_text()
    (source,) = re.findall(r"^```python\n(MODEL = .*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_config.py").write_text(source)
    assert schemas.script(training.CALTECH101).load(tmp_path / "my_config.py").fp16.dtype == "bf16"
    keys = {
        key
        for row in re.findall(r"^\|.*\|(.*)\|$", page, re.MULTILINE)
        for key in re.findall(r"`([A-Za-z][\w.]+)`", row)
    }
    assert len(keys) > 25
    assert not {key for key in keys if setting_at(key, schemas.any_key()) is None}


def test_the_walk_covers_every_config():
    walks = re.findall(r"^walk \d (\w+)", (ROOT / "vit_cifar10_hybrid" / "README.md").read_text(), re.MULTILINE)
    shipped = {path.stem for path in (ROOT / "vit_cifar10_hybrid" / "configs").glob("config_*.py")}
    others = {"config_data_parallel", "config_fashion_mnist"}  # of train_dp.py, and of another data set
    assert set(walks) == shipped - others


def test_lines_that_the_hybrid_tutorial_shows_are_those_of_its_scripts():
    folder = ROOT / "vit_cifar10_hybrid"
    scripts = (folder / name for name in ("train_dp.py", "train_hybrid.py"))
    before, after = ({line.strip() for line in script.read_text().splitlines()} for script in scripts)
    page = (folder / "README.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    removed, added = ({line[1:].strip() for line in diff.splitlines() if line[0] == sign} for sign in "-+")
    assert removed <= before - after
    assert added <= after - before
    steps = re.findall(r"^(.+?)  # \d\. ", page, re.MULTILINE)
    assert len(steps) == 2
    assert set(steps) <= before & after


def test_a_checkpoint_of_the_quickstart_is_valid(quickstart, clone):
    """What the page verifies is what the run left."""
    assert storage.newest(clone / "runs" / "quickstart-1" / storage.FOLDER)[0]


def test_every_kind_of_appended_flag_is_used():
    typed = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.reason is None
        for command in commands(block.text)
        if re.search(r"train\w*\.(py|sh) ", command)
    ]
    used = {next(words for words in SMALLER if words in command) for command in typed}
    assert used == set(SMALLER)
