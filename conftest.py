import contextlib
import fcntl
import gc
import io
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks are forks, and thread pools do not survive a fork
os.environ.pop("DATA", None)
# Forks of a process that has initialised CUDA cannot use a GPU, and most tests start more ranks than there are GPUs.
# So all tests run on the CPU, except test_gpu.py, which starts new processes.
os.environ.setdefault("MY_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))  # pytest-xdist gets here again
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import colossal_vit.compat  # noqa: F401 so that forked ranks need not import it, nor the others that are marked so
import matplotlib.figure
import numpy as np
import pytest
import rich.console  # noqa: F401
import timm  # noqa: F401
import torch
import torch.utils.tensorboard
from colossal_vit import results
from colossal_vit.data.digits import digits
from colossal_vit.engine.engine import Engine
from colossal_vit.hooks import recorder
from colossal_vit.provenance import ResultFolder
from PIL import Image

import fork_ranks

with contextlib.suppress(ModuleNotFoundError):  # tests of another example do without this one
    import cifar10
    import train_dp  # noqa: F401
    import train_hybrid  # noqa: F401
    import vit
with contextlib.suppress(ModuleNotFoundError):  # gpu_check.py's tests do without DALI
    import imagenet_dali_dataloader  # noqa: F401

NUM_TEST_IMAGES = 90  # for `few_test_images`: two full batches of 32 and a part of one
MODULES = dict(sys.modules)  # what the train scripts import, and this file

torch.set_num_threads(1)
# Autograd initialises its device threads in the first backward pass; if it finds a GPU then, forks cannot use autograd.
# A FakeTensorMode with CUDA tensors makes it find one, so the first backward pass has to come before.
torch.ones(1, requires_grad=True).backward()
# The first picture makes matplotlib load a backend and fonts: here, so that forks which draw need not.
figure = matplotlib.figure.Figure()
figure.add_subplot(title="a title").plot([0, 1])
figure.savefig(io.BytesIO())
# To draw the curves takes longer than a small run. The fixture `curves` is for the tests that look at them.
recorder.draw = lambda directory: None
# Otherwise each fork's first collection touches, and so copies, the memory of all imported modules; and it destroys
# garbage of this process, such as the store of an earlier test, whose threads do not exist in the fork: that aborts it.
gc.freeze()
os.register_at_fork(after_in_child=gc.freeze)
# There are more ranks than cores, and they constantly wake each other. Under SCHED_BATCH a waking rank does not preempt
# a running one, which saves a third of the context switches.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it


def pytest_addoption(parser):
    group = parser.getgroup("random cases (tests/stress)")
    group.addoption("--cases", type=int, help="number of each kind (default: a few)")
    group.addoption("--seed", type=int, help="of the first one; the others' count up (default: made from the commit)")
    group.addoption("--result", type=Path, help="folder that gets a line for each, after those it has, and provenance")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config):
    if config.option.cases:
        config.option.timeout = 0  # a hundred cases take as long as they take
    if config.option.seed is None:  # not so in a worker of pytest-xdist, which gets the options of the others
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=fork_ranks.ROOT, capture_output=True, text=True)
        config.option.seed = int(commit.stdout[:6] or "0", 16)


def pytest_generate_tests(metafunc):
    """Give a test with the marker `cases` that many seeds in a row, unless --cases says how many."""
    if marker := metafunc.definition.get_closest_marker("cases"):
        first, number = metafunc.config.option.seed, metafunc.config.option.cases or marker.args[0]
        metafunc.parametrize("seed", range(first, first + number), ids=lambda seed: f"seed {seed}")


