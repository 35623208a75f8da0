"""A fake GPU whose tensors have a device but no data, beside a CPU that computes, to find what a CPU alone cannot show.

Mixing the GPU's tensors with CPU tensors fails as on a real GPU, and copies between both are seen by dispatch modes. It
cannot run a backward pass, for which autograd needs a CUDA context, so every leaf of the graph gets a gradient of ones,
and DistributedDataParallel gets no reducer. It has no values, so the host reads random ones, which take both sides of
branches. PyTorch's device `meta`, whose tensors do not mix with CPU tensors either, runs the real backward pass.
"""

import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from colossal_vit.checkpoint import storage
from colossal_vit.compat import cpu
from colossal_vit.dry_run import fakes
from colossal_vit.dry_run.meter import measure
from colossal_vit.engine import engine
from colossal_vit.launch.flags import Arguments
from colossal_vit.parallel import collectives
from colossal_vit.run import Run
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cuda_accelerator import CudaAccelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import training

CUDA, META = torch.device("cuda", 0), torch.device("meta")
ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "NVIDIA H200",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "get_device_properties": SimpleNamespace(name="NVIDIA H200", total_memory=1e11, major=9, minor=0),
}
NOTHING = ("_lazy_init", "set_device", "manual_seed", "manual_seed_all", "set_rng_state", "empty_cache")
NOTHING += ("set_sync_debug_mode",)
STREAM_OF = ("default_stream", "current_stream")
BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class _Stream:
    """The work of the fake device: what it copies in the background is there once the host has waited for it.

    Attributes:
        queued: copies to the host so far.
        done: those of them that the host has waited for.
    """

    def __init__(self):
        self.queued = self.done = 0

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=partial(self._wait, self.queued))

    def _wait(self, number: int) -> None:
        self.done = max(self.done, number)

    def synchronize(self, *_: object) -> None:
        self.done = self.queued

    def follow(self, args: tuple, kwargs: dict, results: object) -> None:
        """Note from when on the results are there: as what they are made of, or as a copy that begins now."""
        number = max((getattr(value, "copy_number", 0) for value in tree_leaves((args, kwargs))), default=0)
        if kwargs.get("non_blocking") and kwargs.get("device") == torch.device("cpu"):
            self.queued = number = self.queued + 1
        for result in tree_leaves(results) if number else ():
            if isinstance(result, Tensor):
                result.copy_number = number

    def check(self, value: Tensor) -> None:
        assert getattr(value, "copy_number", 0) <= self.done, "the host reads what the device has not copied yet"


