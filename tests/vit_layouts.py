"""The model of train_hybrid.py on the ranks of each layout."""

import torch
from colossal_vit.parallel.layout import Layout
from colossalai.legacy.core import global_context as gpc

import layouts
import training
import vit

# The contract's own list: the others are of the same parts, or differ in the number of micro-batches only.
LAYOUTS = {"one process": (1, {}), **{name: kind for name, kind in layouts.LAYOUTS.items() if "micro" not in name}}
for name in ("PP 2 × 2.5D 4", "DP 2 × PP 2", "DP 4, zero 3"):
    del LAYOUTS[name]
SHARDED = [name for name in LAYOUTS if "DP" not in name and "interleaved" not in name]


def settings(layout, **values):
    return training.config_of(training.flags(**{**LAYOUTS[layout][1], **values}))


def call(function, layout, **values):
    """`function()` on each rank of a layout."""
    world_size, own = LAYOUTS[layout]
    return training.call(function, world_size, **{**own, **values})


def build():
    layout = Layout.of(gpc.config, torch.distributed.get_world_size())
    return vit.build_vit(gpc.config, layout), vit.full_vit(gpc.config), gpc.config
