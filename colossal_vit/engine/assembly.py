"""`initialize`, the counterpart of `colossalai.initialize`: builds the engine for a config's layout and features."""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from colossal_vit.compat.patches import set_pipeline_dtype
from colossal_vit.config.load import num_model_chunks
from colossal_vit.engine import compilation, precision
from colossal_vit.engine.ema import Ema
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.fully_sharded import PieceGradients, pieces_of, shard_fully
from colossal_vit.engine.optimizers import frozen_parameters
from colossal_vit.engine.reduction import CopiesHandler, GradientReducer, make_buckets
from colossal_vit.engine.train_loader import TrainLoader
from colossal_vit.engine.zero import Zero
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
from colossalai.legacy.utils import is_using_ddp, is_using_pp, sync_model_param
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

SMALLEST_BUCKET = 1  # MB of gradients, as DistributedDataParallel's first bucket; torch.compile cuts at it, too


class Training(NamedTuple):
    """What trains: the engine, and what the loop feeds it with."""

    engine: Engine
    train_dataloader: TrainLoader | None
    test_dataloader: Iterable | None
    lr_scheduler: Any


class OneForwardOneBackward(PipelineSchedule):
    """Colossal-AI's 1F1B schedule, which calls the model past the engine."""

    def _forward_step(self, engine: Engine, *args: Any, **options: Any) -> Tensor:
        first = self.microbatch_offset
        with engine.forward_pass(range(first, first + self.microbatch_size), self.batch_size):
            return super()._forward_step(engine, *args, **options)


class InterleavedSchedule(InterleavedPipelineSchedule):
    """Colossal-AI's interleaved 1F1B schedule, without a check that imports a module which no longer exists."""

    def pre_processing(self, engine: Engine) -> None:
        pass

    def _forward_step(self, engine: Engine, model_chunk_id: int, *args: Any, **options: Any) -> Tensor:
        first = self.microbatch_offset[model_chunk_id]
        with engine.forward_pass(range(first, first + self.microbatch_size), self.batch_size):
            return super()._forward_step(engine, model_chunk_id, *args, **options)


def _stage_input(stage_output: Tensor | None, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Input and labels of a model chunk. Upstream's default feeds images to every chunk of the first rank."""
    images, labels = batch
    return (images if gpc.is_pipeline_first_stage() else stage_output), labels


def _schedule(config: Any, dtype: torch.dtype) -> NonPipelineSchedule | PipelineSchedule:
    if not is_using_pp():
        return NonPipelineSchedule()
    # TENSOR_SHAPE is the shape of the full activations between stages; 2D, 2.5D and 3D split batch and hidden size.
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
    return OneForwardOneBackward(config.NUM_MICRO_BATCHES, **options)


def _set_switches(config: Any) -> None:
    """Set torch's switches for kernels and their precision, which are of the whole process."""
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    torch.backends.cudnn.deterministic = config.cudnn_deterministic
    # Backward passes of fused attention add up in any order, cuDNN's and the others alike, and torch's own switch for
    # determinism leaves them so unless it makes errors of all that cannot be deterministic.
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(not config.cudnn_deterministic)
    # torch's default is TF32 in cuDNN but not in matrix products: "fp32" would be two precisions in one model.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.TF32


def _check(config: Any, model: nn.Module) -> None:
    """Refuse features that exclude each other, and layers whose result depends on the layout.

    Raises:
        UserError: naming them.
    """
    fp16 = config.fp16
    if config.torch_ddp.get("static_graph") and config.gradient_accumulation > 1:
        raise UserError(
            f"torch_ddp.static_graph = True does not work with gradient_accumulation = {config.gradient_accumulation}: "
            f"PyTorch takes the first backward pass, which reduces nothing, for the pattern of all"
        )
    if fp16 and config.DTYPE == "float64":
        raise UserError(f"DTYPE = 'float64' does not work with fp16.mode = {fp16.mode}: leave one of them out")
    if is_using_pp() and fp16 and fp16.mode != AMP_TYPE.NAIVE:
        raise UserError(f"fp16.mode = {fp16.mode} does not work with a pipeline: use AMP_TYPE.NAIVE or None")
    if gpc.tensor_parallel_size > 1 and fp16 and fp16.get("half_residual"):
        raise UserError(
            "fp16.half_residual = True does not work with tensor parallelism, whose layers add biases in fp32: "
            "use AMP_TYPE.NAIVE, or leave it out"
        )
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            raise UserError(
                f"the model's {name!r} is torch's {type(module).__name__}, which drops other elements in each layout "
                f"and after resuming: use colossal_vit.rng.dropout.Dropout, and name_layers at the end"
            )
        if isinstance(module, _BatchNorm):
            raise UserError(
                f"the model's {name!r} is a {type(module).__name__}, which normalises over a rank's micro-batch, so "
                f"that each layout computes something else: use a model without one"
            )
    if is_using_ddp() and config.zero and config.zero.stage == 3 and fp16 and fp16.get("opt_level") == "O2":
        raise UserError(
            "zero.stage = 3 does not work with fp16.opt_level = 'O2', whose norms are of another type: use stage 1 or 2"
        )
    if config.zero and config.torch_ddp:
        raise UserError("torch_ddp has no effect with zero, which reduces gradients by itself: leave one of them out")


def _reduce_gradients(
    config: Any, model: nn.Module, zero: Zero | None, is_compiled: bool, device: torch.device
) -> tuple[nn.Module, list[Any]]:
    """Have gradients averaged over data-parallel ranks: by ZeRO, in a pipeline by buckets, otherwise by PyTorch's DDP.

    Returns:
        The model to call, and the engine's gradient handlers.

    Raises:
        UserError: if the buckets are too small for a compiled model.
    """
    num_passes = (config.NUM_MICRO_BATCHES if is_using_pp() else 1) * config.gradient_accumulation
    if zero:
        return model, [zero.reducer(model, num_passes)]
    if not is_using_ddp():
        return model, []
    if config.zero:  # stage 3
        return model, [PieceGradients(model)]
    group = gpc.get_group(ParallelMode.DATA)
    if is_using_pp():
        return model, [GradientReducer(make_buckets(model.parameters(), group, {}), num_passes)]
    bucket = config.torch_ddp.get("bucket_cap_mb", SMALLEST_BUCKET)
    if is_compiled and bucket < SMALLEST_BUCKET:
        raise UserError(
            f"torch_ddp.bucket_cap_mb = {bucket} does not work with COMPILE = {config.COMPILE!r}, which takes at "
            f"least {SMALLEST_BUCKET}: raise it, or set COMPILE = False"
        )
    replica = DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,  # done by sync_model_param
        gradient_as_bucket_view=True,  # saves a second copy of the gradients
        **config.torch_ddp,
    )
    return replica, []


