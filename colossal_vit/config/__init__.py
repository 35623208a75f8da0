"""Config files: plain Python, as the Colossal-AI tutorials have them, loaded, overridden and checked.

UPPERCASE names are hyper-parameters, lowercase ones switch features of Colossal-AI (`parallel`, `fp16`, ...). A file
is evaluated once, with every `--set KEY=VALUE` applied whenever KEY is assigned, so that values computed further down
follow the override.
"""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
from colossal_vit.config.check import idle_keys
from colossal_vit.config.complete import affects_training, complete, recorded
from colossal_vit.config.load import load, plain, to_json, written
from colossal_vit.config.overrides import parse_override

__all__ = [
    "affects_training",
    "complete",
    "idle_keys",
    "load",
    "parse_override",
    "plain",
    "recorded",
    "to_json",
    "written",
]
