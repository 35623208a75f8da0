"""Device, backend and process groups of this rank."""

import argparse
import os
import time

import colossalai.legacy as colossalai
import torch
import torch.distributed as dist
from colossal_vit.compat import cpu, patches
from colossal_vit.errors import UserError
from colossal_vit.launch.launchers import Rendezvous
from colossal_vit.parallel.layout import Layout
from colossalai.context import Config
from colossalai.legacy.core import global_context as gpc


def choose_backend(args: argparse.Namespace, rendezvous: Rendezvous, layout: Layout) -> str:
    """Return the backend `--backend`, or by default NCCL with CUDA and gloo without.

    Raises:
        UserError: if the backend needs CUDA or cannot send what the layout sends, or NCCL is to connect more processes
            than this machine has GPUs.
    """
    available = torch.cuda.is_available()
    backend = args.backend or ("nccl" if available else "gloo")
    if backend == "nccl" and not available:
        raise UserError("--backend nccl needs CUDA, which this machine lacks: leave the flag out or use gloo")
    if backend == "gloo" and available and layout.pipeline > 1:
        raise UserError(
            f"--backend gloo with parallel.pipeline = {layout.pipeline}: gloo cannot send from one GPU to another what "
            f"stages hand on: leave the flag out, or set CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    works = rendezvous.rank < layout.world_size  # a process without work needs no GPU
    if backend == "nccl" and works and device_index(rendezvous) >= torch.cuda.device_count():
        raise UserError(
            f"rank {rendezvous.rank} would be process {rendezvous.local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPU(s): start at most one process per GPU"
        )
    return backend


def device_index(rendezvous: Rendezvous) -> int:
    """Return this process's index among the GPUs visible to it."""
    bound = rendezvous.launcher in ("slurm", "openmpi") and torch.cuda.device_count() == 1
    return 0 if bound else rendezvous.local_rank  # a launcher may make only one GPU visible to each process


def check_granted(args: argparse.Namespace) -> None:
    """Check that SLURM has not withheld this machine's GPUs from a job that did not ask for any.

    Where it enforces requests, a job without one would train on CPUs, hundreds of times slower.

    Raises:
        UserError: if it has, unless the user has chosen CPUs, by `--backend gloo` or an empty CUDA_VISIBLE_DEVICES.
    """
    granted = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"} & os.environ.keys()
    if args.backend is None and "SLURM_JOB_ID" in os.environ and not granted and (count := cpu.num_idle_gpus()):
        raise UserError(
            f"this machine has {count} NVIDIA GPU(s), but none for this job: ask SLURM for them, by srun "
            f"--gpus-per-node={count}, or give --backend gloo to train on CPUs"
        )


def prepare_device(dtype: str, rendezvous: Rendezvous) -> torch.device:
    """Correct and set what this process has of torch and Colossal-AI; returns its device.

    Args:
        dtype: name of torch's default type.
        rendezvous: this process.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    if not torch.cuda.is_available():
        cpu.enable()
    patches.apply()
    return choose_device(rendezvous)


def choose_device(rendezvous: Rendezvous) -> torch.device:
    """Return this rank's device: where there are fewer GPUs than processes, which only gloo can connect, they share."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(rendezvous) % torch.cuda.device_count())


def _check_own_gpu(rendezvous: Rendezvous, store: dist.Store, device: torch.device) -> None:
    """Check that each rank has a GPU of its own, which NCCL needs. Collective.

    A process that sees one GPU only may have been bound to its own one, or be on a machine that has no other.

    Raises:
        UserError: on every rank, if two have the same one.
    """
    keys = [f"gpu-{rank}" for rank in range(rendezvous.world_size)]
    store.set(keys[rendezvous.rank], str(torch.cuda.get_device_properties(device).uuid))
    ranks: dict[bytes, list[int]] = {}
    for rank, gpu in enumerate(store.multi_get(keys)):
        ranks.setdefault(gpu, []).append(rank)
    shared = next((found for found in ranks.values() if len(found) > 1), None)
    if shared:
        if rendezvous.rank == 0:
            time.sleep(1.0)  # time for the others to read it, since the store may end with this process
        raise UserError(
            f"ranks {shared[0]} and {shared[1]} have the same GPU: start at most one process per GPU, on each machine "
            f"as many as it has"
        )


def launch_groups(
    config: Config, rendezvous: Rendezvous, backend: str, store: dist.Store, timeout: float, device: torch.device
) -> Config:
    """Create Colossal-AI's process groups, with its launch function for the launcher.

    Args:
        config: the resolved config.
        rendezvous: this process.
        backend: "nccl", "gloo" or "fake".
        store: shared by all ranks, see `join_store`.
        timeout: of collective operations, in seconds.
        device: this rank's.

    Returns:
        `gpc.config`, a copy of the config that Colossal-AI has made.

    Raises:
        UserError: on every rank, if NCCL is to connect two that have the same GPU.
    """
    common = {"config": config, "backend": backend, "seed": config.SEED, "verbose": False}
    where, world_size = {"host": rendezvous.host, "port": rendezvous.port}, str(rendezvous.world_size)
    with patches.groups(store, timeout, device):
        if device.type == "cuda" and rendezvous.world_size > 1 and backend == "nccl":
            _check_own_gpu(rendezvous, store, device)
        if rendezvous.launcher == "torch":
            os.environ.update(MASTER_ADDR=rendezvous.host, MASTER_PORT=str(rendezvous.port), WORLD_SIZE=world_size)
            colossalai.launch_from_torch(**common)
        elif rendezvous.launcher == "slurm":
            os.environ["SLURM_NPROCS"] = world_size
            colossalai.launch_from_slurm(**common, **where)
        elif rendezvous.launcher == "openmpi":
            os.environ["OMPI_COMM_WORLD_SIZE"] = world_size
            colossalai.launch_from_openmpi(**common, **where)
        else:
            place = dict(rank=rendezvous.rank, world_size=rendezvous.world_size, local_rank=rendezvous.local_rank)
            colossalai.launch(**common, **where, **place)
    return gpc.config
