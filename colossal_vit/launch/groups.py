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
    """NCCL with CUDA, gloo without, or what `--backend` says.

    Raises:
        UserError: if it cannot be, or this machine has fewer GPUs than processes.
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
            f"{torch.cuda.device_count()} GPU(s): start one process a GPU"
        )
    return backend


def _device_index(rendezvous: Rendezvous) -> int:
    """Which of the GPUs that this process sees is its own."""
    bound = rendezvous.launcher in ("slurm", "openmpi") and torch.cuda.device_count() == 1
    return 0 if bound else rendezvous.local_rank  # a launcher may show each process its own GPU only


def choose_device(rendezvous: Rendezvous) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", _device_index(rendezvous)) if torch.cuda.is_available() else torch.device("cpu")


def launch_groups(
    config: Config, rendezvous: Rendezvous, backend: str, store: dist.Store, timeout: float, device: torch.device
) -> None:
    """Have Colossal-AI make the process groups, with the launch function that fits the launcher."""
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
