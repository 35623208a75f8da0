"""A Vision Transformer's tensors by timm's names, whoever wrote them: other libraries, wrappers, training scripts."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from colossal_vit.errors import UserError, reason
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

PATCHES = "patch_embed.proj.weight"  # (width, 3, patch size, patch size)
HEAD = "head.weight"  # (classes, width)
CLIPS_PATCHES = "visual.conv1.weight"
# Names of which timm has no filter, by how that of the projection of patches ends: patterns, and timm's names for them.
TORCHVISIONS = {
    r"\bconv_proj\.": "patch_embed.proj.",
    r"\bclass_token\b": "cls_token",
    r"\bencoder\.pos_embedding\b": "pos_embed",
    r"\bencoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
    r"\.ln_([12])\.": r".norm\1.",
    r"\.self_attention\.in_proj_": ".attn.qkv.",
    r"\.self_attention\.out_proj\.": ".attn.proj.",
    r"\.mlp\.(?:0|linear_1)\.": ".mlp.fc1.",  # the second one as in files of before torchvision 0.14
    r"\.mlp\.(?:3|linear_2)\.": ".mlp.fc2.",
    r"\bencoder\.ln\.": "norm.",
    r"\bheads\.head\.": "head.",
}
# As its folders have them, and where they differ, as version 5 has them in memory. timm's filter for DINOv2 knows what
# comes of the mask token and the registers.
TRANSFORMERS = {
    r"\bembeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"\bembeddings\.position_embeddings\b": "pos_embed",
    r"\bembeddings\.distillation_token\b": "dist_token",
    r"\bembeddings\.(cls_token|mask_token|register_tokens)\b": r"\1",
    r"\b(?:encoder\.layer|layers)\.(\d+)\.": r"blocks.\1.",
    r"\.attention\.(?:attention\.)?(q|k|v)(?:uery|ey|alue|_proj)\.": r".attn.\1.",
    r"\.attention\.(?:output\.dense|o_proj)\.": ".attn.proj.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.(?:intermediate\.dense|mlp\.weights_in)\.": ".mlp.fc1.",
    r"\.(?:output\.dense|mlp\.weights_out)\.": ".mlp.fc2.",
    r"\.layer_scale([12])\.lambda1\b": r".ls\1.gamma",
    r"\blayernorm\.": "norm.",
    r"\bclassifier\.": "head.",
}
OTHER_NAMES = {"conv_proj.weight": TORCHVISIONS, "embeddings.patch_embeddings.projection.weight": TRANSFORMERS}
Log = Callable[[str], object]


def flatten(nested: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors in dicts in dicts, each by the keys that lead to it, with dots between them."""
    tensors = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            tensors |= {f"{key}.{name}": tensor for name, tensor in flatten(value).items()}
        elif isinstance(value, Tensor):
            tensors[str(key)] = value
    return tensors


def _rename(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors without the names of `OTHER_NAMES`; query, key and value as one tensor, as timm has them.

    Raises:
        LookupError: if one of these three is missing.
        RuntimeError: if their shapes differ.
    """
    tables = [table for end, table in OTHER_NAMES.items() if any(name.endswith(end) for name in tensors)]
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, ours in (rule for table in tables for rule in table.items()):
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    for query in [name for name in renamed if tables and ".attn.q." in name]:
        parts = [renamed.pop(query.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        renamed[query.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return renamed


def _of_one_model(source: Path | str, tensors: Mapping[str, Tensor], key: str | None, log: Log) -> Mapping[str, Tensor]:
    """Return the tensors of one model, without what is before their names: the keys of a training's checkpoint, what
    DistributedDataParallel or torch.compile add, the attribute that has the model.

    Args:
        source: of the tensors, for messages.
        tensors: of one or more models.
        key: which of several to take; any part of what is before its names.
        log: gets a line if names are changed.

    Raises:
        UserError: naming the models, if it is not clear which one to take.
    """
    ends = f".{PATCHES}", f".{CLIPS_PATCHES}"
    prefixes = [name[: len(name) + 1 - len(end)] for name in tensors for end in ends if f".{name}".endswith(end)]
    # With one whose names have nothing before them, the others are parts of it, such as a decoder.
    chosen = [""] if "" in prefixes else prefixes
    if key is not None:
        chosen = [prefix for prefix in prefixes if f".{key}." in f".{prefix}"]
    if len(chosen) != 1 and (prefixes or key is not None):
        named = ", ".join(prefix.rstrip(".") for prefix in prefixes if prefix)
        has = f"has {named}: set it to one of these" if named else "has no models with names: leave it out"
        raise UserError(f"{source}: finetune.checkpoint_key = {key!r}, but the file {has}")
    (prefix,) = chosen or [""]
    ours = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if HEAD not in ours:  # it may be beside the backbone, as in transformers
        beside = prefix[: prefix.rstrip(".").rfind(".") + 1]
        heads = {name: tensors.get(f"{beside}{name}") for name in (HEAD, "head.bias")}
        ours |= {name: tensor for name, tensor in heads.items() if tensor is not None}
    if prefix:
        others = f"; its {len(tensors) - len(ours)} other tensors are left out" if len(ours) < len(tensors) else ""
        log(f"{source}: {prefix} is taken off its names{others}")
    return ours


def to_timm(source: Path | str, tensors: Mapping[str, Tensor], key: str | None, log: Log) -> Mapping[str, Tensor]:
    """Return the tensors of one Vision Transformer by timm's names; timm itself converts those of CLIP and DINOv2.

    Args:
        source, tensors, key, log: see `_of_one_model`.

    Raises:
        UserError: if it is not clear which model to take, its names are unknown, or it is a distilled one.
    """
    try:
        tensors = _of_one_model(source, _rename(tensors), key, log)
        patches = next((tensor for name, tensor in tensors.items() if name in (PATCHES, CLIPS_PATCHES)), None)
        if patches is not None and patches.ndim == 4:
            # A model of the weights' own sizes, so that nothing is resampled.
            model = SimpleNamespace(pos_embed=None, patch_embed=SimpleNamespace(proj=SimpleNamespace(weight=patches)))
            tensors = checkpoint_filter_fn(dict(tensors), model, adapt_layer_scale=True)
    except (LookupError, RuntimeError) as error:
        raise UserError(f"{source}: its names cannot be converted to timm's: {reason(error)}") from None
    if PATCHES not in tensors:
        raise UserError(
            f"{source}: has no {PATCHES}: not a Vision Transformer with names of timm, torchvision or transformers"
        )
    if "dist_token" in tensors:
        raise UserError(
            f"{source}: has a dist_token: a distilled model has two class tokens and two heads, and none here does: "
            f"take weights without it, see timm.list_pretrained('deit3_*')"
        )
    return tensors
