"""What a setting of a config file is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colossal_vit.config.rules import Rule

DP, HYBRID, CALTECH101, IMAGENET = "train_dp", "train_hybrid", "caltech101", "imagenet"
PATHS = {  # where each example script is
    DP: "vit_cifar10_hybrid/train_dp.py",
    HYBRID: "vit_cifar10_hybrid/train_hybrid.py",
    CALTECH101: "vit_caltech101_amp/train.py",
    IMAGENET: "vit_imagenet_dali/train.py",
}
SCRIPTS = tuple(PATHS)

REQUIRED, OPTIONAL = object(), object()  # stand where a default would


@dataclass(frozen=True)
class Setting:
    """A key with a value.

    Attributes:
        rule: what the value must be.
        meaning: what it does, with its unit.
        default: the value where the file has none; REQUIRED if there must be one, in a block if that is given; OPTIONAL
            if without one nothing happens, or what `meaning` says.
        without_model: the default in train_hybrid, which has no MODEL whose value would count; None if it is the same.
        scripts: that use it.
        needs: keys beside it without which it does nothing, each with the values that will do; none given means any
            but None, False and 0.
        learned: whether another value changes what is learned, by more than rounding and as long as the global batch
            stays the same; if not, a run may resume with another one.
    """

    rule: Rule
    meaning: str
    default: Any = OPTIONAL
    scripts: tuple[str, ...] = SCRIPTS
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without_model: Any = None
    learned: bool = True


@dataclass(frozen=True)
class Block:
    """A key whose value is a dict of settings.

    Attributes:
        meaning, scripts, learned: as of a `Setting`.
        settings: in it.
        default: None if the block switches on a feature, which None switches off; {} if it is always there.
        switches: settings of which one has to be on, that is, not None, False or 0: the block does nothing otherwise.
    """

    meaning: str
    settings: Mapping[str, "Setting | Block"] = field(repr=False)
    default: dict[str, Any] | None = None
    scripts: tuple[str, ...] = SCRIPTS
    switches: tuple[str, ...] = ()
    learned: bool = True


def default_for(setting: Setting | Block, script: str | None) -> Any:
    """The default in a script of SCRIPTS, or in any other one; OPTIONAL if it does not use the setting."""
    if setting.scripts != SCRIPTS and script not in setting.scripts:
        return OPTIONAL
    if script == HYBRID and isinstance(setting, Setting) and setting.without_model is not None:
        return setting.without_model
    return setting.default


def unmet_need(setting: Setting, beside: Mapping[str, Any]) -> str | None:
    """The first key of `needs` whose value in `beside` leaves the setting without effect, or None.

    An earlier run has recorded the names of AMP modes.
    """
    for key, fitting in setting.needs.items():
        found = beside.get(key)
        if str(found) not in map(str, fitting) if fitting else not found:
            return key
    return None
