"""All patches of Colossal-AI 0.5.0. Each names the defect it fixes; tests/test_patches.py demonstrates each defect by
removing the fix. Four have their own modules: `norms.py`, `compiled.py`, `patch_embedding.py`, and `import_stubs.py`,
which `colossal_vit.compat` applies when it imports Colossal-AI.

Defects that are avoided by using Colossal-AI differently, without a patch, are handled where they matter: `engine/`
(step, clipping, accumulation, schedule, mixed precision), `compat/cpu.py` (machines without CUDA), `data/samplers.py`
(order of the samples).
"""

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.compat import compiled, norms, patch_embedding
from colossalai import amp
from colossalai.accelerator import get_accelerator
from colossalai.legacy import amp as legacy_amp
from colossalai.legacy import communication
from colossalai.legacy.communication import collective, p2p
from colossalai.legacy.context.parallel_context import ParallelContext
from colossalai.legacy.nn.layer import parallel_2d, parallel_2p5d, parallel_3d, vanilla
from colossalai.legacy.nn.layer.parallel_1d import _operation as parallel_1d_operation
from colossalai.legacy.nn.layer.parallel_2d import _operation as parallel_2d_operation
from colossalai.legacy.nn.layer.parallel_2p5d import _operation as parallel_2p5d_operation
from colossalai.legacy.nn.layer.parallel_3d import _operation as parallel_3d_operation
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils
from torch import Tensor

IN_FP32 = ("_ReduceByBatch2D", "_RreduceByBatch2p5D", "_ReduceByBatch3D")  # autograd functions, under autocast
IN_FP32 += ("_AllGatherTensor2D", "_AllGatherTensor2p5D")


def _async_grad_hook(grad, param_id):
    """Give a parameter of a 3D layer its gradient, which the layer reduces asynchronously.

    Fixes: from torch 2.0 on the hook is called with `grad=None` if the layer returned none, and upstream's hook adds
    to it.
    """
    pending = parallel_3d_utils.pop_async_grad(param_id)
    if pending is None:
        return grad
    return pending if grad is None else grad.add_(pending)


def drop_gradients_of_frozen() -> None:
    """Free the gradients that 3D layers have reduced for parameters which are not trained. Call after a backward pass.

    Fixes: the layers compute and reduce the gradient of every parameter, and keep it until the parameter's hook takes
    it; the hook of a parameter without gradient is never called.
    """
    bucket = parallel_3d_utils._async_grad_bucket.bucket
    for work, _ in bucket.values():
        if work is not None:
            work.wait()
    bucket.clear()


def _broadcast_copy(tensor: Tensor, *source: Any) -> Tensor:
    """Broadcast the weight of a 3D classifier.

    Fixes: upstream broadcasts into the parameter, and so has it in the backward pass. But `fully_shard` frees what it
    has gathered, and gathers it again for the backward pass.
    """
    return collective.broadcast(tensor.clone(), *source)


