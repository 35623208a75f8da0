"""The reference of all config keys as Markdown: `python -m colossal_vit.config > docs/configuration.md`."""

from collections.abc import Mapping

from colossal_vit.config.schema import GROUPS
from colossal_vit.config.settings import OPTIONAL, PATHS, REQUIRED, SCRIPTS, Block, Each, Setting

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m colossal_vit.config`; edit `colossal_vit/config/schema.py`. -->

A config is a Python file. UPPERCASE names are hyper-parameters, lowercase ones switch features on. `--set KEY=VALUE`
overrides a value; keys in a block have a dot: `--set parallel.tensor.size=2`. Names that start with `_`
are free for your own use.

Unknown keys, wrong values and keys that the script at hand does not use are refused. Where a default differs between
scripts, it is given for each: {scripts}.
"""


def _value(default: object) -> str:
    return "**required**" if default is REQUIRED else "" if default is OPTIONAL else f"`{default!r}`"


def _default(setting: Setting | Block) -> str:
    if not isinstance(setting.default, Each):
        return _value(setting.default)
    by_value: dict[str, list[str]] = {}
    for script, default in zip(setting.scripts, setting.default, strict=True):
        by_value.setdefault(_value(default) or "none", []).append(script)
    return "<br>".join(f"{value} {', '.join(names)}" for value, names in by_value.items())


def _rows(settings: Mapping[str, Setting | Block], prefix: str = "") -> list[str]:
    rows = []
    for key, setting in settings.items():
        used = "" if setting.scripts == SCRIPTS else f" ({', '.join(setting.scripts)} only)"
        must = f" {setting.rule.expected}" if isinstance(setting, Setting) else " a dict"
        rows.append(f"| `{prefix}{key}` |{must} | {_default(setting)} | {setting.meaning}{used} |")
        if isinstance(setting, Block):
            rows += _rows(setting.settings, f"{prefix}{key}.")
    return rows


def reference() -> str:
    """The page."""
    lines = [INTRODUCTION.format(scripts=", ".join(f"{name} (`{path}`)" for name, path in PATHS.items()))]
    for title, settings in GROUPS.items():
        lines += [f"## {title}", "", "| key | must be | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [*_rows(settings), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(reference(), end="")
