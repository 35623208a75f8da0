"""Every train script on a GPU that is not there, in every mode: data, model, loss, update, evaluation, checkpoint."""

import importlib
import sys

import pytest
import torch

import check_layouts
import cifar10
import fake_gpu
import fork_ranks
import recipes

MODES = [None, "TORCH", "NAIVE", "APEX"]
SMALL = dict(IMG_SIZE=32, HIDDEN_SIZE=32, DEPTH=2, NUM_HEADS=4, DROP_RATE=0.1, BATCH_SIZE=16)
FOLDER = fork_ranks.ROOT / "vit_caltech101_amp/config"
SCRIPTS = {
    "vit_cifar10_hybrid/train_hybrid.py": (
        "configs/config_pipeline_parallel.py",
        {**SMALL, "parallel.pipeline": 1, "DROP_PATH_RATE": 0.1},
    ),
    "vit_cifar10_hybrid/train_dp.py": ("configs/config_data_parallel.py", {**SMALL, "gradient_accumulation": 2}),
    "vit_caltech101_amp/train.py": ("config/config_fp32.py", {**SMALL, "CACHE_SIZE": 36, "OPTIMIZER": "adamw"}),
    "vit_imagenet_dali/train.py": ("config_sample.py", {**SMALL, "gradient_accumulation": 2, "SYNTHETIC": True}),
}


def on_gpu(script, amp, *more, prepare=lambda: None, device=fake_gpu.CUDA):
    """Run a script there; returns what is in its checkpoints: (is a moment, type)."""
    path = fork_ranks.ROOT / script
    config, values = SCRIPTS[script]
    flags = recipes.set_flags({**values, **({"fp16.dtype": "fp16"} if amp else {"fp16": None})})
    flags += ["--set", f"fp16.mode=AMP_TYPE.{amp}"] if amp else []

    def function():
        prepare()
        sys.path.insert(0, str(path.parent))
        sys.modules.pop("train", None)  # there are two
        module = importlib.import_module(path.stem)
        saved = fake_gpu.run(module.main, ["--config", str(path.parent / config), *flags, *more], device)
        return {(name.startswith("exp_avg."), str(t.dtype)) for tensors in saved for name, t in tensors.items()}

    (types,) = fork_ranks.call(function, launched=False)
    return types


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("amp", MODES)
def test_a_run_leaves_nothing_on_the_cpu(script, amp, tmp_path):
    """Two optimizer steps, an evaluation and a checkpoint."""
    types = on_gpu(script, amp, "--output", str(tmp_path), "--max-steps", "2")
    assert {kind for kind, _ in types} == {False, True}
    assert {dtype for _, dtype in types} == {"torch.float32"}, "weights and moments are kept in fp32"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("amp", [None, "NAIVE"])  # autocast does not know the device
def test_nor_does_a_backward_pass(script, amp):
    on_gpu(script, amp, "--dry-run", device=fake_gpu.META)


def test_what_is_left_there_is_found(tmp_path):
    def prepare():
        init = cifar10.Batches.__init__

        def on_the_cpu(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.mean = torch.zeros(3, 1, 1)

        cifar10.Batches.__init__ = on_the_cpu

    with pytest.raises(AssertionError, match="found at least two devices, cuda:0 and cpu"):
        on_gpu(recipes.HYBRID, None, "--output", str(tmp_path), prepare=prepare)


@pytest.mark.parametrize("amp", [None, "NAIVE"])
@pytest.mark.parametrize(
    "layout", ["DP 2, split state", "PP 2", "PP 2 interleaved × 2", "1D 2", "2D 4", "2.5D 8", "3D 8", "PP 2 × 2D 4"]
)
def test_nor_does_a_layout(layout, amp):
    """A step of the first rank, collectives included."""
    world_size, values = {**check_layouts.LAYOUTS, "DP 2, split state": (2, {"zero.stage": 1})}[layout]
    argv = [*recipes.flags(amp, **values), "--dry-run", "--world_size", str(world_size)]

    def function():
        import train_hybrid

        fake_gpu.run(train_hybrid.main, argv)

    fork_ranks.call(function, launched=False)
