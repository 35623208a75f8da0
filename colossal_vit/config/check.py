"""Config values held against the schema."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from colossal_vit.config.schema import IDLE, OLDER_NAMES, SCHEMA, setting_at
from colossal_vit.config.settings import PATHS, REQUIRED, Block, Setting, default_for, unmet_need
from colossal_vit.errors import UserError

SHOWN = 200  # a message shows so many characters of a value


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    by_folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a line about an unknown name: what was meant, or what there is."""
    return _did_you_mean(name, names := list(names)) or f"; known are {', '.join(sorted(names))}"


def shown(value: Any) -> str:
    """A value on one line, cut off if it is long."""
    try:
        text = str(value) if isinstance(value, Enum) else " ".join(repr(value).splitlines())
    except Exception:  # a number has more digits than Python converts, or a class of the config's own fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


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
        name = f"{prefix}{key}"
        setting = setting_at(name) if name in OLDER_NAMES else settings.get(key)
        if setting is None:
            helper = "" if prefix else " (a helper's name starts with _)"
            raise UserError(f"{source}: unknown key {name}{nearest(str(key), settings)}{helper}")
        if isinstance(setting, Setting):
            if not setting.rule.allows(value):
                meant = _did_you_mean(value, setting.rule.names) if isinstance(value, str) else ""
                raise UserError(f"{source}: {name} = {shown(value)}, but it must be {setting.rule.expected}{meant}")
        elif value is not None:
            if not isinstance(value, Mapping):
                keys = ", ".join(setting.settings)
                raise UserError(f"{source}: {name} = {shown(value)}, but it must be a dict({keys}) or None")
            check(value, source, setting.settings, f"{name}.")


def check_script(values: Mapping[str, Any], script: str, source: str) -> None:
    """Refuse keys that one of SCRIPTS would ignore, and missing ones.

    Raises:
        UserError: naming the key.
    """
    for key in values:
        if script not in (users := SCHEMA[key].scripts) and key not in IDLE.get(script, ()):
            others = " and ".join(PATHS[user] for user in users)
            raise UserError(f"{source}: {key} is not used by {PATHS[script]}, only by {others}: leave it out")
    for key, setting in SCHEMA.items():
        if key not in values and default_for(setting, script) is REQUIRED:
            raise UserError(f"{source}: {key} is missing; it must be {setting.rule.expected}")


def check_effect(
    values: Mapping[str, Any],
    script: str | None,
    source: str,
    overridden: Iterable[str] = (),
    settings: Mapping[str, Setting | Block] = SCHEMA,
    prefix: str = "",
) -> None:
    """Refuse values, other than defaults, that do nothing without another one, and blocks that lack what they need.

    Args:
        values: that `check` allows, without defaults.
        script: one of SCRIPTS, or None.
        source, settings, prefix: as of `check`.
        overridden: paths of keys set on the command line. Values in the file that need another one of them may stay
            there: `--set OPTIMIZER='adamw'` is no mistake in a file that has SGD's MOMENTUM.

    Raises:
        UserError: naming both keys.
    """
    beside = {key: default_for(setting, script) for key, setting in settings.items()}
    beside = {key: default for key, default in beside.items() if isinstance(default, (bool, int, float, str))} | values
    for key, value in values.items():
        name, setting = f"{prefix}{key}", settings[key]
        if isinstance(setting, Block):
            if value is not None and key not in IDLE.get(script, ()):
                for inner, needed in setting.settings.items():
                    if needed.default is REQUIRED and inner not in value:
                        raise UserError(f"{source}: {name}.{inner} is missing; it must be {needed.rule.expected}")
                if setting.switches and not value.keys() & setting.switches:
                    switches = " or ".join(f"{name}.{switch}" for switch in setting.switches)
                    raise UserError(f"{source}: {name} = {shown(value)} does nothing: set {switches}, or {name} = None")
                check_effect(value, None, source, overridden, setting.settings, f"{name}.")
        elif value != setting.default and (other := unmet_need(setting, beside)) is not None:
            if f"{prefix}{other}" in overridden and name not in overridden:
                continue
            fitting = setting.needs[other]
            remedy = f"it is for {' or '.join(map(shown, fitting))}" if fitting else f"set {prefix}{other}"
            raise UserError(
                f"{source}: {name} = {shown(value)} does nothing with {prefix}{other} = {shown(beside.get(other))}: "
                f"{remedy}, or leave it out"
            )


def idle_keys(values: Mapping[str, Any], script: str | None) -> dict[str, str]:
    """The keys that a script takes and does nothing with, with the reason."""
    return {key: why for key, why in IDLE.get(script, {}).items() if key in values}
