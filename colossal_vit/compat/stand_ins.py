"""Stand-ins, that is stubs, for modules that Colossal-AI imports and nothing here uses.

Importing `colossalai.legacy` pulls in transformers, bitsandbytes and torch's compiler, which take half of the CPU time
that a train script needs to start, and one module that breaks torch.compile. `install` replaces each by a stub module.
A stub has only the names that Colossal-AI imports from it; using one of them, or importing any other, raises.

A module that other code may use is deferred instead: it is imported at the first access to one of its attributes.
"""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

# Module -> the names that Colossal-AI 0.5.0 imports from it at import time, and why it is not needed.
STAND_INS: dict[str, tuple[tuple[str, ...], str]] = {
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
# Colossal-AI's registry of optimizers holds a reference to it, and accesses it only to find an optimizer by name. Up to
# torch 2.13, its import compiles eight optimizers to TorchScript.
DEFERRED = ("torch.distributed.optim",)


def _refusal(what: str, reason: str) -> str:
    return (
        f"{what} is a stand-in in this process ({reason}): import the real module before colossal_vit, see "
        f"colossal_vit/compat/stand_ins.py"
    )


class _Unused(type):
    """Metaclass of the names in a stub: they can be imported and subclassed, and raise when used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(_refusal(cls.__qualname__, cls.reason))

    __instancecheck__ = __call__

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(_refusal(f"{cls.__qualname__}.{name}", cls.reason))


class _StandIn(types.ModuleType):
    def __init__(self, name: str, names: tuple[str, ...], reason: str):
        super().__init__(name, f"A stand-in: {reason}.")
        self.reason, self.__spec__ = reason, ModuleSpec(name, None)  # find_spec wants one
        self.__file__ = __file__  # shown in the message of a failed import
        for unused in names:
            setattr(self, unused, _Unused(f"{name}.{unused}", (), {"reason": reason}))

    def __getattr__(self, name: str) -> NoReturn:
        # AttributeError and no other: pickle looks up names in every module, and takes this error to mean "not here".
        raise AttributeError(_refusal(f"{self.__name__}.{name}", self.reason))


class _Deferred(types.ModuleType):
    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import of a submodule needs __path__
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def install() -> None:
    """Add the stubs to `sys.modules`; modules that were imported before are kept."""
    for name, (names, reason) in STAND_INS.items():
        sys.modules.setdefault(name, _StandIn(name, names, reason))
    for name in DEFERRED:
        sys.modules.setdefault(name, _Deferred(name))
