"""Model FLOPs utilisation: the FLOP/s of the model's own arithmetic as a share of the device's peak (A. Chowdhery et
al., "PaLM", arXiv:2204.02311, appendix B)."""

import re

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

# Dense TFLOP/s of matrix products in (fp16 or bf16, TF32, fp32), from NVIDIA's data sheets of these names, which say
# twice as much "with sparsity"; that of "Blackwell" has the HGX B200. GeForce cards are in the appendices of NVIDIA's
# white papers "Ampere GA102", "Ada" and "RTX Blackwell GPU Architecture": products summed in fp32. Those before Ampere
# have neither bf16 nor TF32. The first entry whose words all occur in the device's name applies; None stands for other
# GPUs with these words. Whole words are compared: "RTX A1000" is no A100.
PEAK_TFLOPS: dict[tuple[str, ...], tuple[float, float, float] | None] = {
    ("MIG",): None,  # a part of a GPU
    ("B200",): (2250, 1100, 75),
    ("GH200",): (989, 494, 67),
    ("H200", "NVL"): (835, 417, 60),
    ("H100", "PCIe"): (756, 378, 51),
    ("H100", "NVL"): (835, 417, 60),
    ("H100",): (989, 494, 67),
    ("H200",): (989, 494, 67),
    ("A100",): (312, 156, 19.5),
    ("A10",): (125, 62.5, 31.2),
    ("A40",): (149.7, 74.8, 37.4),
    ("L40S",): (362, 183, 91.6),
    ("L40",): (181, 90.5, 90.5),
    ("L4",): (121, 60, 30.3),
    ("T4",): (65, 8.1, 8.1),
    ("RTX", "Laptop"): None,
    ("RTX", "5090", "D"): None,
    ("RTX", "5090"): (209.5, 104.8, 104.8),
    ("RTX", "4090", "D"): None,
    ("RTX", "4090"): (165.2, 82.6, 82.6),
    ("RTX", "3090", "Ti"): None,
    ("RTX", "3090"): (71, 35.6, 35.6),
    ("V100", "PCIE"): (112, 14, 14),
    ("V100",): (125, 15.7, 15.7),
}


def training_flops(model: nn.Module, img_size: int) -> int:
    """FLOPs to train on one image: three times the forward pass, since the backward pass costs twice as much.

    Recomputed activations do not count, and the last block counts as the others even if it computes the class token
    only: implementations of a model are compared by the same number.

    Args:
        model: takes images (B, 3, img_size, img_size); its weights are neither copied nor used.
        img_size: in pixels.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    image = torch.empty(1, 3, img_size, img_size, device="meta", dtype=next(iter(shapes.values())).dtype)
    training = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(model, shapes, image)
    model.train(training)
    counts = counter.get_flop_counts()
    blocks = [sum(counts[name].values()) for name in counts if re.fullmatch(r"\w+\.blocks\.\d+", name)]
    return 3 * (counter.get_total_flops() + blocks[0] - blocks[-1])


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the peak dense FLOP/s of a GPU; None if `PEAK_TFLOPS` does not list it.

    Args:
        device_name: from `torch.cuda.get_device_name`, for example "NVIDIA H100 80GB HBM3".
        dtype: of the matrix products.
        tf32: whether fp32 products use TensorFloat-32.
    """
    words = set(re.split(r"[\s-]+", device_name))
    peaks = next((peaks for needed, peaks in PEAK_TFLOPS.items() if words.issuperset(needed)), None)
    if peaks is None:
        return None
    half, reduced, single = peaks
    full = reduced if tf32 else single
    return (full if dtype == torch.float32 else half) * 1e12


def peak_of(device: torch.device, dtype: torch.dtype, tf32: bool) -> float | None:
    """`peak_flops` of a device of this machine; None for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32) if device.type == "cuda" else None
