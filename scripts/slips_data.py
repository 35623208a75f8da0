"""Slips in data, augmentation, packing, predictions and exports."""

from slips import Slip

SLIPS: list[Slip] = []
