"""Colossal-AI's legacy engine on a machine without CUDA: tensors on the CPU, gloo between processes.

Colossal-AI gets the device from its accelerator object in some places and from `torch.cuda` in others. `enable()`
redirects both to the CPU, inside Colossal-AI only: `torch.cuda` itself is not changed.
"""

import contextlib
import ctypes
import importlib
import os
import types
from pathlib import Path

import torch
from colossal_vit.compat.patches import overlay
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.context.random import add_seed, reset_seeds, set_mode

# Modules of Colossal-AI that call torch.cuda on any device.
_MODULES_CALLING_CUDA = (
    "colossalai.legacy.context.random._helper",
    "colossalai.legacy.context.random.seed_manager",
    "colossalai.legacy.communication.utils",
    "colossalai.legacy.nn.layer.parallel_3d._utils",
)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # as in malloc.h


class HostAccelerator(CpuAccelerator):
    """The CPU accelerator, with the methods that Colossal-AI calls and `CpuAccelerator` does not implement."""

    def synchronize(self, device=None) -> None:
        """Nothing to wait for: CPU operations are finished when they return."""

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()


# The functions of `torch.cuda` that Colossal-AI calls, implemented for the CPU.
_CUDA_ON_HOST = types.SimpleNamespace(
    current_device=lambda: torch.device("cpu"),
    default_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
    get_rng_state=lambda *args: torch.get_rng_state(),  # torch's own is looked up late: dry runs replace it
    is_available=lambda: False,
    manual_seed=torch.manual_seed,
    set_rng_state=lambda state, *args: torch.set_rng_state(state),
)


def num_idle_gpus(root: Path = Path("/")) -> int:
    """Return how many GPUs this machine has, if this process can use none and they are not hidden on purpose; else 0.

    Args:
        root: of the file system, where the NVIDIA driver lists its GPUs under `proc`, and WSL has `dev/dxg`.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    listed = root / "proc/driver/nvidia/gpus"
    return len(list(listed.iterdir())) if listed.is_dir() else int((root / "dev/dxg").exists())


def idle_gpus(root: Path = Path("/")) -> str | None:
    """Return a warning if this machine has GPUs that the installed torch cannot use; see `num_idle_gpus`."""
    if not (found := num_idle_gpus(root)):
        return None
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"warning: this machine has {found} NVIDIA GPU(s), but this run is on the CPU: torch {torch.__version__} is "
        f"built {built}. Compare with the CUDA Version in the first lines of nvidia-smi; `bash scripts/setup.sh` "
        f"installs what fits the driver"
    )


def _keep_freed_memory() -> None:
    """Have glibc reuse freed memory instead of giving it back to the system, as PyTorch does on GPUs.

    Otherwise the large tensors of each training step are new pages, which the system has to clear.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def enable() -> None:
    """Make Colossal-AI run on the CPU in this process. Call before launching; calling twice is harmless."""
    _keep_freed_memory()
    set_accelerator(HostAccelerator())
    torch_on_host = overlay(torch, cuda=_CUDA_ON_HOST)
    for name in _MODULES_CALLING_CUDA:
        module = importlib.import_module(name)
        with contextlib.suppress(AttributeError):
            module.torch = torch_on_host
    reset_seeds()
    for mode in (ParallelMode.TENSOR, ParallelMode.DATA):  # which Colossal-AI itself makes where there is CUDA
        add_seed(mode, 0)
    set_mode(ParallelMode.DATA)