def overlay(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    """Return a copy of `module` with some attributes replaced, to patch it for one importer and no other."""
    changed = types.ModuleType(module.__name__)
    changed.__getattr__ = lambda name: getattr(module, name)
    changed.__dict__.update(changes)
    return changed


def _filling_ops_queue(tensors: Tensor | list[Tensor], operation: Callable, peer: int, queue: list[dist.P2POp]) -> None:
    """Put the sends or receives of one direction into the queue of an exchange between neighbouring stages.

    Fixes: with two stages, the previous and the next stage are the same rank. Each rank sends to its previous stage
    first and to its next stage second; upstream also receives from the previous stage first. Since messages between two
    ranks arrive in order, activations and gradients are swapped. Here what is received from the next stage, which is
    queued second, goes to the front. Several tensors of one direction keep their order.
    """
    own = [dist.P2POp(operation, tensor, peer) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    queue[:] = own + queue if operation is dist.irecv else queue + own


def _follow_autocast(function: type[torch.autograd.Function]) -> None:
    """Make a layer's autograd function compute in the data type of the enclosing autocast region, on any device.

    Fixes: under CUDA autocast, upstream's functions cast to float16 even if autocast is to bfloat16; under CPU autocast
    they do not cast, which mixes types and fails. Means of losses, which upstream computes in float32, still are. So
    are the gathered parameters of the patch embedding: in half precision the sums of their gradients overflow.
    """
    forward, backward = inspect.unwrap(function.forward), inspect.unwrap(function.backward)
    in_fp32 = function.__name__ in IN_FP32
    if getattr(function, "follows_autocast", False):
        return

    def forward_in_autocast_dtype(ctx, *args):
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        if not torch.is_autocast_enabled(device):
            return forward(ctx, *args)
        dtype = torch.float32 if in_fp32 else torch.get_autocast_dtype(device)
        cast = [arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        with torch.autocast(device, enabled=False):
            return forward(ctx, *cast)

    function.forward, function.backward = staticmethod(forward_in_autocast_dtype), staticmethod(backward)
    function.follows_autocast = True


class _NoSynchronize:
    """The accelerator for Colossal-AI's pipeline, without synchronisation.

    Fixes: upstream synchronises host and device after each exchange between stages. Waiting for the request is enough:
    it makes the device's stream wait for the message.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(get_accelerator(), name)

    def synchronize(self, device: Any = None) -> None:
        pass


def _ignore_warnings() -> None:
    """Hide the warnings of Colossal-AI, and those that its layers cause in every step; tests check their gradients."""
    warnings.filterwarnings("ignore", module=r"colossalai\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"c10d::\w+: an autograd kernel was not registered", category=UserWarning)


def apply() -> None:
    """Apply all patches to this process. Call before launching; calling twice is harmless."""
    _ignore_warnings()
    for module in (parallel_1d_operation, parallel_2d_operation, parallel_2p5d_operation, parallel_3d_operation):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, torch.autograd.Function):
                _follow_autocast(value)
    parallel_1d_operation.dist = overlay(dist, all_reduce=compiled.all_reduce)
    collective._reduce_scatter_func = compiled.reduce_scatter
    parallel_2d.layers.Matmul_AB_2D = compiled.Product("2d")
    parallel_2p5d.layers.Matmul_AB_2p5D = compiled.Product("2.5d")
    parallel_2p5d.layers.add_bias_2p5d = compiled.add_bias_2p5d
    parallel_3d_operation.broadcast = _broadcast_copy
    parallel_3d_operation.id, parallel_3d_operation.push_async_grad = compiled.key_of, compiled.push_async_grad
    p2p.filling_ops_queue = _filling_ops_queue
    p2p.get_accelerator = _NoSynchronize
    parallel_3d_utils._async_grad_hook = _async_grad_hook
    parallel_2d.LayerNorm2D.forward = norms.forward_2d
    parallel_2p5d.LayerNorm2p5D.forward = norms.forward_2p5d
    parallel_3d.LayerNorm3D.forward = norms.forward_3d
    vanilla.VanillaPatchEmbedding.forward = patch_embedding.forward_vanilla


def restore_amp_type() -> None:
    """Put AMP_TYPE where configs import it from: `colossalai.amp`.

    Fixes: 0.5.0 has it in `colossalai.legacy.amp` only, so that no config of the tutorials loads.
    """
    amp.AMP_TYPE = legacy_amp.AMP_TYPE
    sys.modules.setdefault("colossalai.amp.amp_type", legacy_amp.amp_type)


def set_pipeline_dtype(dtype: torch.dtype) -> None:
    """Set the data type of gradients that pipeline stages receive.

    Fixes: the interleaved schedule receives its last gradients without a data type, which means float32.
    """
    communication.recv_backward = functools.partial(p2p.recv_backward, dtype=dtype)


@contextmanager
def groups(store: dist.Store, seconds: float, device: torch.device) -> Iterator[None]:
    """Create process groups inside the block through `store`, each with a timeout, and on this rank's device.

    With torch's backend "fake", all groups are fake ones, whose other members need not exist, and groups of others are
    not created at all: a million of them would take minutes.

    Fixes: upstream initialises torch from `tcp://[host]:port` for any host. Brackets are for IPv6 literals only, and
    Python from 3.11.4 on rejects them around anything else, so that every launcher fails; and the store that torch
    creates there listens on all interfaces. Upstream sets no timeout, so that a rank waits 10 minutes (NCCL) or 30
    (gloo) for a dead one. And it selects the device after creating the groups, as rank modulo number of GPUs under srun
    and as local rank under mpirun, even if the launcher shows each process only one GPU.

    Args:
        store: shared by all ranks.
        seconds: the timeout of each group.
        device: this rank's device.
    """
    changed = [(dist, name) for name in ("init_process_group", "new_group", "get_backend")]
    changed += [(ParallelContext, name) for name in ("set_device", "detect_num_processes_on_current_node")]
    originals = [getattr(owner, name) for owner, name in changed]
    init, new, *_ = originals
    timeout = timedelta(seconds=seconds)

    def init_process_group(*args: Any, init_method: str | None = None, backend: str, **options: Any) -> None:
        if backend == "nccl":
            options["device_id"] = device
        init(*args, backend=backend, store=store, timeout=timeout, **options)
        if backend == "fake":
            rank = dist.get_rank()
            dist.new_group = lambda ranks, **_: (
                new(ranks, timeout=timeout, backend="fake") if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER
            )
            dist.get_backend = lambda *_: "fake"
            ParallelContext.detect_num_processes_on_current_node = lambda *_: None  # asks all of them

    dist.init_process_group, dist.new_group = init_process_group, functools.partial(new, timeout=timeout)
    ParallelContext.set_device = lambda *_: None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield
    finally:
        for (owner, name), original in zip(changed, originals, strict=True):
            setattr(owner, name, original)
