"""Machines with GPUs, as far as they can be had without one: counts and launchers are faked, tensors have no data."""

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from colossal_vit.compat import cpu, patches
from colossal_vit.engine import assembly, build_optimizer, initialize
from colossal_vit.errors import UserError
from colossal_vit.launch import groups
from colossal_vit.launch.flags import get_parser
from colossal_vit.launch.launchers import find_rendezvous
from colossal_vit.plan import report
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context.parallel_context import ParallelContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fake_gpu
import fork_ranks
import launchers
import recipes

SCRIPTS = ["vit_cifar10_hybrid/train_hybrid.py", "vit_cifar10_hybrid/train_dp.py", "vit_caltech101_amp/train.py"]
SCRIPTS += ["vit_imagenet_dali/train.py", "vit_caltech101_amp/benchmark.py"]

# ---------------------------------------------------------------------------------------------------------------------
# Processes that fork
# ---------------------------------------------------------------------------------------------------------------------


def test_importing_a_script_asks_for_no_gpu():
    """A process that has asked cannot fork, as `--dry-run` does; and ranks that ask take memory of the first GPU."""
    program = """
        import os, runpy, sys, torch
        from contextlib import suppress

        def refuse(*_):
            raise AssertionError("asks for a GPU")

        torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = torch.cuda.is_available = refuse
        for script in sys.argv[1:]:
            sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
            with suppress(SystemExit):
                runpy.run_path(script, run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), *(str(fork_ranks.ROOT / script) for script in SCRIPTS)]
    done = subprocess.run(command, env=launchers.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == len(SCRIPTS)


def test_a_dry_run_asks_for_a_gpu_in_its_forks_only():
    """As on a machine with one: the processes that plan would not work otherwise."""

    def function():
        asked = []
        torch._C._cuda_getDeviceCount = lambda: asked.append(os.getpid()) or 0
        torch.cuda.is_available = lambda: torch._C._cuda_getDeviceCount() > 0
        sys.argv = ["train_hybrid.py", *recipes.flags(), "--dry-run"]
        import train_hybrid

        report.plan(train_hybrid.main)
        return asked

    assert fork_ranks.call(function, launched=False) == [[]]


# ---------------------------------------------------------------------------------------------------------------------
# Which GPU, and when
# ---------------------------------------------------------------------------------------------------------------------


def slurm(rank, local_rank, world_size=8):
    values = dict(PROCID=rank, LOCALID=local_rank, NTASKS=world_size, JOB_ID=7, STEP_ID=0, NODELIST="localhost")
    return {f"SLURM_{key}": str(value) for key, value in values.items()}


def openmpi(rank, local_rank):
    values = dict(RANK=rank, LOCAL_RANK=local_rank, SIZE=4, LOCAL_SIZE=4)
    return {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in values.items()}


def torchrun(rank, local_rank):
    values = dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=8, MASTER_ADDR="localhost", MASTER_PORT=29500)
    return {key: str(value) for key, value in values.items()}


CASES = {  # environment, GPUs that the process sees, the one it is to take
    "srun, 4 tasks a node of 8 GPUs, block": (slurm(5, 1), 8, 1),
    "srun, 4 tasks a node of 4 GPUs, block": (slurm(6, 2), 4, 2),
    "srun, 4 tasks a node of 4 GPUs, cyclic": (slurm(5, 2), 4, 2),
    "srun, 4 tasks a node of 8 GPUs, cyclic": (slurm(7, 3), 8, 3),
    "srun --gpus-per-task=1": (slurm(5, 1), 1, 0),
    "mpirun": (openmpi(2, 2), 4, 2),
    "mpirun, each process sees its own GPU": (openmpi(2, 2), 1, 0),
    "torchrun": (torchrun(5, 1), 4, 1),
}


def launched_on_gpus(variables, visible, backend=None):
    """What happens in which order when a rank starts on a machine of so many GPUs."""

    def function():
        events = []
        for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
            del os.environ[name]
        os.environ.update(variables)
        cpu.enable()  # Colossal-AI's tensors are on the CPU; it and we find these GPUs when we ask torch
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: visible
        torch.cuda.set_device = lambda device: events.append(("device", getattr(device, "index", device)))
        patches.apply()
        args = get_parser().parse_args(["--config", "x", *(["--backend", backend] if backend else [])])
        rendezvous = find_rendezvous(args)
        config = Config(dict(SEED=1, parallel=dict(pipeline=1, tensor=dict(mode=None, size=1))))
        set_seed = ParallelContext.set_seed
        ParallelContext.set_seed = lambda self, seed: (events.append(("seeds",)), set_seed(self, seed))
        fake_gpu.without_peers(lambda backend, device_id=None, **_: events.append(("groups", backend, device_id)))
        chosen, device = groups.choose_backend(args, rendezvous), groups.choose_device(rendezvous)
        groups.launch_groups(config, rendezvous, chosen, dist.HashStore(), 10.0, device)
        return events

    return fork_ranks.call(function, launched=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_device_is_chosen_before_the_groups_are_made(name):
    variables, visible, number = CASES[name]
    events = launched_on_gpus(variables, visible)
    assert events == [("device", number), ("groups", "nccl", torch.device("cuda", number)), ("seeds",)]


def test_gloo_is_bound_to_no_gpu():
    assert launched_on_gpus(torchrun(0, 0), 4, "gloo")[1] == ("groups", "gloo", None)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    rendezvous = SimpleNamespace(launcher="torch", rank=2, local_rank=2)
    with pytest.raises(UserError, match="rank 2 would be process 3 on this machine, which has 2 GPU"):
        groups.choose_backend(SimpleNamespace(backend=None), rendezvous)


# ---------------------------------------------------------------------------------------------------------------------
# What is installed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "said", "installs"),
    [
        (None, "no NVIDIA driver: the CUDA 13 set, on the CPU", "sync --frozen"),
        ("13.0", "a driver for CUDA 13: the CUDA 13 set", "sync --frozen"),
        (
            "12.4",
            "a driver for CUDA 12: the CUDA 12 set, requirements-cu12.txt",
            "-r requirements-cu12.txt --group dev",
        ),
        ("11.8", "a driver for CUDA 11, too old for either set: the CUDA 13 set, on the CPU", "sync --frozen"),
    ],
)
def test_setup_installs_what_the_driver_takes(driver, said, installs, tmp_path):
    """With a uv that only notes what it is told."""
    programs = tmp_path / "bin"
    for path, lines in {
        tmp_path / ".venv/bin/uv": 'echo "$@" > "$(dirname "$0")/told"',
        programs / "nvidia-smi": f'echo "| NVIDIA-SMI 999.9  Driver Version: 999.9  CUDA Version: {driver}  |"',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    if driver is None:
        (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "scripts").mkdir()
    shutil.copy(fork_ranks.ROOT / "scripts/setup.sh", tmp_path / "scripts")
    command = ["bash", "-euo", "pipefail", "-c", "source scripts/setup.sh"]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"setup: {said}, into {tmp_path}/.venv\n"), done.stderr
    assert installs in (tmp_path / ".venv/bin/told").read_text()


def test_gpus_that_torch_cannot_use_are_told_of(tmp_path, monkeypatch):
    """Not where there are none, where they are hidden on purpose, and where they are used."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cpu.idle_gpus(tmp_path) is None
    for number in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warning = cpu.idle_gpus(tmp_path)
    assert warning.startswith("warning: this machine has 2 NVIDIA GPU(s), but this run is on the CPU: torch 2.")
    assert "\n" not in warning
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpu.idle_gpus(tmp_path) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.idle_gpus(tmp_path) is None