def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: nn.Module | None = None,
    train_dataloader: Iterable | None = None,
    test_dataloader: Iterable | None = None,
    lr_scheduler: Any = None,
) -> Training:
    """Build the engine from the components of a training, for the layout and the features in `gpc.config`.

    Args:
        model: this rank's part of the model.
        optimizer: over the parameters of `model`.
        criterion: called as `criterion(output, label)`.
        train_dataloader: yields `(images, labels)` micro-batches; an incomplete last optimizer step is dropped.
        test_dataloader: returned unchanged.
        lr_scheduler: returned unchanged, for `Trainer`, which steps it once per optimizer step.

    Returns:
        The engine and what was given, the training batches as `TrainLoader`.

    Raises:
        UserError: if features in the config exclude each other, or this machine lacks what one needs.
    """
    config = gpc.config
    device = get_accelerator().get_current_device()
    _set_switches(config)
    _check(config, model)
    fp16 = config.fp16
    dtype = precision.compute_dtype(fp16, device)

    bare_model = model = model.to(device)
    name_parameters(model)
    if is_using_ddp():
        sync_model_param(model, ParallelMode.DATA)
    for parameter in frozen_parameters(config, model):
        parameter.requires_grad_(False)
    model, criterion = precision.wrap_model(model, criterion, fp16, device)
    stage = config.zero.stage if is_using_ddp() and config.zero else 0
    zero = None
    if stage == 3:
        shard_fully(bare_model, optimizer, device)
    elif stage:
        trained = [p for p in model.parameters() if p.requires_grad]
        zero = Zero(trained, optimizer, gpc.get_group(ParallelMode.DATA), stage)
    # Now, so that master weights are made of the parameters that ZeRO leaves to this rank's optimizer only.
    optimizer = precision.wrap_optimizer(optimizer, fp16, device)

    # Before DDP, so that the compiled backward pass has breaks at its gradient buckets.
    by_block = stage > 0 or gpc.tensor_parallel_size > 1 or is_using_pp()
    is_compiled = compilation.compile_if_chosen(model, config.COMPILE, device, by_block)
    model, gradient_handlers = _reduce_gradients(config, model, zero, is_compiled, device)
    if gpc.tensor_parallel_size > 1 and gpc.get_world_size(ParallelMode.DATA) > 2:  # a sum of two has no order
        gradient_handlers.append(CopiesHandler(pieces_of(bare_model)))
    if stage:
        optimizer.norm_group = ParallelMode.GLOBAL

    ema = None
    if config.ema:
        masters = optimizer.working_to_master_map
        own = [p for p in pieces_of(bare_model) if not zero or zero.owns(p)]
        if any(masters.get(p, p).itemsize < 4 for p in own):
            raise UserError("ema needs weights in fp32, which fp16.opt_level = 'O3' has not")
        ema = Ema([(p, masters.get(p, p)) for p in own], **config.ema, publish=zero and zero.broadcast_weights)
    engine = Engine(
        model=model,
        bare_model=bare_model,
        optimizer=optimizer,
        criterion=criterion,
        gradient_handlers=gradient_handlers,
        clip_grad_norm=config.clip_grad_norm,
        verbose=False,
        schedule=_schedule(config, dtype),
        accumulation=config.gradient_accumulation,
        ema=ema,
        zero=zero,
    )
    engine.schedule.dtype = dtype  # upstream sets it for its own fp16 wrapper only
    # Upstream's logger inspects the stack and source files for each micro-batch's debug message: some 10 ms.
    engine.schedule._logger = logging.getLogger(__name__)
    if train_dataloader is not None:
        train_dataloader = TrainLoader(train_dataloader, config.gradient_accumulation)
    return Training(engine, train_dataloader, test_dataloader, lr_scheduler)
