"""What a setting of a config file is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED, OPTIONAL = object(), object()  # stand where a default would


@dataclass(frozen=True)
class Setting:
    """A key with a value.

    Attributes:
        type: that pydantic validates the value as, see `config.types`.
        meaning: what it does, with its unit.
        default: the value where the file has none; REQUIRED if there must be one, in a block if that is given; OPTIONAL
            if without one nothing happens, or what `meaning` says.
        needs: keys beside it without which it does nothing, each with the values that will do; none given means any
            but None, False and 0.
        affects_training: whether another value changes what is learned, by more than rounding and as long as the
            global batch stays the same; if not, a run may resume with another one.
    """

    type: Any
    meaning: str
    default: Any = OPTIONAL
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    affects_training: bool = True


@dataclass(frozen=True)
class SettingsBlock:
    """A key whose value is a dict of settings.

    Attributes:
        meaning, affects_training: as of a `Setting`.
        settings: in it.
        default: None if the block switches on a feature, which None switches off; {} if it is always there.
        switches: settings of which one has to be on, that is, not None, False or 0: the block does nothing otherwise.
    """

    meaning: str
    settings: Mapping[str, "Setting | SettingsBlock"] = field(repr=False)
    default: dict[str, Any] | None = None
    switches: tuple[str, ...] = ()
    affects_training: bool = True


@dataclass(frozen=True)
class Ignored:
    """A key of published configs that a script takes and does nothing with.

    Attributes:
        reason: for the log.
    """

    reason: str


Settings = Mapping[str, Setting | SettingsBlock | Ignored]


def unmet_need(setting: Setting, beside: Mapping[str, Any]) -> str | None:
    """Return the first key of `needs` whose value in `beside` leaves the setting without effect, or None.

    An earlier run has recorded the names of AMP modes.
    """
    for key, fitting in setting.needs.items():
        found = beside.get(key)
        if str(found) not in map(str, fitting) if fitting else not found:
            return key
    return None
