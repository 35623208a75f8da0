"""Every change made to Colossal-AI 0.5.0 itself, in one place. Each names the defect it fixes; tests/test_patches.py
shows that each defect is real by taking the fix out. Two are long and stand in files of their own, `stand_ins.py`,
which has to come before Colossal-AI's import, and `norms.py`.

What is fixed by using Colossal-AI differently, rather than by changing it, is in the room that needs it: `engine/`
(step, clipping, accumulation, schedule, mixed precision), `compat/cpu.py` (machines without CUDA), `data/samplers.py`
(order of the samples).
"""

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.compat import norms
from colossalai.accelerator import get_accelerator
from colossalai.legacy import communication
from colossalai.legacy.communication import p2p
from colossalai.legacy.context.parallel_context import ParallelContext
from colossalai.legacy.nn.layer import parallel_2d, parallel_2p5d, parallel_3d
from colossalai.legacy.nn.layer.parallel_1d import _operation as parallel_1d_operation
from colossalai.legacy.nn.layer.parallel_2d import _operation as parallel_2d_operation
from colossalai.legacy.nn.layer.parallel_2p5d import _operation as parallel_2p5d_operation
from colossalai.legacy.nn.layer.parallel_3d import _operation as parallel_3d_operation
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils


def _async_grad_hook(grad, param_id):
    """Hand the gradient that a 3D layer is still reducing to the parameter it belongs to.

    Fixes: from torch 2.0 on the hook is called with `grad=None` when the layer returned none, and upstream's adds
    to it.
    """
    pending = parallel_3d_utils.pop_async_grad(param_id)
    if pending is None:
        return grad
    return pending if grad is None else grad.add_(pending)


def overlay(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    """A module that answers like `module`, but for the `changes`: patches one importer of it and no other."""
    changed = types.ModuleType(module.__name__)
    changed.__getattr__ = lambda name: getattr(module, name)
    changed.__dict__.update(changes)
    return changed


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Exchange tensors with the neighbouring stages, such that messages meet who they are meant for.

    Fixes: in a pipeline of two stages the previous and the next stage are the same rank. It sends to its previous stage
    first and to its next one second, and messages between two ranks arrive in order, but upstream receives from the
    previous stage first: activations and gradients are swapped.
    """
    sends = [operation for operation in operations if operation.op is dist.isend]
    receives = [operation for operation in operations if operation.op is not dist.isend]
    return dist.batch_isend_irecv(sends + receives[::-1])


def _follow_autocast(function: type[torch.autograd.Function]) -> None:
    """Make a layer's operation compute in the data type of the autocast region it runs in, on any device.

    Fixes: upstream's operations cast to float16 whenever CUDA's autocast is on, also when that is bfloat16, and on the
    CPU not at all, which mixes types and fails. Those upstream computes in float32 (norms, losses) stay so.
    """
    forward, backward = inspect.unwrap(function.forward), inspect.unwrap(function.backward)
    if getattr(function, "follows_autocast", False):
        return
    in_fp32 = inspect.getclosurevars(function.forward).nonlocals.get("cast_inputs") is torch.float32

    def forward_in_autocast_dtype(ctx, *args):
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        if not torch.is_autocast_enabled(device):
            return forward(ctx, *args)
        dtype = torch.float32 if in_fp32 else torch.get_autocast_dtype(device)
        cast = (arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)
        with torch.autocast(device, enabled=False):
            return forward(ctx, *cast)

    function.forward, function.backward = staticmethod(forward_in_autocast_dtype), staticmethod(backward)
    function.follows_autocast = True


class _NoSynchronize:
    """An accelerator as Colossal-AI's pipeline sees it.

    Fixes: upstream has the host wait for the device after each exchange of the stages. The wait of the request is
    enough: it makes the device's queue wait for the message.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(get_accelerator(), name)

    def synchronize(self, device: Any = None) -> None:
        pass


def apply() -> None:
    """Apply all patches to this process. Call before launching; calling twice is harmless."""
    for module in (parallel_1d_operation, parallel_2d_operation, parallel_2p5d_operation, parallel_3d_operation):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, torch.autograd.Function):
                _follow_autocast(value)
    p2p.dist = overlay(dist, batch_isend_irecv=_batch_isend_irecv)
    p2p.get_accelerator = _NoSynchronize
    parallel_3d_utils._async_grad_hook = _async_grad_hook
    parallel_2d.LayerNorm2D.forward = norms.forward_2d
    parallel_2p5d.LayerNorm2p5D.forward = norms.forward_2p5d
    parallel_3d.LayerNorm3D.forward = norms.forward_3d


def set_pipeline_dtype(dtype: torch.dtype) -> None:
    """Tell the pipeline's communication the data type of activations.

    Fixes: the interleaved schedule asks for its last gradients without saying their type, and gets float32.
    """
    communication.recv_backward = functools.partial(p2p.recv_backward, dtype=dtype)


@contextmanager
def groups(store: dist.Store, seconds: float, device: torch.device) -> Iterator[None]:
    """Have the process groups made inside the block meet in `store`, each with a timeout, and on this rank's device.

    With torch's backend "fake", all of them are groups whose other members need not exist.

    Fixes: upstream asks torch to meet at `tcp://[host]:port` whatever the host is, but brackets are for IPv6 literals
    only, and Python from 3.11.4 on refuses them around anything else, so every launcher dies at once; and the store
    that torch makes there listens at every address of the machine. It passes no timeout, so a rank that waits for a
    dead one waits 10 minutes (NCCL) or 30 (gloo). And it chooses the device once the groups are made, by the rank
    modulo the number of GPUs under srun, and by the local rank under mpirun, whatever GPUs the process sees.
    """
    init, new, set_device = dist.init_process_group, dist.new_group, ParallelContext.set_device
    timeout = timedelta(seconds=seconds)

    def init_process_group(*args: Any, init_method: str | None = None, backend: str, **options: Any) -> None:
        if backend == "nccl":
            options["device_id"] = device
        init(*args, backend=backend, store=store, timeout=timeout, **options)

    def new_group(*args: Any, **options: Any) -> dist.ProcessGroup:
        if dist.get_backend() == "fake":
            options["backend"] = "fake"
        return new(*args, timeout=timeout, **options)

    dist.init_process_group, dist.new_group = init_process_group, new_group
    ParallelContext.set_device = lambda *_: None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield
    finally:
        dist.init_process_group, dist.new_group, ParallelContext.set_device = init, new, set_device
