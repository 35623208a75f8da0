"""Config values held against the schema."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from colossal_vit.config.schema import OLDER_NAMES, setting_at
from colossal_vit.config.settings import OPTIONAL, REQUIRED, Ignored, Setting, Settings, SettingsBlock, unmet_need
from colossal_vit.config.types import expected, names
from colossal_vit.errors import UserError
from colossal_vit.typed_json import adapter
from pydantic import ValidationError

SHOWN = 200  # a message shows so many characters of a value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a line about an unknown name: which of these was meant; empty if none is close."""
    by_folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a line about an unknown name: what was meant, or what there is."""
    return did_you_mean(name, names := list(names)) or f"; known are {', '.join(sorted(names))}"


def shown(value: Any) -> str:
    """Return a value on one line, cut off if it is long."""
    try:
        text = str(value) if isinstance(value, Enum) else " ".join(repr(value).splitlines())
    except Exception:  # a number has more digits than Python converts, or a class of the config's own fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check(
    values: Mapping[str, Any], source: str, schema: Settings, prefix: str = "", settings: Settings | None = None
) -> dict[str, Any]:
    """Return the values, validated; those that are None and have no default are left out, so that an override can
    remove them.

    Args:
        values: of a config file, or of a block in it.
        source: the file.
        schema: all keys that a config may have.
        prefix, settings: of the block.

    Raises:
        UserError: if a key is unknown, or a value not of its type; naming key, value and what would be right.
    """
    settings = schema if settings is None else settings
    meant = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        setting = setting_at(name, schema) if name in OLDER_NAMES else settings.get(key)
        if setting is None:
            helper = "" if prefix else " (of another script? a helper's name starts with _)"
            raise UserError(f"{source}: unknown key {name}{nearest(str(key), settings)}{helper}")
        if isinstance(setting, Setting):
            try:
                value = adapter(setting.type).validate_python(value)
            except ValidationError:
                if value is None and setting.default is OPTIONAL:
                    continue
                near = did_you_mean(value, names(setting.type)) if isinstance(value, str) else ""
                wrong = f"{source}: {name} = {shown(value)}"
                raise UserError(f"{wrong}, but it must be {expected(setting.type)}{near}") from None
        elif isinstance(setting, SettingsBlock) and value is not None:
            if not isinstance(value, Mapping):
                keys = ", ".join(setting.settings)
                raise UserError(f"{source}: {name} = {shown(value)}, but it must be a dict({keys}) or None")
            value = check(value, source, schema, f"{name}.", setting.settings)
        meant[key] = value
    return meant


def check_effect(
    values: Mapping[str, Any],
    source: str,
    settings: Settings,
    overridden: Iterable[str] = (),
    prefix: str = "",
) -> None:
    """Refuse a config or block without what it must have, or with values, other than defaults, that do nothing.

    Args:
        values: that `check` allows, without defaults.
        source, prefix: as of `check`.
        settings: all keys, or those of the block.
        overridden: paths of keys set on the command line. Values in the file that need another one of them may stay
            there: `--set OPTIMIZER='adamw'` is no mistake in a file that has SGD's MOMENTUM.

    Raises:
        UserError: naming the key, and the one that it needs.
    """
    beside = dict(values)
    for key, setting in settings.items():
        default = getattr(setting, "default", OPTIONAL)
        if default is REQUIRED and key not in values:
            raise UserError(f"{source}: {prefix}{key} is missing; it must be {expected(setting.type)}")
        if default is not OPTIONAL:
            beside.setdefault(key, default)
    for key, value in values.items():
        name, setting = f"{prefix}{key}", settings[key]
        if isinstance(setting, SettingsBlock) and value is not None:
            if setting.switches and not value.keys() & setting.switches:
                switches = " or ".join(f"{name}.{switch}" for switch in setting.switches)
                raise UserError(f"{source}: {name} = {shown(value)} does nothing: set {switches}, or {name} = None")
            check_effect(value, source, setting.settings, overridden, f"{name}.")
        elif isinstance(setting, Setting) and value != setting.default:
            other = unmet_need(setting, beside)
            if other is None or (f"{prefix}{other}" in overridden and name not in overridden):
                continue
            fitting = setting.needs[other]
            remedy = f"it is for {' or '.join(map(shown, fitting))}" if fitting else f"set {prefix}{other}"
            raise UserError(
                f"{source}: {name} = {shown(value)} does nothing with {prefix}{other} = {shown(beside.get(other))}: "
                f"{remedy}, or leave it out"
            )


def idle_keys(values: Mapping[str, Any], schema: Settings) -> dict[str, str]:
    """Return the keys that a script takes and does nothing with, with the reason."""
    return {key: found.reason for key in values if isinstance(found := schema.get(key), Ignored)}
