"""Each defect of Colossal-AI 0.5.0 that is fixed here, shown twice: upstream's behaviour, and ours in its place.

When an upstream half fails, upstream has changed, and the fix may go.
"""

import importlib
import inspect
import math
import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import colossalai.legacy as colossalai
import pytest
import torch
from colossal_vit.compat import cpu, patches
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine.assembly import initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.schedules import CosineAnnealingWarmupLR
from colossalai import amp as colossalai_amp
from colossalai.legacy import nn as col_nn
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.nn.layer import parallel_2d, parallel_2p5d, parallel_3d
from colossalai.legacy.utils import get_dataloader
from colossalai.nn import lr_scheduler as col_schedulers
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

import fork_ranks
from test_vit import LAYOUTS, settings

LAYOUT_1D = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}


# ---- brackets around the host ----


def launch_alone(address="localhost", patched=True):
    store, device = torch.distributed.HashStore(), torch.device("cpu")
    with patches.groups(store, fork_ranks.PATIENCE, device) if patched else nullcontext():
        colossalai.launch({}, 0, 1, address, fork_ranks.free_port(), backend="gloo", verbose=False)


def launch_at(address, patched):
    def function():
        cpu.enable()
        launch_alone(address, patched)
        return torch.distributed.get_world_size()

    return fork_ranks.call(function, launched=False)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_upstream_puts_brackets_around_names_and_ipv4(address):
    with pytest.raises(AssertionError, match="ValueError"):
        launch_at(address, patched=False)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_every_form_of_address_launches(address):
    assert launch_at(address, patched=True) == [1]


# ---- AMP_TYPE is not where configs import it from ----


def test_upstream_has_no_amp_type_where_configs_import_it_from():
    """What `restore_amp_type` puts there, `test_config.py` loads the tutorials' configs with."""
    package = Path(colossalai_amp.__file__)
    assert "AMP_TYPE" not in package.read_text()
    assert not package.with_name("amp_type.py").exists()


# ---- without clip_grad_norm every gradient is set to zero ----


def upstream_initialize(*args):
    if gpc.config.gradient_accumulation == 1:
        del gpc.config["gradient_accumulation"]  # upstream wraps for any value, and then wants a data loader
    for key in ("zero", "model"):  # upstream takes these features for on where the keys are there, whatever they say
        del gpc.config[key]
    return colossalai.initialize(*args, verbose=False)


def weight_change(initialize_with):
    def function():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        before = model.weight.detach().clone()
        engine, *_ = initialize_with(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss())
        engine.zero_grad()
        engine.backward(engine.criterion(engine(torch.ones(2, 4)), torch.zeros(2, 1)))
        engine.step()
        return (model.weight - before).abs().max().item()

    return fork_ranks.call(function)[0]


def test_upstream_trains_nothing_without_clipping():
    assert weight_change(upstream_initialize) < 1e-12


def test_no_clipping_when_unset():
    assert weight_change(initialize) > 1e-3


# ---- mixed precision ----


def real_torch_amp():
    """Upstream's module, in whose place there is a stand-in; for a fork."""
    name = "colossalai.legacy.amp.torch_amp.torch_amp"
    del sys.modules[name]
    return importlib.import_module(name)


def test_upstream_torch_amp_dies_on_torch_2():
    def function():
        real_torch_amp().TorchAMPOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))

    with pytest.raises(AssertionError, match="major"):
        fork_ranks.call(function)


def test_upstream_engine_clips_scaled_gradients():
    """The engine calls `clip_grad_by_norm`, which upstream's AMP optimizers do not override: it never unscales."""
    from colossalai.interface import OptimizerWrapper
    from colossalai.legacy.amp.naive_amp import NaiveAMPOptimizer

    def function():
        upstream = (real_torch_amp().TorchAMPOptimizer, NaiveAMPOptimizer)
        return [optimizer.clip_grad_by_norm is OptimizerWrapper.clip_grad_by_norm for optimizer in upstream]

    assert fork_ranks.call(function) == [[True, True]]


