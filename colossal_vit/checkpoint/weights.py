"""Weights from elsewhere: of timm, a file, a folder or another run, fitted to other images and classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NotRequired

import timm
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.contents import Channels, State
from colossal_vit.checkpoint.storage import MODEL, STATE
from colossal_vit.config.check import did_you_mean
from colossal_vit.errors import UserError, reason
from colossal_vit.typed_json import RECORD
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import Attention, build_sincos2d_pos_embed, resample_abs_pos_embed
from timm.models import PretrainedCfg, get_pretrained_cfg, load_state_dict_from_hf
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor
from typing_extensions import TypedDict

PATCHES = "patch_embed.proj.weight"  # (width, 3, patch size, patch size)
BIAS = "patch_embed.proj.bias"  # (width,)
HEAD = "head.weight"  # (classes, width)
CLIPS_PATCHES = "visual.conv1.weight"
# Who else names a Vision Transformer's tensors, by how one of them ends.
OTHER_NAMES = {
    "embeddings.patch_embeddings.projection.weight": "transformers",
    "conv_proj.weight": "torchvision",
}
OTHER_MODEL = "take weights of the same model, or set MODEL or its sizes to theirs"
Log = Callable[[str], object]


class Found(NamedTuple):
    """Weights that are found, and not read yet.

    Attributes:
        named: the path or name that was given.
        path: to them; None if they are of a model of timm.
        checkpoint: that they are in, opened, since a run may remove it; None for other files and folders.
    """

    named: str
    path: Path | None
    checkpoint: storage.Checkpoint | None


class Weights(NamedTuple):
    """Weights of a Vision Transformer.

    Attributes:
        source: where they are from, for messages.
        tensors: in fp32, by timm's names.
    """

    source: Path | str
    tensors: dict[str, Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


class _Preprocessing(TypedDict):
    """What timm says of how its weights see images."""

    __pydantic_config__ = RECORD
    mean: NotRequired[Channels | None]
    std: NotRequired[Channels | None]


class _FolderConfig(TypedDict):
    """config.json in a folder of timm's."""

    __pydantic_config__ = RECORD
    architecture: NotRequired[str]
    model_args: NotRequired[dict[str, Any] | None]
    label_names: NotRequired[Any]
    pretrained_cfg: NotRequired[_Preprocessing]


def find(named: str) -> Found:
    """Return weights by their path: a safetensors file, a folder of timm's with one, a checkpoint, a run, for its
    newest one.

    Args:
        named: the path or, if there is no such path, a model of timm.

    Raises:
        UserError: if there is no such path and it cannot be a model of timm, or no valid checkpoint of a run.
    """
    path = Path(named)
    if not path.exists():
        if path.suffix == ".safetensors" or len(path.parts) > 1:
            raise UserError(f"{named}: no such file or directory")
        return Found(named, None, None)
    of_run = path.is_dir() and (storage.is_checkpoint(path) or not (path / MODEL).exists())
    return Found(named, path, storage.open_named(path) if of_run else None)


def find_state(found: Found) -> Mapping[str, Any]:
    """Return what is known of how weights were trained: `config`, `data` and `normalization` of a checkpoint's state,
    or less.

    Raises:
        UserError: if timm has no such weights, or what describes them cannot be read.
    """
    if not found.path:
        known = _timm_weights(found.named)
        return {"config": {}, "normalization": (known.mean, known.std)}
    if found.checkpoint:
        return found.checkpoint.state
    file = _file(found.path)
    state, config = file.with_name(STATE), file.with_name("config.json")
    if file.name == MODEL and state.exists():
        return typed_json.read(state, State)
    if file.name == MODEL and config.exists():
        return _state_of_folder(typed_json.read(config, _FolderConfig))
    return {"config": {}}


def _state_of_folder(config: _FolderConfig) -> dict[str, Any]:
    """Return what config.json in a folder of timm's says, as a checkpoint's state does."""
    model = {"MODEL": config.get("architecture"), "NUM_HEADS": (config.get("model_args") or {}).get("num_heads")}
    names, images = config.get("label_names"), config.get("pretrained_cfg", {})
    known = images.get("mean"), images.get("std")
    return {
        "config": {key: value for key, value in model.items() if value},
        "data": {"classes": names} if isinstance(names, list) else None,
        "normalization": known if all(known) else None,
    }


