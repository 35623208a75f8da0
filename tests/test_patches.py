"""Each defect of Colossal-AI 0.5.0 that is fixed here, shown twice: upstream's behaviour, and ours in its place.

When the half with upstream's behaviour fails, upstream has changed, and the fix may go.
"""

import importlib
import inspect
import math
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import colossalai.legacy as colossalai
import pytest
import torch
from colossal_vit.compat import cpu, patches
from colossal_vit.data.samplers import GlobalBatchSampler
from colossal_vit.engine.assembly import _stage_input, initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.schedules import CosineAnnealingWarmupLR
from colossal_vit.parallel.sharding import Shard
from colossalai import amp as colossalai_amp
from colossalai.accelerator import get_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.interface import OptimizerWrapper
from colossalai.legacy import communication as comm
from colossalai.legacy import nn as col_nn
from colossalai.legacy.amp.naive_amp import NaiveAMPOptimizer
from colossalai.legacy.communication import p2p
from colossalai.legacy.context import ParallelMode, seed
from colossalai.legacy.context.random import get_seeds
from colossalai.legacy.core import global_context as gpc
from colossalai.legacy.engine.schedule import InterleavedPipelineSchedule
from colossalai.legacy.nn.layer import parallel_2d, parallel_2p5d, parallel_3d
from colossalai.legacy.nn.layer.parallel_3d import _utils as parallel_3d_utils
from colossalai.legacy.nn.layer.vanilla import VanillaPatchEmbedding
from colossalai.legacy.utils import get_dataloader
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR as ColossalCosine
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

import fork_ranks
from vit_layouts import call

# Patches are applied in forks only, so these are upstream's.
UPSTREAM_NORMS = {
    layer: layer.forward for layer in (parallel_2d.LayerNorm2D, parallel_2p5d.LayerNorm2p5D, parallel_3d.LayerNorm3D)
}
UPSTREAM_3D_HOOK = parallel_3d_utils._async_grad_hook
UPSTREAM_QUEUE = p2p.filling_ops_queue

TENSOR_1D = {"pipeline": 1, "tensor": {"mode": "1d", "size": 2}}
TENSOR_2D = {"pipeline": 1, "tensor": {"mode": "2d", "size": 4}}
PIPELINE_2 = {"pipeline": 2, "tensor": {"mode": None, "size": 1}}


# ---- Launching, configs ----


def launch_alone(address="localhost", patched=True):
    store, device = torch.distributed.HashStore(), torch.device("cpu")
    with patches.groups(store, fork_ranks.PATIENCE, device) if patched else nullcontext():
        colossalai.launch({}, 0, 1, address, fork_ranks.free_port(), backend="gloo", verbose=False)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_every_form_of_address_launches_and_none_has_brackets_around_it(address):
    def launch(patched):
        cpu.enable()
        launch_alone(address, patched)
        return torch.distributed.get_world_size()

    if address != "::1":  # the one form that upstream's brackets are right for
        with pytest.raises(AssertionError, match="ValueError"):
            fork_ranks.call(partial(launch, patched=False), launched=False)
    assert fork_ranks.call(partial(launch, patched=True), launched=False) == [1]


def test_upstream_has_no_amp_type_where_configs_import_it_from():
    """What `restore_amp_type` puts there, `test_config.py` loads the tutorials' configs with."""
    package = Path(colossalai_amp.__file__)
    assert "AMP_TYPE" not in package.read_text()
    assert not package.with_name("amp_type.py").exists()


# ---- The engine: clipping, mixed precision, accumulation ----


def upstream_initialize(*args):
    if gpc.config.gradient_accumulation == 1:
        del gpc.config["gradient_accumulation"]  # upstream wraps for any value, and then wants a data loader
    for key in ("zero", "model"):  # upstream takes these features for on where the keys are there, whatever they say
        del gpc.config[key]
    return colossalai.initialize(*args, verbose=False)


