"""Colossal-AI's Engine, put together so that one optimizer step means the same in every layout.

`initialize` has the signature of `colossalai.initialize` and returns its `Engine`. What differs from upstream 0.5.0:

- without `clip_grad_norm` nothing is clipped (upstream clips to 0, which sets every gradient to zero);
- clipping happens once per optimizer step, on unscaled gradients, by the norm over all ranks that share the model;
- `gradient_accumulation` counts steps, not backward passes, of which a pipeline makes several a step; gradients are
  reduced over the data-parallel ranks once per optimizer step;
- AMP works on torch 2 and on the CPU;
- a loss or gradient that is not finite stops every rank before the weights are touched.
"""

import logging
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit import precision
from colossal_vit.config import Layout, num_model_chunks
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.patches import set_pipeline_dtype
from colossal_vit.reduction import PipelineGradientHandler
from colossal_vit.sharding import name_parameters
from colossal_vit.waits import read
from colossalai.accelerator import get_accelerator
from colossalai.legacy.amp import AMP_TYPE
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine import Engine as ColossalEngine
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
from torch.profiler import record_function


class Engine(ColossalEngine):
    """Colossal-AI's Engine with gradient accumulation of its own.

    The caller makes the same calls for every micro-step: `zero_grad`, forward and `backward` (or `execute_schedule`),
    `step`. Every `accumulation`-th `step` updates the weights.

    Attributes:
        accumulation: micro-steps in an optimizer step.
        num_steps: optimizer steps made so far, skipped ones included.
        bare_model: the model inside the wrappers for precision and data parallelism.
        grad_norm: norm of the full gradient of the last optimizer step, unscaled, before clipping.
        loss: mean over the global batch of the last optimizer step; None where this rank does not see it.
        part: called as `with part(name):` around "forward" and "backward" of each micro-step and "update" of each
            optimizer step, for profilers.
    """

    def __init__(self, *args: Any, bare_model: nn.Module, accumulation: int = 1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bare_model, self.accumulation = bare_model, accumulation
        self.num_steps = 0
        self.grad_norm, self.loss = math.nan, None
        self._losses: list[Tensor] = []  # of the micro-steps of this step
        self.part: Callable[[str], AbstractContextManager] = record_function
        self._micro_step = 0
        self._reduce_in_backward(accumulation == 1)

    @property
    def finished_step(self) -> bool:
        """Whether the last call of `step` completed an optimizer step."""
        return self._micro_step == 0

    def _reduce_in_backward(self, enabled: bool) -> None:
        """Let DDP reduce the gradients of the coming micro-step, or keep them local (what `no_sync` does)."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = enabled

    def settle_buckets(self, shape: tuple[int, ...]) -> None:
        """Bring DDP to where it is after the first step of a run, by a backward pass on images of zeros.

        Once it has seen in which order gradients come, DDP sorts them into other buckets, and where in a bucket a
        gradient lies decides in which order four ranks or more add it up. Weights stay; buffers and random numbers do
        not.

        Args:
            shape: of a batch of images.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.train()
            self._reduce_in_backward(True)
            self.model(torch.zeros(shape, device=next(self.model.parameters()).device)).float().sum().backward()
            self.optimizer.zero_grad()
            self._reduce_in_backward(self.accumulation == 1)

    def zero_grad(self) -> None:
        if self._micro_step == 0:
            super().zero_grad()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.part("forward"):
            return super().__call__(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        with self.part("backward"):
            super().backward(loss / self.accumulation)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        with self.part("backward"):
            super().backward_by_grad(tensor, grad)

    def execute_schedule(self, data_iter: Iterable, forward_only: bool = False, **options: Any) -> tuple:
        output, label, loss = super().execute_schedule(data_iter, forward_only=forward_only, **options)
        if loss is not None and not forward_only:
            self._losses.append(loss.detach())
        return output, label, loss

    def step(self) -> None:
        """Count a micro-step; on the last one reduce, clip and update.

        Raises:
            TrainingError: on every rank, before the update, if the gradient is not finite.
        """
        self._micro_step = (self._micro_step + 1) % self.accumulation
        self._reduce_in_backward(self._micro_step == self.accumulation - 1)
        if not self.finished_step:
            return
        self.num_steps += 1
        with self.part("update"):
            self._update()

    def _update(self) -> None:
        self._all_reduce_gradients()
        known = [self.optimizer.clip_grad_by_norm(self._clip_grad_norm)]
        if self._losses:  # in the last pipeline stage only
            loss = torch.stack(self._losses).mean(dtype=torch.float64)
            if (replicas := gpc.get_world_size(ParallelMode.DATA)) > 1:
                dist.all_reduce(loss, group=gpc.get_group(ParallelMode.DATA))
            known.append(loss / replicas)
        self._losses.clear()
        self.grad_norm, *losses = read(known)
        self.optimizer.grad_norm, self.loss = self.grad_norm, losses[0] if losses else None
        scale = self.optimizer.loss_scale
        if not math.isfinite(self.grad_norm) and (scale is None or scale <= 1):
            raise TrainingError(
                f"step {self.num_steps}: the gradient is not finite (norm {self.grad_norm}); the weights are as after "
                f"step {self.num_steps - 1}. Lower LEARNING_RATE, lengthen the warm-up or set clip_grad_norm."
            )
        self.optimizer.step()


class MicroBatches:
    """A data loader as the Engine wants it: whole optimizer steps only, and the time spent waiting for data known.

    Attributes:
        data_s: seconds spent waiting for batches since the start.
        start: the micro-batch that the next epoch starts with, see `seek`.
        taken: how many micro-batches of the current epoch are behind.
    """

    def __init__(self, loader: Iterable, accumulation: int):
        self.loader = loader
        self.num_micro_batches = len(loader) // accumulation * accumulation
        if not self.num_micro_batches:
            raise UserError(
                f"gradient_accumulation = {accumulation}, but an epoch has only {len(loader)} batches on each rank: "
                f"lower gradient_accumulation or BATCH_SIZE"
            )
        self.data_s, self.start, self.taken = 0.0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self.num_micro_batches

    def state_dict(self) -> dict[str, Any]:
        """What the loader must know to go on, beside epoch and micro-batch: for JSON, mostly nothing."""
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}

    def seek(self, epoch: int, start: int, state: dict[str, Any]) -> bool:
        """Go on with micro-batch `start` of `epoch`; returns whether the batches are those of `state_dict`'s run."""
        self.start = start
        if hasattr(self.loader, "load_state_dict"):
            return self.loader.load_state_dict(state)
        if (sampler := getattr(self.loader, "sampler", None)) is not None:
            sampler.epoch, sampler.start = epoch, start
        return True

    def __iter__(self) -> Iterator:
        self.taken, self.start = self.start, 0
        return self._batches()

    def _batches(self) -> Iterator:
        batches = iter(self.loader)
        while self.taken < self.num_micro_batches:
            started = time.perf_counter()
            with record_function("data"):
                batch = next(batches)
            self.data_s += time.perf_counter() - started
            self.taken += 1
            yield batch


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
    layout = Layout.of(config, gpc.get_world_size(ParallelMode.GLOBAL))
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
    model, optimizer, criterion = precision.convert(model, optimizer, criterion, fp16, device)

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
    )
    engine.schedule.dtype = dtype  # upstream knows only its own fp16 wrapper
    # Upstream's logger walks the stack and reads source files for each micro-batch's debug message: some 10 ms.
    engine.schedule._logger = logging.getLogger(__name__)
    if train_dataloader is not None:
        train_dataloader = MicroBatches(train_dataloader, config.gradient_accumulation)
    return engine, train_dataloader, test_dataloader, lr_scheduler