def test_the_warning_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "idle_gpus", lambda: "warning: idle")
    said = fork_ranks.run(recipes.HYBRID, [*recipes.flags(), "--output", str(tmp_path), "--max-steps", "1"]).stdout[0]
    assert said.splitlines()[1].endswith(" warning: idle")


@pytest.mark.parametrize(
    ("kind", "variable", "words"), [("cuda", "CC", "a C compiler"), ("cpu", "CXX", "a C++ compiler")]
)
def test_what_compiling_takes(kind, variable, words, tmp_path):
    """A compiler for the language that the kernels, or on a GPU their launchers, are in; and Python's headers."""

    def function():
        device, said = torch.device(kind), []
        assembly._check_compilable(device)  # this machine has both
        os.environ[variable] = "no-such"
        for change in (lambda: os.environ.update({variable: "cat"}), lambda: None):
            with pytest.raises(UserError) as error:
                assembly._check_compilable(device)
            said.append(str(error.value))
            change()
            sysconfig.get_paths = lambda: {"include": str(tmp_path)}
        return said

    ((compiler, headers),) = fork_ranks.call(function)
    assert f"COMPILE = True needs {words}, and 'no-such' is not on PATH" in compiler
    assert f"there is no {tmp_path}/Python.h: install them (Debian: apt-get install python3-dev)" in headers


