"""What a compiled model runs on a GPU, found without one: kernels, with the bytes that they move and their FLOPs.

The unchanged engine trains on the CPU with a backend of torch.compile that computes nothing. Dynamo and AOTAutograd
make their graphs of CPU tensors, since autograd needs a CUDA context for others. Each graph is then traced again on
fake CUDA tensors, and Inductor lowers it for a GPU that torch.cuda pretends to have. Its results are empty tensors of
the right shapes.
"""

import functools
import importlib.util
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from colossal_vit.engine import compilation
from colossal_vit.engine.engine import Engine
from colossal_vit.plan.meter import count_bytes
from colossal_vit.plan.trace import KINDS, flops_of, launches
from colossalai.context import Config
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

VERSIONS = "2.10", "2.14"  # of torch; Inductor is taken apart here by names that others may lack
FEW, MANY = DEPTHS = (2, 4)  # of the models that are lowered; Inductor fuses the residual sums of two blocks in turns
# From the tables of compute capabilities and the data sheets: multiprocessors, bytes of shared memory, of the L2 cache.
H100, A100 = (9, 0), (8, 0)
GPUS = {H100: (132, 232448, 50 << 20), A100: (108, 166912, 40 << 20)}


def can_lower(config: Config) -> bool:
    """Whether a config's compiled step can be lowered here."""
    return torch.__version__.startswith(tuple(f"{version}." for version in VERSIONS)) and config.DTYPE == "float32"


class Kernel(NamedTuple):
    """A launch.

    Attributes:
        name: of the operator, or of the generated kernel.
        flops: of a matrix product.
        nbytes: read and written.
        generated: whether Inductor wrote it.
    """

    name: str
    flops: float
    nbytes: float
    generated: bool = False


def num_generated(kernels: list[Kernel]) -> int:
    """Number of those that Inductor wrote."""
    return sum(kernel.generated for kernel in kernels)


def num_bytes(kernels: list[Kernel]) -> float:
    """Bytes read and written."""
    return sum(kernel.nbytes for kernel in kernels)


def num_flops(kernels: list[Kernel]) -> float:
    """FLOPs of matrix products."""
    return sum(kernel.flops for kernel in kernels)


class Lowered(NamedTuple):
    """What a micro-batch runs.

    Attributes:
        passes: the launches of the forward and the backward pass, in order.
        sources: the Triton modules of the generated kernels, each of which is named `triton_kernel`.
    """

    passes: dict[str, list[Kernel]]
    sources: set[str]


class Lowering(NamedTuple):
    """A model with two and with four blocks; all figures are linear in the number of blocks before the last one.

    Attributes:
        images: of the micro-batch, on all tensor-parallel ranks.
        depths: what is lowered, by number of blocks.
    """

    images: int
    depths: dict[int, Lowered]

    def of_block(self, kind: str, measure: Callable[[list[Kernel]], float]) -> float:
        """What a block before the last one adds to a measure of the forward or backward pass."""
        few, many = (measure(self.depths[depth].passes[kind]) for depth in DEPTHS)
        return (many - few) / (MANY - FEW)

    def of_rest(self, kind: str, measure: Callable[[list[Kernel]], float]) -> float:
        """What a pass takes beside the blocks before the last one."""
        return measure(self.depths[FEW].passes[kind]) - (FEW - 1) * self.of_block(kind, measure)

    def of_model(self, kind: str, measure: Callable[[list[Kernel]], float], depth: int) -> float:
        """A measure of a pass through a model with so many blocks."""
        return self.of_rest(kind, measure) + (depth - 1) * self.of_block(kind, measure)

    def operations(self, kernels: list[Kernel], images: int) -> np.ndarray:
        """FLOPs and bytes of kernels with so many images, in proportion, (kernels, 2)."""
        values = np.array([(kernel.flops, kernel.nbytes) for kernel in kernels], dtype=float).reshape(-1, 2)
        return values * (images / self.images)


class _Lowered(BaseException):
    """Ends a compilation behind the generated code; Inductor does not catch it."""


class _Recorder(TorchDispatchMode):
    """Records what runs between compiled programs, and what these would launch, in `kernels`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo compiles nothing under it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not torch._guards.TracingContext.try_get() and launches(function):
            flops = flops_of(function, args, kwargs or {}, result)
            self.kernels.append(Kernel(function._schema.name, flops, count_bytes([args, kwargs, result])))
        return result


def _flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """CUDA's attention, which a model on the CPU would not choose; flash attention takes no fp32."""
    if query.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]


def _answers(capability: tuple[int, int]) -> dict[str, Callable]:
    """Functions of torch.cuda on a machine with one such GPU."""
    processors, shared, cache = GPUS[capability]
    properties = SimpleNamespace(
        name="NVIDIA GPU", total_memory=80 << 30, major=capability[0], minor=capability[1], gcnArchName="",
        multi_processor_count=processors, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32, shared_memory_per_block=49152, L2_cache_size=cache,
        shared_memory_per_block_optin=shared,
    )  # fmt: skip
    answers = dict(
        is_available=True, device_count=1, current_device=0, get_device_name=properties.name, set_device=None,
        get_device_capability=capability, is_bf16_supported=True, get_device_properties=properties, synchronize=None,
        _get_device_properties=properties, _exchange_device=0, _maybe_exchange_device=0, _lazy_init=None,
        is_current_stream_capturing=False, current_stream=SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None,
    )  # fmt: skip
    return {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}


