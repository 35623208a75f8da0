"""Weights from elsewhere: of timm, a file, a folder or another run, fitted to other images and classes."""

import argparse
import math
import re
import zipfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

import timm
import torch
from colossal_vit import typed_json
from colossal_vit.checkpoint import storage
from colossal_vit.checkpoint.contents import Channels, State
from colossal_vit.checkpoint.names import HEAD, PATCHES, Log, flatten, to_timm
from colossal_vit.checkpoint.storage import MODEL, STATE
from colossal_vit.config.check import did_you_mean
from colossal_vit.errors import UserError, reason
from colossal_vit.typed_json import RECORD, Count
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import Attention, build_sincos2d_pos_embed, resample_abs_pos_embed
from timm.models import PretrainedCfg, get_pretrained_cfg, load_state_dict_from_hf
from torch import Tensor
from typing_extensions import TypedDict

BIAS = "patch_embed.proj.bias"  # (width,)
HEADS = (HEAD, "head.bias")
TORCH_MODEL = "pytorch_model.bin"  # MODEL in folders of before safetensors
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
# How names begin that the features depend on; a model without one of theirs computes something else.
BODY = ("patch_embed.", "cls_token", "reg_token", "pos_embed", "norm_pre.", "blocks.", "norm.", "fc_norm.")
OTHER_MODEL = "take weights of the same model, or set MODEL or its sizes to theirs"


class Found(NamedTuple):
    """Weights that are found, and not read yet.

    Attributes:
        named: the path or name that was given.
        path: to them; None if they are of a model of timm.
        checkpoint: that they are in, opened, since a run may remove it; None for other files and folders.
        key: which of several models in a file they are; None for the only one.
    """

    named: str
    path: Path | None
    checkpoint: storage.Checkpoint | None
    key: str | None


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


class _Preprocessing(TypedDict):
    """What timm says of how its weights see images."""

    __pydantic_config__ = RECORD
    mean: NotRequired[Channels | None]
    std: NotRequired[Channels | None]


class _FolderConfig(TypedDict):
    """config.json in a folder of timm's, or of transformers'."""

    __pydantic_config__ = RECORD
    architecture: NotRequired[str]
    model_args: NotRequired[dict[str, Any] | None]
    label_names: NotRequired[Any]
    pretrained_cfg: NotRequired[_Preprocessing]
    num_attention_heads: NotRequired[Count]
    hidden_act: NotRequired[Literal["gelu"]]  # timm's Vision Transformers have no other
    id2label: NotRequired[dict[int, str] | None]


class _Preprocessor(TypedDict):
    """preprocessor_config.json in a folder of transformers'."""

    __pydantic_config__ = RECORD
    do_normalize: NotRequired[bool | None]
    image_mean: NotRequired[Channels | None]
    image_std: NotRequired[Channels | None]


def find(named: str, key: str | None = None) -> Found:
    """Return weights by their path: a file, a folder of timm's or transformers' with one, a checkpoint, a run, for its
    newest one.

    Args:
        named: the path or, if there is no such path, a model of timm.
        key: which of several models in a file to take.

    Raises:
        UserError: if there is no such path and it cannot be a model of timm, or no valid checkpoint of a run.
    """
    path = Path(named)
    if not path.exists():
        if path.suffix in ENDINGS or len(path.parts) > 1:
            raise UserError(f"{named}: no such file or directory")
        return Found(named, None, None, key)
    of_run = path.is_dir() and (storage.is_checkpoint(path) or not _file(path).exists())
    return Found(named, path, storage.open_named(path) if of_run else None, key)


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
    if file.name in (MODEL, TORCH_MODEL) and config.exists():
        images = file.with_name("preprocessor_config.json")
        seen = typed_json.read(images, _Preprocessor) if images.exists() else {}
        return _state_of_folder(typed_json.read(config, _FolderConfig), seen)
    return {"config": {}}