def _file(path: Path) -> Path:
    """Return the file with weights that a path leads to."""
    return path / MODEL if path.is_dir() else path


def _without_prefix(source: Path | str, tensors: Mapping[str, Tensor], log: Log) -> Mapping[str, Tensor]:
    """Return the tensors without what wrappers such as DistributedDataParallel or torch.compile put before their names.

    Raises:
        UserError: if there are several models.
    """
    prefixes = [name.removesuffix(PATCHES) for name in tensors if name.endswith(f".{PATCHES}")]
    if PATCHES in tensors or not prefixes:
        return tensors
    if len(prefixes) > 1:
        raise UserError(f"{source}: has several models, {', '.join(prefixes)}: keep the tensors of one of them")
    (prefix,) = prefixes
    ours = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    others = f"; its {len(tensors) - len(ours)} other tensors are left out" if len(ours) < len(tensors) else ""
    log(f"{source}: {prefix} is taken off its names{others}")
    return ours


def _by_timms_names(source: Path | str, tensors: Mapping[str, Tensor], log: Log) -> Mapping[str, Tensor]:
    """Return the tensors by timm's names, converted by timm itself where it knows the others, as those of CLIP and
    DINOv2.

    Raises:
        UserError: if they have names that it does not know, or those of a distilled model.
    """
    tensors = _without_prefix(source, tensors, log)
    patches = next((tensor for name, tensor in tensors.items() if name.endswith((PATCHES, CLIPS_PATCHES))), None)
    if patches is not None and patches.ndim == 4:
        # A model of the weights' own sizes, so that nothing is resampled.
        model = SimpleNamespace(pos_embed=None, patch_embed=SimpleNamespace(proj=SimpleNamespace(weight=patches)))
        try:
            tensors = checkpoint_filter_fn(dict(tensors), model, adapt_layer_scale=True)
        except (LookupError, RuntimeError) as error:
            raise UserError(f"{source}: timm cannot convert its names: {reason(error)}") from None
    if PATCHES not in tensors:
        whose = next((who for end, who in OTHER_NAMES.items() if any(name.endswith(end) for name in tensors)), None)
        said = f"its names are those of {whose}" if whose else "not a Vision Transformer with timm's names"
        remedy = ": take the weights that timm has, see timm.list_pretrained('vit_*')" if whose else ""
        raise UserError(f"{source}: has no {PATCHES}: {said}{remedy}")
    if "dist_token" in tensors:
        raise UserError(
            f"{source}: has a dist_token: a distilled model has two class tokens and two heads, and none here does: "
            f"take weights without it, see timm.list_pretrained('deit3_*')"
        )
    return tensors


def _in_fp32(source: Path | str, tensors: Mapping[str, Tensor], log: Log) -> dict[str, Tensor]:
    """Return the weights in fp32, by timm's names.

    Raises:
        UserError: if they are not those of a Vision Transformer, see `_by_timms_names`.
    """
    tensors = _by_timms_names(source, tensors, log)
    # What is computed with before shapes are held against a model's.
    shapes = {name: tuple(tensors[name].shape) for name in (PATCHES, BIAS, HEAD) if name in tensors}
    shape = shapes[PATCHES]
    if len(shape) != 4 or min(shape) < 1 or shape[1] != 3 or shape[2] != shape[3]:
        raise UserError(f"{source}: {PATCHES} is of shape {shape}, which is not (width, 3, patch size, patch size)")
    if shapes.get(BIAS, shape[:1]) != shape[:1]:
        raise UserError(f"{source}: {BIAS} is of shape {shapes[BIAS]}, but {PATCHES} of {shape}")
    if len(shapes.get(HEAD, (0, 0))) != 2:
        raise UserError(f"{source}: {HEAD} is of shape {shapes[HEAD]}, which is not (classes, width)")
    return {name: tensor.float() for name, tensor in tensors.items()}


