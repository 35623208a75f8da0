"""Every train script on a GPU that is not there, in every mode: data, model, loss, update, evaluation, checkpoint."""

import contextlib
import importlib
import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from colossal_vit.checkpoint.full_tensors import FullTensors
from colossal_vit.engine import engine, initialize
from colossal_vit.results import read_metrics
from torchvision.transforms import v2

import cifar10
import fake_gpu
import fork_ranks
import layouts
import training
import waits

MODES = [None, "TORCH", "NAIVE", "APEX"]
RECIPE = {"bce.threshold": 0.2, "ema.decay": 0.9}
SMALL = dict(IMG_SIZE=32, HIDDEN_SIZE=32, DEPTH=2, NUM_HEADS=4, DROP_RATE=0.1, BATCH_SIZE=16)
SCRIPTS = {  # what each trains with
    training.HYBRID: {**SMALL, **RECIPE, "parallel.pipeline": 1, "DROP_PATH_RATE": 0.1},
    training.DATA_PARALLEL: {**SMALL, "gradient_accumulation": 2},
    training.CALTECH101: {**SMALL, "CACHE_SIZE": 36, "MOMENTUM": 0.9},
    training.IMAGENET: {**SMALL, **training.MIX, "gradient_accumulation": 2, "SYNTHETIC": True},
}


def on_gpu(script, amp, *more, prepare=lambda: None, device=fake_gpu.CUDA, overflows=0.0, **values):
    """Run a script there; returns what is in its checkpoints, (is a moment, type), and what it printed."""
    values = {**SCRIPTS[script], **values, **({"fp16.dtype": "fp16"} if amp else {"fp16": None})}
    argv = [*training.flags(amp, script=script, small=False, **values), *more]

    def function():
        prepare()
        path = fork_ranks.ROOT / script
        sys.path.insert(0, str(path.parent))
        sys.modules.pop("train", None)  # there are two
        module = importlib.import_module(path.stem)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            saved = fake_gpu.run(module.main, argv, device, overflows)
        moments = ("exp_avg.", "momentum_buffer.")
        types = {(name.startswith(moments), str(t.dtype)) for tensors in saved for name, t in tensors.items()}
        return types, said.getvalue()

    return fork_ranks.call(function, launched=False)[0]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("amp", MODES)
def test_a_run_leaves_nothing_on_the_cpu(script, amp, tmp_path):
    """Two optimizer steps, an evaluation and a checkpoint."""
    argv = ["--output", str(tmp_path), "--max-steps", "4", "--profile"]
    types, said = on_gpu(script, amp, *argv, prepare=lambda: waits.print_waits(pytest.MonkeyPatch()))
    assert waits.ONE in said
    assert {kind for kind, _ in types} == {False, True}
    assert {dtype for _, dtype in types} == {"torch.float32"}, "weights and moments are kept in fp32"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("amp", [None, "NAIVE"])  # autocast does not know the device
def test_a_backward_pass_leaves_nothing_on_the_cpu(script, amp):
    on_gpu(script, amp, "--dry-run", device=fake_gpu.META)


@pytest.mark.parametrize("amp", [None, "NAIVE"])
def test_a_checkpoint_is_copied_from_the_gpu_in_the_background(amp, tmp_path):
    """Weights, moments and averages into pinned memory, with one wait for all of them before they are written."""
    waits_of_copy = []

    def prepare():
        copy, synchronize = FullTensors.copy, torch.cuda.synchronize

        def copy_and_count(full):
            with waits.WaitCounter(device=fake_gpu.CUDA) as counter:
                torch.cuda.synchronize = lambda *_: waits_of_copy.append("synchronize")
                files = copy(full)
                torch.cuda.synchronize = synchronize
            print(f"waits of a checkpoint: {waits_of_copy}, others {counter.others}")
            return files

        FullTensors.copy = copy_and_count

    _, said = on_gpu(training.HYBRID, amp, "--output", str(tmp_path), "--max-steps", "1", prepare=prepare)
    assert "waits of a checkpoint: ['synchronize'], others {}\n" in said