def test_weights_move_without_clip_grad_norm_and_upstream_sets_every_gradient_to_zero():
    def weight_change(initialize_with):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        before = model.weight.detach().clone()
        engine, *_ = initialize_with(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss())
        engine.zero_grad()
        engine.backward(engine.criterion(engine(torch.ones(2, 4)), torch.zeros(2, 1)))
        engine.step()
        return (model.weight - before).abs().max().item()

    assert fork_ranks.call(partial(weight_change, upstream_initialize))[0] < 1e-12
    assert fork_ranks.call(partial(weight_change, initialize))[0] > 1e-3


def real_torch_amp():
    """Import upstream's module, which nothing else imports, in a fork."""
    return importlib.import_module("colossalai.legacy.amp.torch_amp.torch_amp")


def test_upstream_torch_amp_dies_on_torch_2():
    def function():
        real_torch_amp().TorchAMPOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))

    with pytest.raises(AssertionError, match="major"):
        fork_ranks.call(function)


def test_upstream_engine_clips_scaled_gradients():
    """The engine calls `clip_grad_by_norm`, which upstream's AMP optimizers do not override: it never unscales."""

    def function():
        upstream = (real_torch_amp().TorchAMPOptimizer, NaiveAMPOptimizer)
        return [optimizer.clip_grad_by_norm is OptimizerWrapper.clip_grad_by_norm for optimizer in upstream]

    assert fork_ranks.call(function) == [[True, True]]


def test_clipping_is_by_the_norm_over_all_ranks_and_upstreams_by_each_ranks_own():
    """Two tensor-parallel ranks, gradients of (3, 4) on each: the global norm is sqrt(50), clipped to 1."""

    def clipped_update(initialize_with):
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.shard = Shard("weight", ((0, ParallelMode.PARALLEL_1D),))
        model = torch.nn.Module()
        model.register_parameter("weight", weight)
        engine, *_ = initialize_with(model, torch.optim.SGD([weight], lr=1.0), None)
        weight.grad = torch.tensor([3.0, 4.0])
        engine.step()
        return weight.detach().norm().item()

    for initialize_with, norm in ((upstream_initialize, 1.0), (initialize, math.sqrt(0.5))):
        norms = fork_ranks.call(partial(clipped_update, initialize_with), 2, parallel=TENSOR_1D, clip_grad_norm=1.0)
        assert norms == pytest.approx([norm] * 2, rel=1e-4), initialize_with


def test_accumulation_counts_steps_and_upstreams_backward_passes():
    """Pipeline of 2, two micro-batches, accumulation 2: at which calls of `step` the weights move."""

    def moves(initialize_with):
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

    config = dict(NUM_MICRO_BATCHES=2, TENSOR_SHAPE=(2, 4), gradient_accumulation=2, clip_grad_norm=1e9)
    upstreams, ours = (
        fork_ranks.call(partial(moves, initialize_with), 2, parallel=PIPELINE_2, **config)
        for initialize_with in (upstream_initialize, initialize)
    )
    assert upstreams[0] != [False, True] * 2
    assert ours == [[False, True] * 2] * 2


# ---- Machines without CUDA ----


def test_accelerator_and_random_streams_work_without_cuda_and_upstreams_do_not():
    methods = ("synchronize", "device_count", "get_rng_state")

    def upstream():
        refused = []
        for method in methods:
            try:
                getattr(CpuAccelerator(), method)()
            except (RuntimeError, TypeError):
                refused.append(method)
        launch_alone()
        return tuple(refused), dict(get_seeds())

    def ours():
        for method in methods:
            getattr(get_accelerator(), method)()
        with seed(ParallelMode.TENSOR):  # in which its layers draw weights, which are replaced
            return {mode.name for mode in get_seeds()}

    assert fork_ranks.call(upstream, launched=False) == [(methods, {})]
    assert fork_ranks.call(ours) == [{"DATA", "TENSOR"}]