def read(found: Found, log: Log = print) -> Weights:
    """Return the weights themselves; `log` gets a line if names are changed.

    Raises:
        UserError: if there are none, they cannot be read, or are not those of a Vision Transformer.
    """
    if not found.path:
        return _read_timm(found.named, log)
    if found.checkpoint:
        file = found.checkpoint.path / MODEL
        return Weights(file, _in_fp32(file, found.checkpoint.tensors(MODEL), log))
    file = _file(found.path)
    if file.suffix != ".safetensors":
        raise UserError(
            f"{file}: only .safetensors files are read, and folders with one: files of other formats (.bin, .pth, "
            f".pt, .ckpt, .npz) can run code when they are opened. Convert it: safetensors.torch.save_file(state, "
            f"'{file.with_suffix('.safetensors').name}') of the state_dict in torch.load('{file.name}', "
            f"weights_only=True)"
        )
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or reason(error)}") from None
    return Weights(file, _in_fp32(file, tensors, log))


def _check_reachable(repository: str) -> None:
    """Ask the Hugging Face Hub once for a file that is not in its cache on this machine.

    A download asks again and again, with a warning each time, until 24 seconds later it says that there is no network.

    Raises:
        OSError: if the file cannot be had.
    """
    name, _, revision = repository.partition("@")
    if try_to_load_from_cache(name, MODEL, revision=revision or None) is None:
        try:
            get_hf_file_metadata(hf_hub_url(name, MODEL, revision=revision or None))
        except Exception as error:  # not an OSError if it is one of the HTTP client, of which the hub has had several
            raise OSError(reason(error)) from error


def _timm_weights(name: str) -> PretrainedCfg:
    """Return what timm knows of its pretrained weights of a model.

    Raises:
        UserError: if timm has no such model, or no weights of it.
    """
    try:
        known = get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        known = None
    if known is None:
        hint = did_you_mean(name, [*timm.list_models(), *timm.list_pretrained()]) or ", see timm.list_pretrained()"
        raise UserError(f"{name}: is no file or folder here, and no pretrained model of timm{hint}")
    if not known.hf_hub_id:
        raise UserError(f"{name}: timm has no weights of it on the Hugging Face Hub, see timm.list_pretrained()")
    return known


def _read_timm(name: str, log: Log) -> Weights:
    """Return the pretrained weights of a model of timm, from the Hugging Face Hub or its cache on this machine.

    Raises:
        UserError: if timm has no such model, it has no weights, or they cannot be fetched.
    """
    known = _timm_weights(name)
    try:
        _check_reachable(known.hf_hub_id)
        tensors = load_state_dict_from_hf(known.hf_hub_id, MODEL)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{name}: cannot be fetched from {known.hf_hub_id} on the Hugging Face Hub ({reason(error)}); "
            f"without a network give the path of its model.safetensors"
        ) from None
    return Weights(name, _in_fp32(name, tensors, log))


# ---------------------------------------------------------------------------------------------------------------------
# Fitting, in place
# ---------------------------------------------------------------------------------------------------------------------


