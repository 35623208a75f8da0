"""Machines with GPUs, as far as they can be had without one: counts and launchers are faked, tensors have no data."""

import itertools
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit.compat import cpu, patches
from colossal_vit.engine import build_optimizer, compilation, initialize
from colossal_vit.errors import UserError
from colossal_vit.launch import groups
from colossal_vit.launch.flags import get_parser
from colossal_vit.launch.launchers import find_rendezvous
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context.parallel_context import ParallelContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fake_gpu
import fork_ranks
import training

# ---- Which GPU, and when ---------------------------------------------------------------------------------------------


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


def launched_on_gpus(variables, visible, backend=None, pipeline=1, gpu_of=lambda rank: f"GPU-{rank}"):
    """What happens in which order when a rank starts on a machine of so many GPUs; `gpu_of` each rank is its UUID."""

    def function():
        events = []
        for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
            del os.environ[name]
        os.environ.update(variables)
        cpu.enable()  # Colossal-AI's tensors are on the CPU; it and we find these GPUs when we ask torch
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: visible
        torch.cuda.set_device = lambda device: events.append(("device", getattr(device, "index", device)))
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpu_of(rendezvous.rank))
        patches.apply()
        args = get_parser().parse_args(["--config", "x", *(["--backend", backend] if backend else [])])
        rendezvous = find_rendezvous(args)
        config = Config(dict(SEED=1, parallel=dict(pipeline=pipeline, tensor=dict(mode=None, size=1))))
        layout = Layout.of(config, rendezvous.world_size)
        store = dist.HashStore()
        for rank in range(rendezvous.world_size):  # what the others say
            store.set(f"gpu-{rank}", gpu_of(rank))
        ParallelContext.set_seed = lambda self, seed: events.append(("seeds",))
        fake_gpu.without_peers(lambda backend, device_id=None, **_: events.append(("groups", backend, device_id)))
        chosen, device = groups.choose_backend(args, rendezvous, layout), groups.choose_device(rendezvous)
        groups.launch_groups(config, rendezvous, chosen, store, 10.0, device)
        return events

    return fork_ranks.call(function, launched=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_device_is_chosen_before_the_groups_are_made(name):
    variables, visible, number = CASES[name]
    events = launched_on_gpus(variables, visible)
    assert events == [("device", number), ("groups", "nccl", torch.device("cuda", number)), ("seeds",)]


def test_gloo_is_bound_to_no_gpu():
    assert launched_on_gpus(torchrun(0, 0), 4, "gloo")[1] == ("groups", "gloo", None)


@pytest.mark.parametrize(("rank", "visible", "number"), [(1, 1, 0), (5, 4, 1), (2, 4, 2)])
def test_processes_that_gloo_connects_share_gpus(rank, visible, number):
    """More of them than GPUs, which NCCL refuses; two then have the same one."""
    events = launched_on_gpus(torchrun(rank, rank), visible, "gloo", gpu_of=lambda rank: "the same")
    assert events == [("device", number), ("groups", "gloo", None), ("seeds",)]


ONE_GPU = {"visible": 1, "gpu_of": lambda rank: "the only one"}  # each process sees it, as if it were bound to it


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        (slurm(1, 1, world_size=2), ONE_GPU, "ranks 0 and 1 have the same GPU: start at most one process"),
        (openmpi(1, 1), ONE_GPU, "ranks 0 and 1 have the same GPU: start at most one process"),
        (torchrun(2, 2), {"visible": 2}, "rank 2 would be process 3 on this machine, which has 2 GPU"),
        (
            torchrun(0, 0),
            {"visible": 4, "backend": "gloo", "pipeline": 2},
            "--backend gloo with parallel.pipeline = 2: gloo cannot send",
        ),
    ],
    ids=["srun", "mpirun", "torchrun", "gloo"],
)
def test_processes_that_gpus_do_not_fit_are_refused(variables, given, words):
    """On all ranks, before NCCL or gloo finds out."""
    with pytest.raises(AssertionError, match=f"UserError: {re.escape(words)}"):
        launched_on_gpus(variables, **given)


