"""`initialize`, the counterpart of `colossalai.initialize`: the engine for the layout and the features of a config."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from colossal_vit.compat.patches import set_pipeline_dtype
from colossal_vit.config.load import num_model_chunks
from colossal_vit.engine import precision
from colossal_vit.engine.ema import Ema
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.engine.reduction import PipelineGradientHandler
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.sharding import name_parameters
from colossalai.accelerator import get_accelerator
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine.schedule import (
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    get_tensor_shape,
)
from colossalai.legacy.nn.layer.base_layer import ParallelLayer
from colossalai.legacy.nn.layer.vanilla import WrappedDropout
from colossalai.legacy.utils import is_using_ddp, is_using_pp, sync_model_param
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class InterleavedSchedule(InterleavedPipelineSchedule):
    """Colossal-AI's interleaved 1F1B schedule without its check of the model, which imports a module that is gone."""

    def pre_processing(self, engine: Engine) -> None:
        pass


def _stage_input(stage_output: Tensor | None, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Input and label of a model chunk. Upstream's default gives images to every chunk of the first rank."""
    images, labels = batch
    return (images if gpc.is_pipeline_first_stage() else stage_output), labels


def _schedule(config: Any, dtype: torch.dtype) -> NonPipelineSchedule | PipelineSchedule:
    if not is_using_pp():
        return NonPipelineSchedule()
    # TENSOR_SHAPE is that of the whole activation between two stages; 2D, 2.5D and 3D split batch and hidden size.
    shape = get_tensor_shape()
    layout = Layout.current()
    if shape is not None:
        batch, *sequence, hidden = shape
        shape = (batch // layout.batch_parts, *sequence, hidden // layout.hidden_parts)
    options = dict(
        data_process_func=_stage_input,
        tensor_shape=shape,
        scatter_gather_tensors=gpc.is_initialized(ParallelMode.PARALLEL_1D),
    )
    set_pipeline_dtype(dtype)
    num_chunks = num_model_chunks(config)
    if num_chunks > 1:
        return InterleavedSchedule(config.NUM_MICRO_BATCHES, num_chunks, **options)
    return PipelineSchedule(config.NUM_MICRO_BATCHES, **options)


def _check_compilable(device: torch.device) -> None:
    """Refuse to compile where a tool for it is missing.

    On a GPU, Triton compiles a launcher in C for each kernel; on the CPU, the kernels are C++. Both include Python.h.

    Raises:
        UserError: on a machine without compiler or headers.
    """
    language, variable, programs, package = (
        ("C", "CC", ("gcc", "clang", "cc"), "gcc") if device.type == "cuda" else ("C++", "CXX", ("g++",), "g++")
    )
    programs = (os.environ[variable],) if variable in os.environ else programs
    if not any(map(shutil.which, programs)):
        raise UserError(
            f"COMPILE = True needs a {language} compiler, and {' or '.join(map(repr, programs))} is not on PATH: "
            f"install one (Debian: apt-get install {package}), name it in {variable}, or leave COMPILE out"
        )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        raise UserError(
            f"COMPILE = True needs Python's headers, and there is no {header}: install them (Debian: apt-get install "
            f"python3-dev), or leave COMPILE out"
        )


def _compile(model: nn.Module) -> None:
    """Compile a model in place: whole, or under tensor and pipeline parallelism each transformer block.

    The blocks share one program. It is cut where a layer communicates, and where random numbers are drawn that the
    tensor-parallel ranks have to agree on.
    """
    if gpc.tensor_parallel_size == 1 and not is_using_pp():
        model.compile()
        return
    for module in list(model.modules()):
        inner = getattr(module, "module", module)  # of Colossal-AI's automatic layers
        if isinstance(inner, (ParallelLayer, WrappedDropout)) or getattr(module, "draws_together", False):
            module.forward = torch.compiler.disable(module.forward)
        for block in getattr(module, "blocks", nn.ModuleDict()).children():
            block.compile()


def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: nn.Module | None = None,
    train_dataloader: Iterable | None = None,
    test_dataloader: Iterable | None = None,
    lr_scheduler: Any = None,
    ophooks: list | None = None,
    verbose: bool = False,
) -> tuple[Engine, Iterable | None, Iterable | None, Any]:
    """Wrap the components of a training for the layout and the features in `gpc.config`.

    Args:
        model: this rank's part of the model.
        optimizer: over the parameters of `model`.
        criterion: called as `criterion(output, label)`.
        train_dataloader: yields `(images, labels)` micro-batches; its tail that fills no optimizer step is dropped.
        test_dataloader: returned as it is.
        lr_scheduler: returned as it is; step it once per optimizer step, with `hooks.LRSchedulerHook`.
        ophooks: Colossal-AI's hooks into each operator.
        verbose: passed to Colossal-AI's engine.

    Returns:
        `(engine, train_dataloader, test_dataloader, lr_scheduler)`.

    Raises:
        UserError: if the config asks for features that exclude each other, or that this machine cannot give.
    """
    config = gpc.config
    device = get_accelerator().get_current_device()
    torch.backends.cudnn.benchmark = config.get("cudnn_benchmark", False)
    torch.backends.cudnn.deterministic = config.get("cudnn_deterministic", False)
    # By default torch allows cuDNN TensorFloat-32, so that "fp32" would mean two precisions in one model.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.get("TF32", False)
    fp16 = config.fp16
    dtype = precision.compute_dtype(fp16, device)
    if (config.get("torch_ddp") or {}).get("static_graph") and config.gradient_accumulation > 1:
        raise UserError(
            f"torch_ddp.static_graph = True does not work with gradient_accumulation = {config.gradient_accumulation}: "
            f"PyTorch takes the first backward pass, which reduces nothing, for the pattern of all"
        )
    if is_using_pp() and fp16 and fp16.mode != AMP_TYPE.NAIVE:
        raise UserError(f"fp16.mode = {fp16.mode} does not work with a pipeline: use AMP_TYPE.NAIVE or None")

    bare_model = model = model.to(device)
    name_parameters(model)
    if is_using_ddp():
        sync_model_param(model, ParallelMode.DATA)
    model, optimizer, criterion = precision.wrap_for_precision(model, optimizer, criterion, fp16, device)

    if config.get("COMPILE"):
        _check_compilable(device)
        _compile(model)  # before DDP, which then cuts the compiled backward pass at its buckets

    gradient_handlers = []
    if is_using_ddp() and is_using_pp():
        num_passes = config.NUM_MICRO_BATCHES * config.gradient_accumulation
        group = gpc.get_group(ParallelMode.DATA)
        gradient_handlers = [PipelineGradientHandler(model.parameters(), group, num_passes)]
    elif is_using_ddp():
        model = DistributedDataParallel(
            model,
            process_group=gpc.get_group(ParallelMode.DATA),
            device_ids=[device] if device.type == "cuda" else None,
            init_sync=False,  # done above
            gradient_as_bucket_view=True,  # no second copy of the gradient
            **(config.get("torch_ddp") or {}),
        )

    ema = None
    if (settings := config.get("ema")) is not None:
        masters = optimizer.working_to_master_map
        ema = Ema([(parameter, masters.get(parameter, parameter)) for parameter in bare_model.parameters()], settings)
    engine = Engine(
        model=model,
        bare_model=bare_model,
        optimizer=optimizer,
        criterion=criterion,
        gradient_handlers=gradient_handlers,
        clip_grad_norm=config.clip_grad_norm,
        ophook_list=ophooks,
        verbose=verbose,
        schedule=_schedule(config, dtype),
        accumulation=config.gradient_accumulation,
        ema=ema,
    )
    engine.schedule.dtype = dtype  # upstream knows only its own fp16 wrapper
    # Upstream's logger walks the stack and reads source files for each micro-batch's debug message: some 10 ms.
    engine.schedule._logger = logging.getLogger(__name__)
    if train_dataloader is not None:
        train_dataloader = MicroBatches(train_dataloader, config.gradient_accumulation)
    return engine, train_dataloader, test_dataloader, lr_scheduler
