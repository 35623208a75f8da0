"""Starts a run from weights that are trained already, as the config's block `finetune` says, in any layout."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import timm
from colossal_vit import typed_json
from colossal_vit.checkpoint import fitting, storage
from colossal_vit.checkpoint.broadcast import Distributed, Source, from_memory, load_model, own_shapes
from colossal_vit.checkpoint.contents import Channels
from colossal_vit.checkpoint.fitting import Normalization
from colossal_vit.checkpoint.sources import weights_file
from colossal_vit.config.schema import default
from colossal_vit.engine.engine import Engine
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import all_gather_object
from colossal_vit.run import Run
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError
from timm.models import get_pretrained_cfg, load_state_dict_from_hf
from torch import Tensor
from typing_extensions import TypedDict

OTHER_MODEL = "take weights of the same model, or set MODEL or its sizes to theirs"
FILE = "model.safetensors"


def _check_reachable(repository: str) -> None:
    """Ask the Hugging Face Hub once for a file that is not in its cache on this machine.

    A download asks again and again, with a warning each time, until 24 seconds later it says that there is no network.

    Raises:
        OSError: if the file cannot be had.
    """
    name, _, revision = repository.partition("@")
    if try_to_load_from_cache(name, FILE, revision=revision or None) is None:
        try:
            get_hf_file_metadata(hf_hub_url(name, FILE, revision=revision or None))
        except Exception as error:  # not an OSError if it is one of the HTTP client, of which the hub has had several
            raise OSError(str(error) or type(error).__name__) from error


def _of_timm(name: str) -> dict[str, Tensor]:
    """The pretrained weights of a model of timm, from the Hugging Face Hub or its cache on this machine.

    Raises:
        UserError: if timm has no such model, it has no weights, or they cannot be fetched.
    """
    try:
        known = get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        known = None
    if known is None:
        close = difflib.get_close_matches(name, [*timm.list_models(), *timm.list_pretrained()], n=1)
        hint = f"; did you mean {close[0]}?" if close else ", see timm.list_pretrained()"
        raise UserError(f"{name}: is no file or folder here, and no pretrained model of timm{hint}")
    if not known.hf_hub_id:
        raise UserError(f"{name}: timm has no weights of it on the Hugging Face Hub, see timm.list_pretrained()")
    try:
        _check_reachable(known.hf_hub_id)
        return load_state_dict_from_hf(known.hf_hub_id, FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{name}: cannot be fetched from {known.hf_hub_id} on the Hugging Face Hub ({str(error).splitlines()[0]}); "
            f"without a network give the path of its model.safetensors"
        ) from None


class _Preprocessing(TypedDict):
    """What timm says of how its weights see images."""

    __pydantic_config__ = typed_json.RECORD
    mean: NotRequired[Channels | None]
    std: NotRequired[Channels | None]


class _Config(TypedDict):
    """config.json in a folder of timm's."""

    __pydantic_config__ = typed_json.RECORD
    pretrained_cfg: NotRequired[_Preprocessing]


def _normalization(file: Path) -> Normalization | None:
    """How the images were normalised that weights were trained with, if a file beside theirs says it."""
    folder, known = file.parent, None
    if file.name == FILE and (folder / storage.STATE).exists():
        known = storage.read_state(folder).get("normalization")
    elif file.name == FILE and (folder / "config.json").exists():
        config = typed_json.read(folder / "config.json", _Config).get("pretrained_cfg", {})
        known = config.get("mean"), config.get("std")
    return known if known and all(known) else None


def _read(source: str) -> tuple[dict[str, Tensor], Normalization | None]:
    """The weights of a path or, if there is no such path, of timm's model of that name, in fp32.

    Returns:
        Also how the images were normalised that they were trained with, if it is known.
    """
    path = Path(source)
    if path.exists():
        file = weights_file(path)
        return fitting.read(file), _normalization(file)
    if path.suffix == ".safetensors" or len(path.parts) > 1:
        raise UserError(f"{source}: no such file or directory")
    weights = fitting.in_fp32(source, _of_timm(source))
    known = get_pretrained_cfg(source)
    return weights, (known.mean, known.std)