def _state_of_folder(config: _FolderConfig, seen: _Preprocessor) -> dict[str, Any]:
    """Return what the files in a folder of timm's or transformers' say, as a checkpoint's state does."""
    heads = (config.get("model_args") or {}).get("num_heads", config.get("num_attention_heads"))
    model = {"MODEL": config.get("architecture"), "NUM_HEADS": heads}
    labels = [label for _, label in sorted((config.get("id2label") or {}).items())]
    if all(re.fullmatch(r"LABEL_\d+", label) for label in labels):  # of data without names
        labels = None
    names, images = config.get("label_names", labels), config.get("pretrained_cfg", {})
    known = images.get("mean"), images.get("std")
    if seen.get("do_normalize", True):
        known = known if all(known) else (seen.get("image_mean"), seen.get("image_std"))
    return {
        "config": {key: value for key, value in model.items() if value},
        "data": {"classes": names} if isinstance(names, list) else None,
        "normalization": known if all(known) else None,
    }


def _file(path: Path) -> Path:
    """Return the file with weights that a path leads to."""
    if not path.is_dir():
        return path
    return next((path / name for name in (MODEL, TORCH_MODEL) if (path / name).exists()), path / MODEL)


def _load_torch(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of torch.save, of which nothing is run.

    Raises:
        UserError: if it has more than tensors, numbers and containers, or cannot be read.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # of the command line, in many trainings' files
            # Those of before torch 1.6 are no archives, which alone can be mapped.
            archive = zipfile.is_zipfile(file)
            loaded = torch.load(file, "cpu", weights_only=True, mmap=archive)  # noqa: TID251 runs nothing then
        return flatten(loaded if isinstance(loaded, Mapping) else {})
    except Exception as error:  # a damaged or forged file may raise any
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{file}: contains a {found[1]}, which could run code and is not read: write the weights alone where "
                f"they were made, with torch.save(model.state_dict(), 'weights.pth')"
            ) from None
        why = re.search(r"Unsupported operand \d+", str(error))  # the first line says whom to trust instead
        said = getattr(error, "strerror", None) or (why[0] if why else reason(error))
        raise UserError(f"{file}: is no safetensors, and no file of torch.save that can be read: {said}") from None


def _in_fp32(source: Path | str, tensors: Mapping[str, Tensor], key: str | None, log: Log) -> dict[str, Tensor]:
    """Return the weights in fp32, by timm's names.

    Raises:
        UserError: if they are not those of a Vision Transformer, see `to_timm`.
    """
    tensors = to_timm(source, tensors, key, log)
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


def read(found: Found, log: Log = print) -> dict[str, Tensor]:
    """Return the weights themselves, in fp32, by timm's names; `log` gets a line if what is before names is taken off.

    Raises:
        UserError: if there are none, they cannot be read, or are not those of a Vision Transformer.
    """
    if not found.path:
        return _in_fp32(found.named, _read_timm(found.named), found.key, log)
    file = found.checkpoint.path / MODEL if found.checkpoint else _file(found.path)
    try:
        if found.checkpoint:
            tensors = found.checkpoint.tensors(MODEL)
        elif file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            tensors = _load_torch(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or reason(error)}") from None
    return _in_fp32(file, tensors, found.key, log)


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


def _read_timm(name: str) -> dict[str, Tensor]:
    """Return the pretrained weights of a model of timm, from the Hugging Face Hub or its cache on this machine.

    Raises:
        UserError: if timm has no such model, it has no weights, or they cannot be fetched.
    """
    known = _timm_weights(name)
    try:
        _check_reachable(known.hf_hub_id)
        return load_state_dict_from_hf(known.hf_hub_id, MODEL)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{name}: cannot be fetched from {known.hf_hub_id} on the Hugging Face Hub ({reason(error)}); "
            f"without a network give the path of its model.safetensors"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# Fitting, in place
# ---------------------------------------------------------------------------------------------------------------------


