"""Config values held against the schema."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from colossal_vit.config.schema import SCHEMA
from colossal_vit.config.settings import PATHS, REQUIRED, Block, Setting, default_for
from colossal_vit.errors import UserError
from colossalai.legacy.amp import AMP_TYPE

SCALER_KEYS = {
    AMP_TYPE.TORCH: {"init_scale", "growth_factor", "backoff_factor", "growth_interval"},
    AMP_TYPE.NAIVE: {
        "initial_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "min_scale",
        "max_scale",
    },
    AMP_TYPE.APEX: {"opt_level"},  # the scalers of O1 and O2 are those of TORCH and NAIVE, with their defaults
}


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a line about an unknown name: what was meant, or what there is."""
    by_folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]}?" if close else f"; known are {', '.join(sorted(by_folded.values()))}"


def check(values: Mapping[str, Any], source: str, settings: Mapping[str, Setting | Block] = SCHEMA, prefix: str = ""):
    """Refuse unknown keys, and values that break their rules.

    Args:
        values: of a config file, or of a block in it.
        source: the file.
        settings: what is allowed.
        prefix: of the block.

    Raises:
        UserError: naming the key, the value and what would be right.
    """
    for key, value in values.items():
        name = prefix + key
        if key not in settings:
            helper = "" if prefix else " (a helper's name starts with _)"
            raise UserError(f"{source}: unknown key {name}{nearest(key, settings)}{helper}")
        setting = settings[key]
        if isinstance(setting, Setting):
            if not setting.rule.allows(value):
                raise UserError(f"{source}: {name} = {value!r}, but it must be {setting.rule.expected}")
        elif value is not None:
            if not isinstance(value, Mapping):
                raise UserError(f"{source}: {name} = {value!r}, but it must be a dict({', '.join(setting.settings)})")
            check(value, source, setting.settings, f"{name}.")


def check_script(values: Mapping[str, Any], script: str, source: str) -> None:
    """Refuse keys that one of SCRIPTS would ignore, and missing ones.

    Raises:
        UserError: naming the key.
    """
    for key in values:
        if script not in (users := SCHEMA[key].scripts):
            others = " and ".join(PATHS[user] for user in users)
            raise UserError(f"{source}: {key} is not used by {PATHS[script]}, only by {others}: leave it out")
    for key, setting in SCHEMA.items():
        if key not in values and default_for(setting, script) is REQUIRED:
            raise UserError(f"{source}: {key} is missing; it must be {setting.rule.expected}")