WITHHELD = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("variables", "flags", "refused"),
    [
        (WITHHELD, [], True),
        ({}, [], False),
        (WITHHELD, ["--backend", "gloo"], False),
        ({**WITHHELD, "CUDA_VISIBLE_DEVICES": ""}, [], False),
        ({**WITHHELD, "SLURM_GPUS_ON_NODE": "4"}, [], False),  # torch cannot use them, which the warning says
    ],
)
def test_gpus_that_slurm_withholds_are_asked_for(variables, flags, refused, tmp_path, monkeypatch):
    """A job that asked for none would train on CPUs."""
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    count = cpu.num_idle_gpus
    monkeypatch.setattr(cpu, "num_idle_gpus", lambda *_: count(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    argv = [*training.flags(), "--output", str(tmp_path / "run"), "--launcher", "none", "--max-steps", "1", *flags]
    result = fork_ranks.start(training.HYBRID, argv, [variables]).wait()
    assert result.codes == [2 if refused else 0], str(result)
    line = "this machine has 4 NVIDIA GPU(s), but none for this job: ask SLURM for them, by srun --gpus-per-node=4, or"
    assert (line in result.stderr[0]) == refused
    assert (tmp_path / "run").exists() != refused


# ---- What is installed -----------------------------------------------------------------------------------------------


NO_SET = "the CUDA 13 set, on the CPU"
MACHINES = {  # the driver's version and CUDA, compute capabilities of the GPUs, the architecture: what setup says
    "no driver": (None, None, [], "x86_64", f"no NVIDIA driver: {NO_SET}"),
    "an old driver": ("470.57", "11.4", [8.0], "x86_64", f"a driver for CUDA 11, too old on x86_64: {NO_SET}"),
    "CUDA 12": ("525.60", "12.0", [7.0, 8.0], "x86_64", "a driver for CUDA 12: the CUDA 12 set"),
    "CUDA 12, Blackwell": ("575.57", "12.9", [12.0], "x86_64", "a driver for CUDA 12: the CUDA 12 set"),
    "CUDA 12, ARM": ("550.54", "12.4", [9.0], "aarch64", f"a driver for CUDA 12, too old on aarch64: {NO_SET}"),
    "CUDA 13": ("580.65", "13.0", [7.5, 8.9, 12.1], "x86_64", "a driver for CUDA 13: the CUDA 13 set"),
    "CUDA 13, ARM": ("580.65", "13.0", [9.0], "aarch64", "a driver for CUDA 13: the CUDA 13 set"),
    "CUDA 13, Volta": ("580.65", "13.0", [7.0], "x86_64", "a driver for CUDA 13: the CUDA 12 set"),
    "CUDA 13, Pascal": ("580.65", "13.0", [6.1, 9.0], "x86_64", "a driver for CUDA 13: the CUDA 13 set"),
    "CUDA 14": ("620.10", "14.1", [9.0], "x86_64", "a driver for CUDA 14: the CUDA 13 set"),
}


def machine(folder, driver=None, cuda=None, gpus=(), architecture="x86_64", nvidia_smi=True, **programs):
    """A folder with scripts/setup.sh on a machine with this driver, and a uv that only notes what it is told.

    Args:
        folder: an empty one.
        driver: its version; None: there is none.
        cuda: the newest CUDA that it knows.
        gpus: their compute capabilities.
        architecture: what `uname -m` says.
        nvidia_smi: whether there is this program.
        programs: shell scripts by name, in place of those on PATH, or of uv in the environment.

    Returns:
        Runs a command there; `CompletedProcess`.
    """
    listed = "\\n".join(str(gpu) for gpu in gpus)
    scripts = {
        "nvidia-smi": f'''case "$*" in
            "") echo "| NVIDIA-SMI {driver}  Driver Version: {driver}  CUDA Version: {cuda}  |" ;;
            "--query-gpu=compute_cap --format=csv,noheader") printf "{listed}\\n" ;;
            *) exit 2 ;;
        esac''',
        "uname": f"echo {architecture}",
        "uv": 'echo "$UV_PROJECT_ENVIRONMENT $@" >> "$(dirname "$0")/told"',
        **programs,
    }
    if driver is None or not nvidia_smi:
        scripts["nvidia-smi"] = "exit 9"
    for name, lines in scripts.items():
        path = folder / ".venv/bin/uv" if name == "uv" else folder / "bin" / name
        if lines is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    if scripts["uv"]:
        (folder / ".venv/bin/activate").touch()
    proc = folder / "proc/driver/nvidia"
    if driver is not None:
        proc.mkdir(parents=True)
        module = "NVIDIA UNIX Open Kernel Module for x86_64"
        (proc / "version").write_text(
            f"NVRM version: {module}  {driver}.05  Release Build  Tue Sep 24 2024\nGCC version:  gcc 12.3.0\n"
        )
    (folder / "scripts").mkdir()
    for name in ("requirements.txt", "requirements-cu12.txt"):
        shutil.copy(fork_ranks.ROOT / name, folder)
    script = (fork_ranks.ROOT / "scripts/setup.sh").read_text()
    assert "/proc/driver/nvidia/version" in script
    (folder / "scripts/setup.sh").write_text(script.replace("/proc/driver/nvidia", str(proc)))

    def run(*command, **variables):
        given = {key: value for key, value in os.environ.items() if not key.startswith("VIT_")}
        environment = {**given, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    return run


SOURCE = ("bash", "-euo", "pipefail", "-c", "source scripts/setup.sh; echo continues")


@pytest.mark.parametrize("name", MACHINES)
def test_setup_installs_what_the_driver_and_gpus_take(name, tmp_path):
    *given, said = MACHINES[name]
    done = machine(tmp_path, *given)(*SOURCE)
    assert (done.returncode, done.stdout) == (0, f"setup: {said}, into {tmp_path}/.venv\ncontinues\n"), done.stderr
    told = (tmp_path / ".venv/bin/told").read_text()
    assert told.startswith(f"{tmp_path}/.venv sync --frozen")
    assert told.endswith(f"--no-default-groups --group dev --group cuda{re.search('CUDA (..) set', said).group(1)}\n")
    assert ("no kernels for the GPUs here of compute capability 6.1; set CUDA_" in done.stderr) == ("Pascal" in name)
    assert done.stderr.count("\n") == ("Pascal" in name)


@pytest.mark.parametrize(("driver", "cuda", "cuda_set"), [("470.57", 11, 13), ("525.60", 12, 12), ("580.65", 13, 13)])
def test_setup_finds_the_driver_without_nvidia_smi(driver, cuda, cuda_set, tmp_path):
    done = machine(tmp_path, driver, nvidia_smi=False)(*SOURCE)
    assert done.stdout.startswith(f"setup: a driver for CUDA {cuda}"), done.stderr
    assert f"the CUDA {cuda_set} set" in done.stdout


def test_setup_takes_a_set_and_a_folder_by_name(tmp_path):
    run = machine(tmp_path, "580.65", "13.0", [9.0])
    (tmp_path / "other").symlink_to(".venv")
    done = run(*SOURCE, VIT_CUDA_SET="12", VIT_VENV="other")
    assert done.stdout == f"setup: VIT_CUDA_SET: the CUDA 12 set, into {tmp_path}/other\ncontinues\n", done.stderr
    told = (tmp_path / ".venv/bin/told").read_text()
    assert told.startswith(f"{tmp_path}/other sync")
    assert told.endswith("--group cuda12\n")
    done = run(*SOURCE, VIT_CUDA_SET="11")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "setup: VIT_CUDA_SET = '11', and there are sets for CUDA 12 and 13\n"


def test_setup_removes_the_other_set_first(tmp_path):
    """Both have files of the same names, and what is listed as installed is not installed again."""
    run = machine(tmp_path, "580.65", "13.0", [9.0])
    (tmp_path / ".venv/lib/python3.11/site-packages/nvidia_dali_cuda120-2.4.0.dist-info").mkdir(parents=True)
    assert run(*SOURCE).returncode == 0
    removed, installed = (tmp_path / ".venv/bin/told").read_text().splitlines()
    removed = removed.split()
    assert removed[:2] == ["pip", "uninstall"]
    assert {"nvidia-dali-cuda120", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"} < set(removed)
    assert not {"torch", "numpy", "nvidia-dali-cuda130"} & set(removed)
    assert " sync " in installed


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({"uv": "exit 1"}, "uv could not install the CUDA 13 set into"),
        ({"uv": None, "python3": '[ "$1" = -c ]'}, "-m venv"),
        (
            {"uv": None, "python3": '[ "$1" = -c ] || { mkdir -p "$3/bin"; ln -s /bin/false "$3/bin/python"; }'},
            "pip could not install uv into",
        ),
    ],
    ids=["uv", "venv", "pip"],
)
@pytest.mark.parametrize("command", [SOURCE, ("bash", "scripts/setup.sh")], ids=["sourced", "run"])
def test_setup_ends_with_one_line_if_an_installation_fails(command, programs, words, tmp_path):
    done = machine(tmp_path, **programs)(*command)
    assert done.returncode == 2
    assert "continues" not in done.stdout
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_setup_knows_for_which_gpus_torch_has_kernels():
    """Of the set that is installed here; its list needs no GPU."""
    kernels = " ".join(name.removeprefix("sm_") for name in torch._C._cuda_getArchFlags().split())
    line = f'{torch.version.cuda.split(".")[0]}) kernels="{kernels}" ;;'
    assert line in (fork_ranks.ROOT / "scripts/setup.sh").read_text()


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


def test_warning_of_idle_gpus_is_the_first_line(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "idle_gpus", lambda: "warning: idle")
    said = training.train(tmp_path, steps=1).stdout[0]
    assert said.splitlines()[1].endswith(" warning: idle")


@pytest.mark.parametrize(
    ("kind", "variable", "words"), [("cuda", "CC", "a C compiler"), ("cpu", "CXX", "a C++ compiler")]
)
def test_compiling_without_compiler_or_headers_says_what_is_missing(kind, variable, words, tmp_path):
    """A compiler for the language that the kernels, or on a GPU their launchers, are in; and Python's headers."""

    def function():
        device, said = torch.device(kind), []
        assert compilation.missing(device) is None  # this machine has both
        os.environ[variable] = "no-such"
        for change in (lambda: os.environ.update({variable: "cat"}), lambda: None):
            said.append(compilation.missing(device))
            change()
            sysconfig.get_paths = lambda: {"include": str(tmp_path)}
        return said

    ((compiler, headers),) = fork_ranks.call(function)
    assert f"{words}, and 'no-such' is not on PATH" in compiler
    assert f"there is no {tmp_path}/Python.h: install them (Debian: apt-get install python3-dev)" in headers


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("key", ["TF32", "cudnn_benchmark", "cudnn_deterministic"])
def test_cudnn_switches_of_the_config_set_torchs(key, before):
    """Each alone, whatever they were before."""
    switches = {
        "TF32": [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")],
        "cudnn_benchmark": [(torch.backends.cudnn, "benchmark")],
        "cudnn_deterministic": [(torch.backends.cudnn, "deterministic")],
    }

    def function():
        for where, name in itertools.chain(*switches.values()):
            setattr(where, name, before)
        model = torch.nn.Linear(2, 2)
        initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return {key: {getattr(*switch) for switch in own} for key, own in switches.items()}

    for asked in (False, True):
        expected = {other: {asked if other == key else not asked} for other in switches}
        values = {other: asked if other == key else not asked for other in switches}
        assert fork_ranks.call(function, **values) == [expected]


def test_ddp_takes_the_arguments_of_the_config():
    """From the config's `torch_ddp` block; what is no argument is refused."""

    def function():
        model = torch.nn.Linear(4, 4)
        ddp, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return ddp.model.bucket_bytes_cap, ddp.model.static_graph

    settings = training.config_of(training.flags(**{"torch_ddp.bucket_cap_mb": 3, "torch_ddp.static_graph": True}))
    assert fork_ranks.call(function, 2, **settings) == [(3 * 2**20, True)] * 2
    settings = training.config_of(training.flags(**{"gradient_accumulation": 2, "torch_ddp.static_graph": True}))
    with pytest.raises(AssertionError, match="static_graph = True does not work with gradient_accumulation = 2"):
        fork_ranks.call(function, 2, **settings)
    with pytest.raises(UserError, match=r"unknown key torch_ddp.buckets"):
        training.config_of(training.flags(**{"torch_ddp.buckets": 3}))


# ---- How much is launched --------------------------------------------------------------------------------------------


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
    config = Config(configs.complete(dict(OPTIMIZER="adamw", LEARNING_RATE=0.1, WEIGHT_DECAY=0.1)))
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
def test_run_with_fused_adamw_resumes_to_the_bit(amp, monkeypatch, tmp_path):
    """The CPU has it, too."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda parameters, **options: adamw(parameters, **{**options, "fused": True})
    )
    whole = training.train(tmp_path / "whole", steps=6, amp=amp, DEPTH=1)
    for steps in (3, 6):
        parts = training.train(tmp_path / "parts", steps=steps, amp=amp, DEPTH=1)
    assert parts.records == whole.records


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
