"""`--debug-nan`: find the first module whose output is not finite."""

import re
from functools import partial
from typing import Any

from colossal_vit.engine.loop import Trainer
from colossal_vit.errors import TrainingError
from colossal_vit.hooks.priority import Priority
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.trainer.hooks import BaseHook
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class DebugNanHook(BaseHook):
    """`--debug-nan`: ends a run or an evaluation at the first module whose output, or its gradient, is not finite.

    Slow: host and device are synchronised after every module. Gradients are not checked under loss scaling, where
    overflows are expected now and then and the step is skipped.

    Raises:
        TrainingError: in the forward or backward pass, naming step or evaluation, rank, module and shape.
    """

    def __init__(self):
        super().__init__(Priority.READER)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.engine = trainer.engine
        wrappers = r"^(module(\.|$))?(model(\.|$))?"  # DDP's, and that of Autocast or Converted
        self.names = {module: re.sub(wrappers, "", name) for name, module in self.engine.model.named_modules()}
        for module in self.names:
            module.register_forward_hook(self._check_output)

    def _check(self, what: str, module: nn.Module, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                bad = int((~tensor.isfinite()).sum())
                made = self.engine.num_steps
                where = f"step {made + 1}" if self.engine.training else f"evaluation after step {made}"
                raise TrainingError(
                    f"{where}, rank {gpc.get_global_rank()}: {what} "
                    f"{self.names[module] or 'the model'} ({type(module).__name__}) is not finite: {bad} of "
                    f"{tensor.numel()} values of shape {tuple(tensor.shape)}"
                )

    def _check_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._check("the output of", module, output)
        if self.engine.optimizer.loss_scale is None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._check, "the gradient at the output of", module))
