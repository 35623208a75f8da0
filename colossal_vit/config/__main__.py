"""The reference of all config keys as Markdown: `python -m colossal_vit.config > docs/configuration.md`."""

import re
from collections.abc import Mapping

from colossal_vit.config.schema import GROUPS, OLDER_NAMES, SCHEMA
from colossal_vit.config.settings import HYBRID, OPTIONAL, PATHS, REQUIRED, SCRIPTS, Block, Setting

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m colossal_vit.config`; edit `colossal_vit/config/schema.py`. -->

A config is a Python file. UPPERCASE names are hyper-parameters, lowercase ones switch features on. `--set KEY=VALUE`
overrides a value; keys in a block have a dot: `--set parallel.tensor.size=2`. VALUE is a Python literal, or a string
without quotes: `--set OPTIMIZER=lamb`, `--set fp16.mode=naive`. Of two overrides of a key, the last one counts. A key
without a default is left out by `KEY=None`. AMP modes may be strings in a file too: `fp16 = dict(mode='naive')`. Names
that start with `_` are free for your own use.

Unknown keys, wrong values and keys that the script at hand does not use are errors. A default is the same in all
scripts: {scripts}. `train_hybrid` has no `MODEL`, and needs the sizes of its model instead. An older name works as
what it stands for, `LAMB_EXCLUDE_VECTORS` as its opposite, and `dali.rand_augment` with the policy `'rand'`; both names
with different values are an error.

A run resumes with the values that it began with. Other values are allowed for these keys: {free}.
`NUM_EPOCHS` stretches the learning-rate schedule from the next step on. The others change what is learned by rounding
at most, as long as the global batch stays the same.
"""


def _value(default: object) -> str:
    return "**required**" if default is REQUIRED else "" if default is OPTIONAL else f"`{default!r}`"


SHORTER = {  # what a rule expects, in a table
    r"a whole number of at least (\d+) and below 2³¹": r"int ≥ \1",
    r"a whole number from (\S+) to (\S+)": r"int, \1 to \2",
    r"a number of at least 0 \(.*\)": "float ≥ 0",
    r"a number above 0 \(.*\)": "float > 0",
    r"a number from (\S+) up to, not including, (\S+)": r"float, \1 ≤ x < \2",
    r"a number from (\S+) to (\S+)": r"float, \1 to \2",
    r"a string .*": "str",
    r"True or False": "bool",
    r"one of (.*)": r"\1",
}


def _expected(setting: Setting | Block) -> str:
    """What its value must be."""
    expected = setting.rule.expected if isinstance(setting, Setting) else "dict"
    for pattern, shorter in SHORTER.items():
        if match := re.fullmatch(pattern, expected):
            return match.expand(shorter)
    return expected


def _default(setting: Setting | Block) -> str:
    if isinstance(setting, Setting) and setting.without_model is not None:
        return f"{_value(setting.without_model)} {HYBRID}"
    return _value(setting.default)


def _rows(settings: Mapping[str, Setting | Block], prefix: str = "") -> list[str]:
    rows = []
    for key, setting in settings.items():
        used = "" if setting.scripts == SCRIPTS else f" ({', '.join(setting.scripts)} only)"
        # Where the default is not one value, the meaning ends with it.
        meaning, _, computed = (
            setting.meaning.partition("; ") if setting.default is OPTIONAL else (setting.meaning, "", "")
        )
        default = _default(setting) or computed
        rows.append(f"| `{prefix}{key}` | {_expected(setting)} | {default} | {meaning}{used} |")
        if isinstance(setting, Block):
            rows += _rows(setting.settings, f"{prefix}{key}.")
    return rows


def reference() -> str:
    """The page."""
    scripts = ", ".join(f"{name} (`{path}`)" for name, path in PATHS.items())
    free = ", ".join(f"`{key}`" for key, setting in SCHEMA.items() if not setting.learned)
    lines = [INTRODUCTION.format(scripts=scripts, free=free)]
    for title, settings in GROUPS.items():
        lines += [f"## {title}", "", "| key | must be | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [*_rows(settings), ""]
    lines += ["## Older names", "", "| name | stands for |", "| --- | --- |"]
    lines += [f"| `{name}` | `{newer}` |" for name, newer in OLDER_NAMES.items()]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(reference(), end="")
