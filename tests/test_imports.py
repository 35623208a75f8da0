"""What importing the library does: it imports Colossal-AI without what nobody needs, and changes nothing else."""

import itertools
import re
import subprocess
import sys

import pytest
from colossal_vit.compat.import_stubs import DEFERRED, STUBS, import_stubs

import fork_ranks
import launchers

LIBRARY = fork_ranks.ROOT / "colossal_vit"


def test_imports_leave_out_what_nobody_needs_and_leave_no_stub(fresh_modules):
    """What a train script imports, seen before any test has run."""
    heavy = {"transformers", "accelerate", "bitsandbytes", "torch._inductor.compile_fx", "colossalai.shardformer"}
    assert not heavy & fresh_modules.keys()
    assert not {*STUBS, DEFERRED} & fresh_modules.keys()


def test_imports_change_nothing_else_in_the_process():
    """Not the warnings, not the handlers of errors and signals, not the standard streams."""
    code = """if True:
        import signal, sys, warnings
        seen = lambda: (sys.excepthook, warnings.filters[:], *map(signal.getsignal, (2, 15)), sys.stdout, sys.stderr)
        import torch, timm
        before = seen()
        import train_hybrid
        assert seen() == before, (before, seen())
    """
    environment = launchers.environment(PYTHONPATH=f"{fork_ranks.ROOT}:{fork_ranks.ROOT / 'vit_cifar10_hybrid'}")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_module_imports_colossalai_before_compat():
    """Which imports it without what nobody needs."""
    files = {}  # modules of Colossal-AI and of the library that each imports, in order, its own package first
    for path in LIBRARY.rglob("*.py"):
        name = ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts).removesuffix(".__init__")
        imports = re.findall(r"^(?:from|import) (colossal[\w.]+)", path.read_text(), re.MULTILINE)
        files[name] = [*([] if path.stem == "__init__" else [name.rpartition(".")[0]]), *imports]
    ready = {"colossal_vit.compat"}  # and modules that import it, one way or another
    while found := {name for name, imports in files.items() if ready & {*imports}} - ready:
        ready |= found
    for name, imports in files.items():
        before = [*itertools.takewhile(lambda other: not other.startswith("colossalai"), imports)]
        assert before == imports or ready & {*before}, name


def test_a_stub_has_what_colossalai_imports_and_raises_when_it_is_used(monkeypatch):
    for name in (*STUBS, DEFERRED):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with import_stubs():
        stubs = {name: sys.modules[name] for name in (*STUBS, DEFERRED)}
        for module in STUBS:
            with pytest.raises(ImportError, match=r"cannot import name 'anything_else' from '.*import_stubs\.py"):
                exec(f"from {module} import anything_else")
    assert not stubs.keys() & sys.modules.keys()
    assert stubs[DEFERRED].ZeroRedundancyOptimizer.__name__ == "ZeroRedundancyOptimizer", "is imported when it is used"
    for module, (names, reason) in STUBS.items():
        for unused in names:
            stub = getattr(stubs[module], unused)
            for use in (lambda it=stub: it(), lambda it=stub: it.load, lambda it=stub: isinstance(1, it)):
                with pytest.raises(ImportError, match=rf"^{module}\.{unused} was a stub when .*: {reason[:9]}"):
                    use()
