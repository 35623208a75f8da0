"""Every change made to Colossal-AI 0.5.0 itself, in one place. Each names the defect it mends; tests/test_patches.py
shows that each defect is real by taking the mend out.

What is mended by using Colossal-AI differently, rather than by changing it, stands with its user: `engine.py` (step,
clipping, accumulation, schedule), `precision.py` (mixed precision), `host.py` (machines without CUDA), `data.py`
(order of the samples).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from colossalai.legacy.context.parallel_context import ParallelContext
from colossalai.legacy.context.parallel_mode import ParallelMode
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils


def _init_global_dist(self, rank: int, world_size: int, backend: str, host: str, port: int) -> None:
    """Join the global process group at `host`:`port`.

    Mends: upstream builds `tcp://[host]:port` whatever the host is. Brackets are for IPv6 literals only, and Python
    from 3.11.4 on refuses them around anything else, so every launcher dies at once.
    """
    address = f"[{host}]" if ":" in host else host
    dist.init_process_group(rank=rank, world_size=world_size, backend=backend, init_method=f"tcp://{address}:{port}")
    ranks = list(range(world_size))
    cpu_group = dist.new_group(ranks, backend="gloo") if dist.get_backend() != "gloo" else None
    self._register_dist(rank, world_size, dist.GroupMember.WORLD, cpu_group, ranks, ParallelMode.GLOBAL)
    self.add_global_rank(ParallelMode.GLOBAL, rank)


def _async_grad_hook(grad, param_id):
    """Hand the gradient that a 3D layer is still reducing to the parameter it belongs to.

    Mends: from torch 2.0 on the hook is called with `grad=None` when the layer returned none, and upstream's adds
    to it.
    """
    pending = parallel_3d_utils.pop_async_grad(param_id)
    if pending is None:
        return grad
    return pending if grad is None else grad.add_(pending)


def apply() -> None:
    """Apply all patches to this process. Call before launching; calling twice is harmless."""
    ParallelContext.init_global_dist = _init_global_dist
    parallel_3d_utils._async_grad_hook = _async_grad_hook


@contextmanager
def group_timeout(seconds: float) -> Iterator[None]:
    """Give every process group made inside the block a timeout.

    Mends: upstream passes none, so a rank that waits for a dead one waits 10 minutes (NCCL) or 30 (gloo).
    """
    names = ("init_process_group", "new_group")
    originals = {name: getattr(dist, name) for name in names}
    for name, original in originals.items():
        setattr(dist, name, functools.partial(original, timeout=timedelta(seconds=seconds)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