@pytest.mark.parametrize("asked", [False, True])
def test_attention_adds_in_one_order_with_cudnn_deterministic(asked):
    """The backward passes of all other kernels for a GPU add by atomic operations."""

    def function():
        model = torch.nn.Linear(2, 2)
        initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return [getattr(torch.backends.cuda, f"{k}_sdp_enabled")() for k in ("flash", "mem_efficient", "cudnn", "math")]

    assert fork_ranks.call(function, cudnn_deterministic=asked) == [[not asked] * 3 + [True]]


def test_a_tensor_left_on_the_cpu_is_found(tmp_path):
    def prepare():
        init = cifar10.Cifar10Loader.__init__

        def on_the_cpu(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.mean = torch.zeros(3, 1, 1)

        cifar10.Cifar10Loader.__init__ = on_the_cpu

    with pytest.raises(AssertionError, match=r"found (at least two|two different) devices,? cuda:0(,| and) cpu"):
        on_gpu(training.HYBRID, None, "--output", str(tmp_path), prepare=prepare)


WAITS = {  # what becomes of the event that a run waits for, and one from before what it is to wait for
    "as it is": lambda event, before: event,
    "none": lambda event, before: None,
    "too early": lambda event, before: before,
    "not waited for": lambda event, before: SimpleNamespace(synchronize=lambda: None),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_reads_loss_and_norm_once_they_are_there(wait, tmp_path):
    """And would be found out if it did not."""

    def prepare():
        original = engine.Scalars.__init__

        def init(self, tensors):
            before = fake_gpu.STREAM.record_event()
            original(self, tensors)
            self.ready = WAITS[wait](self.ready, before)

        engine.Scalars.__init__ = init

    found = pytest.raises(AssertionError, match="the host reads what the device has not copied yet")
    with contextlib.nullcontext() if wait == "as it is" else found:
        on_gpu(training.HYBRID, None, "--output", str(tmp_path), "--max-steps", "2", prepare=prepare)


@pytest.mark.parametrize(
    ("script", "policy", "operations"),
    [
        (training.DATA_PARALLEL, "three", {"RandomGrayscale", "RandomSolarize", "GaussianBlur"}),
        (training.CALTECH101, "rand", {"RandAugment"}),
    ],
)
def test_augmented_run_with_overflows_leaves_nothing_on_the_cpu(script, policy, operations, tmp_path):
    def prepare():
        call = v2.Transform.__call__

        def call_and_note(transform, image):
            assert image.device == fake_gpu.CUDA
            print("did", type(transform).__name__)
            return call(transform, image)

        v2.Transform.__call__ = call_and_note

    values = {"augment.policy": policy, "augment.color_jitter": 0.3, "augment.erase": 0.5}
    argv = ["--output", str(tmp_path), "--max-steps", "6"]
    _, said = on_gpu(script, "TORCH", *argv, prepare=prepare, overflows=0.3, **values)
    done = set(re.findall("^did (.*)$", said, re.MULTILINE)) - {"RandomChoice"}
    assert done == {*operations, "ColorJitter", "RandomErasing"}
    assert {step["skipped"] for step in read_metrics(tmp_path)[0]} == {False, True}


LAYOUTS = {**layouts.LAYOUTS, "DP 2, split state": (2, {"BATCH_SIZE": 16, "zero.stage": 1})}
OF_EACH_KIND = ["DP 2", "DP 2, split state", "PP 2", "PP 2 interleaved × 2", "1D 2", "2D 4", "2.5D 8", "3D 8"]
OF_EACH_KIND += ["PP 2 × 2D 4", "DP 2 × PP 2"]


@pytest.mark.parametrize(
    ("layout", "amp"),
    [(name, amp) for name in OF_EACH_KIND for amp in (None, "NAIVE", "TORCH") if amp != "TORCH" or "PP" not in name],
)
def test_a_step_of_a_layout_leaves_nothing_on_the_cpu(layout, amp):
    """A step of the first rank, collectives included, in fp16 with `amp`."""
    world_size, values = LAYOUTS[layout]
    dtype = {"fp16.dtype": "fp16"} if amp else {}
    argv = [*training.flags(amp, **values, **dtype), "--dry-run", "--world_size", str(world_size)]

    def function():
        import train_hybrid

        fake_gpu.run(train_hybrid.main, argv)

    fork_ranks.call(function, launched=False)
