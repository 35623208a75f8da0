"""A GPU whose tensors have a device but no data: what is left on the CPU fails as it would on a real one.

Two things it cannot do: a backward pass, for which autograd asks CUDA for a context, so every leaf of the graph gets a
gradient of ones; and telling values, so the host reads 1.0, 0 and False. On PyTorch's device `meta`, which no operator
mixes with the CPU either, the backward pass is the real one.
"""

import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from colossal_vit import launch
from colossal_vit.checkpoint import capture, storage
from colossal_vit.compat import cpu
from colossal_vit.parallel import ranks
from colossal_vit.plan import fakes
from colossal_vit.run import Run
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cuda_accelerator import CudaAccelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, META = torch.device("cuda", 0), torch.device("meta")
ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "NVIDIA H200",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "get_device_properties": SimpleNamespace(name="NVIDIA H200", total_memory=1e11, major=9, minor=0),
    "default_stream": SimpleNamespace(synchronize=lambda: None),
    "current_stream": SimpleNamespace(synchronize=lambda: None),
}
NOTHING = ("set_device", "manual_seed", "manual_seed_all", "set_rng_state", "synchronize", "empty_cache")
BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class _Values(TorchDispatchMode):
    """What a tensor without data is asked for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def _backward(outputs: Iterable[Tensor]) -> None:
    """Ones for all leaves, on their own device and in their type."""
    seen, waiting = set(), [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:
            ones = torch.ones_like(leaf)
            leaf.grad = ones if leaf.grad is None else leaf.grad + ones


class _NoThread:
    """A pool that works at once: tensors without data are for one thread."""

    def __init__(self, _):
        pass

    def __enter__(self) -> "_NoThread":
        return self

    def __exit__(self, *_) -> None:
        pass

    def submit(self, function: Callable, *args) -> SimpleNamespace:
        answer = function(*args)
        return SimpleNamespace(result=lambda: answer)

    map = staticmethod(map)


def _built_on(device: torch.device, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A function that builds its model there: weights without data cannot be moved."""

    def build_there(*args, **kwargs):
        with device:
            return build(*args, **kwargs)

    return build_there


def _pretend(mode: FakeTensorMode) -> None:
    """Have torch.cuda and Colossal-AI find a GPU."""
    set_accelerator(CudaAccelerator())
    with mode:
        torch.empty(1, device=CUDA)  # from now on, tensors can be there
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in BYTES:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)


def without_peers(noted: Callable[..., object] = lambda **_: None) -> None:
    """Have every process group be one whose other members need not exist, whatever backend is asked for.

    Args:
        noted: called with what `init_process_group` was asked for.
    """
    init = dist.init_process_group

    def init_process_group(rank: int, world_size: int, store: dist.Store, **options: object) -> None:
        noted(**options)
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    dist.init_process_group = init_process_group


def run(main: Callable[[], None], argv: list[str], device: torch.device = CUDA) -> list[dict[str, Tensor]]:
    """Call a train script's `main` on such a GPU, in a process that is good for nothing afterwards.

    With `--dry-run` one rank of any world makes one step, without data.

    Returns:
        The tensors of each checkpoint.
    """
    script = sys.modules[main.__module__]
    saved = []

    def write(path, model, optimizer, *_):
        saved.append({**model, **optimizer})  # in a thread, which sees another device while an operator runs

    FakeTensorMode.avoid_device_init = True  # it would ask torch.cuda, which says below that there is a GPU
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if device == CUDA:
        _pretend(mode)
    else:
        cpu.HostAccelerator.current_device = cpu.HostAccelerator.get_current_device = lambda _: device
        sys.modules["colossal_vit.launch.startup"].choose_device = lambda _: device
    start = launch.start

    def enter(chosen: torch.device) -> None:
        assert chosen == device
        mode.__enter__()
        _Values().__enter__()
        nn.Module._apply = fakes._convert
        if device == CUDA:
            torch.Tensor.backward = lambda loss, *_, **__: _backward([loss])
            torch.autograd.backward = lambda tensors, *_, **__: _backward(tensors)
        torch.Tensor.pin_memory = lambda tensor: tensor
        torch.Tensor.data_ptr = lambda tensor: id(tensor)  # only compared
        capture.random_state = dict
        storage.write = write
        for name in ("build_timm_vit", "build_vit"):
            if hasattr(script, name):
                setattr(script, name, _built_on(device, getattr(script, name)))

    def start_there(*args, **kwargs) -> Run:
        run = start(*args, **kwargs)
        if not run.dry_run:
            enter(run.device)
        return run

    # A world of one rank, whose messages to itself must keep their values.
    dist.all_gather_object = lambda values, value, **_: values.__setitem__(0, value)
    dist.broadcast_object_list = lambda *_, **__: None
    run_on_rank_0 = ranks.run_on_rank_0
    for module in list(sys.modules.values()):
        if getattr(module, "run_on_rank_0", None) is run_on_rank_0:
            module.run_on_rank_0 = lambda work: work()
    if reader := sys.modules.get("caltech101"):
        reader.ThreadPoolExecutor = _NoThread
    launch.start, fakes.fake_tensors = start_there, enter
    sys.argv = [script.__file__, *argv]
    if "--dry-run" not in argv:  # which has such groups anyway
        without_peers()
    main()
    for tensors in saved:
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu", f"{name} of a checkpoint is on {tensor.device}"
    return saved
