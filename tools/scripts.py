"""The train scripts that tools look at, by their paths."""

import sys
from pathlib import Path

from colossal_vit.data.loaders import import_file
from colossal_vit.errors import UserError
from colossal_vit.main import Script


def load(path: str | Path) -> Script:
    """The `SCRIPT` of a train script. Its folder comes first on `sys.path`, as when Python runs it.

    Raises:
        UserError: if there is no such file, or it is no train script.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such train script")
    sys.path.insert(0, str(path.parent))
    script = getattr(import_file(path), "SCRIPT", None)
    if not isinstance(script, Script):
        raise UserError(f"{path}: has no SCRIPT = Script(...), as train scripts have")
    return script
