"""A fake GPU whose tensors have a device but no data, to find tensors that are left on the CPU by mistake.

Mixing its tensors with CPU tensors fails as on a real GPU. It cannot run a backward pass, for which autograd needs a
CUDA context, so every leaf of the graph gets a gradient of ones; and it has no values, so the host reads 1.0, 0 and
False. PyTorch's device `meta`, whose tensors do not mix with CPU tensors either, runs the real backward pass.
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
    """Makes up the values of tensors without data that the host reads."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def _backward(outputs: Iterable[Tensor]) -> None:
    """Add a gradient of ones to all leaves of the graph, on their device and in their type."""
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
    """A thread pool that works in the calling thread, since the fake tensor mode applies to one thread only."""

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
    """Wrap `build` to create its model on `device`, since weights without data cannot be moved."""

    def build_there(*args, **kwargs):
        with device:
            return build(*args, **kwargs)

    return build_there


def _pretend(mode: FakeTensorMode) -> None:
    """Make torch.cuda and Colossal-AI detect a GPU."""
    set_accelerator(CudaAccelerator())
    with mode:
        torch.empty(1, device=CUDA)  # initialises the mode for CUDA tensors
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in BYTES:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)


def without_peers(noted: Callable[..., object] = lambda **_: None) -> None:
    """Make every process group a fake one, whose other members need not exist, for any backend.

    Args:
        noted: called with the options of `init_process_group`.
    """
    init = dist.init_process_group

    def init_process_group(rank: int, world_size: int, store: dist.Store, **options: object) -> None:
        noted(**options)
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    dist.init_process_group = init_process_group


def run(main: Callable[[], None], argv: list[str], device: torch.device = CUDA) -> list[dict[str, Tensor]]:
    """Call a train script's `main` on a fake GPU or `meta`. Patches this process irreversibly, so call it in a fork.

    With `--dry-run`, one rank of any layout makes one step.

    Returns:
        For each checkpoint that `main` saves, its model and optimizer tensors.
    """
    script = sys.modules[main.__module__]
    saved = []

    def write(path, model, optimizer, *_):
        # Checked after `main`: to this thread, tensors show another device while an operator runs in the main thread.
        saved.append({**model, **optimizer})

    FakeTensorMode.avoid_device_init = True  # otherwise it initialises CUDA if torch.cuda, as patched, has a GPU
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
        torch.Tensor.data_ptr = lambda tensor: id(tensor)  # pointers are only compared
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

    # For one rank, object collectives return its own value; fake groups would not.
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
    if "--dry-run" not in argv:  # dry runs have fake groups anyway
        without_peers()
    main()
    for tensors in saved:
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu", f"{name} of a checkpoint is on {tensor.device}"
    return saved
