"""Pictures of layouts: which rank holds what, and how long steps take. Legible on light and on dark pages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from colossal_vit.compat import patches
from colossal_vit.parallel.sharding import Shard, split_batch
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.testing._internal.distributed.fake_pg import FakeStore  # and torch's backend "fake"

# Mid-tones: lines and text that can be read on white and on black, fills that white text can be read on.
TEXT = "#7d8590"
COLORS = ("#3a7fc1", "#c56a1f", "#3a8f55", "#c14b48", "#8464c4", "#8f6a48", "#bd5a9b", "#28898f")
MOST_REPLICAS = 4  # more replicas of a model are not drawn
MOST_PIECES = 64  # more pieces of a matrix are not labelled
SHARES = {"computing": COLORS[0], "communicating": COLORS[3], "bubble": COLORS[1]}  # a step's time, by what it is for


def style(axes: Axes) -> Axes:
    """Give axes our colours, no background, and no frame at the top and on the right."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(TEXT)
    axes.tick_params(which="both", colors=TEXT)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(TEXT)
    return axes


def save(figure: Figure, path: Path) -> None:
    """Write a figure with a transparent background."""
    figure.savefig(path, transparent=True, dpi=120)


def write(figure: Figure, path: Path) -> str:
    """Save a figure, in a folder that is created if missing; returns a line that says where it is, or why not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)
    except OSError as error:
        return f"no picture: {path} cannot be written: {error.strerror or error}"
    return f"picture: {path}"


# ---- Which piece a rank holds ----------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A rectangle of a matrix, in shares of its height and width."""

    top: float
    left: float
    height: float
    width: float


ACTIVATION = "activation"


def find_pieces(
    parallel: Mapping, side: int, shards: Mapping[str, Shard], norm: Shard | None
) -> dict[str, list[Piece]]:
    """By matrix, the pieces of all tensor-parallel ranks. Call it in a process of its own, whose groups it changes.

    Args:
        parallel: the block of the config.
        side: see `Layout`.
        shards: of the matrices, by name.
        norm: shard of the weight of a norm, whose first split is that of the hidden size of activations; None if they
            are whole on every rank.

    Returns:
        Also the pieces of an activation (images × hidden size) between two blocks, as `ACTIVATION`.
    """
    tensor = dict(parallel["tensor"])
    full = torch.empty(side**2, side**2, device="meta")  # units into which every mode can split
    found: dict[str, list[Piece]] = {name: [] for name in [*shards, ACTIVATION]}

    def piece(view: torch.Tensor) -> Piece:
        top, left = divmod(view.storage_offset(), len(full))
        height, width = view.shape if view.stride(1) == 1 else view.shape[::-1]
        return Piece(*(number / len(full) for number in (top, left, height, width)))

    with patches.groups(FakeStore(), 60.0, torch.device("cpu")):
        gpc.init_global_dist(0, tensor["size"], "fake", "localhost", 0)
        gpc.load_config(Config({"parallel": {"pipeline": 1, "tensor": tensor}}))
        for rank in range(tensor["size"]):
            gpc.add_global_rank(ParallelMode.GLOBAL, rank)
            gpc.init_parallel_groups()
            for name, shard in shards.items():
                found[name].append(piece(shard.split(full)))
            activation = split_batch(full)
            for dim, mode in norm.splits[:1] if norm else ():
                activation = activation.chunk(gpc.get_world_size(mode), dim + 1)[gpc.get_local_rank(mode)]
            found[ACTIVATION].append(piece(activation))
    return found


