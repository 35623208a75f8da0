"""The train scripts that tools look at, by their paths."""

import sys
from importlib import util
from pathlib import Path

from colossal_vit.errors import UserError
from colossal_vit.launch import Script


def load(path: str | Path) -> Script:
    """The `SCRIPT` of a train script. Its folder comes first on `sys.path`, as when Python runs it.

    Raises:
        UserError: if there is no such file, or it is no train script.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such train script")
    sys.path.insert(0, str(path.parent))
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != str(path):  # train.py is a name that several have
        spec = util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    script = getattr(module, "SCRIPT", None)
    if not isinstance(script, Script):
        raise UserError(f"{path}: has no SCRIPT = launch.Script(...), as train scripts have")
    return script
