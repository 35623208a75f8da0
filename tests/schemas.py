"""The config keys of each train script, and of all of them together, for tests that need no run."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from colossal_vit.config.schema import SCHEMA
from colossal_vit.config.settings import OPTIONAL, REQUIRED, Ignored, Settings
from colossal_vit.main import Script, schema_of

ROOT = Path(__file__).resolve().parents[1]
HYBRID, DP = "vit_cifar10_hybrid/train_hybrid.py", "vit_cifar10_hybrid/train_dp.py"
CALTECH101, IMAGENET = "vit_caltech101_amp/train.py", "vit_imagenet_dali/train.py"
SCRIPTS = (DP, HYBRID, CALTECH101, IMAGENET)


@cache
def script(path: str) -> Script:
    """The `SCRIPT` of a train script; the module of a name that only one of them has."""
    file = ROOT / path
    sys.path += [str(file.parent)] * (str(file.parent) not in sys.path)
    if file.stem != "train":
        return importlib.import_module(file.stem).SCRIPT
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}.train", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SCRIPT


@cache
def schema(path: str) -> Settings:
    """All keys that a train script's config may have, with the script's own loader."""
    return schema_of(script(path).parse(["--config", "/nonexistent"]))


def schema_for(config: Mapping[str, Any]) -> Settings:
    """The keys of a script that trains a model of timm, if the config names one, or another."""
    found = [path for path in (IMAGENET, CALTECH101, DP, HYBRID) if (ROOT / path).exists()]
    found = [path for path in found if (path == HYBRID) != ("MODEL" in config)]
    return schema(found[0]) if found else SCHEMA


@cache
def any_key() -> Settings:
    """The keys of all scripts; none has to be there, and only those of the library have defaults."""
    keys: Settings = {}
    for path in SCRIPTS:
        if (ROOT / path).exists():
            keys |= {key: each for key, each in schema(path).items() if not isinstance(each, Ignored)}
    return SCHEMA | {
        key: replace(each, default=OPTIONAL)
        for key, each in keys.items()
        if key not in SCHEMA or each.default is REQUIRED
    }
