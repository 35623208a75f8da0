"""The training loop and its steps: engine, mixed precision, optimizers, schedules, gradient reduction."""

from colossal_vit.engine.assembly import Training, initialize
from colossal_vit.engine.criterion import build_criterion
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.muon import Muon
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.engine.schedules import build_scheduler

__all__ = [
    "Lamb",
    "Muon",
    "Trainer",
    "Training",
    "build_criterion",
    "build_optimizer",
    "build_scheduler",
    "initialize",
]