def draw_pieces(axes: Axes, pieces: Sequence[Piece], ranks: Sequence[int], title: str) -> None:
    """Draw a matrix with the piece of each rank; a piece that several ranks hold has the numbers of all."""
    holders: dict[Piece, list[int]] = {}
    for rank, piece in zip(ranks, pieces, strict=True):
        holders.setdefault(piece, []).append(rank)
    for number, (piece, held_by) in enumerate(holders.items()):
        color = COLORS[number % len(COLORS)] if len(holders) > 1 else TEXT
        corner = piece.left, piece.top
        axes.add_patch(Rectangle(corner, piece.width, piece.height, facecolor=color, edgecolor="white", linewidth=1))
        if len(holders) <= MOST_PIECES:
            label = ", ".join(map(str, held_by)) if len(held_by) <= 8 else "all ranks"
            at = piece.left + piece.width / 2, piece.top + piece.height / 2
            size = 10 if len(holders) <= 16 else 6
            axes.text(*at, label, ha="center", va="center", color="white", fontsize=size, fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.patch.set_alpha(0)
    axes.set_title(title, color=TEXT, fontsize=9)


# ---- Which rank holds which blocks -----------------------------------------------------------------------------------


def draw_layout(
    title: str, stages: Sequence[str], replicas: int, tensor: int, matrices: Mapping[str, Sequence[Piece]]
) -> Figure:
    """A picture of a layout: its ranks by replica and pipeline stage, and what tensor parallelism splits.

    Args:
        title: names the layout.
        stages: the layers of each pipeline stage.
        replicas: data-parallel size.
        tensor: tensor-parallel size.
        matrices: by title, the pieces of the first `tensor` ranks; none without tensor parallelism.
    """
    shown = list(range(replicas)) if replicas <= MOST_REPLICAS else [*range(MOST_REPLICAS - 1), replicas - 1]
    width = max(2.6 * len(stages), 2.6 * len(matrices), 4.5)
    heights = [0.62 * len(shown) + 0.9, *([3.1] if matrices else [])]
    figure = Figure(figsize=(width, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title, color=TEXT, fontsize=11)
    top, *bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    axes = top.subplots()
    for stage, layers in enumerate(stages):
        axes.text(stage + 0.5, -0.12, layers.replace("; ", "\n"), ha="center", va="bottom", color=TEXT, fontsize=9)
        for row, replica in enumerate(shown):
            first = (replica * len(stages) + stage) * tensor
            label = f"ranks {first}-{first + tensor - 1}" if tensor > 1 else f"rank {first}"
            color = COLORS[stage % len(COLORS)]
            axes.add_patch(Rectangle((stage + 0.02, row + 0.04), 0.96, 0.92, facecolor=color))
            axes.text(stage + 0.5, row + 0.5, label, ha="center", va="center", color="white", fontweight="bold")
    names = [f"replica {replica}" for replica in shown] if replicas > 1 else ["one model"]
    if len(shown) < replicas:
        names[-1] = f"…\n{names[-1]}"
    axes.set(xlim=(0, len(stages)), ylim=(len(shown), -0.6), xticks=[])
    axes.set_yticks([row + 0.5 for row in range(len(shown))], names, color=TEXT)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.patch.set_alpha(0)
    if matrices:
        for axes, (name, pieces) in zip(
            bottom[0].subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
        ):
            draw_pieces(axes, pieces, range(tensor), name)
    return figure


# ---- How long steps take ---------------------------------------------------------------------------------------------


def draw_steps(axes: Axes, layouts: Mapping[str, Mapping[str, float]], images: int, title: str) -> None:
    """Draw the step times of layouts as stacked bars from top to bottom, each with its images/s.

    Args:
        axes: to draw on.
        layouts: by name: "seconds" of a step, and what shares of it are "computing", "communicating" and "bubble".
        images: of a step.
        title: of the axes.
    """
    names, ends = list(layouts), [0.0] * len(layouts)
    for part, color in SHARES.items():
        seconds = [layout["seconds"] * layout[part] for layout in layouts.values()]
        bars = axes.barh(names, seconds, 0.7, ends, color=color, label=part)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    rates = [f"{images / layout['seconds']:,.0f} images/s" for layout in layouts.values()]
    axes.bar_label(bars, rates, padding=3, color=TEXT, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title=title, xlabel=f"seconds of a step of {images:,} images, predicted")
    style(axes)
    axes.tick_params(axis="y", length=0, labelsize=7.5)


def add_legend(figure: Figure, **options: Any) -> None:
    """Add a legend to a figure, by default at the top; options as for matplotlib."""
    figure.legend(frameon=False, labelcolor=TEXT, fontsize=8, **{"loc": "outside upper right", "ncols": 3, **options})


def draw_plan(layouts: Mapping[str, Mapping[str, float]], images: int, title: str) -> Figure:
    """A figure of `draw_steps`."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    draw_steps(figure.subplots(), layouts, images, title)
    add_legend(figure)
    return figure
