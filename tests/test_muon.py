"""Muon takes the steps of torch's, whichever way the matrices are cut, and AdamW's with everything else."""

import pytest
import torch
from colossal_vit import config as configs
from colossal_vit.checkpoint import storage
from colossal_vit.engine import Muon, build_optimizer
from colossal_vit.parallel.sharding import Shard
from colossalai.context import Config
from colossalai.legacy.amp import AMP_TYPE
from timm.models.vision_transformer import VisionTransformer
from torch._subclasses.fake_tensor import FakeTensorMode

import training
from layouts import LAYOUTS, OPTIMIZERS, PIPELINE, tensor
from test_dry_run import planned
from vit_layouts import build, call

SHAPES = [(24, 16), (16, 24), (16, 16), (40, 1)]  # tall, wide, square, a single column
OPTIONS = dict(lr=0.02, weight_decay=0.1)


@pytest.fixture
def full_iteration(monkeypatch):
    """torch's Muon iterates in the precision of its parameters, not in bf16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def weights(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.shard = Shard("blocks.0.mlp.fc1.weight")
    return parameters


def gradients(shapes, step):
    """Random gradients of very different sizes; the last one's rows do not span all directions."""
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (-step % 5) for shape in shapes]
    found[-1][1:] = found[-1][:1]
    return found


