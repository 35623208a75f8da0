"""LAMB takes the steps of Colossal-AI's, in every layout, without waiting for the device; rates, decays, schedules."""

import copy
import math
from collections import Counter
from functools import partial, reduce

import pytest
import timm
import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit.engine import Lamb, build_optimizer, build_scheduler, lamb, reduction
from colossal_vit.engine.amp_optimizer import AMPOptimizer
from colossal_vit.engine.assembly import initialize
from colossal_vit.errors import UserError
from colossal_vit.parallel.sharding import Shard, global_norm
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from colossalai.nn.optimizer import Lamb as ColossalLamb
from timm.models.vision_transformer import VisionTransformer
from timm.optim import Lamb as TimmLamb
from timm.optim import param_groups_layer_decay
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import training
from vit_layouts import build, call, settings

SHAPES = [(24, 16), (16,), (4, 3, 5, 5), (1, 7, 8), ()]
OPTIONS = dict(lr=0.02, weight_decay=0.1)


def weights(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(parameters, step):
    """Gradients of very different sizes, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (-step % 5)).to(p.dtype)


def take_steps(optimizer, steps=range(50)):
    """Make steps of an optimizer, and return its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
    return parameters


def assert_same(parameters, expected, rtol):
    for number, (here, there) in enumerate(zip(parameters, expected, strict=True)):
        error = ((here - there).norm() / there.norm()).item()
        assert error <= rtol, f"parameter {number} of shape {tuple(here.shape)}: relative error {error:.1e}"


# ---- One process ----


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize(
    "options",
    [{}, OPTIONS, dict(**OPTIONS, bias_correction=True), dict(**OPTIONS, adam=True), dict(betas=(0.0, 0.5), eps=0.1)],
    ids=str,
)
def test_lamb_equals_colossalais(options, dtype, rtol):
    expected = take_steps(ColossalLamb(weights(dtype), **options))
    assert_same(take_steps(Lamb(weights(dtype), **options)), expected, rtol)


def test_lamb_with_options_by_group_equals_colossalais_whatever_is_updated_at_a_time(monkeypatch):
    """Groups have options of their own; how many parameters are updated at a time changes nothing."""

    def groups():
        a, b, c, d, e = weights()
        return [dict(params=[a, b], lr=0.1), dict(params=[c], weight_decay=0.5, eps=1e-3), dict(params=[d, e])]

    expected = take_steps(ColossalLamb(groups(), **OPTIONS))
    whole = take_steps(Lamb(groups(), **OPTIONS))
    assert_same(whole, expected, 1e-6)
    monkeypatch.setattr(lamb, "_BATCH_ON_CPU", 1)
    assert all(map(torch.equal, take_steps(Lamb(groups(), **OPTIONS)), whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_takes_moments_of_another_precision(dtype):
    """As a run has them that is resumed with another DTYPE."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Lamb([parameter], lr=0.1)
    optimizer.state[parameter].update(step=1, exp_avg=torch.ones(3, dtype=other), exp_avg_sq=torch.ones(3, dtype=other))
    optimizer.step()
    assert {optimizer.state[parameter][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {dtype}


def test_excluded_groups_have_no_trust_ratio():
    """timm leaves out the trust ratio where there is no weight decay; here it is said in the group."""

    def groups(**excluded):
        a, b, c, d, e = weights()
        return [dict(params=[a, c, d], weight_decay=0.1), dict(params=[b, e], weight_decay=0.0, **excluded)]

    expected = take_steps(TimmLamb(groups(), lr=0.02, bias_correction=False, max_grad_norm=None))
    assert_same(take_steps(Lamb(groups(adam=True), lr=0.02)), expected, 1e-6)
    adapted = take_steps(Lamb(groups(), lr=0.02))
    assert (adapted[3] - expected[3]).abs().max() > 0.01, "a trust ratio must show"


def optimizer_config(**values):
    return Config(configs.complete(dict(LEARNING_RATE=0.1, WEIGHT_DECAY=0.05) | values))


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("vit_tiny_patch16_224", "token"),
        ("vit_base_patch32_224", "avg"),
        ("deit3_small_patch16_224", "token"),
        ("vit_base_patch16_clip_224", "token"),
        ("vit_small_patch16_rope_mixed_224", "avg"),
    ],
)
def test_rates_and_decays_equal_timms(name, pool):
    """Layer by layer, and without weight decay on vectors, parameter by parameter."""
    model = timm.create_model(name, global_pool=pool)
    names = {parameter: key for key, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, [*model.no_weight_decay()], layer_decay=0.75)
    expected = {names[p]: (0.1 * group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    optimizer = build_optimizer(optimizer_config(LAYER_DECAY=0.75, DECAY_VECTORS=False), model)
    found = {
        names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values), key
    assert optimizer.param_groups[0]["lr"] == 0.1, "the rate on record is the head's"


@pytest.mark.parametrize("layout", ["PP 2", "2.5D 8", "3D 8"])
def test_rates_and_decays_are_the_same_in_every_layout(layout):
    """Matrices are adapted; biases, norms, class token and position embedding are not, in whatever pieces."""
    values = dict(OPTIMIZER="lamb", WEIGHT_DECAY=0.1, LAYER_DECAY=0.5, DECAY_VECTORS=False)

    def options():
        model, *_ = build()
        groups = build_optimizer(gpc.config, model).param_groups
        return {p.shard.name: (g["lr"], g["weight_decay"], g["adam"]) for g in groups for p in g["params"]}

    (expected,) = call(options, "one process", **values)
    found = call(options, layout, **values)
    assert {name: rate for rank in found for name, rate in rank.items()} == expected
    assert len({rate for rate, *_ in expected.values()}) == settings(layout).DEPTH + 2
    for name, (_, decay, not_adapted) in expected.items():
        is_matrix = name.endswith(".weight") and "norm" not in name
        assert (decay, not_adapted) == ((0.1, False) if is_matrix else (0.0, True)), name


@pytest.mark.parametrize(("name", "usual_eps"), [("sgd", None), ("adamw", 1e-8), ("lamb", 1e-6)])
def test_built_optimizer_has_epsilon_and_decays_of_the_config(name, usual_eps):
    model = torch.nn.Linear(2, 3)
    usual = build_optimizer(optimizer_config(OPTIMIZER=name), model)
    (whole,) = usual.param_groups
    assert (len(whole["params"]), whole["weight_decay"]) == (2, 0.05)
    changed = build_optimizer(optimizer_config(OPTIMIZER=name, DECAY_VECTORS=False, EPSILON=1e-5), model)
    matrices, vectors = changed.param_groups
    assert (matrices["params"], matrices["weight_decay"]) == ([model.weight], 0.05)
    assert (vectors["params"], vectors["weight_decay"]) == ([model.bias], 0.0)
    assert vectors.get("adam", True)
    assert (whole.get("eps"), matrices.get("eps")) == (usual_eps, usual_eps and 1e-5)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize(
    ("name", "theirs", "values"),
    [
        ("sgd", torch.optim.SGD, {"MOMENTUM": 0.0}),
        ("sgd", partial(torch.optim.SGD, momentum=0.7), {"MOMENTUM": 0.7}),
        ("adamw", torch.optim.AdamW, {}),
        ("adamw", partial(torch.optim.AdamW, eps=0.1), {"EPSILON": 0.1}),
        ("lamb", partial(TimmLamb, always_adapt=True), {}),
        ("lamb", partial(TimmLamb, always_adapt=True, eps=0.1), {"EPSILON": 0.1}),
    ],
)
def test_a_built_optimizer_takes_the_steps_of_torchs_and_timms(name, theirs, values, vectors):
    """With all that a config says of it: a rate for each layer, and weight decay on vectors or not."""
    if name == "lamb":
        theirs = partial(theirs, bias_correction=False, max_grad_norm=None)
    if name == "lamb" and not vectors:
        theirs = partial(theirs, always_adapt=False)
    sizes = dict(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=5)
    models = [VisionTransformer(**sizes) for _ in range(2)]
    for model in models:
        for number, parameter in enumerate(model.parameters()):
            parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    excluded = [] if vectors else [*models[0].no_weight_decay()]
    groups = param_groups_layer_decay(models[0], 0.2, excluded, layer_decay=0.5)
    for group in groups:
        group.update(lr=0.1 * group.pop("lr_scale"), weight_decay=0.2 if vectors else group["weight_decay"])
    config = optimizer_config(OPTIMIZER=name, WEIGHT_DECAY=0.2, LAYER_DECAY=0.5, DECAY_VECTORS=vectors, **values)
    optimizers = theirs(groups), build_optimizer(config, models[1])
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model.parameters(), step)
            optimizer.step()
    for (key, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_whose_first_step_overflows_goes_on_as_torchs_that_is_not_fused(momentum, monkeypatch):
    """On a parameter that has had no gradient before, too. What torch leaves uninitialised is made visible."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, math.nan))
    config = optimizer_config(OPTIMIZER="sgd", MOMENTUM=momentum, WEIGHT_DECAY=0.2)
    found, expected = (torch.nn.ParameterList([torch.ones(3, 4), torch.ones(5)]) for _ in range(2))
    sgd = build_optimizer(config, found)
    plain = torch.optim.SGD(expected, lr=sgd.param_groups[0]["lr"], momentum=momentum, weight_decay=0.2)
    for step in range(5):
        for parameters in (found, expected):
            give_gradients(parameters, step)
            parameters[0].grad = parameters[0].grad if step != 2 else None
            parameters[1].grad = parameters[1].grad if step > 2 else None
        overflows = step in (0, 3)
        sgd.found_inf = torch.tensor(float(overflows))
        if overflows:
            for parameter in found:
                parameter.grad = None if parameter.grad is None else torch.full_like(parameter, math.inf)
        else:
            plain.step()
        sgd.step()
    assert_same(found, expected, 1e-6)


@pytest.mark.parametrize(("weight", "gradient", "moved"), [(0.0, 1.0, 1.0), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_trust_ratio_is_1_where_a_norm_is_0(weight, gradient, moved):
    """A first step without bias correction moves by lr (1 - β₁) / √(1 - β₂) = 0.5 lr where there is a gradient."""
    p = torch.nn.Parameter(torch.full((3, 4), weight))
    p.grad = torch.full_like(p, gradient)
    Lamb([p], lr=0.1, betas=(0.75, 0.75), eps=1e-12).step()
    torch.testing.assert_close(p.detach(), torch.full((3, 4), weight - 0.05 * moved))


def test_step_skips_parameters_without_gradient():
    """A parameter that has had no gradient keeps its step count, which the bias correction depends on."""

    def steps(cls):
        parameters = weights()
        optimizer = cls(parameters, **OPTIONS, bias_correction=True)
        for step in range(6):
            give_gradients(parameters, step)
            parameters[0].grad = parameters[0].grad if step % 3 else None
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        return parameters

    assert_same(steps(Lamb), steps(ColossalLamb), 1e-6)


def test_a_step_with_an_overflow_is_not_counted():
    """Nor is it taken off from the count of a parameter without gradient, which was not counted in it."""

    def steps(overflow):
        parameters = weights()
        optimizer = Lamb(parameters, **OPTIONS, bias_correction=True)
        for step in range(2):
            give_gradients(parameters, step)
            optimizer.step()
            if overflow:
                parameters[0].grad, optimizer.found_inf = None, torch.tensor(1.0)
                optimizer.step()
                optimizer.undo_step_count()
                optimizer.found_inf = None
        return parameters

    assert all(map(torch.equal, steps(True), steps(False)))


def test_lamb_calls_a_closure_and_refuses_what_it_cannot_update():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([p])

    def closure():
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (p < 1.0).all()
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    p.grad, optimizer.state[p]["exp_avg"] = torch.ones(3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"exp_avg of shape \(2,\) for a parameter of \(3,\)"):
        optimizer.step()
    for wrong in (dict(lr=-1.0), dict(eps=-1e-6), dict(weight_decay=float("nan")), dict(betas=(0.9, 1.0))):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Lamb([p], **wrong)


def test_any_memory_layout_makes_the_same_step():
    """Pieces cut from a checkpoint are not contiguous, and the kernel would not notice.

    Nor are some of their gradients: those of the first steps are contiguous, those of the last are not.
    """

    def strided(w):
        return w.transpose(0, 1).contiguous().transpose(0, 1)

    def steps(lay_out):
        shapes = [(6, 8), (4, 3, 5, 5)]
        optimizer = Lamb([torch.nn.Parameter(lay_out(w.detach())) for w in weights(shapes=shapes)], **OPTIONS)
        take_steps(optimizer, range(3))
        for state in optimizer.state.values():
            state.update(exp_avg=lay_out(state["exp_avg"]), exp_avg_sq=lay_out(state["exp_avg_sq"]))
        for p in optimizer.param_groups[0]["params"]:
            p.grad = lay_out(p.detach() ** 2)
        optimizer.step()
        return optimizer.param_groups[0]["params"]

    expected, found = steps(torch.Tensor.contiguous), steps(strided)
    assert not any(p.is_contiguous() for p in found)
    assert_same(found, expected, 1e-7)


# ---- State ----


@pytest.mark.parametrize(
    ("cls", "dtype", "rtol"),
    [(Lamb, torch.float32, 0), (Lamb, torch.bfloat16, 0), (ColossalLamb, torch.float32, 1e-6)],
)
def test_state_dict_of_either_class_is_gone_on_from(cls, dtype, rtol):
    first = cls(weights(dtype), **OPTIONS, bias_correction=True)
    take_steps(first, range(5))
    saved = copy.deepcopy(first.state_dict())
    second = Lamb([torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]])
    second.load_state_dict(copy.deepcopy(saved))
    assert_same(take_steps(second, range(5, 10)), take_steps(first, range(5, 10)), rtol)
    assert saved["state"][0]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_the_rounding_of_weights(dtype):
    """v decays by 0.1 % a step, which bf16 cannot hold: with gradients that end, moments in bf16 would stay."""
    parameters, expected = weights(dtype), weights(torch.float64)
    optimizer, reference = Lamb(parameters), Lamb(expected)
    give_gradients(parameters, 0)
    for p, e in zip(parameters, expected, strict=True):
        e.grad = p.grad.double()
    for _ in range(50):
        optimizer.step()
        reference.step()
        for p in (*parameters, *expected):
            p.grad.zero_()
    for p, e in zip(parameters, expected, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[p][key].double(), reference.state[e][key], rtol=1e-5, atol=0)


# ---- The device is never waited for ----


class Operations(TorchDispatchMode):
    """Counts what is asked of the device."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten" and "promote_types" not in str(function):
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(cls, num_parameters):
    """The operations of the second step, on a GPU that does not exist: tensors without data, which nobody can read."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.ones(5, 6, device="cuda")) for _ in range(num_parameters)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = cls(parameters, **OPTIONS, bias_correction=True)
        optimizer.step()
        with Operations() as found:
            optimizer.step()
    return found.count


def test_step_reads_nothing_back_and_asks_for_few_kernels():
    few, many = operations(Lamb, 2), operations(Lamb, 60)
    assert few == many, "the number of operations must not depend on the number of parameters"
    assert many.total() < 20
    assert not any("copy" in name for name in many)
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        operations(ColossalLamb, 2)


def test_master_weights_are_copied_to_the_model_by_one_kernel():
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.ones(5, 6, device="cuda", dtype=torch.bfloat16)) for _ in range(10)]
        optimizer = AMPOptimizer(torch.optim.SGD(weights, lr=1.0), master_weights=True)
        for master in optimizer.working_to_master_map.values():
            master.grad = torch.ones_like(master)
        with Operations() as found:
            optimizer.launch_update()  # SGD as it is here does not take part in it
            optimizer.finish_update(1.0)
    assert {name: count for name, count in found.count.items() if "copy" in name} == {"aten._foreach_copy_.default": 1}


# ---- Tensor parallel ----


def give_pieces(parameters, reference, step, dtype=torch.float32):
    """Random gradients for a full model, and for its pieces; those that are not used have none, or any that may be."""
    generator = torch.Generator().manual_seed(step)
    full = {}
    for name, p in reference.named_parameters():
        full[name] = torch.randn(p.shape, generator=generator).to(dtype)
        p.grad = full[name].float()
    for p in parameters:
        unused = torch.ones_like(p) if step % 2 else None
        p.grad = p.shard.split(full[p.shard.name]) if p.shard.in_use else unused


def assert_joined(parameters, reference):
    full = dict(reference.named_parameters())
    for p in parameters:
        assert_same([p.shard.gather(p.detach())], [full[p.shard.name]], 1e-6)


@pytest.mark.parametrize("layout", ["1D 4", "2D 4", "2.5D 8", "3D 8"])
def test_norms_are_those_of_whole_parameters(layout, random_weights, monkeypatch):
    """Joined pieces equal the full parameters under Colossal-AI's optimizer; for one all_reduce of 2 N numbers."""
    reduced = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, *a, **k: reduced.append(t.numel()) or all_reduce(t, *a, **k))

    def function():
        model, reference, _ = build()
        parameters = list(model.parameters())
        optimizer, expected = Lamb(parameters, **OPTIONS), ColossalLamb(reference.parameters(), **OPTIONS)
        for step in range(3):
            give_pieces(parameters, reference, step)
            reduced.clear()
            with Operations() as found:
                optimizer.step()
            assert reduced == [2 * len(parameters)]
            assert not any("scalar_dense" in name for name in found.count)
            expected.step()
        assert_joined(parameters, reference)
        return len([p for p in parameters if p.grad is None])

    unused = call(function, layout)
    assert any(unused) == (layout in ("2.5D 8", "3D 8"))


@pytest.mark.parametrize("layout", ["one process", "2.5D 8"])
def test_master_weights_have_the_norms_of_whole_parameters(layout, random_weights):

    def function():
        model, reference, _ = build()
        optimizer = Lamb(model.parameters(), **OPTIONS)
        parameters = list(model.parameters())
        engine, *_ = initialize(model, optimizer, torch.nn.Identity())
        for p in reference.parameters():
            p.data = p.data.bfloat16().float()
        expected = ColossalLamb(reference.parameters(), **OPTIONS)
        for step in range(3):
            give_pieces(parameters, reference, step, torch.bfloat16)
            engine.step()
            expected.step()
        masters = optimizer.param_groups[0]["params"]
        assert {p.dtype for p in masters} == {torch.float32}
        assert_joined(masters, reference)
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(parameters, masters, strict=True))

    call(function, layout, clip_grad_norm=0.0, amp="NAIVE", **{"fp16.dtype": "bf16"})


ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (1, 0, 3, 2)]


