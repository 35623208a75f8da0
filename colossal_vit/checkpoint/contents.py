"""The types of a checkpoint's JSON files, through which they are read."""

from typing import Annotated, Any, NotRequired

from colossal_vit.typed_json import RECORD, Count, Finite, Positive
from pydantic import AfterValidator
from typing_extensions import TypedDict

VERSION = 1


def _is_known(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"only {VERSION} is known here")
    return version


Channels = tuple[Finite, Finite, Finite]


class Fingerprint(TypedDict):
    """What tells one content of a file from another."""

    bytes: Count
    sha256: str


class Manifest(TypedDict):
    """manifest.json: what the other files are."""

    version: Annotated[Count, AfterValidator(_is_known)]
    files: dict[str, Fingerprint]


class Best(TypedDict):
    """The best evaluation so far, and the step after which it was."""

    accuracy: Finite
    step: Count


class Scaler(TypedDict):
    """The state of a loss scaler; empty without one. That of apex has other fields."""

    __pydantic_config__ = RECORD
    loss_scale: NotRequired[Positive]
    growth_step: NotRequired[Count]
    hysteresis_step: NotRequired[Count]


class Data(TypedDict):
    """What identifies a data set, see `data.identity.identify`."""

    __pydantic_config__ = RECORD
    classes: NotRequired[list[str] | Count]


class Source(TypedDict):
    """Where a run's data were read: by which loader, relative to the repository, and in which folder."""

    __pydantic_config__ = RECORD
    loader: NotRequired[str]
    folder: NotRequired[str]


class Change(TypedDict):
    """What `--accept-changes` accepted after a step: values, each before and after, and other data in words."""

    __pydantic_config__ = RECORD
    step: Count
    values: dict[str, Any]
    data: str


class State(TypedDict):
    """state.json, see `Checkpointer.state`; older versions wrote none of the fields that are not required."""

    __pydantic_config__ = RECORD
    step: Count
    epoch: Count
    images: Count
    global_batch: Count
    optimizer: str | None
    moments_step: Count  # updates in the moments
    fewer_updates: NotRequired[dict[str, Count]]  # in those of parameters that were frozen at first, by name
    scaler: Scaler
    best: Best | None
    ranks: NotRequired[list[Any]]  # states of generators, in earlier versions
    config: dict[str, Any]
    normalization: NotRequired[tuple[Channels, Channels] | None]  # mean, standard deviation
    versions: NotRequired[dict[str, str]]
    data: NotRequired[Data | None]
    source: NotRequired[Source]
    started_from: NotRequired[str | None]
    changes: NotRequired[list[Change]]
