"""Device, backend and process groups of this rank."""

import argparse
import os

import colossalai.legacy as colossalai
import torch
import torch.distributed as dist
from colossal_vit.compat import patches
from colossal_vit.errors import UserError
from colossal_vit.launch.launchers import Rendezvous
from colossalai.context import Config


def choose_backend(args: argparse.Namespace, rendezvous: Rendezvous) -> str:
    """The backend `--backend`, or by default NCCL with CUDA and gloo without.

    Raises:
        UserError: if the backend is unknown or needs CUDA, or this machine has fewer GPUs than processes.
    """
    available = torch.cuda.is_available()
    backend = args.backend or ("nccl" if available else "gloo")
    if backend not in ("nccl", "gloo"):
        raise UserError(f"--backend {backend}: must be nccl (with CUDA) or gloo")
    if backend == "nccl" and not available:
        raise UserError("--backend nccl needs CUDA, which this machine lacks: leave the flag out or use gloo")
    if available and _device_index(rendezvous) >= torch.cuda.device_count():
        raise UserError(
            f"rank {rendezvous.rank} would be process {rendezvous.local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPU(s): start at most one process per GPU"
        )
    return backend


def _device_index(rendezvous: Rendezvous) -> int:
    """This process's index among the GPUs visible to it."""
    bound = rendezvous.launcher in ("slurm", "openmpi") and torch.cuda.device_count() == 1
    return 0 if bound else rendezvous.local_rank  # a launcher may make only one GPU visible to each process


def choose_device(rendezvous: Rendezvous) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", _device_index(rendezvous)) if torch.cuda.is_available() else torch.device("cpu")


def launch_groups(
    config: Config, rendezvous: Rendezvous, backend: str, store: dist.Store, timeout: float, device: torch.device
) -> None:
    """Create Colossal-AI's process groups, with its launch function for the launcher.

    Args:
        config: the resolved config; becomes `gpc.config`.
        rendezvous: this process.
        backend: "nccl", "gloo" or "fake".
        store: shared by all ranks, see `join_store`.
        timeout: of collective operations, in seconds.
        device: this rank's.
    """
    common = {"config": config, "backend": backend, "seed": config.SEED, "verbose": False}
    where = {"host": rendezvous.host, "port": rendezvous.port}
    with patches.groups(store, timeout, device):
        if rendezvous.launcher == "torch":
            os.environ.update(MASTER_ADDR=rendezvous.host, MASTER_PORT=str(rendezvous.port))
            colossalai.launch_from_torch(**common)
        elif rendezvous.launcher == "slurm":
            os.environ.setdefault("SLURM_NPROCS", os.environ["SLURM_NTASKS"])
            colossalai.launch_from_slurm(**common, **where)
        elif rendezvous.launcher == "openmpi":
            colossalai.launch_from_openmpi(**common, **where)
        else:
            place = dict(rank=rendezvous.rank, world_size=rendezvous.world_size, local_rank=rendezvous.local_rank)
            colossalai.launch(**common, **where, **place)