def add_in(order, tensor, group):
    """`dist.all_reduce` that adds the ranks in an order: NCCL's depends on the communicator, so on the replica."""
    parts = [torch.empty_like(tensor) for _ in order]
    dist.all_gather(parts, tensor, group=group)
    tensor.copy_(reduce(torch.add, (parts[rank] for rank in order)))


def test_replicas_whose_ranks_are_summed_in_another_order_have_the_same_norms_and_weights(monkeypatch):
    def function():
        rank = dist.get_rank()

        def trained(order):
            monkeypatch.setattr(dist, "all_reduce", partial(add_in, order))
            generator, norms = torch.Generator().manual_seed(rank), []
            optimizer = Lamb([torch.nn.Parameter(torch.randn(40, generator=generator))], **OPTIONS)
            (weight,) = optimizer.param_groups[0]["params"]
            weight.shard = Shard("weight", ((0, ParallelMode.PARALLEL_1D),))
            for _ in range(50):
                weight.grad = torch.randn(40, generator=generator)
                norms.append(global_norm([weight.grad], [weight]))
                optimizer.step()
            return torch.stack([*norms, *weight.detach()])

        sums = [torch.zeros(1000) for _ in ORDERS]
        for order, total in zip(ORDERS, sums, strict=True):
            total += torch.rand(1000, generator=torch.Generator().manual_seed(rank))
            add_in(order, total, gpc.get_group(ParallelMode.TENSOR))
        assert not any(torch.equal(sums[0], other) for other in sums[1:]), "float32 shows the order"
        first, *others = map(trained, ORDERS)
        return [torch.equal(first, other) for other in others]

    assert call(function, "1D 4") == [[True] * 3] * 4