def _fit(
    source: str, weights: dict[str, Tensor], shapes: Mapping[str, list[int]], config: Mapping[str, Any], head: str
) -> None:
    """Fit weights in place to a model whose full tensors are of `shapes`.

    Raises:
        UserError: if they cannot be, naming what differs.
    """
    theirs, ours = weights[fitting.PATCHES].shape[-1], shapes[fitting.PATCHES][-1]
    if theirs != ours:
        raise UserError(f"{source}: has patches of {theirs} px, but this model's are of {ours} px: {OTHER_MODEL}")
    if "pos_embed" in weights and list(weights["pos_embed"].shape) != shapes["pos_embed"]:
        fitting.resample(source, weights, config["IMG_SIZE"], f"IMG_SIZE = {config['IMG_SIZE']}")
    if "fc_norm.weight" in shapes and "norm.weight" in weights:
        fitting.new_norm(weights)
    if head == "new":
        fitting.new_head(weights, config["NUM_CLASSES"], f"NUM_CLASSES = {config['NUM_CLASSES']}")
    elif not fitting.has_head(weights, config["NUM_CLASSES"]):
        there = f"one for {len(weights['head.weight'])} classes" if "head.weight" in weights else "no head"
        raise UserError(
            f"{source}: has {there}, but finetune.head = 'keep' needs one for NUM_CLASSES = {config['NUM_CLASSES']}: "
            f"set it to 'new'"
        )


def _renormalize(named: str, weights: dict[str, Tensor], theirs: Normalization, ours: Normalization) -> str:
    """Fit weights in place to images that are normalised in another way; returns what to log, empty for nothing."""
    if all(map(np.array_equal, theirs, ours)):
        return ""
    done = fitting.renormalize(weights, theirs, ours)
    (mean, std), (our_mean, our_std) = ([tuple(values) for values in pair] for pair in (theirs, ours))
    return (
        f"{named} has learned from images of mean {mean} and deviation {std}, here they have {our_mean} and {our_std}: "
        f"{'its patch embedding is rescaled, so that it sees the same' if done else 'it does not see the same'}"
    )


def start_from(run: Run, engine: Engine, normalization: Normalization | None = None) -> None:
    """Load the weights that `finetune.weights` names into a model that has made no step. Collective.

    Only rank 0 reads them.

    Args:
        run: whose config has the block `finetune`.
        engine: with the model.
        normalization: how the images of this run are normalised; None if that does not matter.

    Raises:
        UserError: on every rank, if there are none, they cannot be read or are not of this model, or only the head
            that they would not get is asked for.
    """
    finetune = run.config.finetune
    named, head = finetune.get("weights"), finetune.get("head", default("finetune", "head"))
    if named is None:
        raise UserError(
            f"finetune = {dict(finetune)}, but there are no weights to start from: set finetune.weights, --resume a "
            f"checkpoint, or leave the block out"
        )
    if run.args.eval_only and not run.args.eval_knn and head == "new":
        raise UserError(
            f"--eval-only evaluates the head of finetune.weights = {named!r}, but finetune.head = 'new' starts with "
            f"one of zeros: set it to 'keep', or give --eval-knn, which needs no head"
        )
    shapes = {name: shape for shapes in all_gather_object(own_shapes(engine)) for name, shape in shapes.items()}

    def find() -> Source:
        try:
            weights, theirs = _read(named)
            _fit(named, weights, shapes, run.config, head)
            if theirs and normalization and (said := _renormalize(named, weights, theirs, normalization)):
                run.log.info(said)
        except UserError as error:
            raise UserError(f"finetune.weights: {error}") from None
        return from_memory(weights)

    load_model(f"finetune.weights: {named}", Distributed(find), engine, OTHER_MODEL)
    if engine.ema:
        engine.ema.restart()
    what = "a new head" if head == "new" else "their head"
    run.log.info(f"starting from the weights of {named}, with {what}")