class _Device(TorchDispatchMode):
    """Leaves operators on the fake device to the fake tensor mode; all others compute real values on the CPU.

    Args:
        mode: the fake tensor mode.
        device: the fake device.
        overflows: how often the gradient norm or the loss of a step is infinite, from 0 to 1.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device, overflows: float):
        super().__init__()
        self.mode, self.device, self.overflows = mode, device, overflows
        self.random = random.Random(0)
        self.reading = False

    def _is_there(self, value: object) -> bool:
        return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == self.device.type)

    def _made_up(self, dtype: torch.dtype) -> float | int | bool:
        """A value that the host reads of the device."""
        if not dtype.is_floating_point:
            return self.random.randrange(2)
        infinite = self.reading and self.random.random() < self.overflows
        return float("inf") if infinite else self.random.uniform(0.1, 10.0)

    def read(self, scalars: engine.Scalars, read: Callable = engine.Scalars.read) -> list[float]:
        """In place of the method that reads loss and norm."""
        self.reading = True
        try:
            return read(scalars)
        finally:
            self.reading = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):  # which needs CUDA
            return _pin(function(*args, **kwargs))
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            STREAM.check(args[0])
            return self._made_up(args[0].dtype)
        if any(map(self._is_there, tree_leaves((args, kwargs)))):
            with self.mode:
                results = function(*args, **kwargs)
            if self.device == CUDA:
                STREAM.follow(args, kwargs, results)
            return results
        return function(*args, **kwargs)


STREAM = _Stream()


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
    for name in STREAM_OF:
        setattr(torch.cuda, name, lambda *_: STREAM)
    torch.cuda.synchronize = STREAM.synchronize
    for name in BYTES:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    # The reducer of DistributedDataParallel measures its times by CUDA events.
    dist.Reducer, dist.Logger = MagicMock(), MagicMock()


PINNED = "is_in_pinned_memory"  # attribute of a tensor's storage, which its views share


def _pin(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    setattr(pinned.untyped_storage(), PINNED, True)
    return pinned


def without_peers(noted: Callable[..., object] = lambda **_: None) -> None:
    """Make every process group a fake one, whose other members need not exist, for any backend.

    Args:
        noted: called with the options of `init_process_group`.
    """
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(rank: int, world_size: int, store: dist.Store, **options: object) -> None:
        noted(**options)
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    dist.init_process_group = init_process_group
    dist.new_group = lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})


def run(
    main: Callable[[Arguments], object], argv: list[str], device: torch.device = CUDA, overflows: float = 0.0
) -> list[dict[str, Tensor]]:
    """Call a train script's `main` on a fake GPU or `meta`. Patches this process irreversibly, so call it in a fork.

    With `--dry-run`, one rank of any layout makes one step.

    Args:
        main: of the train script.
        argv: its command line.
        device: `CUDA` or `META`.
        overflows: how often the gradient norm or the loss of a step is infinite, from 0 to 1.

    Returns:
        For each checkpoint that `main` saves, its model and optimizer tensors.
    """
    script = sys.modules[main.__module__]
    saved = []

    def write(path, files, *_):
        # Checked after `main`: to this thread, tensors show another device while an operator runs in the main thread.
        saved.append({**files[storage.MODEL], **files[storage.OPTIMIZER]})

    FakeTensorMode.avoid_device_init = True  # otherwise it initialises CUDA if torch.cuda, as patched, has a GPU
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if device == CUDA:
        _pretend(mode)
    else:
        cpu.HostAccelerator.current_device = cpu.HostAccelerator.get_current_device = lambda _: device
        sys.modules["colossal_vit.launch.groups"].choose_device = lambda _: device
        for name in ("AdamW", "SGD"):  # it has no fused kernels
            unfused = getattr(torch.optim, name)
            setattr(torch.optim, name, lambda groups, fused, unfused=unfused, **options: unfused(groups, **options))
    start = script.start

    def enter(chosen: torch.device) -> None:
        assert chosen == device
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) copies where modes see it
        there = _Device(mode, device, overflows).__enter__()
        engine.Scalars.read = lambda scalars: there.read(scalars)
        nn.Module._apply = fakes._convert
        if device == CUDA:
            torch.Tensor.backward = lambda loss, *_, **__: _backward([loss])
            torch.autograd.backward = lambda tensors, *_, **__: _backward(tensors)
        torch.Tensor.pin_memory = _pin
        torch.Tensor.is_pinned = lambda tensor: hasattr(tensor.untyped_storage(), PINNED)
        torch.Tensor.data_ptr = lambda tensor: id(tensor)  # pointers are only compared
        storage.write = write
        for name in ("build_timm_vit", "build_vit"):
            if hasattr(script, name):
                setattr(script, name, _built_on(device, getattr(script, name)))

    def start_there(*args, **kwargs) -> Run:
        run = start(*args, **kwargs)
        if not run.alone:
            enter(run.device)
        return run

    # For one rank, object collectives return its own value; fake groups would not.
    dist.all_gather_object = lambda values, value, **_: values.__setitem__(0, value)
    dist.broadcast_object_list = lambda *_, **__: None
    run_on_rank_0 = collectives.run_on_rank_0
    for module in list(sys.modules.values()):
        if getattr(module, "run_on_rank_0", None) is run_on_rank_0:
            module.run_on_rank_0 = lambda work: work()
    script.start, fakes.fake_tensors = start_there, enter
    sys.argv = [script.__file__, *argv]
    args = training.arguments(main, argv)
    if args.dry_run:
        built, batches, *_ = script.SCRIPT.build_fake(args)
        measure(built, batches)
    else:
        without_peers()
        main(args)
    for tensors in saved:
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu", f"{name} of a checkpoint is on {tensor.device}"
    return saved
