"""Slips in engine, optimizers, precision, hooks, evaluation, launch signals and the plan."""

from slips import Slip

SLIPS: list[Slip] = []
