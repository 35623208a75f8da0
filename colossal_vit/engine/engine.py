"""Colossal-AI's Engine, changed so that an optimizer step computes the same in every layout.

Differences from upstream 0.5.0:

- without `clip_grad_norm` nothing is clipped (upstream clips to 0, which sets every gradient to zero);
- clipping happens once per optimizer step, on unscaled gradients, by the norm over all ranks that share the model;
- `gradient_accumulation` counts calls of `step`, not backward passes, of which a pipeline makes several per call;
  gradients are reduced over the data-parallel ranks once per optimizer step;
- AMP works on torch 2 and on the CPU;
- a gradient that is not finite changes no weight, and ends every rank if no lower loss scale can help;
- no step waits for a GPU: the host reads a step's loss and gradient norm while the GPU has work of the next step.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.compat.patches import drop_gradients_of_frozen
from colossal_vit.data.samplers import data_place
from colossal_vit.engine.ema import Ema
from colossal_vit.engine.zero import Zero
from colossal_vit.errors import TrainingError
from colossal_vit.rng.dropout import batch_of
from colossalai.accelerator import get_accelerator
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine import Engine as ColossalEngine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function


class Scalars:
    """Scalar tensors on one device, for the host to read while the device continues with what was queued later.

    Args:
        tensors: of any floating-point types.
    """

    def __init__(self, tensors: list[Tensor]):
        values = torch.stack([tensor.double() for tensor in tensors])
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.ready = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def read(self) -> list[float]:
        """Their values; waits until the device has computed them."""
        if self.ready is not None:
            self.ready.synchronize()
        return [value.item() for value in self.values.unbind()]


class Engine(ColossalEngine):
    """Colossal-AI's Engine with built-in gradient accumulation.

    The caller makes the same calls for every micro-step: `zero_grad`, forward and `backward` (or `execute_schedule`),
    `step`. Every `accumulation`-th `step` updates the weights.

    On a GPU the host reads the result of an optimizer step in the next one, when a backward pass begins and the device
    still has a forward pass to do; on the CPU at once. `wait_for_step` has it read now.

    Attributes:
        accumulation: micro-steps per optimizer step.
        num_steps: optimizer steps so far, including steps skipped for overflow.
        bare_model: the model without the wrappers for precision and data parallelism.
        result_time: when the result of a step was last read, by `time.perf_counter`.
        grad_norm: in that step, the L2 norm of the full gradient, unscaled, before clipping.
        loss: in that step, the mean over the global batch; None except on the last pipeline stage.
        ema: the moving average of the weights, or None.
        zero: the split of the optimizer state over the data-parallel ranks, or None.
        part: context manager factory for profilers, entered as `with part(name):` around the "forward" and "backward"
            of each micro-step and the "update" of each optimizer step.
    """

    def __init__(
        self,
        *args: Any,
        bare_model: nn.Module,
        accumulation: int,
        ema: Ema | None,
        zero: Zero | None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.bare_model, self.accumulation, self.ema, self.zero = bare_model, accumulation, ema, zero
        self.num_steps = 0
        self.result_time, self.grad_norm, self.loss = 0.0, math.nan, None
        self._unread: Scalars | None = None  # norm and loss of the last optimizer step
        self._losses: list[Tensor] = []  # one for each micro-step of this step
        self.part: Callable[[str], AbstractContextManager] = record_function
        self._micro_step = 0
        self._reduce_in_backward(accumulation == 1)

    def _reduce_in_backward(self, enabled: bool) -> None:
        """Have DDP reduce gradients in the next backward pass, or keep them local as `no_sync` does."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = enabled

    def rebuild_ddp_buckets(self, shape: tuple[int, ...], steps: int) -> None:
        """Have DDP rebuild its buckets now, by backward passes on zero images, so that a resumed run is bit-identical.

        DDP does so after the first step of a process, with a static graph after the second, in the order in which
        gradients became ready. A gradient's place in its bucket determines the order in which four or more ranks sum
        it, and so the rounding. The weights are left unchanged.

        Args:
            shape: of a batch of images, (B, 3, H, W).
            steps: those that the run has made.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        self.train()
        self._reduce_in_backward(True)
        for _ in range(min(steps, 2 if self.model.static_graph else 1)):
            self(torch.zeros(shape, device=get_accelerator().get_current_device())).float().sum().backward()
            self.optimizer.zero_grad()
        self._reduce_in_backward(self.accumulation == 1)

    def zero_grad(self) -> None:
        if self._micro_step == 0:
            super().zero_grad()

    def _samples(self, samples: range, batch_size: int) -> Tensor:
        """Return what dropout tells the samples of a forward pass by: their optimizer step and place in the global
        batch.

        Args:
            samples: numbers in this rank's micro-step; a pipeline's forward pass has some of them.
            batch_size: samples of this rank in a micro-step.

        Returns:
            int64 (B, 2) on the device.
        """
        replica, replicas = data_place(None, None)
        first = (self._micro_step * replicas + replica) * batch_size
        device = get_accelerator().get_current_device()
        places = torch.arange(first + samples.start, first + samples.stop, device=device)
        return torch.stack([torch.full_like(places, self.num_steps), places], dim=1)

    @contextmanager
    def forward_pass(self, samples: range, batch_size: int) -> Iterator[None]:
        """Surround whatever calls the model. Pipelines call it, or a chunk of it, without the engine.

        Args:
            samples, batch_size: see `_samples`.
        """
        with self.part("forward"), batch_of(self._samples(samples, batch_size) if self.training else None):
            if self.zero:
                self.zero.before_forward()
            yield

    def __call__(self, images: Tensor) -> Any:
        with self.forward_pass(range(len(images)), len(images)):
            return super().__call__(images)

    def backward(self, loss: Tensor) -> None:
        self._fetch_result()  # since the loss scale depends on it
        with self.part("backward"):
            super().backward(loss / self.accumulation)
            drop_gradients_of_frozen()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        self._fetch_result()
        if not tensor.requires_grad:  # nothing is trained up to the end of this pipeline stage
            return
        with self.part("backward"):
            super().backward_by_grad(tensor, grad)
            drop_gradients_of_frozen()

    def execute_schedule(self, data_iter: Iterable, forward_only: bool = False, **options: Any) -> tuple:
        output, label, loss = super().execute_schedule(data_iter, forward_only=forward_only, **options)
        if loss is not None and not forward_only:
            self._losses.append(loss.detach())
        return output, label, loss

    def step(self) -> None:
        """Count a micro-step; after the last one of an optimizer step, reduce and clip gradients and update weights.

        Raises:
            TrainingError: as `wait_for_step`, of the step before on a GPU, on the CPU of this one.
        """
        self._micro_step = (self._micro_step + 1) % self.accumulation
        self._reduce_in_backward(self._micro_step == self.accumulation - 1)
        if self._micro_step > 0:
            return
        self.wait_for_step()  # the step before, where all ranks are at the same place and none waits for one that ends
        self.num_steps += 1
        with self.part("update"):
            self._update()

    @property
    def reads_late(self) -> bool:
        """Whether the result of a step is read in the next one."""
        return get_accelerator().get_current_device().type == "cuda"

    @property
    def read_steps(self) -> int:
        """Optimizer steps whose result has been read."""
        return self.num_steps - (self._unread is not None)

    def _update(self) -> None:
        self._all_reduce_gradients()
        known = [self.optimizer.clip_grad_by_norm(self._clip_grad_norm)]
        if self._losses:  # only the last pipeline stage has any
            loss = torch.stack(self._losses).mean(dtype=torch.float64)
            if (replicas := gpc.get_world_size(ParallelMode.DATA)) > 1:
                dist.all_reduce(loss, group=gpc.get_group(ParallelMode.DATA))
            known.append(loss / replicas)
        self._losses.clear()
        self._unread = Scalars(known)
        self.optimizer.launch_update()
        if not self.optimizer.updates_on_device:
            self._fetch_result()  # which updates the weights
        if self.zero:
            self.optimizer.zero_grad()  # frees the memory that the broadcasts need
            self.zero.send_weights()
        if self.ema:
            self.ema.update(self.num_steps)
        if not self.reads_late:
            self.wait_for_step()

    def _fetch_result(self) -> None:
        """Read the result of the last optimizer step, unless it has been read."""
        if self._unread is None:
            return
        self.grad_norm, *losses = self._unread.read()
        self.loss, self.result_time, self._unread = losses[0] if losses else None, time.perf_counter(), None
        self.optimizer.finish_update(self.grad_norm)

    def wait_for_step(self) -> None:
        """Read the result of the last optimizer step, unless it has been read. Nothing is saved before.

        Raises:
            TrainingError: on every rank, if the gradient was not finite and no loss scale that can still fall explains
                it. That step has not changed the weights.
        """
        self._fetch_result()
        if self.optimizer.has_diverged:
            raise TrainingError(
                f"step {self.num_steps}: the gradient is not finite (norm {self.grad_norm}); the weights are as after "
                f"step {self.num_steps - 1}. Lower LEARNING_RATE, lengthen the warm-up or set clip_grad_norm."
            )