def clipped_update(initialize_with):
    """Two tensor-parallel ranks, gradients of (3, 4) on each: the global norm is sqrt(50), clipped to 1."""

    def function():
        rank = gpc.get_local_rank(ParallelMode.TENSOR)
        weight = torch.nn.Parameter(torch.zeros(2))
        from colossal_vit.parallel.sharding import Shard

        weight.shard = Shard("weight", ((0, ParallelMode.PARALLEL_1D),))
        model = torch.nn.Module()
        model.register_parameter("weight", weight)
        engine, *_ = initialize_with(model, torch.optim.SGD([weight], lr=1.0), None)
        weight.grad = torch.tensor([3.0, 4.0])
        engine.step()
        return rank, weight.detach().norm().item()

    return fork_ranks.call(function, 2, parallel=LAYOUT_1D, clip_grad_norm=1.0)


def test_upstream_clips_by_each_ranks_own_norm():
    for _, norm in clipped_update(upstream_initialize):
        assert norm == pytest.approx(1.0, rel=1e-4)  # together sqrt(2), above the bound of 1


def test_clips_by_the_norm_over_all_ranks():
    norms = [norm for _, norm in clipped_update(initialize)]
    assert norms == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-4)
    assert math.hypot(*norms) == pytest.approx(1.0, rel=1e-4)


def backward_passes_per_update(initialize_with):
    """Pipeline of 2, two micro-batches, accumulation 2: how many calls of `step` until the weights move."""

    def function():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 4, (16,)))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        engine, loader, *_ = initialize_with(
            model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(), loader
        )
        batches, moved = iter(loader), []
        for _ in range(4):
            before = model.weight.detach().clone()
            engine.zero_grad()
            engine.execute_schedule(batches, return_output_label=False)
            engine.step()
            moved.append(not torch.equal(model.weight, before))
        return moved

    parallel = {"pipeline": 2, "tensor": {"mode": None, "size": 1}}
    config = dict(NUM_MICRO_BATCHES=2, TENSOR_SHAPE=(2, 4), gradient_accumulation=2, clip_grad_norm=1e9)
    return fork_ranks.call(function, 2, parallel=parallel, **config)


def test_upstream_accumulation_counts_backward_passes():
    assert backward_passes_per_update(upstream_initialize)[0] != [False, True] * 2


def test_accumulation_counts_steps():
    assert backward_passes_per_update(initialize) == [[False, True] * 2] * 2


# ---- machines without CUDA ----


def test_upstream_needs_cuda():
    def function():
        from colossalai.accelerator.cpu_accelerator import CpuAccelerator

        refused = []
        for call in ("synchronize", "current_device", "empty_cache", "device_count"):
            try:
                getattr(CpuAccelerator(), call)()
            except RuntimeError:
                refused.append(call)
        launch_alone()
        from colossalai.legacy.context.random import get_seeds

        return refused, dict(get_seeds())

    refused, seeds = fork_ranks.call(function, launched=False)[0]
    assert refused == ["synchronize", "current_device", "empty_cache", "device_count"]
    assert seeds == {}


def test_host_answers_for_cuda():
    def function():
        from colossalai.accelerator import get_accelerator
        from colossalai.legacy.context import seed
        from colossalai.legacy.context.random import get_seeds

        accelerator = get_accelerator()
        accelerator.synchronize()
        accelerator.empty_cache()
        assert accelerator.current_device() == torch.device("cpu")
        with seed(ParallelMode.TENSOR):
            inside = torch.rand(1).item()
        return {mode.name for mode in get_seeds()}, inside, torch.rand(1).item()

    answers = fork_ranks.call(function, 2, parallel=LAYOUT_1D)
    assert all(modes == {"DATA", "TENSOR"} for modes, _, _ in answers)
    assert answers[0][1] != answers[1][1], "split activations need other masks on each tensor-parallel rank"
    assert answers[0][2] == answers[1][2], "common activations need the same masks on each tensor-parallel rank"


