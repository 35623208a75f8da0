"""Tensors and batches without data."""

from collections.abc import Callable, Iterator

import torch
from colossal_vit.data.batches import Loader, sees_images
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class FakeBatches(Loader):
    """Batches of the right shapes with nothing in them, for `images, labels` on the device.

    Args:
        num_batches: in an epoch, on this rank.
        shape: of a batch of images, (B, 3, H, W).
        device: where they would be.
    """

    def __init__(self, num_batches: int, shape: tuple[int, ...], device: torch.device):
        self.num_batches, self.shape, self.device = num_batches, shape, device
        self.first_stage = sees_images()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.num_batches):
            labels = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
            yield torch.zeros(self.shape, device=self.device) if self.first_stage else labels, labels


class _Answers(TorchDispatchMode):
    """Answers what only tensors with data can be asked."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            # On a GPU what is asked for is a norm or a count of overflows; on the CPU also an optimizer's step count.
            return 1.0 if args[0].device.type == "cpu" else 0.0
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and isinstance(result, tuple):
            # DDP reads its gradients from the future of the reduction, and that of a fake group holds none.
            done = torch.futures.Future()
            done.set_result(result[0])
            return result[0], _create_work_from_future(done).boxed()
        return result


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply` for fake parameters; PyTorch's replaces them by others, without the attributes they have."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        tensor.data = function(tensor.data)
    return module


def fake_tensors(device: torch.device) -> None:
    """From here on, every tensor that this process makes is a fake one, on `device` where the script names none."""
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    torch.set_default_device(device)  # fake weights cannot be moved to another one
    nn.Module._apply = _convert
    for module in (torch, torch.random, torch.cuda):  # a generator's state has to be real
        module.get_rng_state = lambda *_: torch.empty(0)
        module.set_rng_state = lambda *_: None
    _Answers().__enter__()