def test_memory_of_large_tensors_is_reused():
    """Otherwise each step gets new pages, and the system clears them first."""

    def new_pages(enabled):
        if enabled:
            cpu.enable()
        for number in range(30):
            if number == 20:  # a fork first copies the pages that it has from its parent
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    (usual,), (enabled,) = (fork_ranks.call(partial(new_pages, enabled), launched=False) for enabled in (False, True))
    assert usual > 10 * enabled


# ---- Layers ----


def test_upstream_1d_layers_do_not_fit_a_vit():
    """What stands in their place is compared with timm in test_vit.py."""

    def function():
        choice = type(col_nn.Linear(8, 8).module.module).__name__
        try:
            col_nn.LayerNorm(8)(torch.ones(1, 8))
        except Exception as error:
            return choice, type(error).__name__
        return choice, "works"

    for choice, norm in fork_ranks.call(function, 2, parallel=TENSOR_1D):
        assert choice == "Linear1D_Col", "upstream would make the attention's projection a row layer now"
        assert norm != "works"


def test_3d_hook_takes_a_missing_gradient_and_upstreams_dies():
    def function():
        ours, results = parallel_3d_utils._async_grad_hook, []
        for hook in (UPSTREAM_3D_HOOK, ours):
            parallel_3d_utils.push_async_grad(torch.distributed.barrier(async_op=True), torch.ones(2), 7)
            try:
                results.append(hook(None, 7).tolist())
            except AttributeError:
                results.append("dies")
        return [*results, ours(torch.ones(2), 8).tolist()]

    assert fork_ranks.call(function) == [["dies", [1.0, 1.0], [1.0, 1.0]]]


INPUTS = {  # (B, N, part of a hidden size of 768)
    "rms 0.1": lambda x: 0.1 * x,
    "rms 1": lambda x: x,
    "rms 30": lambda x: 30 * x,
    "one activation of 300": lambda x: torch.cat([torch.full_like(x[..., :1], 300.0), x[..., 1:]], -1),
    "a mean of 20": lambda x: x + 20,
    "a mean of 1000": lambda x: x + 1000,
}


def norm_error(make, dtype, autocast=False):
    """The largest errors of a norm and of torch's, with their backward passes, on this rank: relative to fp64."""
    norm = col_nn.LayerNorm(768, eps=1e-6)
    norm = norm if autocast else norm.to(dtype)
    modes = {"2d": ParallelMode.PARALLEL_2D_ROW, "2.5d": ParallelMode.PARALLEL_2P5D_ROW}
    mode = modes.get(gpc.config.parallel.tensor.mode) or norm.output_parallel_mode
    rank, group, size = gpc.get_local_rank(mode), gpc.get_group(mode), gpc.get_world_size(mode)

    def whole(part):
        parts = [torch.empty_like(part) for _ in range(size)]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1).double()

    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    draw = torch.randn(2, 4, 5, 768 // size, generator=generator)
    x, gradient = make(draw[0]).to(dtype).requires_grad_(), draw[1].to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        output = norm(x)
    assert output.dtype == (torch.float32 if autocast else dtype), "as PyTorch's norm"
    output.backward(gradient.to(output.dtype))
    found = [(output, x.grad)]
    for wide in (dtype, torch.float64):  # torch's norm of the whole, and what is right
        full = whole(x.detach()).to(wide).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast and wide == dtype):
            expected = torch.nn.functional.layer_norm(full, (768,), eps=1e-6)
        expected.backward(whole(gradient).to(expected.dtype))
        found.append(tuple(tensor.detach().chunk(size, -1)[rank] for tensor in (expected, full.grad)))
    *approximate, right = found
    return tuple(
        max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(pair, right, strict=True))
        for pair in approximate
    )


