"""What a setting of a config file is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colossal_vit.config.rules import Rule

DP, HYBRID, CALTECH101, IMAGENET = "train_dp", "train_hybrid", "caltech101", "imagenet"
PATHS = {  # of the example scripts
    DP: "vit_cifar10_hybrid/train_dp.py",
    HYBRID: "vit_cifar10_hybrid/train_hybrid.py",
    CALTECH101: "vit_caltech101_amp/train.py",
    IMAGENET: "vit_imagenet_dali/train.py",
}
SCRIPTS = tuple(PATHS)

REQUIRED, OPTIONAL = object(), object()  # in the place of a default


@dataclass(frozen=True)
class Setting:
    """A key with a value.

    Attributes:
        rule: what the value must be.
        meaning: what it does, with its unit.
        default: the value where the file has none; or one for each script, in the order of `scripts`; REQUIRED if there
            must be one, in a block if that is given; OPTIONAL if without one nothing happens, or what `meaning` says.
        scripts: that use it.
        needs: keys beside it without which it does nothing, each with the values that will do; none given means any
            but None, False and 0.
        idle: scripts that take it and do nothing with it, because published configs have it; with the reason.
    """

    rule: Rule
    meaning: str
    default: Any = OPTIONAL
    scripts: tuple[str, ...] = SCRIPTS
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)


class Each(tuple):
    """A default for each script."""


@dataclass(frozen=True)
class Block:
    """A key whose value is a dict of settings, or None to switch the feature off.

    Attributes:
        meaning, default, scripts, idle: as of a `Setting`.
        settings: in it.
        switches: settings of which one has to be on, that is, not None, False or 0: the block does nothing otherwise.
    """

    meaning: str
    settings: Mapping[str, "Setting | Block"] = field(repr=False)
    default: Any = OPTIONAL
    scripts: tuple[str, ...] = SCRIPTS
    switches: tuple[str, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)


def default_for(setting: Setting | Block, script: str | None) -> Any:
    """The default in a script; one that is not listed has those that all scripts have in common."""
    if isinstance(setting.default, Each):
        return setting.default[setting.scripts.index(script)] if script in setting.scripts else OPTIONAL
    return setting.default if script in setting.scripts or setting.scripts == SCRIPTS else OPTIONAL
