"""What `--plan` knows of machines: how fast they compute, and how fast they send."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from colossal_vit.config.check import nearest
from colossal_vit.errors import UserError
from colossal_vit.mfu import peak_flops
from colossal_vit.plan.meter import SENT_SHARE
from colossal_vit.plan.trace import Message, Pass

HERE = "here"  # the name of this machine
RESERVED_GB = 2.0  # CUDA's context, NCCL's buffers, workspaces of cuBLAS: nothing of PyTorch's allocator


class Machine(Protocol):
    """What the planner asks. Times in seconds; groups of ranks are given by size, and ranks of them on a node.

    Attributes:
        memory_gb: for each rank.
        reserved_gb: of that, what a rank takes beside its tensors.
        overlap: whether messages are sent while a rank computes.
        ranks_per_node: at most.
        noise: share by which predicted times have to differ, or else they may be equal.
        warning: a line about how the machine was measured, or None.
    """

    memory_gb: float
    reserved_gb: float
    overlap: bool
    ranks_per_node: int
    noise: float
    warning: str | None

    def compute(self, part: tuple, record: Pass) -> float:
        """A pass of a part of the model; `part` is (mode, size and depth of tensor parallelism, part, pass, batch)."""

    def send(self, message: Message, on_node: int) -> float:
        """A collective, or a message between two ranks (kind "send")."""

    def update(self, part: tuple, num_bytes: float, elements: float) -> float:
        """An optimizer step of so many elements, that reads and writes so many bytes."""

    def speed(self, num_active: int) -> float:
        """Of one of so many processes that compute at a time on one node, relative to one that is alone."""


@dataclass(frozen=True)
class Gpus:
    """A machine by its data sheet.

    Attributes:
        half_tflops, single_tflops: peaks of dense matrix products, in fp16 or bf16, and in fp32.
        matmul_share: share of the peak that large matrix products reach.
        memory_gb, memory_gb_s: of a GPU.
        gpus_per_node: that NVLink connects.
        link_gb_s, network_gb_s: NVLink and network of a GPU, in one direction.
        memory_share: share of the memory's bandwidth that operators reach.
        link_share: share of the bandwidth that collectives reach.
        operator_us: least time of an operator of PyTorch; the host needs it to start one.
        link_us, network_us: latency of a message, on a node and between nodes.
        overlap: whether messages are sent while the device computes.
    """

    half_tflops: float
    single_tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8
    matmul_share: float = 0.8
    memory_share: float = 0.9
    link_share: float = 0.8
    operator_us: float = 5.0
    link_us: float = 10.0
    network_us: float = 20.0
    half: bool = True
    overlap: bool = True
    reserved_gb: ClassVar[float] = RESERVED_GB
    noise: ClassVar[float] = 0.0
    warning: ClassVar[str | None] = None

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node

    def compute(self, part: tuple, record: Pass) -> float:
        flops, moved = record.operations.T
        peak = (self.half_tflops if self.half else self.single_tflops) * self.matmul_share * 1e12
        device = np.maximum(flops / peak, moved / (self.memory_gb_s * self.memory_share * 1e9))
        return float(np.maximum(device, self.operator_us * 1e-6).sum())

    def send(self, message: Message, on_node: int) -> float:
        if message.size == 1:
            return 0.0
        if message.size <= on_node:
            bandwidth, latency = self.link_gb_s, self.link_us
        else:  # the group's ring enters and leaves a node by the network cards of all its GPUs there
            bandwidth, latency = min(self.link_gb_s, on_node * self.network_gb_s), self.network_us
        sent = message.nbytes * SENT_SHARE[message.kind](message.size)
        return latency * 1e-6 * math.ceil(math.log2(message.size)) + sent / (bandwidth * self.link_share * 1e9)

    def update(self, part: tuple, num_bytes: float, elements: float) -> float:
        return num_bytes / (self.memory_gb_s * self.memory_share * 1e9)

    def speed(self, num_active: int) -> float:
        return 1.0


def _gpus(device: str, **values: Any) -> Gpus:
    half, single = (peak_flops(device, dtype) / 1e12 for dtype in (torch.float16, torch.float32))
    return Gpus(half, single, **values)


# Peaks are those of `mfu.PEAK_TFLOPS`. Memory, its bandwidth and NVLink (half of the sum of both directions) are from
# NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM: 80 GB, 3.35 TB/s, 900 GB/s), "H200 Tensor Core GPU" (141 GB,
# 4.8 TB/s, 900 GB/s), "A100 Tensor Core GPU" (SXM: 80 GB, 2,039 GB/s; 40 GB, 1,555 GB/s; 600 GB/s). The network is
# that of NVIDIA's DGX with these GPUs: a card of 400 Gb/s for each H100 or H200, of 200 Gb/s for each A100 ("DGX H100",
# "DGX A100" data sheets). `matmul_share`: the fastest products that S. Bekman measured, 794.5 of 989 TFLOP/s on an H100
# and 267.9 of 312 on an A100 (github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). The other shares
# and latencies are assumptions: nobody has measured them for these tables.
MACHINES: dict[str, Gpus] = {
    "h100": _gpus("H100", memory_gb=80, memory_gb_s=3350, link_gb_s=450, network_gb_s=50, matmul_share=0.803),
    "h200": _gpus("H200", memory_gb=141, memory_gb_s=4800, link_gb_s=450, network_gb_s=50, matmul_share=0.803),
    "a100": _gpus("A100", memory_gb=80, memory_gb_s=2039, link_gb_s=300, network_gb_s=25, matmul_share=0.859),
    "a100-40gb": _gpus("A100", memory_gb=40, memory_gb_s=1555, link_gb_s=300, network_gb_s=25, matmul_share=0.859),
}


def find_machine(name: str, changes: Mapping[str, Any] | None, half: bool, tf32: bool) -> Gpus:
    """A machine of the table, with the changes of the config block `machine`, or a new one made of that block.

    Args:
        name: any case.
        changes: the block, or None.
        half: whether matrix products are in fp16 or bf16.
        tf32: whether those in fp32 use TensorFloat-32.

    Raises:
        UserError: if it is not in the table and the block does not describe it.
    """
    changes = dict(changes or {})
    known = MACHINES.get(name.lower())
    if known and tf32 and "single_tflops" not in changes:
        changes["single_tflops"] = peak_flops(name.split("-")[0].upper(), torch.float32, True) / 1e12
    try:
        return dataclasses.replace(known, half=half, **changes) if known else Gpus(half=half, **changes)
    except TypeError:
        needed = [f.name for f in dataclasses.fields(Gpus) if f.default is dataclasses.MISSING]
        missing = [key for key in needed if key not in changes]
        raise UserError(
            f"--plan {name}: no such machine{nearest(name, [*MACHINES, HERE])} (or describe it in a config block "
            f"machine: {', '.join(missing)})"
        ) from None