class _Driver:
    """Triton's driver of a GPU that is not there."""

    binary_ext = "cubin"

    def __init__(self, capability: tuple[int, int]):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _kernels_of(scheduler: Any) -> list[Kernel]:
    """The launches of a lowered graph."""
    from torch._inductor.fx_utils import count_flops_fx
    from torch._inductor.ir import MultiOutput, _CollectiveKernel
    from torch._inductor.scheduler import NopKernelSchedulerNode

    kernels = []
    for node in scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput | _CollectiveKernel):
            continue  # nothing runs, it picks one of the results of the operator before, or traces count it
        called = node.is_extern()
        if called and getattr(node.node, "op_overload", None) is torch.ops.colossal_vit.product.default:
            kernels += _product_of_split_matrices(node.node.get_origin_node())
            continue
        flops = sum(filter(None, map(count_flops_fx, node.node.origins))) if called else 0.0
        name = str(getattr(node.node, "op_overload", None) or node.node.get_kernel_name()) if called else "generated"
        kernels.append(Kernel(name, flops, node.get_read_write_buffers_sizes(), generated=not called))
    return kernels


def _product_of_split_matrices(call: Node) -> list[Kernel]:
    """The launches in the operator of `compat/compiled.py`: for each rank of a side, copies to send and a product."""
    _, number, *operands, _, (side, *_) = call.args
    a, b, c = (node.meta["val"] for node in (*operands, call))
    flops = 2 * math.isqrt(a.numel() * b.numel() * c.numel())  # each dimension is in two of the three
    copied = {0: (a, b), 1: (b,), 2: (a,)}[number]
    copies = [Kernel("aten::copy_", 0.0, count_bytes([matrix, matrix])) for matrix in copied]
    return side * [*copies, Kernel("aten::mm", flops, count_bytes([a, b, c]))]


def _lower(graph: GraphModule, capability: tuple[int, int], options: dict[str, Any]) -> tuple[list[Kernel], str]:
    """Lower a graph of AOTAutograd, of CPU tensors, for a GPU: its launches, and the generated code."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _triton
    from triton.runtime.driver import driver

    for node in graph.graph.nodes:
        if node.op == "call_function" and "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    found = []
    codegen = GraphLowering.codegen

    def stop_after(lowering: Any) -> None:
        code = codegen(lowering)[0]
        found.extend([_kernels_of(lowering.scheduler), getattr(code, "value", code)])
        raise _Lowered

    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with (
        mock.patch.multiple(torch.cuda, create=True, **_answers(capability)),
        mock.patch.object(fake_tensor.FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(fake_tensor, "init_gpu_context"),  # which in torch 2.10 would start CUDA
        mock.patch.object(GraphLowering, "codegen", stop_after),
        config.patch(compile_threads=1, force_disable_caches=True),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        mode,
        V.set_fake_mode(mode),
    ):
        driver.set_active(_Driver(capability))
        _triton.has_triton.cache_clear()
        inputs = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, Tensor)
            else value
            for value in (node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
        ]
        try:
            compile_fx_inner(make_fx(graph, decomposition_table=select_decomp_table())(*inputs), inputs, **options)
        except _Lowered:
            pass
        finally:
            _triton.has_triton.cache_clear()
    kernels, code = found or ([], "")  # nothing is to be computed
    return kernels, code


def lower(engine: Engine, batches: Iterable, by_block: bool, capability: tuple[int, int]) -> Lowered:
    """What a micro-batch of an engine on the CPU would launch on a GPU, compiled as `COMPILE` does it.

    Patches this process irreversibly: call it in a fork.

    Args:
        engine: eager, without data parallelism and pipeline.
        batches: the first one is used.
        by_block: whether blocks are compiled one by one, as under tensor and pipeline parallelism.
        capability: compute capability, one of `GPUS`.
    """
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    recorder, sources = _Recorder(), set()

    def inner(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
        (output,) = graph.graph.find_nodes(op="output")
        values = [node if node is None else node.meta["val"] for node in output.args[0]]
        known = {key: options[key] for key in ("is_backward", "is_inference", "static_input_idxs") if key in options}
        kernels, code = _lower(graph, capability, known)
        for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL):
            sources.add(source.replace(name, "triton_kernel"))

        def pretend(*_: Any) -> list[Any]:
            recorder.kernels += kernels
            with torch.utils._python_dispatch._disable_current_modes():
                return [
                    torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
                    if isinstance(value, Tensor)
                    else value
                    for value in values
                ]

        return make_boxed_func(pretend)

    F.scaled_dot_product_attention = _flash_attention
    compilation.compile_model(engine.model, by_block, backend=functools.partial(compile_fx, inner_compile=inner))
    images, labels = next(iter(batches))
    engine.train()
    passes: dict[str, list[Kernel]] = {}
    with recorder:
        for _ in range(2):  # the first one compiles
            engine.optimizer.zero_grad()
            passes = {kind: [] for kind in KINDS}
            recorder.kernels = passes["forward"]
            loss = engine.criterion(engine(images), labels)
            recorder.kernels = passes["backward"]
            engine.backward(loss)
    return Lowered(passes, sources)


def compile_kernel(source: str, capability: tuple[int, int]) -> list[bytes]:
    """Compile a generated kernel with Triton and the ptxas in its wheel; the cubin of each of its configurations.

    Args:
        source: of `Lowered.sources`.
        capability: any compute capability that ptxas knows.
    """
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.driver import driver

    major, minor = capability
    driver.set_active(_Driver(capability))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        config.patch(use_static_cuda_launcher=False),  # which keeps no cubin
    ):
        path = Path(folder) / "kernel.py"  # Triton reads a function's source from its file
        path.write_text(re.sub(r"cc=\d+, major=\d+", f"cc={10 * major + minor}, major={major}", source))
        spec = importlib.util.spec_from_file_location("kernel", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = module.triton_kernel
        return [kernel._precompile_config(each).kernel.asm["cubin"] for each in kernel.configs]