def _resample(weights: Weights, img_size: int, asked: str) -> None:
    """Resample the position embedding for images of `img_size` px; the class token's embedding is kept.

    Raises:
        UserError: naming what the user `asked`, if the embedding is not a square grid.
    """
    source, tensors = weights
    width, _, _, patch = tensors[PATCHES].shape
    position = tensors.get("pos_embed", torch.empty(0))  # (1, N, C)
    num_tokens = position.shape[1] if position.ndim == 3 else 0
    num_prefix = num_tokens - math.isqrt(num_tokens) ** 2  # tokens that are not patches
    if num_tokens == 0 or num_prefix > 1 or position.shape != (1, num_tokens, width):
        raise UserError(
            f"{asked}: pos_embed of {source} is of shape {tuple(position.shape)}, which is not (1, N, width) with "
            f"N a square, or a square and the class token"
        )
    grid = [img_size // patch] * 2
    tensors["pos_embed"] = resample_abs_pos_embed(position, grid, num_prefix_tokens=num_prefix)


def _num_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of heads of a config's model; None if it does not say."""
    if "NUM_HEADS" in config or not timm.is_model(config.get("MODEL") or ""):
        return config.get("NUM_HEADS")
    with torch.device("meta"):
        model = timm.create_model(config["MODEL"])
    return next((module.num_heads for module in model.modules() if isinstance(module, Attention)), None)


def other_heads(trained: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Say so if weights were trained with another number of heads, which no shape tells.

    Args:
        trained: the config of their run.
        config: of this run.
    """
    before, now = _num_heads(trained), _num_heads(config)
    return "" if None in (before, now) or before == now else f"was trained with NUM_HEADS = {before}, not {now}"


def _has_learned_positions(weights: Weights) -> bool:
    """Return whether there is a position embedding for a square grid that is not sines and cosines, see
    `fix_positions`.
    """
    position = weights.tensors.get("pos_embed", torch.empty(0))  # (1, N, C)
    if position.ndim != 3 or position.shape[2] % 4:
        return False
    side = math.isqrt(position.shape[1])
    fixed = build_sincos2d_pos_embed([side, side], position.shape[2])
    return not torch.allclose(position[0, -len(fixed) :].float(), fixed, rtol=0, atol=0.01)  # they may be bf16


def _num_classes(weights: Weights) -> int | None:
    """Return the number of classes that the head is for; None without a head."""
    return len(weights.tensors[HEAD]) if HEAD in weights.tensors else None


def _new_head(weights: Weights, num_classes: int) -> None:
    """Start with a head of zeros, as the ViT paper does for fine-tuning (arXiv:2010.11929, section 3.2)."""
    width = len(weights.tensors[PATCHES])
    weights.tensors.update({HEAD: torch.zeros(num_classes, width), "head.bias": torch.zeros(num_classes)})


def _new_norm(weights: Weights) -> None:
    """Put a new norm behind average pooling in place of the one before it, as MAE's fine-tuning does (arXiv:2111.06377,
    appendix A.1)."""
    width = len(weights.tensors[PATCHES])
    weights.tensors.update({"fc_norm.weight": torch.ones(width), "fc_norm.bias": torch.zeros(width)})
    for name in ("norm.weight", "norm.bias"):
        weights.tensors.pop(name, None)


def read_fitted(
    found: Found, head: str, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], log: Log = print
) -> dict[str, Tensor]:
    """Return the weights that `finetune.weights` names, fitted to a model.

    Args:
        found: by that name.
        head: "keep" theirs, or start with a "new" one.
        shapes: of the model's full tensors, by name.
        config: has IMG_SIZE and NUM_CLASSES.
        log: see `read`.

    Raises:
        UserError: if there are none, they cannot be read or are not of this model, naming what differs.
    """
    named = found.named
    weights = read(found, log)._replace(source=named)
    theirs, ours = weights.tensors[PATCHES].shape[-1], shapes[PATCHES][-1]
    if theirs != ours:
        raise UserError(f"{named}: has patches of {theirs} px, but this model's are of {ours} px: {OTHER_MODEL}")
    if said := other_heads(find_state(found)["config"], config):
        raise UserError(f"{named}: {said}: set it to theirs")
    if config.get("POSITIONS") == "sincos2d" and _has_learned_positions(weights):
        raise UserError(f"{named}: has learned positions, which POSITIONS = 'sincos2d' would not train: leave it out")
    if "pos_embed" in weights.tensors and list(weights.tensors["pos_embed"].shape) != shapes["pos_embed"]:
        _resample(weights, config["IMG_SIZE"], f"IMG_SIZE = {config['IMG_SIZE']}")
    if "fc_norm.weight" in shapes and "norm.weight" in weights.tensors:
        _new_norm(weights)
    num_classes = config["NUM_CLASSES"]
    if head == "new":
        _new_head(weights, num_classes)
    elif (there := _num_classes(weights)) != num_classes:
        raise UserError(
            f"{named}: has {'no head' if there is None else f'one for {there} classes'}, but finetune.head = 'keep' "
            f"needs one for NUM_CLASSES = {num_classes}: set it to 'new'"
        )
    return weights.tensors