def test_memory_of_large_tensors_is_reused():
    """Otherwise each step gets new pages, and the system clears them first."""

    def new_pages():
        if enabled:
            cpu.enable()
        for number in range(30):
            if number == 20:  # a fork first copies the pages that it has from its parent
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    found = []
    for enabled in (False, True):  # noqa: B007 new_pages reads it
        found += fork_ranks.call(new_pages, launched=False)
    assert found[0] > 10 * found[1]


# ---- layers of 1D ----


def test_upstream_1d_layers_do_not_fit_a_vit():
    def function():
        choice = type(col_nn.Linear(8, 8).module.module).__name__
        try:
            col_nn.LayerNorm(8)(torch.ones(1, 8))
        except Exception as error:
            return choice, type(error).__name__
        return choice, "works"

    for choice, norm in fork_ranks.call(function, 2, parallel=LAYOUT_1D):
        assert choice == "Linear1D_Col", "upstream would make the attention's projection a row layer now"
        assert norm != "works"


# (What stands in their place is compared with timm in test_vit.py.)


# ---- gradients of 3D layers ----


def test_3d_hook_takes_a_missing_gradient():
    from colossalai.legacy.nn.layer.parallel_3d import _utils

    def function():
        upstream, pending = _utils._async_grad_hook, torch.ones(2)
        results = []
        for hook in (upstream, patches._async_grad_hook):
            _utils.push_async_grad(torch.distributed.barrier(async_op=True), pending, 7)
            try:
                results.append(hook(None, 7).tolist())
            except AttributeError:
                results.append("dies")
        return results, patches._async_grad_hook(pending, 8).tolist()

    patched = _utils._async_grad_hook is patches._async_grad_hook
    assert not patched, "tests apply patches in forks only"

    def with_upstream():
        original = _utils._async_grad_hook
        fork_ranks._launch(0, 1, fork_ranks.free_port(), {})
        _utils._async_grad_hook = original
        return function()

    results, alone = fork_ranks.call(with_upstream, launched=False)[0]
    assert results == ["dies", [1.0, 1.0]]
    assert alone == [1.0, 1.0]


# ---- layer norms in half precision ----

UPSTREAM_NORMS = {
    layer: layer.forward for layer in (parallel_2d.LayerNorm2D, parallel_2p5d.LayerNorm2p5D, parallel_3d.LayerNorm3D)
}
INPUTS = {  # (B, N, part of a hidden size of 768)
    "rms 0.1": lambda x: 0.1 * x,
    "rms 1": lambda x: x,
    "rms 30": lambda x: 30 * x,
    "one activation of 300": lambda x: torch.cat([torch.full_like(x[..., :1], 300.0), x[..., 1:]], -1),
    "a mean of 20": lambda x: x + 20,
}


