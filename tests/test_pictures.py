"""Pictures show what ranks really hold, and those in docs/ are what their script draws."""

import subprocess
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from colossal_vit.parallel.layout import Layout
from colossal_vit.plan import pictures, report
from colossalai.legacy.core import global_context as gpc
from PIL import Image

import fork_ranks
import train_hybrid
import training
import vit
from layouts import LAYOUTS

WEIGHTS = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")


@pytest.mark.parametrize("layout", ["1D 4", "2D 4", "2.5D 8", "3D 8"])
def test_pieces_are_what_ranks_hold(layout):
    """Real ranks' weights, and the output of their first block, are those pieces of the full ones."""
    world_size, values = LAYOUTS[layout]
    config = training.config_of(training.flags(**values))
    images = torch.randn(config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE)

    @torch.no_grad()
    def on_a_rank():
        model = vit.build_vit(gpc.config, Layout.of(gpc.config, world_size))
        held = {p.shard.name: (p.shard, p.data.t() if p.shard.transposed else p.data) for p in model.parameters()}
        return held, model.blocks["0"](model.patch_embed(images))

    ranks = fork_ranks.call(on_a_rank, world_size, **config)
    shards = {name: shard for name, (shard, _) in ranks[0][0].items()}
    side, norm = Layout.of(config, world_size).side, shards["blocks.0.norm1.weight"]
    matrices = {name: shards[name] for name in WEIGHTS}
    (found,) = fork_ranks.call(lambda: pictures.find_pieces(config.parallel, side, matrices, norm), launched=False)

    full = vit.full_vit(config)
    with torch.no_grad():
        activation = full.blocks[0](full.norm_pre(full._pos_embed(full.patch_embed(images)))).transpose(1, 2)
    for rank, (held, output) in enumerate(ranks):
        parts = {name: (full.state_dict()[name], held[name][1]) for name in WEIGHTS}
        parts[pictures.ACTIVATION] = activation, output.transpose(1, 2)
        for name, (whole, part) in parts.items():
            piece = found[name][rank]
            top, height = round(piece.top * whole.shape[0]), round(piece.height * whole.shape[0])
            left, width = round(piece.left * whole.shape[1]), round(piece.width * whole.shape[1])
            torch.testing.assert_close(part, whole[top : top + height, left : left + width], rtol=0, atol=1e-5)


def test_a_picture_that_cannot_be_written_is_a_line(tmp_path):
    (tmp_path / "file").touch()
    argv = [*training.flags(**{**LAYOUTS["PP 2"][1], "DEPTH": 2}), "--dry-run", "--world_size", "2"]
    args = train_hybrid.SCRIPT.parse([*argv, "--output", str(tmp_path)])
    plans = report.plan(train_hybrid.build, args)
    said = pictures.write(report.draw_layout(plans), tmp_path / "file/run/layout.png")
    assert "layout.png cannot be written: Not a directory" in said


def test_committed_pictures_are_what_the_script_draws(tmp_path):
    """`python scripts/pictures.py` draws them; compared where matplotlib is the one that drew them."""
    tracked = subprocess.run(["git", "ls-files", "docs/pictures"], cwd=fork_ranks.ROOT, capture_output=True, text=True)
    committed = {Path(name).name for name in tracked.stdout.split()}
    drawn = fork_ranks.run("scripts/pictures.py", ["--output", str(tmp_path)])
    assert drawn.codes == [0], str(drawn)
    assert committed == {path.name for path in tmp_path.iterdir()}
    for name in committed:
        was, now = (Image.open(folder / name) for folder in (fork_ranks.ROOT / "docs/pictures", tmp_path))
        if f"version{matplotlib.__version__}," in was.info["Software"]:
            assert was.size == now.size, name
            assert np.array_equal(np.asarray(was), np.asarray(now)), f"{name} is not up to date"
