"""What a rank computes in its first steps, to compare it with one process."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from colossal_vit.checkpoint.tensors import parameter_slots
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.optimizers import layer_of
from colossal_vit.hooks.priority import Priority
from colossal_vit.parallel.collectives import all_gather_object
from colossal_vit.parallel.sharding import output_part
from colossal_vit.rng.dropout import WHOLE, ActivationPart, Dropout, current_samples
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor, nn


class Record(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        key: step, kind and name.
        places: samples in the global batch, (B,); None for what is whole, such as a parameter.
        column: the first of its last dimension.
        values: in fp64.
    """

    key: tuple[int, str, str]
    places: np.ndarray | None
    column: int
    values: np.ndarray


def layers(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model with parameters or dropout, by timm's names: Colossal-AI's automatic ones wrap
    others.
    """
    children = dict(model.named_children())
    if children and children.keys() != {"module"}:
        for name, child in children.items():
            yield from layers(child, f"{path}.{name}".removeprefix("."))
    elif not isinstance(model, nn.Identity) and not getattr(model, "is_off", False):
        yield path, model


def _place(name: str) -> tuple[int, bool]:
    """Return where a layer or parameter is, to compare: what is frozen ends before a layer, or before the head."""
    return layer_of(f"{name}.", depth=2**31), name.partition(".")[0] == "head"


class RecordTensorsHook(BaseHook):
    """Records every layer's output and its gradient, and the gradients of parameters, of each step.

    Kinds come in the order of computation: "input", "output", "labels", "gradient at" (a layer's output) and "gradient
    of" (a parameter).

    Args:
        records: they are appended to it.
    """

    def __init__(self, records: list[Record]):
        super().__init__(Priority.READER)
        self.step, self.records = 0, records

    def before_train(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        model = self.engine.bare_model
        trained = [_place(slot.shard.name) for slot in parameter_slots(self.engine) if slot.trained]
        first = min(place for places in all_gather_object(trained) for place in places)
        for chunk in model if isinstance(model, nn.ModuleList) else [model]:
            chunk.register_forward_pre_hook(self._record_input)
            for name, layer in layers(chunk):
                if _place(name) < first:  # its output has a gradient in the later stages of a pipeline only
                    continue
                part = layer.output_part if isinstance(layer, Dropout) else output_part(layer)
                layer.register_forward_hook(partial(self._record_output, name, part))
        self.engine.criterion.register_forward_pre_hook(self._record_labels)
        clip = self.engine.optimizer.clip_grad_by_norm

        def record_and_clip(*args: Any) -> Tensor:
            self._record_gradients()
            return clip(*args)

        self.engine.optimizer.clip_grad_by_norm = record_and_clip

    def _record(self, kind: str, name: str, part: ActivationPart, tensor: Tensor, places: Tensor) -> None:
        own = places.unflatten(0, (part.rows, -1))[part.row].numpy()
        values = tensor.detach().double().cpu().numpy()
        self.records.append(Record((self.step, kind, name), own, part.column * tensor.shape[-1], values))

    def _record_input(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if model.training:
            self.places = current_samples()[:, 1].cpu()
            if inputs[0].ndim == 4:
                self._record("input", "images", WHOLE, inputs[0], self.places)

    def _record_labels(self, criterion: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._record("labels", "", WHOLE, inputs[1], self.places)

    def _record_output(self, name: str, part: ActivationPart, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if not layer.training or current_samples() is None:  # it is recomputed
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        places = self.places
        self._record("output", name, part, output, places)
        # Of the mean over the global batch: this rank's loss is the mean over its part, times the loss scale.
        scale = gpc.get_world_size(ParallelMode.DATA) * (self.engine.optimizer.loss_scale or 1.0)
        output.register_hook(lambda grad: self._record("gradient at", name, part, grad / scale, places))

    @torch.no_grad()
    def _record_gradients(self) -> None:
        scale = self.engine.optimizer.loss_scale or 1.0
        for slot in parameter_slots(self.engine):
            if slot.owned and slot.trained:
                grad = slot.working.grad
                grad = torch.zeros_like(slot.working) if grad is None else grad  # 2.5D uses some ranks' pieces
                values = (slot.shard.gather(grad) / scale).double().cpu().numpy()
                if gpc.get_local_rank(ParallelMode.TENSOR) == 0:
                    self.records.append(Record((self.step, "gradient of", slot.shard.name), None, 0, values))

    def before_train_iter(self, trainer: Trainer) -> None:
        self.step = self.engine.num_steps + 1
