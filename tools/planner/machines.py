"""What the planner knows of machines: how fast they compute, and how fast they send."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from colossal_vit.config.check import nearest
from colossal_vit.dry_run.meter import SENT_SHARE
from colossal_vit.dry_run.report import in_fork
from colossal_vit.errors import UserError
from colossal_vit.model.mfu import peak_flops
from colossal_vit.provenance import gpu_names

from tools.planner.trace import Message, Pass

HERE = "here"  # the name of this machine
RESERVED_GB = 2.0  # CUDA's context, NCCL's buffers, workspaces of cuBLAS: nothing of PyTorch's allocator


@dataclass(frozen=True)
class Machine:
    """A machine by its data sheet. Times in seconds; groups of ranks are given by size, and ranks of them on a node.

    Attributes:
        half_tflops, single_tflops: peaks of dense matrix products, in fp16 or bf16, and in fp32.
        matmul_share: share of the peak that matrix products reach.
        memory_gb, memory_gb_s: of a GPU.
        gpus_per_node: that NVLink connects.
        link_gb_s, network_gb_s: NVLink and network of a GPU, in one direction.
        memory_share: share of the memory's bandwidth that operators reach.
        link_share: share of the bandwidth that collectives reach.
        operator_us: least time of an operator on the device.
        launch_us: what the host needs to start one, while the device computes those before it.
        link_us, network_us: latency of a message, on a node and between nodes.
        half: whether matrix products are in fp16 or bf16.
        overlap: whether messages are sent while the device computes.
        reserved_gb: of the memory, what a rank takes beside its tensors.
    """

    half_tflops: float
    single_tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8
    matmul_share: float = 0.63
    memory_share: float = 0.6
    link_share: float = 0.8
    operator_us: float = 5.0
    launch_us: float = 42.0
    link_us: float = 10.0
    network_us: float = 20.0
    half: bool = True
    overlap: bool = True
    reserved_gb: float = RESERVED_GB

    def compute(self, record: Pass) -> float:
        """Return the seconds of a pass of a part of the model."""
        flops, moved = record.operations.T
        peak = (self.half_tflops if self.half else self.single_tflops) * self.matmul_share * 1e12
        device = np.maximum(flops / peak, moved / (self.memory_gb_s * self.memory_share * 1e9))
        computing = float(np.maximum(device, self.operator_us * 1e-6).sum())
        return max(computing, len(record.operations) * self.launch_us * 1e-6)

    def send(self, message: Message, on_node: int) -> float:
        """Return the seconds of a collective, or of a message between two ranks (kind "send")."""
        if message.size == 1:
            return 0.0
        if message.size <= on_node:
            bandwidth, latency = self.link_gb_s, self.link_us
        else:  # the group's ring enters and leaves a node by the network cards of all its GPUs there
            bandwidth, latency = min(self.link_gb_s, on_node * self.network_gb_s), self.network_us
        sent = message.nbytes * SENT_SHARE[message.kind](message.size)
        return latency * 1e-6 * math.ceil(math.log2(message.size)) + sent / (bandwidth * self.link_share * 1e9)

    def update(self, num_bytes: float) -> float:
        """Return the seconds of an optimizer step that reads and writes so many bytes."""
        return num_bytes / (self.memory_gb_s * self.memory_share * 1e9)


# Peaks are those of `mfu.PEAK_TFLOPS`. Memory, its bandwidth and NVLink (half of the sum of both directions) are from
# NVIDIA's data sheets: "HGX B200" (180 GB, 7.7 TB/s, 1.8 TB/s), "H200 Tensor Core GPU" (141 GB, 4.8 TB/s, 900 GB/s),
# "H100 Tensor Core GPU" (SXM: 80 GB, 3.35 TB/s, 900 GB/s), "A100 Tensor Core GPU" (SXM: 80 GB, 2,039 GB/s; 40 GB,
# 1,555 GB/s; 600 GB/s), "V100" (SXM2: 32 GB, 900 GB/s, 300 GB/s), and those of the L40S (48 GB, 864 GB/s), A10 (24 GB,
# 600 GB/s), L4 (24 GB, 300 GB/s), T4 (16 GB, 320 GB/s) and, in the white papers of `mfu.py`, of the RTX 5090 (32 GB,
# 1,792 GB/s), RTX 4090 (24 GB, 1,008 GB/s) and RTX 3090 (24 GB, 936 GB/s). Cards without NVLink send by PCI Express of
# 16 lanes: 16, 32 or 64 GB/s in generation 3, 4 or 5; GeForce half as much, since two of them send through the host.
# The network is that of NVIDIA's DGX with these GPUs, a card for each: 400 Gb/s (B200, H100, H200), 200 Gb/s (A100),
# 50 Gb/s (V100: 4 cards of 100 Gb/s for 8); for the others 100 Gb/s for a node of 8 are assumed.
# `matmul_share` and `memory_share` are those with which the steps in results/1x_NVIDIA_H200 are predicted best. They
# stand for attention, small products and gaps too. In the traced step of results/1x_NVIDIA_H200/profile the host takes
# 16.3 ms for 230 launches of the forward pass and 23.4 ms for 473 of the backward pass, 56 us each; `launch_us` is that
# without a quarter for the tracer, an estimate. `link_share` and the latencies are assumptions: nobody has measured
# them for these tables.
_SPECIFICATIONS: dict[str, dict[str, float]] = {
    "b200": dict(memory_gb=180, memory_gb_s=7700, link_gb_s=900, network_gb_s=50),
    "h200": dict(memory_gb=141, memory_gb_s=4800, link_gb_s=450, network_gb_s=50),
    "h100": dict(memory_gb=80, memory_gb_s=3350, link_gb_s=450, network_gb_s=50),
    "a100": dict(memory_gb=80, memory_gb_s=2039, link_gb_s=300, network_gb_s=25),
    "a100-40gb": dict(memory_gb=40, memory_gb_s=1555, link_gb_s=300, network_gb_s=25),
    "v100": dict(memory_gb=32, memory_gb_s=900, link_gb_s=150, network_gb_s=6.25),
    "l40s": dict(memory_gb=48, memory_gb_s=864, link_gb_s=32, network_gb_s=1.56),
    "a10": dict(memory_gb=24, memory_gb_s=600, link_gb_s=32, network_gb_s=1.56),
    "l4": dict(memory_gb=24, memory_gb_s=300, link_gb_s=32, network_gb_s=1.56),
    "t4": dict(memory_gb=16, memory_gb_s=320, link_gb_s=16, network_gb_s=1.56),
    "rtx-5090": dict(memory_gb=32, memory_gb_s=1792, link_gb_s=32, network_gb_s=1.56),
    "rtx-4090": dict(memory_gb=24, memory_gb_s=1008, link_gb_s=16, network_gb_s=1.56),
    "rtx-3090": dict(memory_gb=24, memory_gb_s=936, link_gb_s=16, network_gb_s=1.56),
}


def _peak_tflops(name: str, dtype: torch.dtype, tf32: bool = False) -> float:
    return peak_flops(name.upper(), dtype, tf32) / 1e12


MACHINES = {
    name: Machine(_peak_tflops(name, torch.float16), _peak_tflops(name, torch.float32), **values)
    for name, values in _SPECIFICATIONS.items()
}
# Roughly a core of a CPU, whose time messages take, and its share of the memory's bandwidth: enough to choose the
# layouts that are timed.
CORE = Machine(0.05, 0.05, 4, 5, 1, 1, 2**20, launch_us=0.0, overlap=False, reserved_gb=0.5)
# What may be said of a machine, by name.
SPECS = ("half_tflops", "single_tflops", "memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s", "gpus_per_node")
SPECS += ("matmul_share",)


def name_of(gpu: str) -> str | None:
    """Return the name in `MACHINES` of a GPU as its driver calls it; None if it has none."""
    # An entry such as "h100" has the words of GPUs with other peaks too, such as the H100 PCIe.
    words, peak = set(gpu.lower().replace("-", " ").split()), peak_flops(gpu, torch.float16)
    names = [
        name
        for name in MACHINES
        if words.issuperset(name.split("-")) and peak == peak_flops(name.upper(), torch.float16)
    ]
    return max(names, key=len, default=None)  # "a100-40gb" rather than "a100"


def parse_specs(words: Sequence[str]) -> dict[str, float]:
    """Return the values of `--spec KEY=NUMBER`.

    Raises:
        UserError: for another key, or what is no positive number.
    """
    values: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in SPECS:
            raise UserError(f"--spec {word}: no such key{nearest(key, SPECS)}; the keys are {', '.join(SPECS)}")
        try:
            values[key] = float(text)
        except ValueError:
            values[key] = math.nan
        if not 0 < values[key] < math.inf or (key == "matmul_share" and values[key] > 1):
            limit = "a number above 0 and up to 1" if key == "matmul_share" else "a number above 0"
            raise UserError(f"--spec {word}: must be {limit}")
    return values


def find_machine(name: str, specs: Mapping[str, float], half: bool, tf32: bool) -> Machine:
    """Return a machine of the table, with other specs, or a new one made of these.

    Args:
        name: any case.
        specs: see `parse_specs`.
        half: whether matrix products are in fp16 or bf16.
        tf32: whether those in fp32 use TensorFloat-32.

    Raises:
        UserError: if it is not in the table and the specs do not describe it.
    """
    specs = dict(specs)
    known = MACHINES.get(name.lower())
    if known and tf32:
        specs.setdefault("single_tflops", _peak_tflops(name, torch.float32, tf32))
    try:
        return dataclasses.replace(known, half=half, **specs) if known else Machine(half=half, **specs)
    except TypeError:
        needed = [f.name for f in dataclasses.fields(Machine) if f.default is dataclasses.MISSING]
        missing = [key for key in needed if key not in specs]
        raise UserError(
            f"--machine {name}: no such machine{nearest(name, [*MACHINES, HERE])} (or describe it with --spec: "
            f"{', '.join(missing)})"
        ) from None


def this_machine(world_size: int, half: bool, tf32: bool) -> Machine:
    """Return what ranks the layouts that are to be timed here: this machine's GPU, an H100 if it is unknown, or its
    cores.

    Its memory is what each process can have.

    Raises:
        UserError: if it has fewer GPUs than ranks.
    """
    gpus = gpu_names()
    if not gpus:
        return dataclasses.replace(CORE, memory_gb=psutil.virtual_memory().total / 1e9 / world_size)
    if world_size > len(gpus):
        raise UserError(
            f"--machine {HERE}: --world_size {world_size}, but this machine has {len(gpus)} GPU(s): at most one "
            f"process per GPU can be timed here"
        )
    # Who asks for a GPU's memory starts CUDA, and no fork of a process that has done so can use a GPU.
    total = in_fork(lambda: torch.cuda.mem_get_info(0)[1])
    return find_machine(name_of(gpus[0]) or "h100", {"memory_gb": total / 1e9}, half, tf32)
