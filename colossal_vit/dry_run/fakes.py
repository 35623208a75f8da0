"""Fake tensors, with shapes but no data, and fake process groups."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
    import torch.distributed._tools.fake_collectives  # where older versions of torch make them known to fake tensors
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sgd_", "Meta"):  # else it makes real tensors
    torch.library.impl("aten::_fused_sgd_", "Meta", lambda *tensors, **options: None)


class _FakeValues(TorchDispatchMode):
    """Makes up the results of operators that need a tensor's data."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            # On a GPU these are norms and overflow counts; on the CPU also step counts, which must not be 0.
            return 1.0 if args[0].device.type == "cpu" else 0.0
        return function(*args, **(kwargs or {}))


class FakeReductions(TorchDispatchMode):
    """Has fake groups answer DDP: it reads the gradients from an all-reduce's future, and a fake group's is empty."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and isinstance(result, tuple):
            done = torch.futures.Future()
            done.set_result(result[0])
            return result[0], _create_work_from_future(done).boxed()
        return result


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply` in place; PyTorch's replaces fake parameters by new ones, without attributes such as `shard`."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        tensor.data = function(tensor.data)
    return module


def _with_data(function: Callable, *args: Any) -> Any:
    """Call a function whose tensors have data: a mesh of ranks looks for this one among them."""
    with torch._C._DisableTorchDispatch():
        return function(*args)


def fake_tensors(device: torch.device) -> None:
    """Make every tensor that this process creates from now on a fake one, on `device` by default. Irreversible."""
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    torch.set_default_device(device)  # fake weights cannot be moved to another device
    nn.Module._apply = _convert
    DeviceMesh.from_group = partial(_with_data, DeviceMesh.from_group)
    for module in (torch, torch.random, torch.cuda):  # the state of a generator cannot be a fake tensor
        module.get_rng_state = lambda *_: torch.empty(0)
        module.set_rng_state = lambda *_: None
    FakeReductions().__enter__()
    _FakeValues().__enter__()