def take_steps(optimizer, parameters, steps=range(8)):
    shapes = [p.shape for p in parameters]
    for step in steps:
        for p, gradient in zip(parameters, gradients(shapes, step), strict=True):
            p.grad = gradient.to(p.dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


def assert_same(found, expected, rtol, of=""):
    error = ((found - expected).norm() / expected.norm()).item()
    assert error <= rtol, f"{of} {tuple(found.shape)}: relative error {error:.1e}"


# ---- One process ----


@pytest.mark.parametrize("values", [{}, {"momentum": 0.5, "nesterov": False}, {"momentum": 0.0}], ids=str)
def test_matrices_of_any_shape_take_the_steps_of_torchs_muon(values, full_iteration):
    ours, theirs = weights(), weights()
    expected = torch.optim.Muon(theirs, **OPTIONS, **values, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon([dict(params=ours, matrices=1)], **OPTIONS, **values)
    for here, there in zip(take_steps(optimizer, ours), take_steps(expected, theirs), strict=True):
        assert_same(here, there, 1e-13)
    for here, there in zip(ours, theirs, strict=True):
        momentum = expected.state[there]["momentum_buffer"]
        assert_same(optimizer.state[here]["momentum_buffer"], momentum, 1e-15)
        assert optimizer.state[here]["step"] == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iteration_in_bf16_is_torchs(dtype):
    ours, theirs = weights(dtype=dtype), weights(dtype=dtype)
    expected = take_steps(torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw"), theirs)
    groups = [dict(params=ours, matrices=1)]
    for here, there in zip(take_steps(Muon(groups, dtype=torch.bfloat16, **OPTIONS), ours), expected, strict=True):
        assert_same(here, there, 1e-7)
    (full,) = take_steps(Muon([dict(params=weights()[:1], matrices=1)], **OPTIONS), weights()[:1])
    assert (full - expected[0]).abs().max() > 1e-3, "rounding to bf16 must show"


def test_fused_queries_keys_and_values_are_three_matrices(full_iteration):
    (fused,) = weights([(48, 16)])
    apart = [torch.nn.Parameter(piece.clone()) for piece in fused.detach().chunk(3)]
    expected = torch.optim.Muon(apart, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon([dict(params=[fused], matrices=3)], **OPTIONS)
    for step in range(4):
        (fused.grad,) = gradients([(48, 16)], step)
        for p, gradient in zip(apart, fused.grad.chunk(3), strict=True):
            p.grad = gradient
        optimizer.step()
        expected.step()
    assert_same(fused, torch.cat(apart), 1e-13)


def small_vit(**values):
    sizes = dict(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=5, init_values=0.1)
    model = VisionTransformer(**sizes, **values).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    return model


def test_built_optimizer_takes_the_steps_of_torchs_muon_in_the_blocks_and_of_its_adamw_elsewhere(full_iteration):
    """With the rates of layer decay, no weight decay on vectors, an epsilon, and a frozen matrix."""
    models = small_vit(), small_vit()
    config = dict(OPTIMIZER="muon", LEARNING_RATE=0.1, WEIGHT_DECAY=0.2, LAYER_DECAY=0.5, DECAY_VECTORS=False)
    config |= dict(EPSILON=1e-3, MUON_MOMENTUM=0.8, MUON_NESTEROV=False)
    ours = build_optimizer(Config(configs.complete(config)), models[0])
    named = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        parameter.shard = Shard(name)
        parameter.requires_grad_(name != "blocks.0.mlp.fc1.weight")
    hidden = [f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    whole = {name: named.pop(name) for name in hidden}
    pieces = {
        name: [torch.nn.Parameter(piece.clone()) for piece in p.detach().chunk(3 if "qkv" in name else 1)]
        for name, p in whole.items()
        if name != "blocks.0.mlp.fc1.weight"
    }

    def rate(name):
        below = 2 - int(name.split(".")[1]) if name.startswith("blocks.") else 3 * ("embed" in name or "token" in name)
        return 0.1 * 0.5 ** (below + (name in ("norm.weight", "norm.bias")))

    decays = {name: 0.2 * (name in ("head.weight", "patch_embed.proj.weight")) for name in named}
    adamw = torch.optim.AdamW(
        [dict(params=[p], lr=rate(name), weight_decay=decays[name]) for name, p in named.items()], eps=1e-3
    )
    muon = torch.optim.Muon(
        [dict(params=of_name, lr=rate(name)) for name, of_name in pieces.items()],
        weight_decay=0.2,
        momentum=0.8,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in models[0].named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name in pieces:
                for p, g in zip(pieces[name], gradient.chunk(len(pieces[name])), strict=True):
                    p.grad = g.clone()
            elif name in named:
                named[name].grad = gradient
            parameter.grad = gradient.clone() if parameter.requires_grad else None
        for optimizer in (ours, adamw, muon):
            optimizer.step()
    expected = whole | named | {name: torch.cat(of_name) for name, of_name in pieces.items()}
    for name, parameter in models[0].named_parameters():
        assert_same(parameter, expected[name], 1e-11, name)


@pytest.mark.parametrize(
    ("fp16", "dtype"),
    [
        (None, None),
        (dict(mode=AMP_TYPE.TORCH), torch.bfloat16),
        (dict(mode=AMP_TYPE.NAIVE, dtype="fp16"), torch.bfloat16),
        (dict(mode=AMP_TYPE.APEX, opt_level="O0"), None),
    ],
    ids=str,
)
def test_iteration_is_in_bf16_where_activations_are_in_half_precision(fp16, dtype):
    config = Config(configs.complete(dict(OPTIMIZER="muon", fp16=fp16)))
    assert build_optimizer(config, small_vit()).dtype == dtype


def test_step_reads_nothing_back_from_the_device():
    """On a GPU that does not exist: tensors without data, which nobody can read."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.ones(6, 5, device="cuda")) for _ in range(3)]
        for p in parameters:
            p.grad, p.shard = torch.ones_like(p), Shard("blocks.0.attn.qkv.weight")
        groups = [dict(params=parameters[:1], matrices=0), dict(params=parameters[1:], matrices=3)]
        optimizer = Muon(groups, **OPTIONS)
        optimizer.found_inf = torch.zeros((), device="cuda")
        for _ in range(2):
            optimizer.step()


# ---- Cut matrices ----


@pytest.mark.parametrize("layout", ["1D 4", "2D 4", "2.5D 8", "3D 8"])
def test_cut_matrices_are_orthogonalised_whole(layout, random_weights):
    def function():
        model, reference, config = build()
        config.OPTIMIZER = "muon"
        for name, parameter in reference.double().named_parameters():
            parameter.shard = Shard(name)
        optimizer, expected = (build_optimizer(config, m) for m in (model.double(), reference))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in reference.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            full = {name: p.grad for name, p in reference.named_parameters()}
            for p in model.parameters():
                p.grad = p.shard.split(full[p.shard.name]).contiguous() if p.shard.in_use else None
            optimizer.step()
            expected.step()
        full = dict(reference.named_parameters())
        for p in model.parameters():
            assert_same(p.shard.gather(p.detach()), full[p.shard.name], 1e-12, p.shard.name)
        return len([p for p in model.parameters() if p.shard.splits])

    assert all(call(function, layout))


def tensors(run):
    """The tensors of a run's newest checkpoint by name, moments under their kind."""
    checkpoint, _ = storage.newest(run.output / "checkpoints")
    return checkpoint.tensors(storage.MODEL) | checkpoint.tensors(storage.OPTIMIZER)


# Each resumes from the checkpoint of the one before it.
CHAIN = {
    "2.5D 8": LAYOUTS["2.5D 8"],
    "DP 2 × PP 2 × 1D 2, split state": (8, {**LAYOUTS["DP 2 × PP 2 × 1D 2"][1], "zero.stage": 2}),
    "2D 4, two micro-batches": (4, {**tensor("2d", 4), "gradient_accumulation": 2, "BATCH_SIZE": 16}),
    "DP 4, split state": (4, {"BATCH_SIZE": 8, "zero.stage": 1}),
    "PP 2": (2, PIPELINE),
}


def test_run_that_changes_its_layout_again_and_again_is_that_of_one_process(few_test_images, tmp_path, random_weights):
    """In float64 to 1e-11: losses, weights, and moments, of which each parameter has its own optimizer's only."""
    values = {"DEPTH": 2, "DTYPE": "float64", "ema.decay": 0.5, **training.RANDOM, **OPTIMIZERS["muon"]}
    one = training.train(tmp_path / "one", steps=2 * len(CHAIN), **values)
    for number, (processes, layout) in enumerate(CHAIN.values(), 1):
        run = training.train(tmp_path / "other", processes, steps=2 * number, **{**values, **layout})
    for here, there in zip(run.steps, one.steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=1e-11), (here["step"], key)
    assert run.evaluations[-1]["ema_loss"] == pytest.approx(one.evaluations[-1]["ema_loss"], rel=1e-11)
    found, expected = tensors(run), tensors(one)
    kinds = "momentum_buffer", "exp_avg", "exp_avg_sq"
    names = {name for name in expected if not name.startswith(kinds)}
    assert found.keys() == expected.keys()
    for name, of_one in expected.items():
        assert_same(found[name], of_one, 1e-10, name)
    of_kind = {kind: {name for name in names if f"{kind}.{name}" in expected} for kind in kinds}
    assert len(of_kind["momentum_buffer"]) == 4 * 2
    assert of_kind["exp_avg"] == of_kind["exp_avg_sq"] == names - of_kind["momentum_buffer"]


# ---- What it costs ----


def test_dry_run_counts_what_muon_keeps_and_sends():
    """By hand, for two blocks of 64 channels: 12 × 64² elements of hidden matrices in each, all in two pieces in 1D."""
    sizes = {"HIDDEN_SIZE": 64, "DEPTH": 2}
    plans = {}
    for name, layout in {"one": (1, {}), "1D 2": LAYOUTS["1D 2"], "PP 2": LAYOUTS["PP 2"]}.items():
        for optimizer in ("adamw", "muon"):
            argv = training.flags(**{**sizes, "OPTIMIZER": optimizer, **layout[1]})
            plans[name, optimizer] = planned(argv, layout[0])[0]

    def more(part):
        return {name: part(plans[name, "muon"]) - part(plans[name, "adamw"]) for name in ("one", "1D 2", "PP 2")}

    hidden = 2 * 12 * 64**2 * 4  # bytes
    # A second moment less.
    assert more(lambda plan: plan.memory["optimizer"]) == {"one": -hidden, "1D 2": -hidden / 2, "PP 2": -hidden / 2}
    assert more(lambda plan: plan.sent.get("all_gather", 0)) == {"one": 0, "1D 2": hidden / 2, "PP 2": 0}
    assert more(lambda plan: plan.calls.get("all_gather", 0)) == {"one": 0, "1D 2": 2 * 4, "PP 2": 0}