def test_copies_whose_replicas_are_summed_in_another_order_have_the_same_weights():
    """Norms, biases and embeddings in 1D, averaged by DistributedDataParallel over three ranks in some order."""

    def function():
        order = [(0, 1, 2), (2, 1, 0)][gpc.get_local_rank(ParallelMode.TENSOR)]

        def average(state, bucket):
            add_in(order, bucket.buffer(), gpc.get_group(ParallelMode.DATA))
            done = torch.futures.Future()
            done.set_result(bucket.buffer() / len(order))
            return done

        def trained(handled):
            model, *_ = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss())
            engine.model.register_comm_hook(None, average)
            engine.train()
            assert len(engine._gradient_handlers) == 1
            if not handled:
                engine._gradient_handlers.clear()
            generator = torch.Generator().manual_seed(gpc.get_local_rank(ParallelMode.DATA))
            for _ in range(3):
                engine.zero_grad()
                images = torch.randn(4, 3, 32, 32, generator=generator)
                engine.backward(engine.criterion(engine(images), torch.arange(4)))
                engine.step()
            return torch.cat([p.detach().flatten() for p in model.parameters() if not p.shard.splits])

        return trained(True), trained(False)

    values = {"DEPTH": 1, "BATCH_SIZE": 4, "parallel.tensor.mode": "1d", "parallel.tensor.size": 2}
    for first, second in zip(*[iter(training.call(function, 6, **values))] * 2, strict=True):
        assert torch.equal(first[0], second[0])
        assert not torch.equal(first[1], second[1]), "float32 shows the order"


