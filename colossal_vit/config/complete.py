"""A config made complete: older names replaced, defaults filled in, also in its blocks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from colossal_vit.config.check import idle_keys, shown
from colossal_vit.config.overrides import Override, override
from colossal_vit.config.schema import OLDER_NAMES, SCHEMA, meant_by
from colossal_vit.config.settings import OPTIONAL, REQUIRED, Ignored, Settings, SettingsBlock, unmet_need
from colossal_vit.errors import UserError

# Before these keys existed, train scripts had what they say; the optimizer's state tells which optimizer it was.
ONCE_IN_SCRIPTS = ("OPTIMIZER", "SCHEDULE", "MOMENTUM")
# Every run recorded these keys, until their loaders and scripts brought them. In other runs they did nothing.
ONCE_IN_ALL = {"CROP_PADDING", "EVAL_CROP", "IMAGES_PER_S", "TRAIN_PER_CLASS", "dali"}


def complete(values: Mapping[str, Any], schema: Settings = SCHEMA, in_block: bool = False) -> dict[str, Any]:
    """Return the values with the defaults of a schema, also in blocks; keys that are ignored stay.

    In a block, what would do nothing is left out. A block whose switches are all off is None.
    """
    filled: dict[str, Any] = {}
    schema = {key: setting for key, setting in schema.items() if not isinstance(setting, Ignored)}
    for key, setting in schema.items():
        value = values.get(key, setting.default)
        if value is OPTIONAL or value is REQUIRED:
            continue
        if isinstance(setting, SettingsBlock):
            value = setting.default if value is None else value
            if isinstance(value, Mapping):
                value = complete(value, setting.settings, in_block=True)
                if setting.switches and not any(map(value.get, setting.switches)):
                    value = None
        elif in_block and unmet_need(setting, filled) is not None:
            continue
        filled[key] = value
    return filled | {key: value for key, value in values.items() if key not in schema}


def _find(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key, OPTIONAL) if isinstance(values, Mapping) else OPTIONAL
    return values


def _remove(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    kept = {key: value for key, value in values.items() if key != first}
    return {**kept, first: _remove(values[first], rest)} if rest else kept


def older_names(values: Mapping[str, Any], schema: Settings = SCHEMA) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the older names in a config that are not ignored: name, value, and the settings that it stands for."""
    for name, newer in OLDER_NAMES.items():
        given = _find(values, name)
        if given is OPTIONAL or isinstance(schema.get(name.split(".")[0]), Ignored):
            continue
        meant = meant_by(name, given)
        if isinstance(meant, Mapping):
            yield name, given, {f"{newer}.{key}": value for key, value in meant.items()}
        else:
            yield name, given, {newer: meant}


def replace_older_names(
    values: Mapping[str, Any], schema: Settings = SCHEMA, overridden: Iterable[str] = (), source: str | None = None
) -> dict[str, Any]:
    """Return the values, with the settings that older names stand for in place of these.

    Args:
        values: that `check` allows.
        schema: all keys.
        overridden: paths of settings that the command line sets; their values count.
        source: the file, or --set; None for an earlier run's values, of which those of the newer names count.

    Raises:
        UserError: if an older name and the setting that it stands for have different values. One that is 0, False or
            None says nothing against the other.
    """
    meant: list[Override] = []
    kept = dict(values)
    for name, given, settings in older_names(values, schema):
        kept = _remove(kept, name)
        for key, value in settings.items():
            found = _find(values, key)
            if any(key == path or key.startswith(f"{path}.") for path in overridden):
                continue
            if found is OPTIONAL:
                meant.append((tuple(key.split(".")), value))
            elif source is not None and given and found != value:
                raise UserError(
                    f"{source}: {name} = {shown(given)} is an older name of {key} = {shown(value)}, but {key} = "
                    f"{shown(found)}: leave one of them out"
                )
    return dict(override(kept, meant))


def recorded(values: Mapping[str, Any], now: Mapping[str, Any], schema: Settings) -> dict[str, Any]:
    """Return the config that an earlier run has recorded as JSON, as it would be recorded now.

    Args:
        values: of the earlier run.
        now: the resolved config of a run of the same script, whose keys the earlier one need not have had.
        schema: all keys of that run.
    """
    before = replace_older_names(values)
    idle = ONCE_IN_ALL - schema.keys() | idle_keys(before, schema).keys()
    before = {key: value for key, value in before.items() if key not in idle}
    for key in now.keys() & schema.keys() - before.keys():
        before[key] = now[key] if key in ONCE_IN_SCRIPTS else schema[key].default
    return complete({key: value for key, value in before.items() if value not in (OPTIONAL, REQUIRED)}, schema)


def affects_training(key: str, before: Any, after: Any, schema: Settings) -> bool:
    """Return whether the change of a key's value changes what is learned, see `Setting`; in a block of any of its."""
    if before == after or key not in schema:
        return before != after
    setting = schema[key]
    if isinstance(setting, SettingsBlock) and isinstance(before, Mapping) and isinstance(after, Mapping):
        inside = ((name, before.get(name), after.get(name), setting.settings) for name in before.keys() | after.keys())
        return setting.affects_training and any(affects_training(*change) for change in inside)
    return setting.affects_training