@pytest.fixture(scope="session")
def report(pytestconfig):
    """Prints a line on a random case and, with --result, adds it to the log there."""
    if (folder := pytestconfig.option.result) is None:
        return print
    result = ResultFolder(folder, command=shlex.join(["python", "-m", "pytest", *pytestconfig.invocation_params.args]))
    result.write_origin()

    def keep(line):
        with open(folder / "provenance.json") as locked:  # another run may add the cases of other seeds meanwhile
            fcntl.flock(locked, fcntl.LOCK_EX)
            result.log = (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""
            result.print(line)
            result.write_origin()

    return keep


def random_start(monkeypatch):
    """Start from weights that are all random: the usual zeros in the head would hide errors in the layers before it."""
    original = vit.full_vit

    def full_vit(config):
        model = original(config)
        generator = torch.Generator().manual_seed(config.SEED)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data = noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return model

    monkeypatch.setattr(vit, "full_vit", full_vit)


@pytest.fixture
def fresh_modules():
    """`sys.modules` as it was before the first test."""
    return MODULES


@pytest.fixture(autouse=True)
def nothing_left_running():
    """Kill the ranks that a failed test left running, so that they do not slow down later tests."""
    yield
    fork_ranks.end_all()


@pytest.fixture(autouse=True)
def environment_as_found():
    """Take back what a test has set in this process, such as the interface that a rendezvous in a thread has chosen."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """A user's folder: the loader of docs/data.md, a package that it does not know of, and images in its format."""
    folder = tmp_path_factory.mktemp("own")
    page = (fork_ranks.ROOT / "docs/data.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "arrays.py").write_text(source)
    images, labels, test_images, test_labels = digits(32)
    arrays = dict(train_images=images, train_labels=labels, test_images=test_images[:90], test_labels=test_labels[:90])
    arrays = {name: np.stack([a] * 3, axis=1) if name.endswith("images") else a for name, a in arrays.items()}
    np.savez(folder / "images.npz", **arrays)
    return folder


def small_digits(root, num_test_images=NUM_TEST_IMAGES):
    """Write the digits with some of their test images, as CIFAR-10."""
    folder = cifar10.write_images(root)
    os.truncate(folder / cifar10.TEST_FILES[0], num_test_images * cifar10.RECORD_BYTES)


@pytest.fixture(scope="session")
def small_sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    small_digits(root)
    return root


@pytest.fixture
def few_test_images(small_sample, monkeypatch):
    """Evaluate on `NUM_TEST_IMAGES` images only, for tests of many runs with evaluation."""
    monkeypatch.setenv("DATA", str(small_sample))


@pytest.fixture(scope="module")
def curves():
    """Runs draw their curves at the end, as they do outside the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "draw", results.draw)
        yield


@pytest.fixture
def random_weights(monkeypatch):
    random_start(monkeypatch)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """What is slow once, before there are ranks that would all do it; and one place for all tests' programs."""
    import torch._inductor.config as inductor

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    # With more than one thread, its pool, which no fork has, is waited for. Without vector instructions a kernel is
    # compiled in two thirds of the time, and Inductor does not first compile programs to find out which the CPU has.
    settings = {"compile_threads": 1, "cpp.vec_isa_ok": False}
    with pytest.MonkeyPatch.context() as patch, inductor.patch(settings):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        torch.compile(torch.nn.GELU())(torch.ones(32, requires_grad=True)).sum().backward()
        yield


ORIENTATION = 0x0112  # tag of EXIF
STORED = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


def photograph(width, height, number=0):
    """A coloured image, another one for each number, that looks otherwise turned, mirrored or with swapped channels."""
    generator = np.random.default_rng(number)
    coarse = Image.fromarray(generator.integers(20, 236, (5, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + generator.integers(-20, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


def encode(image, orientation=1, **options):
    """The bytes of an image file, by default a PNG, that its EXIF orientation turns into the image."""
    if orientation != 1:
        options["exif"] = exif = Image.Exif()
        exif[ORIENTATION] = orientation
        image = image.transpose(STORED[orientation])
    image.save(file := io.BytesIO(), **{"format": "PNG", **options})
    return file.getvalue()


class SmallDisk:
    """A separate file system at `path`, of the size last given to `resize`."""

    def __init__(self, path):
        self.path = path

    def resize(self, size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@pytest.fixture
def read_late(monkeypatch):
    """Have engines read the result of a step in the next one, as they do where the device is a GPU."""
    monkeypatch.setattr(Engine, "reads_late", True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB. The test is skipped without the permission to mount it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- Where the time goes ----

cpu_seconds: Counter[str] = Counter()  # by file
IN_ALL = "in all, imports included"


def _spent():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = _spent()
    result = yield
    cpu_seconds[item.path.name] += _spent() - before
    if item.config.option.verbose > 0:
        cpu_seconds[item.nodeid] += _spent() - before
    return result


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # what a worker of pytest-xdist tells the process that started it
        session.config.workeroutput["cpu_seconds"] = {**cpu_seconds, IN_ALL: _spent()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    cpu_seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter):
    cpu_seconds[IN_ALL] = cpu_seconds[IN_ALL] or _spent()
    terminalreporter.section("CPU seconds by file")
    for name, seconds in cpu_seconds.most_common():
        terminalreporter.line(f"{seconds:8.1f}  {name}")
