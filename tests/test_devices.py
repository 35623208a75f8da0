"""Machines with GPUs, as far as they can be had without one: counts and launchers are faked, tensors have no data."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from colossal_vit import dry_run, host, launch, patches
from colossal_vit.config import Config
from colossal_vit.errors import UserError
from colossal_vit.rendezvous import find_rendezvous
from colossalai.legacy.context.parallel_context import ParallelContext

import real
import recipes
import world

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
    command = [sys.executable, "-c", textwrap.dedent(program), *(str(world.ROOT / script) for script in SCRIPTS)]
    done = subprocess.run(command, env=real.environment(), capture_output=True, text=True)
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

        dry_run.plan(train_hybrid.main)
        return asked

    assert world.call(function, launched=False) == [[]]


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
        host.enable()  # Colossal-AI's tensors are on the CPU; it and we find these GPUs when we ask torch
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: visible
        torch.cuda.set_device = lambda device: events.append(("device", getattr(device, "index", device)))
        patches.apply()
        args = launch.get_parser().parse_args(["--config", "x", *(["--backend", backend] if backend else [])])
        meeting = find_rendezvous(args)
        config = Config(dict(SEED=1, parallel=dict(pipeline=1, tensor=dict(mode=None, size=1))))
        set_seed = ParallelContext.set_seed
        ParallelContext.set_seed = lambda self, seed: (events.append(("seeds",)), set_seed(self, seed))
        with dry_run.no_peers():
            without_peers = dist.init_process_group

            def init_process_group(*args, backend, device_id=None, **options):
                events.append(("groups", backend, device_id))
                without_peers(*args, backend=backend, **options)

            dist.init_process_group = init_process_group
            launch._launch(
                config, meeting, launch._backend(args, meeting), dist.HashStore(), 10.0, launch._device(meeting)
            )
        return events

    return world.call(function, launched=False)[0]


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
    meeting = SimpleNamespace(launcher="torch", rank=2, local_rank=2)
    with pytest.raises(UserError, match="rank 2 would be process 3 on this machine, which has 2 GPU"):
        launch._backend(SimpleNamespace(backend=None), meeting)