@pytest.mark.parametrize("layout", ["1D 4", "2D 4", "2.5D 8", "3D 8"])
def test_copies_of_a_parameter_get_one_gradient(layout, random_weights):
    """That of the first rank that has the same piece; each rank's gradients are its number. Others keep their own."""

    def function():
        model, *_ = build()
        parameters = [p for p in model.parameters() if p.shard.in_use]
        for p in parameters:
            p.grad = torch.full_like(p, dist.get_rank())
        reduction.CopiesHandler(model.parameters()).handle_gradient()
        places = [tuple((mode.value, gpc.get_local_rank(mode)) for mode in p.shard.modes) for p in parameters]
        return [((p.shard.name, *place), p.grad.unique().tolist()) for p, place in zip(parameters, places, strict=True)]

    expected = {}
    answers = [(rank, *answer) for rank, answers in enumerate(call(function, layout)) for answer in answers]
    for rank, piece, found in answers:
        assert found == expected.setdefault(piece, [float(rank)])
    assert len(expected) < len(answers), "there are copies"


def test_parameter_without_shard_is_whole_on_every_rank():
    def function():
        assert gpc.get_world_size(ParallelMode.TENSOR) == 2
        return [p.detach() for p in take_steps(Lamb(weights(), **OPTIONS), range(3))]

    alone = take_steps(Lamb(weights(), **OPTIONS), range(3))
    for parameters in call(function, "1D 2"):
        assert_same(parameters, alone, 1e-6)