def test_arguments_of_ddp():
    """From the config's `torch_ddp` block; what is no argument is refused."""

    def function():
        model = torch.nn.Linear(4, 4)
        ddp, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return ddp.model.bucket_bytes_cap, ddp.model.static_graph

    settings = recipes.config(recipes.flags(**{"torch_ddp.bucket_cap_mb": 3, "torch_ddp.static_graph": True}))
    assert fork_ranks.call(function, 2, **settings) == [(3 * 2**20, True)] * 2
    settings = recipes.config(recipes.flags(**{"gradient_accumulation": 2, "torch_ddp.static_graph": True}))
    with pytest.raises(AssertionError, match="static_graph = True does not work with gradient_accumulation = 2"):
        fork_ranks.call(function, 2, **settings)
    with pytest.raises(UserError, match=r"unknown key torch_ddp.buckets"):
        recipes.config(recipes.flags(**{"torch_ddp.buckets": 3}))


# ---------------------------------------------------------------------------------------------------------------------
# How much is launched
# ---------------------------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts by name the operators that are dispatched inside the block."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def in_second_call(step):
    """How many operators the second call of `step` dispatches: the first one of an optimizer makes its state."""
    step()
    with Operators() as operators:
        step()
    return operators.names.total()


def test_adamws_update_on_a_gpu_is_one_kernel(monkeypatch):
    config = Config(dict(OPTIMIZER="adamw", LEARNING_RATE=0.1, WEIGHT_DECAY=0.1))
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.ones(5, 6, device="cuda")) for _ in range(10)]
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            optimizer = build_optimizer(config, torch.nn.ParameterList(parameters))
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with Operators() as operators:
                optimizer.step()
        assert operators.names["_fused_adamw_"] == 1
        assert {state["step"].device.type for state in optimizer.state.values()} == {"cuda"}


@pytest.mark.parametrize("amp", [None, "NAIVE"])
def test_a_run_with_that_kernel_resumes_to_the_bit(amp, monkeypatch, tmp_path):
    """The CPU has it, too."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda parameters, **options: adamw(parameters, **{**options, "fused": True})
    )
    whole, _ = recipes.train(tmp_path / "whole", steps=6, amp=amp, DEPTH=1)
    for steps in (3, 6):
        parts, _ = recipes.train(tmp_path / "parts", steps=steps, amp=amp, DEPTH=1)
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole]


@pytest.mark.parametrize("fp16", [None, dict(mode=AMP_TYPE.TORCH, dtype="bf16")], ids=["fp32", "TORCH"])
def test_a_step_dispatches_about_what_a_bare_loop_does(fp16):
    """The same timm model and optimizer, clipped: at most 5 % more operators, and each one is a launch on a GPU."""

    def function():
        images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=4)
        optimizer = torch.optim.AdamW(model.parameters())

        def bare_step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=fp16 is not None):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        bare = in_second_call(bare_step)
        ours, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss())

        def engine_step():
            ours.zero_grad()
            ours.execute_schedule(iter([(images, labels)]), return_loss=True)
            ours.step()

        ours.train()
        return in_second_call(engine_step), bare

    ((ours, bare),) = fork_ranks.call(function, fp16=fp16, clip_grad_norm=1.0)
    assert bare > 300
    assert ours <= 1.05 * bare, (ours, bare)