@pytest.mark.parametrize("layout", ["2D 4", "2.5D 4", "2.5D 8", "3D 8"])
def test_norms_are_as_exact_as_torchs_and_upstreams_are_zero_in_fp16(layout):
    """With no sign of it: an infinite variance makes zeros. In fp32 its variance is a difference without digits."""
    dtypes = torch.float16, torch.bfloat16, torch.float32

    def function():
        ours = {(dtype, name): norm_error(make, dtype) for dtype in dtypes for name, make in INPUTS.items()}
        ours["under autocast"] = norm_error(INPUTS["rms 1"], torch.bfloat16, autocast=True)
        for layer, forward in UPSTREAM_NORMS.items():
            layer.forward = forward
        return ours, norm_error(INPUTS["rms 30"], torch.float16), norm_error(INPUTS["a mean of 1000"], torch.float32)

    for errors, in_fp16, in_fp32 in call(function, layout):
        for case, (ours, torchs) in errors.items():
            assert ours < 2 * torchs, case
        assert in_fp16[0] == 1.0
        assert in_fp32[0] > 100 * in_fp32[1]


@pytest.mark.parametrize("layout", ["2D 4", "2.5D 4", "3D 8"])
def test_weights_of_norms_are_not_rounded_under_autocast(layout):
    def function():
        norm, x = col_nn.LayerNorm(8, eps=1e-6), torch.randn(1, 2, 8 // 2)
        torch.nn.init.constant_(norm.weight, 1 / 3)
        torch.nn.init.constant_(norm.bias, 1 / 3)
        with torch.autocast("cpu", torch.bfloat16):
            under = norm(x)
        return torch.equal(under, norm(x))

    assert all(call(function, layout))


def test_operations_follow_autocast_and_upstreams_do_not(monkeypatch):
    """The type that a 2D layer gives for a bf16 input under bf16 autocast on the CPU, or why it gives none."""

    def product():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                return str(col_nn.Linear(4, 4)(torch.ones(2, 1, 2, dtype=torch.bfloat16)).dtype)
            except RuntimeError as error:
                return str(error)

    assert set(fork_ranks.call(product, 4, parallel=TENSOR_2D)) == {"torch.bfloat16"}
    monkeypatch.setattr(patches, "_follow_autocast", lambda function: None)
    assert all("same dtype" in said for said in fork_ranks.call(product, 4, parallel=TENSOR_2D))


# ---- Pipelines ----


def test_two_stages_get_what_was_meant_for_them_in_order_and_upstream_swaps_it():
    """Activations from the previous stage, gradients from the next one, which here is the same rank.

    Both stages send 1 + rank and 3 + rank forwards, 10 + rank and 30 + rank backwards in one exchange.
    """

    def exchanged():
        rank, shapes = gpc.get_local_rank(ParallelMode.PIPELINE), [torch.Size([1])] * 2
        messages = [[torch.tensor([first + rank]) for first in firsts] for firsts in ((1.0, 3.0), (10.0, 30.0))]
        received = comm.send_forward_backward_recv_forward_backward(*messages, shapes, shapes)
        return [[tensor.item() for tensor in tensors] for tensors in received]

    def upstream():
        p2p.filling_ops_queue = UPSTREAM_QUEUE
        return exchanged()

    assert fork_ranks.call(upstream, 2, parallel=PIPELINE_2) == [
        [[11.0, 31.0], [2.0, 4.0]],
        [[10.0, 30.0], [1.0, 3.0]],
    ]
    assert fork_ranks.call(exchanged, 2, parallel=PIPELINE_2) == [
        [[2.0, 4.0], [11.0, 31.0]],
        [[1.0, 3.0], [10.0, 30.0]],
    ]


def test_upstream_interleaved_schedule_looks_for_a_module_that_is_gone():
    """The source is read, not run."""
    source = inspect.getsource(InterleavedPipelineSchedule.pre_processing)
    assert "from colossalai.zero.sharded_model.sharded_model_v2 import" in source
    assert not (Path(colossalai.__path__[0]).parent / "zero" / "sharded_model").exists()


def test_second_chunk_of_the_first_rank_gets_activations_and_upstreams_images():
    def function():
        schedule = InterleavedPipelineSchedule(2, 2)
        gpc.set_virtual_pipeline_parallel_rank(1)
        batch = ("images", "label")
        upstream = schedule._get_data_label_for_current_step("activations", batch, None, None)[0]
        return upstream, _stage_input("activations", batch)[0]

    assert fork_ranks.call(function, 2, parallel=PIPELINE_2)[0] == ("images", "activations")


def test_stages_see_the_same_samples_and_upstreams_others():
    """Upstream shuffles without a seed of its own, and the other code of two stages may draw differently."""

    def function():
        torch.manual_seed(torch.distributed.get_rank())
        data = torch.utils.data.TensorDataset(torch.arange(64))
        upstream = [batch[0].tolist() for batch in get_dataloader(data, shuffle=True, batch_size=16)]
        return upstream, [indices.tolist() for indices in GlobalBatchSampler(64, 16, seed=5)]

    first, second = fork_ranks.call(function, 2, parallel=PIPELINE_2)
    assert first[0] != second[0]
    assert first[1] == second[1]


# ---- The learning rate ----


def test_warm_up_ends_at_the_base_rate_and_upstreams_overshoots():
    """test_optim.py has the rates one by one."""
    highest = []
    for schedule in (ColossalCosine, CosineAnnealingWarmupLR):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler, rates = schedule(optimizer, total_steps=20, warmup_steps=5), []
        for _ in range(20):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        highest.append(max(rates))
    assert highest[0] > 1.0
    assert highest[1] == 1.0


def test_scheduler_is_stepped_once_per_optimizer_step_and_by_upstreams_hook_per_batch():
    """6 optimizer steps of 2 micro-batches, with a schedule made for 6 steps."""

    def by_upstream(engine, scheduler, loader):
        hook = colossalai.trainer.hooks.LRSchedulerHook(scheduler, by_epoch=False)
        colossalai.trainer.Trainer(engine).fit(loader, epochs=2, hooks=[hook])

    def by_ours(engine, scheduler, loader):
        Trainer(engine, scheduler).fit(loader, epochs=2)

    def learning_rates(train):
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

    (upstreams,), (ours,) = (
        fork_ranks.call(partial(learning_rates, train), gradient_accumulation=2) for train in (by_upstream, by_ours)
    )
    assert min(upstreams) < 0
    assert ours == pytest.approx([1 - step / 6 for step in range(6)])


# ---- Patch embeddings are convolutions, for which GPUs take slow kernels ----


def test_patches_are_embedded_by_a_product_and_upstream_convolves():
    def embedded(patched):
        cpu.enable()
        if patched:
            patches.apply()
        torch.manual_seed(0)
        layer, images = VanillaPatchEmbedding(8, 4, 3, 6), torch.randn(2, 3, 8, 8)
        with profile() as profiler:
            tokens = layer(images)
        return tokens.detach(), "aten::convolution" in [event.key for event in profiler.key_averages()]

    (upstreams, convolves), (ours, still_convolves) = (
        fork_ranks.call(partial(embedded, patched), launched=False)[0] for patched in (False, True)
    )
    assert (convolves, still_convolves) == (True, False)
    torch.testing.assert_close(ours, upstreams)


# ---- Importing Colossal-AI replaces PyTorch's shape functions ----


def test_pytorch_keeps_its_shape_functions_and_upstream_replaces_them_by_old_ones():
    """What torch.compile asks of a convolution whose bias has its gradient from elsewhere."""

    def shape_of_gradient(replaced):
        if replaced:
            importlib.import_module("colossalai._analyzer._subclasses._meta_registration")
        with FakeTensorMode():
            tensors = [torch.empty(shape) for shape in ((2, 4, 3, 3), (2, 3, 6, 6), (4, 3, 2, 2))]
            options = None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
            return tuple(torch.ops.aten.convolution_backward(*tensors, *options)[1].shape)

    assert fork_ranks.call(partial(shape_of_gradient, replaced=False), launched=False) == [(4, 3, 2, 2)]
    if Version(torch.__version__) >= Version("2.11"):  # torch 2.10 refuses to have them replaced
        with pytest.raises(AssertionError, match="meta_conv_backward"):
            fork_ranks.call(partial(shape_of_gradient, replaced=True), launched=False)
