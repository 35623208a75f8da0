"""Whether the model is compiled, and how: `COMPILE`."""

import copy
import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from colossal_vit.errors import UserError
from colossal_vit.parallel.collectives import RankLogger, all_gather_object
from colossal_vit.rng.dropout import Dropout
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.utils import is_using_pp
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.fx import GraphModule


def missing(device: torch.device) -> str | None:
    """Return what torch.compile needs and this machine lacks, with the remedy; None if it has all.

    On a GPU, Triton compiles a launcher in C for each kernel; on the CPU, the kernels are C++. Both include Python.h.
    """
    on_gpu = device.type == "cuda"
    language, variable, programs = ("C", "CC", ["gcc", "clang", "cc"]) if on_gpu else ("C++", "CXX", ["g++"])
    if variable in os.environ:
        named = os.environ[variable]
        programs = [named] if on_gpu else shlex.split(named)[:1]  # Inductor takes options in CXX, Triton none in CC
    if not any(map(shutil.which, programs)):
        return (
            f"a {language} compiler, and {' or '.join(map(repr, programs))} is not on PATH: "
            f"install one (Debian: apt-get install {'gcc' if on_gpu else 'g++'}), or name it in {variable}"
            f"{', one program without options' if on_gpu else ''}"
        )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Python's headers, and there is no {header}: install them (Debian: apt-get install python3-dev)"
    return None


def why_eager(device: torch.device) -> str | None:
    """Why "auto" does not compile; None if it does."""
    if device.type == "cpu":
        return "CPUs gain nothing by it"
    lacks = missing(device)
    return lacks and f"it needs {lacks}"


def check_kernels(model: nn.Module) -> None:
    """Refuse to train a model where the kernel of its dropout cannot be made, compiled model or not.

    Raises:
        UserError: if the device is a GPU, and this machine lacks what they need.
    """
    device = get_accelerator().get_current_device()
    if device.type != "cuda" or not (lacks := missing(device)):
        return
    if any(isinstance(module, Dropout) and not module.is_off for module in model.modules()):
        raise UserError(f"on a GPU, DROP_RATE and DROP_PATH_RATE need {lacks}; or set both to 0")


def compile_if_chosen(model: nn.Module, choice: bool | str, device: torch.device) -> bool:
    """Compile a model in place, if the value of `COMPILE` says so; "auto" logs its choice.

    Returns:
        Whether it is compiled.

    Raises:
        UserError: if `choice` is True and this machine lacks what that needs.
    """
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    by_block = gpc.tensor_parallel_size > 1 or is_using_pp() or is_sharded
    if choice == "auto":
        log, reason = RankLogger(gpc.get_global_rank()), why_eager(device)
        if device.type == "cuda":  # together: in other ranks' programs are collectives that an eager rank does not call
            reason = next(filter(None, all_gather_object(reason)), None)
        log.info(f"COMPILE = 'auto': {f'off, since {reason}' if reason else 'on, as on every GPU with a C compiler'}")
        if not reason:
            compile_model(model, by_block, backend=partial(_inductor_or_eager, log=log))
        return not reason
    if choice:
        if lacks := missing(device):
            raise UserError(f"COMPILE = True needs {lacks}; or set COMPILE = False")
        compile_model(model, by_block)
    return choice


def compile_model(model: nn.Module, by_block: bool, **options: Any) -> None:
    """Compile a model in place: as a whole, or block by block, as under tensor or pipeline parallelism.

    A block is one program, its collectives included (see `compat/compiled.py`), and all blocks share it, except that
    those which drop no paths have their own, and the last one, if it computes the class token only.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config  # here, since it takes seconds

    # Otherwise each process measures which variant of a kernel is fastest, and another one rounds differently.
    config.deterministic = torch.backends.cudnn.deterministic
    # With torch 2.14 that is so in this thread only. By default, the thread of the backward pass makes its kernels, and
    # on a GPU that is another one.
    functorch.force_non_lazy_backward_lowering = torch.backends.cudnn.deterministic
    # Otherwise a batch of another size, such as the last one of an evaluation, makes a program for all sizes. The next
    # evaluation runs that one, but the same evaluation of a run that resumes the first one.
    options["dynamic"] = False
    if not by_block:
        model.compile(**options)
        return
    for module in model.modules():
        for block in getattr(module, "blocks", nn.ModuleDict()).children():
            block.compile(**options)


def _inductor_or_eager(graph: GraphModule, inputs: Sequence[Any], log: RankLogger) -> Callable:
    """Compile with Inductor; a graph whose kernels cannot be made runs operator by operator."""
    # Here, since they take a second to import.
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_or_interpret(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        untouched, program = copy.deepcopy(graph), None  # Inductor changes the graph
        try:
            program = compile_fx_inner(graph, inputs, **options)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            log.info(f"COMPILE = 'auto': a part of the model is not compiled, since that failed: {cause}", ranks=None)
        failed = program is None
        if in_common:
            with unset_fake_temporarily():
                failed = any(all_gather_object(failed, ParallelMode.TENSOR))
        return make_boxed_func(untouched.forward) if failed else program

    # Inductor may change the order of collectives, and so the ranks that take part in them all have its program or none
    # has. They all have to ask each other, and who finds a program in this cache would not.
    in_common = gpc.tensor_parallel_size > 1
    with torch._functorch.config.patch(enable_autograd_cache=not in_common):
        return compile_fx(graph, inputs, inner_compile=compile_or_interpret)