# ---- Schedules ----


def optimizer_of_rate_1():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def schedule_config(**values):
    return Config(configs.complete(dict(LEARNING_RATE=1.0, NUM_EPOCHS=3, WARMUP_EPOCHS=1) | values))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (dict(SCHEDULE="linear"), [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        (dict(SCHEDULE="cosine"), [1 / 2, 1, 1, 0.8535534, 0.5, 0.1464466]),
        (dict(SCHEDULE="cosine", MIN_LEARNING_RATE=0.2), [1 / 2, 1, 1, 0.8828427, 0.6, 0.3171573]),
        (dict(SCHEDULE="cosine", MIN_LEARNING_RATE=1.0), [1 / 2, 1, 1, 1, 1, 1]),
    ],
)
def test_schedule_has_the_warm_up_in_epochs(schedule, expected):
    """One epoch of two optimizer steps, of three."""
    optimizer = optimizer_of_rate_1()
    scheduler = build_scheduler(schedule_config(**schedule), optimizer, 2)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected)


def test_lowest_rate_above_the_highest_is_refused():
    with pytest.raises(UserError, match=r"MIN_LEARNING_RATE = 2\.0 is above LEARNING_RATE = 1\.0"):
        build_scheduler(schedule_config(MIN_LEARNING_RATE=2.0), optimizer_of_rate_1(), 2)