def norm_errors(layout, dtype, upstream=False, autocast=False):
    """By kind of input: the largest error of a norm and its backward pass against fp64, by the largest value."""
    world_size = LAYOUTS[layout][0]

    def function():
        if upstream:
            for layer, forward in UPSTREAM_NORMS.items():
                layer.forward = forward
        norm = col_nn.LayerNorm(768, eps=1e-6)
        norm = norm if autocast else norm.to(dtype)
        modes = {"2d": ParallelMode.PARALLEL_2D_ROW, "2.5d": ParallelMode.PARALLEL_2P5D_ROW}
        mode = modes.get(gpc.config.parallel.tensor.mode) or norm.output_parallel_mode
        rank, group, size = gpc.get_local_rank(mode), gpc.get_group(mode), gpc.get_world_size(mode)

        def whole(part):
            parts = [torch.empty_like(part) for _ in range(size)]
            torch.distributed.all_gather(parts, part.contiguous(), group=group)
            return torch.cat(parts, -1).double()

        errors = {}
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for name, make in INPUTS.items():
            draw = torch.randn(2, 4, 5, 768 // size, generator=generator)
            x, gradient = make(draw[0]).to(dtype).requires_grad_(), draw[1].to(dtype)
            with torch.autocast("cpu", dtype, enabled=autocast):
                output = norm(x)
            assert output.dtype == (torch.float32 if autocast else dtype), "as PyTorch's norm"
            output.backward(gradient.to(output.dtype))
            full = whole(x.detach()).requires_grad_()
            expected = torch.nn.functional.layer_norm(full, (768,), eps=1e-6)
            expected.backward(whole(gradient))
            errors[name] = 0.0
            for here, there in ((output, expected), (x.grad, full.grad)):
                own = there.detach().chunk(size, -1)[rank]
                errors[name] = max(errors[name], ((here - own).abs().max() / own.abs().max()).item())
        return errors

    answers = fork_ranks.call(function, world_size, **settings(layout))
    return {name: max(errors[name] for errors in answers) for name in INPUTS}


@pytest.mark.parametrize("layout", ["2D 4", "2.5D 8", "3D 8"])
def test_upstream_norms_are_zero_in_fp16(layout):
    """With no sign of it: an infinite variance makes zeros."""
    assert norm_errors(layout, torch.float16, upstream=True)["rms 30"] == 1.0


@pytest.mark.parametrize("layout", ["2D 4", "2.5D 4", "2.5D 8", "3D 8"])
def test_norms_compute_in_fp32(layout):
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 1e-4)):
        assert max(norm_errors(layout, dtype).values()) < tolerance, (dtype, norm_errors(layout, dtype))
    assert norm_errors(layout, torch.bfloat16, autocast=True)["rms 1"] < 1.6e-2


# ---- pipelines of two stages ----


def exchanged():
    """Both stages send 1 + rank forwards and 10 + rank backwards in one exchange: what each gets from its two sides."""
    from colossalai.legacy import communication as comm

    rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    shape = torch.Size([1])
    forward, backward = torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])
    received = comm.send_forward_backward_recv_forward_backward(forward, backward, shape, shape)
    return [tensor.item() for tensor in received]


PIPELINE_2 = {"pipeline": 2, "tensor": {"mode": None, "size": 1}}


def test_upstream_swaps_activations_and_gradients_between_two_stages():
    from colossalai.legacy.communication import p2p

    def function():
        p2p.dist = torch.distributed
        return exchanged()

    assert fork_ranks.call(function, 2, parallel=PIPELINE_2) == [[11.0, 2.0], [10.0, 1.0]]


def test_two_stages_get_what_was_meant_for_them():
    """Activations from the previous stage, gradients from the next one, which here is the same rank."""
    assert fork_ranks.call(exchanged, 2, parallel=PIPELINE_2) == [[2.0, 11.0], [1.0, 10.0]]


def test_upstream_interleaved_schedule_looks_for_a_module_that_is_gone():
    """Read, not run: the package that the module would be in has a stand-in here."""
    from colossalai.legacy.engine.schedule import InterleavedPipelineSchedule

    source = inspect.getsource(InterleavedPipelineSchedule.pre_processing)
    assert "from colossalai.zero.sharded_model.sharded_model_v2 import" in source
    assert not (Path(colossalai.__path__[0]).parent / "zero" / "sharded_model").exists()


def test_upstream_gives_images_to_every_chunk_of_the_first_rank():
    from colossal_vit.engine.assembly import _stage_input
    from colossalai.legacy.engine.schedule import InterleavedPipelineSchedule

    def function():
        schedule = InterleavedPipelineSchedule(2, 2)
        gpc.set_virtual_pipeline_parallel_rank(1)
        batch = ("images", "label")
        upstream = schedule._get_data_label_for_current_step("activations", batch, None, None)[0]
        return upstream, _stage_input("activations", batch)[0]

    assert fork_ranks.call(function, 2, parallel=PIPELINE_2)[0] == ("images", "activations")


# ---- autocast in 2D, 2.5D and 3D ----


