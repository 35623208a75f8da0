"""Stubs for modules that Colossal-AI imports and nothing here uses, while it is being imported.

Importing `colossalai.legacy` pulls in transformers, bitsandbytes and torch's compiler, which take half of the CPU time
that a train script needs to start, and one module that breaks torch.compile. Within `import_stubs` each is a stub that
has only the names which Colossal-AI imports from it; using one of them, or importing another, raises. Afterwards the
real modules can be imported as usual.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

# Module -> the names that Colossal-AI 0.5.0 imports from it at import time, and why it is not needed.
STUBS: dict[str, tuple[tuple[str, ...], str]] = {
    "peft": (("PeftModel", "PeftType"), "LoRA for the Booster API; imports transformers and accelerate"),
    "galore_torch": (("GaLoreAdafactor", "GaLoreAdamW"), "the GaLore optimizers; imports bitsandbytes"),
    "bitsandbytes.optim.optimizer": (("Optimizer2State",), "8-bit GaLore"),
    "colossalai.shardformer.layer._operation": (
        ("_gather", "_split"),
        "distributed Adafactor of the Booster API; imports torch._inductor and flash attention",
    ),
    "colossalai.zero.gemini.memory_tracer": (
        ("MemStatsCollector",),
        "the Gemini memory manager; imports all of colossalai.zero, its checkpoints and its fp8 communication",
    ),
    "colossalai.legacy.amp.torch_amp.torch_amp": (
        ("TorchAMPLoss", "TorchAMPModel", "TorchAMPOptimizer"),
        "upstream's AMP_TYPE.TORCH; its import asks for a GPU, and a process that has asked cannot fork any more",
    ),
    # Importing it permanently replaces PyTorch's shape functions of some twenty operators (convolution, layer norm,
    # dropout) by those of torch 1.12, and torch.compile then fails in the backward pass of a convolution.
    "colossalai._analyzer._subclasses._meta_registration": ((), "shape functions of torch 1.12"),
}
# Colossal-AI's registry of optimizers keeps a reference to this module, and looks into it only to find an optimizer by
# name; it is imported then. Up to torch 2.13, its import compiles eight optimizers to TorchScript.
DEFERRED = "torch.distributed.optim"


class _Unused(type):
    """Metaclass of the names in a stub: they can be imported and subclassed, and raise when used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(f"{cls.__qualname__} was a stub when Colossal-AI was imported: {cls.reason}")

    __instancecheck__ = __call__

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        cls()


class _Stub(types.ModuleType):
    def __init__(self, name: str, names: tuple[str, ...], reason: str):
        super().__init__(name, reason)
        self.__spec__ = ModuleSpec(name, None)  # find_spec wants one
        self.__file__ = __file__  # shown in the message of a failed import
        for unused in names:
            setattr(self, unused, _Unused(f"{name}.{unused}", (), {"reason": reason}))


class _Deferred(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def import_stubs() -> Iterator[None]:
    """Put the stubs into `sys.modules`, for as long as this lasts; modules that have been imported stay."""
    stubs = [_Stub(name, *described) for name, described in STUBS.items()]
    stubs = [stub for stub in (*stubs, _Deferred(DEFERRED)) if stub.__name__ not in sys.modules]
    sys.modules.update((stub.__name__, stub) for stub in stubs)
    try:
        yield
    finally:
        for stub in stubs:
            del sys.modules[stub.__name__]