def _resample(named: str, tensors: dict[str, Tensor], img_size: int) -> None:
    """Resample the position embedding for images of `img_size` px; the class token's embedding is kept.

    Raises:
        UserError: if the embedding is not a square grid.
    """
    width, _, _, patch = tensors[PATCHES].shape
    position = tensors.get("pos_embed", torch.empty(0))  # (1, N, C)
    num_tokens = position.shape[1] if position.ndim == 3 else 0
    num_prefix = num_tokens - math.isqrt(num_tokens) ** 2  # tokens that are not patches
    if num_tokens == 0 or num_prefix > 1 or position.shape != (1, num_tokens, width):
        raise UserError(
            f"IMG_SIZE = {img_size}: pos_embed of {named} is of shape {tuple(position.shape)}, which is not "
            f"(1, N, width) with N a square, or a square and the class token"
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


def _is_learned(position: Tensor) -> bool:
    """Return whether a position embedding, (1, N, C), is for a square grid and not of sines and cosines, see
    `fix_positions`.
    """
    if position.ndim != 3 or position.shape[2] % 4:
        return False
    side = math.isqrt(position.shape[1])
    fixed = build_sincos2d_pos_embed([side, side], position.shape[2])
    return not torch.allclose(position[0, -len(fixed) :].float(), fixed, rtol=0, atol=0.01)  # they may be bf16


def _check_names(named: str, tensors: dict[str, Tensor], names: Set[str], log: Log) -> None:
    """Leave out tensors that a model has no place for, in a line; the head is another matter.

    Args:
        named: what has the tensors, for messages.
        tensors: fitted to the model but for the head.
        names: of the model's tensors.
        log: gets the line.

    Raises:
        UserError: if the features would be others, for one is missing or one that they depend on has no place.
    """

    def listed(names: Set[str]) -> str:
        return f"{', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''} ({len(names)} in all)"

    if missing := names - tensors.keys() - set(HEADS):
        raise UserError(f"{named}: has no {listed(missing)}, which this model needs: it is of another model")
    left = tensors.keys() - names - set(HEADS)
    if body := {name for name in left if name.startswith(BODY)}:
        raise UserError(f"{named}: has {listed(body)}, which this model lacks: it is of another model")
    if left:
        log(f"{named}: left out, since this model has no place for it: {listed(left)}")
    for name in left:
        del tensors[name]


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
    named, tensors = found.named, read(found, log)
    width, _, _, theirs = tensors[PATCHES].shape
    if theirs != (ours := shapes[PATCHES][-1]):
        raise UserError(f"{named}: has patches of {theirs} px, but this model's are of {ours} px: {OTHER_MODEL}")
    if said := other_heads(find_state(found)["config"], config):
        raise UserError(f"{named}: {said}: set it to theirs")
    if "pos_embed" in tensors and "pos_embed" in shapes:
        if config.get("POSITIONS") == "sincos2d" and _is_learned(tensors["pos_embed"]):
            raise UserError(
                f"{named}: has learned positions, which POSITIONS = 'sincos2d' would not train: leave it out"
            )
        if list(tensors["pos_embed"].shape) != shapes["pos_embed"]:
            _resample(named, tensors, config["IMG_SIZE"])
    if "fc_norm.weight" in shapes and tensors.pop("norm.weight", None) is not None:
        # Behind average pooling, in place of the one before it, as in MAE's fine-tuning (arXiv:2111.06377, A.1).
        tensors |= {"fc_norm.weight": torch.ones(width), "fc_norm.bias": torch.zeros(width)}
        tensors.pop("norm.bias", None)
    _check_names(named, tensors, shapes.keys(), log)
    classes, sees = tensors[HEAD].shape if HEAD in tensors else (None, width)
    if sees != width:  # of DINOv2 in transformers
        log(f"{named}: its head is left out, since it sees {sees} features and not the {width} of one token")
        classes = None
        for name in HEADS:
            tensors.pop(name, None)
    num_classes = config["NUM_CLASSES"]
    if head == "new":  # of zeros, as in the ViT paper's fine-tuning (arXiv:2010.11929, section 3.2)
        tensors |= {HEAD: torch.zeros(num_classes, width), "head.bias": torch.zeros(num_classes)}
    elif classes != num_classes:
        raise UserError(
            f"{named}: has {'no head' if classes is None else f'one for {classes} classes'}, but finetune.head = "
            f"'keep' needs one for NUM_CLASSES = {num_classes}: set it to 'new'"
        )
    return tensors
