"""The reference of all config keys as Markdown: `python scripts/configuration.py > docs/configuration.md`."""

import re
import sys

from colossal_vit.config.schema import GROUPS, OLDER_NAMES
from colossal_vit.config.settings import OPTIONAL, REQUIRED, Setting, Settings, SettingsBlock
from colossal_vit.config.types import expected
from colossal_vit.model import timm_vit
from colossal_vit.provenance import ROOT

sys.path += [str(ROOT / name) for name in ("vit_cifar10_hybrid", "vit_caltech101_amp", "vit_imagenet_dali")]

import caltech101
import cifar10
import imagenet_dali_dataloader
import mixup
import planning
import vit_settings

OWNERS = {  # the keys of each group, and who has them
    **{title: (settings, "every script") for title, settings in GROUPS.items()},
    "A model of timm": (
        timm_vit.SETTINGS,
        "`train_dp.py`, `vit_caltech101_amp/train.py`, `vit_imagenet_dali/train.py`",
    ),
    "A model in any layout": (vit_settings.SETTINGS, "`train_hybrid.py`"),
    "CIFAR-10": (cifar10.SETTINGS, "the loader `vit_cifar10_hybrid/cifar10.py`"),
    "Caltech101": (caltech101.SETTINGS, "the loader `vit_caltech101_amp/caltech101.py`"),
    "TFRecords": (
        imagenet_dali_dataloader.SETTINGS,
        "the loader `vit_imagenet_dali/imagenet_dali_dataloader.py`",
    ),
    "ImageNet": ({**mixup.SETTINGS, **planning.SETTINGS}, "`vit_imagenet_dali/train.py`"),
}
INTRODUCTION = """\
# Configuration

<!-- Written by `python scripts/configuration.py`; the keys are in config/schema.py and in SETTINGS of their owners. -->

A config is a Python file. UPPERCASE names are hyper-parameters, lowercase ones switch features on. `--set KEY=VALUE`
overrides a value; keys in a block have a dot: `--set parallel.tensor.size=2`. VALUE is a Python literal, or a string
without quotes: `--set OPTIMIZER=lamb`, `--set fp16.mode=naive`. Of two overrides of a key, the last one counts. A key
without a default is left out by `KEY=None`. AMP modes may be strings in a file too: `fp16 = dict(mode='naive')`. Names
that start with `_` are free for your own use.

Unknown keys and wrong values are errors. The library has the keys of every script; a script's model and the loader that
reads its data bring others. An older name works as what it stands for, `LAMB_EXCLUDE_VECTORS` as its opposite, and
`dali.rand_augment` with the policy `'rand'`; setting both names to different values is an error.

A run resumes with the values that it began with. Other values are allowed for these keys: {free}.
`NUM_EPOCHS` stretches the learning-rate schedule from the next step on. The others change what is learned by rounding
at most, as long as the global batch stays the same.
"""


def _value(default: object) -> str:
    return "**required**" if default is REQUIRED else "" if default is OPTIONAL else f"`{default!r}`"


SHORTER = {  # what a type's value must be, in a table
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


def _must_be(setting: Setting | SettingsBlock) -> str:
    """Return what its value must be."""
    words = expected(setting.type) if isinstance(setting, Setting) else "dict"
    for pattern, shorter in SHORTER.items():
        if match := re.fullmatch(pattern, words):
            return match.expand(shorter)
    return words


def _rows(settings: Settings, prefix: str = "") -> list[str]:
    rows = []
    for key, setting in settings.items():
        # Where the default is not one value, the meaning ends with it.
        meaning, _, computed = (
            setting.meaning.partition("; ") if setting.default is OPTIONAL else (setting.meaning, "", "")
        )
        default = _value(setting.default) or computed
        rows.append(f"| `{prefix}{key}` | {_must_be(setting)} | {default} | {meaning} |")
        if isinstance(setting, SettingsBlock):
            rows += _rows(setting.settings, f"{prefix}{key}.")
    return rows


def reference() -> str:
    """Return the page."""
    keys = {key: setting for settings, _ in OWNERS.values() for key, setting in settings.items()}
    inside = {
        f"{block}.{key}": setting for block in keys for key, setting in getattr(keys[block], "settings", {}).items()
    }
    inside = {path: setting for path, setting in inside.items() if keys[path.split(".")[0]].affects_training}
    free = ", ".join(f"`{key}`" for key, setting in (keys | inside).items() if not setting.affects_training)
    lines = [INTRODUCTION.format(free=free)]
    for title, (settings, who) in OWNERS.items():
        header = ["| key | must be | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"## {title}", "", f"For {who}.", "", *header, *_rows(settings), ""]
    lines += ["## Older names", "", "| name | stands for |", "| --- | --- |"]
    lines += [f"| `{name}` | `{newer}` |" for name, newer in OLDER_NAMES.items()]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(reference(), end="")