def product_under_autocast():
    """The type that a 2D layer gives for a bf16 input under bf16 autocast on the CPU, or why it gives none."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            return str(col_nn.Linear(4, 4)(torch.ones(2, 1, 2, dtype=torch.bfloat16)).dtype)
        except RuntimeError as error:
            return str(error)


LAYOUT_2D = {"pipeline": 1, "tensor": {"mode": "2d", "size": 4}}


def test_upstream_operations_do_not_follow_autocast(monkeypatch):
    monkeypatch.setattr(patches, "_follow_autocast", lambda function: None)
    assert all("same dtype" in said for said in fork_ranks.call(product_under_autocast, 4, parallel=LAYOUT_2D))


def test_operations_follow_autocast():
    assert set(fork_ranks.call(product_under_autocast, 4, parallel=LAYOUT_2D)) == {"torch.bfloat16"}


# ---- which samples a rank sees ----


def test_upstream_shuffles_without_a_seed_of_its_own():
    def function():
        data = torch.utils.data.TensorDataset(torch.arange(64))
        torch.manual_seed(torch.distributed.get_rank())  # two pipeline stages whose other code drew differently
        return [batch[0].tolist() for batch in get_dataloader(data, shuffle=True, batch_size=16)]

    first, second = fork_ranks.call(function, 2, parallel={"pipeline": 2, "tensor": {"mode": None, "size": 1}})
    assert first != second


def test_stages_of_a_pipeline_see_the_same_samples():
    def function():
        torch.manual_seed(torch.distributed.get_rank())
        return [indices.tolist() for indices in GlobalBatchSampler(64, 16, seed=5)]

    first, second = fork_ranks.call(function, 2, parallel={"pipeline": 2, "tensor": {"mode": None, "size": 1}})
    assert first == second


# ---- the learning rate ----


def test_upstream_warm_up_overshoots():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = col_schedulers.CosineAnnealingWarmupLR(optimizer, total_steps=20, warmup_steps=5)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) > 1.0


def test_schedule_value_by_value():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=8, warmup_steps=4)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.5, 1.0, 1.5, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]
    assert rates == pytest.approx(expected, abs=1e-12)


def learning_rates(train):
    """The rate of each of 6 optimizer steps of 2 micro-batches, with a schedule made for 6 steps."""

    def function():
        model = torch.nn.Linear(4, 2)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
        engine, loader, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss(), loader)
        rates = []
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        train(engine, scheduler, loader)
        return rates

    return fork_ranks.call(function, gradient_accumulation=2)[0]


def test_upstream_hook_steps_per_batch():
    def train(engine, scheduler, loader):
        hook = colossalai.trainer.hooks.LRSchedulerHook(scheduler, by_epoch=False)
        colossalai.trainer.Trainer(engine).fit(loader, epochs=2, hooks=[hook])

    assert min(learning_rates(train)) < 0


def test_trainer_steps_scheduler_once_per_optimizer_step():
    def train(engine, scheduler, loader):
        Trainer(engine, scheduler).fit(loader, epochs=2)

    assert learning_rates(train) == pytest.approx([1 - step / 6 for step in range(6)])


# ---- importing Colossal-AI replaces PyTorch's shape functions ----


def shapes_of_a_backward_pass(replaced):
    """What torch.compile asks of a convolution whose bias has its gradient from elsewhere."""

    def function():
        if replaced:
            name = "colossalai._analyzer._subclasses._meta_registration"
            del sys.modules[name]
            importlib.import_module(name)
        with FakeTensorMode():
            tensors = [torch.empty(shape) for shape in ((2, 4, 3, 3), (2, 3, 6, 6), (4, 3, 2, 2))]
            options = None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
            return tuple(torch.ops.aten.convolution_backward(*tensors, *options)[1].shape)

    return fork_ranks.call(function, launched=False)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.11"), reason="torch 2.10 refuses to have them replaced")
def test_upstream_replaces_pytorchs_shape_functions_by_old_ones():
    with pytest.raises(AssertionError, match="meta_conv_backward"):
        shapes_of_a_backward_pass(replaced=True)


def test_pytorch_keeps_its_shape_functions():
    assert shapes_of_a_backward_pass(replaced=False) == [(4, 3, 2, 2)]
