import gc
import os
import resource
import signal
import subprocess
import sys
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks are forks, and thread pools do not survive a fork
os.environ.pop("DATA", None)
# Forks of a process that has asked for a GPU cannot use one, and most of these tests start more ranks than there are
# GPUs: all but test_gpu.py, which starts processes of its own, run on the CPU.
os.environ["GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import colossal_vit  # noqa: F401 silences what comes next
import colossalai.legacy  # noqa: F401 so that forked ranks need not import it, nor the others that are marked so
import matplotlib.figure  # noqa: F401
import pytest
import timm  # noqa: F401
import torch
import torch.utils.tensorboard
from colossal_vit.data.digits import write_cifar10

import cifar10
import fork_ranks
import train_dp  # noqa: F401
import train_hybrid  # noqa: F401
import vit

NUM_TEST_IMAGES = 90  # for `few_test_images`: two full batches of 32 and a part of one
MODULES = dict(sys.modules)  # what the train scripts import, and this file

torch.set_num_threads(1)
# Autograd looks for GPUs in its first backward pass, and where it finds one no fork can use it. A FakeTensorMode with
# CUDA tensors makes it find one, so the first pass has to come before.
torch.ones(1, requires_grad=True).backward()
gc.freeze()  # else each fork's first collection reads, and so copies, all that was imported
# More ranks than cores, each waking the others all the time: a rank that is not interrupted for one that has just woken
# up saves a third of the switches.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it


def random_start(monkeypatch):
    """Start from weights that are all random: the usual start has a head of zeros, which hides what is behind it."""
    original = vit.full_vit

    def full_vit(config):
        model = original(config)
        generator = torch.Generator().manual_seed(config.SEED)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return model

    monkeypatch.setattr(vit, "full_vit", full_vit)


@pytest.fixture
def fresh_modules():
    """The modules that were imported before the first test."""
    return MODULES


@pytest.fixture(autouse=True)
def nothing_left_running():
    """Ranks of a test that failed would take the processor from all that come after it."""
    yield
    fork_ranks.end_all()


def small_digits(root, num_test_images=NUM_TEST_IMAGES):
    """Write the digits with some of their test images, as CIFAR-10."""
    folder = write_cifar10(root)
    os.truncate(folder / cifar10.TEST_FILES[0], num_test_images * cifar10.RECORD_BYTES)


@pytest.fixture(scope="session")
def small_sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    small_digits(root)
    return root


@pytest.fixture
def few_test_images(small_sample, monkeypatch):
    """For runs that all evaluate."""
    monkeypatch.setenv("DATA", str(small_sample))


@pytest.fixture
def random_weights(monkeypatch):
    random_start(monkeypatch)


class SmallDisk:
    """A disk of its own at `path`, of the size last given to `resize`."""

    def __init__(self, path):
        self.path = path

    def resize(self, size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB. Takes the right to mount; skipped without."""
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


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("CPU seconds by file")
    for name, seconds in cpu_seconds.most_common():
        terminalreporter.line(f"{seconds:8.1f}  {name}")
    terminalreporter.line(f"{_spent():8.1f}  in all, imports included")
