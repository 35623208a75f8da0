"""The loss of a training, in every layout."""

import torch
import torch.nn.functional as F
from colossal_vit.compat.norms import at_least_fp32
from colossal_vit.data.batches import IGNORED
from colossal_vit.errors import UserError
from colossal_vit.parallel.sharding import mean_over_batch_parts, split_batch
from colossalai.context import Config
from colossalai.legacy import nn as col_nn
from torch import Tensor, nn


class BinaryCrossEntropy(nn.Module):
    """Each class a question of its own, as in H. Touvron et al., "DeiT III", arXiv:2204.07118.

    The mean over images and classes, or the sum over classes. Equals timm's `BinaryCrossEntropy`.

    Args:
        smoothing: share of the target that all classes divide.
        threshold: targets above it become 1 and all others 0; None leaves them.
        sum_classes: whether the classes' losses are summed.
    """

    def __init__(self, smoothing: float, threshold: float | None = None, sum_classes: bool = False):
        super().__init__()
        self.smoothing, self.threshold, self.sum_classes = smoothing, threshold, sum_classes

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (B, C) and labels (B,) or targets (B, C); those that are `IGNORED` do not count."""
        targets = split_batch(labels)
        counted = torch.ones(len(targets), device=logits.device)
        if targets.ndim == 1:
            counted, targets = targets != IGNORED, F.one_hot(targets.clamp(min=0), logits.shape[1])
        targets = targets * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        if self.threshold is not None:
            targets = targets > self.threshold
        logits = at_least_fp32(logits)
        losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
        losses = losses.sum(1) if self.sum_classes else losses.mean(1)
        return mean_over_batch_parts((losses * counted).sum() / counted.sum())


def build_criterion(config: Config) -> nn.Module:
    """Cross entropy with LABEL_SMOOTHING, or what the block `bce` says.

    Raises:
        UserError: if bce.threshold does not lie between the smoothed targets of a wrong and of the right class.
    """
    if bce := config.bce:
        wrong = config.LABEL_SMOOTHING / config.NUM_CLASSES
        right = 1 - config.LABEL_SMOOTHING + wrong
        if (threshold := bce.get("threshold")) is not None and not wrong <= threshold < right:
            raise UserError(
                f"bce.threshold = {threshold}: all targets would be {int(threshold < wrong)}, since those of other "
                f"classes are {wrong:g} and that of an image's own is {right:g} with LABEL_SMOOTHING = "
                f"{config.LABEL_SMOOTHING} and NUM_CLASSES = {config.NUM_CLASSES}: set it to at least {wrong:g} and "
                f"below {right:g}, or LABEL_SMOOTHING = 0.0"
            )
        return BinaryCrossEntropy(config.LABEL_SMOOTHING, **bce)
    return col_nn.CrossEntropyLoss(label_smoothing=config.LABEL_SMOOTHING)
