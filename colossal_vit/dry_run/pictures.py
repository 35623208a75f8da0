"""Pictures of layouts: which rank holds what."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from colossal_vit.compat import patches
from colossal_vit.drawing import COLORS, DARK, NEUTRAL, styled
from colossal_vit.parallel.sharding import Shard, split_batch
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.testing._internal.distributed.fake_pg import FakeStore  # and torch's backend "fake"

MOST_REPLICAS = 4  # more replicas of a model are not drawn
MOST_PIECES = 64  # more pieces of a matrix are not labelled


def write(figure: Figure, path: Path) -> str:
    """Save a figure, in a folder that is created if missing; returns a line that says where it is, or why not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with styled():
            figure.savefig(path)
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


def find_pieces(parallel: Mapping, side: int, shards: Mapping[str, Shard], norm: Shard) -> dict[str, list[Piece]]:
    """By matrix, the pieces of all tensor-parallel ranks. Call it in a process of its own, whose groups it changes.

    Args:
        parallel: the block of the config.
        side: see `Layout`.
        shards: of the matrices, by name.
        norm: shard of the weight of a norm, whose first split is that of the hidden size of activations; none in 1D.

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
            for dim, mode in norm.splits[:1]:
                activation = activation.chunk(gpc.get_world_size(mode), dim + 1)[gpc.get_local_rank(mode)]
            found[ACTIVATION].append(piece(activation))
    return found


def draw_pieces(axes: Axes, pieces: Sequence[Piece], ranks: Sequence[int], title: str) -> None:
    """Draw a matrix with the piece of each rank; a piece that several ranks hold has the numbers of all."""
    holders: dict[Piece, list[int]] = {}
    for rank, piece in zip(ranks, pieces, strict=True):
        holders.setdefault(piece, []).append(rank)
    for number, (piece, held_by) in enumerate(holders.items()):
        color = COLORS[number % len(COLORS)] if len(holders) > 1 else NEUTRAL
        corner = piece.left, piece.top
        axes.add_patch(Rectangle(corner, piece.width, piece.height, facecolor=color, edgecolor="white", linewidth=1))
        if len(holders) <= MOST_PIECES:
            label = ", ".join(map(str, held_by)) if len(held_by) <= 8 else "all ranks"
            at = piece.left + piece.width / 2, piece.top + piece.height / 2
            ink = {"color": "white"} if color in DARK else {}
            axes.text(*at, label, ha="center", va="center", fontsize=9 if len(holders) <= 16 else 6.5, **ink)
    axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", title=title)
    axes.set_axis_off()


# ---- Which rank holds which blocks -----------------------------------------------------------------------------------


@styled()
def draw_layout(
    title: str, stages: Sequence[str], replicas: int, tensor: int, matrices: Mapping[str, Sequence[Piece]]
) -> Figure:
    """Draw a picture of a layout: its ranks by replica and pipeline stage, and what tensor parallelism splits.

    Args:
        title: names the layout.
        stages: the layers of each pipeline stage.
        replicas: data-parallel size.
        tensor: tensor-parallel size.
        matrices: by title, the pieces of the first `tensor` ranks; none without tensor parallelism.
    """
    shown = list(range(replicas)) if replicas <= MOST_REPLICAS else [*range(MOST_REPLICAS - 1), replicas - 1]
    columns = max(len(stages), len(matrices), 2)
    heights = [0.4 * len(shown) + 0.9, *([2.4] if matrices else [])]
    figure = Figure(figsize=(0.1 + 2.1 * columns, sum(heights) + 0.4))
    figure.suptitle(title, x=0.01, ha="left")
    top, *bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    axes = top.subplots()
    for stage, layers in enumerate(stages):
        lines = layers.replace("blocks ", "blocks\N{NO-BREAK SPACE}").split("; ")
        width = 28 * columns // len(stages)
        lines = [textwrap.fill(line, width, break_on_hyphens=False) for line in lines]
        axes.text(stage + 0.5, -0.1, "\n".join(lines), ha="center", va="bottom")
        for row, replica in enumerate(shown):
            first = (replica * len(stages) + stage) * tensor
            label = f"ranks {first}-{first + tensor - 1}" if tensor > 1 else f"rank {first}"
            axes.add_patch(Rectangle((stage + 0.01, row + 0.05), 0.98, 0.9, facecolor=NEUTRAL))
            axes.text(stage + 0.5, row + 0.5, label, ha="center", va="center")
    for row, replica in enumerate(shown):
        name = f"replica {replica}" if replicas > 1 else "one model"
        if row and replica > shown[row - 1] + 1:
            name = f"…\n{name}"
        axes.text(-0.02, row + 0.5, name, ha="right", va="center")
    axes.set(xlim=(0, len(stages)), ylim=(len(shown), -0.1))
    axes.set_axis_off()
    if matrices:
        for axes, (name, pieces) in zip(
            bottom[0].subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
        ):
            draw_pieces(axes, pieces, range(tensor), name)
    return figure
