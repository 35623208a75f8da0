"""What compiled models would run on GPUs, found on a CPU: launches, bytes, cubins."""

import functools
import re

import pytest
import torch
from colossal_vit.models import build_timm_vit
from colossal_vit.plan import fakes, lowering
from colossal_vit.plan.enumeration import own_layout
from colossal_vit.plan.lowering import num_bytes, num_flops, num_generated
from colossal_vit.plan.request import request_of

import fork_ranks
import train_dp
import train_hybrid
import training
from layouts import tensor

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
TINY = {"DEPTH": 2, "BATCH_SIZE": 8, "COMPILE": "auto"}


def request_for(script, argv, world_size="1"):
    return request_of(
        script.build, training.arguments(script.main, [*argv, "--plan", "h100", "--world_size", world_size])
    )


@functools.cache
def lowered_base(rate):
    """ViT-B/16 for data parallelism with this dropout, in bf16 at batch 64; and an eager block's operations."""
    values = {"BATCH_SIZE": 64, "gradient_accumulation": 1, "DROP_RATE": rate, "fp16.dtype": "bf16"}
    argv = training.flags(script=training.DATA_PARALLEL, small=False, **values)

    def lowered():
        request = request_for(train_dp, argv)
        eager = request.trace((None, 1, None)).part("block", "forward", 64).operations
        return request.lower_layout((None, 1, None), by_block=False), eager

    return fork_ranks.call(lowered, launched=False)[0]


@pytest.fixture
def base():
    return lowered_base(0.0)


def of_block(lowered, measure):
    return sum(lowered.of_block(kind, measure) for kind in ("forward", "backward"))


@pytest.mark.parametrize(("rate", "num_dropouts", "most"), [(0.1, 3, 30), (0.0, 0, 34)], ids=["shipped", "no dropout"])
def test_a_compiled_block_stays_within_its_budget(rate, num_dropouts, most):
    """Beside its 12 products and 2 attentions, which libraries compute, `merge_heads` and dropouts: 28 or 32 kernels.

    Of them, 12 or 16 cast weights, biases and their gradients between fp32 and bf16.
    """
    lowered, _ = lowered_base(rate)
    called = 12 + 2 + 1 + 2 * num_dropouts
    assert of_block(lowered, lambda kernels: sum(not each.generated for each in kernels)) == called
    assert of_block(lowered, num_generated) <= most
    assert of_block(lowered, num_bytes) <= 2.7e9


def test_compiled_products_are_those_of_eager_steps_and_take_fewer_launches(base):
    """By hand: 12 products of hidden size², and queries with keys and weights with values, 2 FLOPs a term."""
    lowered, eager = base
    images, tokens, hidden = 64, 197, 768
    flops = 2 * images * tokens * hidden * (12 * hidden + 2 * tokens)
    assert lowered.of_block("forward", num_flops) == flops
    assert eager[:, 0].sum() == flops
    assert len(eager) < 30, "no view or question about a tensor is among them"
    assert lowered.of_block("forward", len) < len(eager)
    assert lowered.of_block("forward", num_bytes) < eager[:, 1].sum()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_generated_kernels_become_cubins(capability, base, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = sorted(base[0].depths[2].sources, key=len)
    some = [sources[0], sources[len(sources) // 2], sources[-1]]

    def compiled():
        return [lowering.compile_kernel(source, capability) for source in some]

    for cubins in fork_ranks.call(compiled, launched=False)[0]:
        assert cubins
        assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


# Of one block, forward and backward, on a rank: operators that the host calls and kernels that it launches, eagerly;
# kernels compiled; bytes for each image eagerly and compiled. In a pipeline, blocks are compiled one by one. At this
# width as at those of real models, rows need no padding: Inductor pads some of others, and copies them for products.
BUDGETS = {
    "DP": (None, False, 0, (96, 29, 35, 659e3, 654e3)),
    "PP": (None, True, 0, (96, 29, 35, 659e3, 662e3)),
    "1D": (tensor("1d", 2), True, 1, (98, 33, 37, 419e3, 399e3)),
    "2D": (tensor("2d", 4), True, 2, (346, 141, 87, 575e3, 301e3)),
    "2.5D": (tensor("2.5d", 4), True, 2, (306, 149, 103, 575e3, 301e3)),
    "3D": (tensor("3d", 8), True, 1, (206, 101, 47, 170e3, 106e3)),
}


@pytest.mark.parametrize(("values", "by_block", "side", "budget"), BUDGETS.values(), ids=BUDGETS)
def test_a_block_stays_within_the_budget_of_its_layout(values, by_block, side, budget):
    """Under tensor parallelism it has its share of the products: 12, each of them the sum of two in 2D and 2.5D."""
    values = {**(values or {}), **TINY, "HIDDEN_SIZE": 128}
    argv, size = training.flags("NAIVE", **values), values.get("parallel.tensor.size", 1)

    def counted():
        request = request_for(train_hybrid, argv, str(size))
        split = own_layout(request.config, size).tensor
        eager = [request.trace(split).part("block", kind, 8 * size) for kind in ("forward", "backward")]
        return eager, request.lower(split, by_block, images=8 * size), request.config

    ((eager, lowered, config),) = fork_ranks.call(counted, launched=False)
    found = (
        sum(each.calls for each in eager),
        sum(len(each.operations) for each in eager),
        of_block(lowered, len),
        sum(each.operations[:, 1].sum() for each in eager) / (8 * size),
        of_block(lowered, num_bytes) / (8 * size),
    )
    assert all(each <= most for each, most in zip(found, budget, strict=True)), found
    assert of_block(lowered, lambda kernels: sum("mm" in each.name for each in kernels)) == 12 * (side or 1)
    hidden, tokens = config.HIDDEN_SIZE, (config.IMG_SIZE // config.PATCH_SIZE) ** 2 + 1
    flops = 2 * 8 * tokens * hidden * (12 * hidden + 2 * tokens)
    assert lowered.of_block("forward", num_flops) == flops


@pytest.fixture
def plan(monkeypatch):
    """The output of `--plan` for a small model in fp32, and images/s of its best layout, on this torch or another."""

    def planned(compiles, version=torch.__version__):
        monkeypatch.setattr(torch, "__version__", version)
        values = {"MODEL": "vit_tiny_patch16_224", "IMG_SIZE": 32, "BATCH_SIZE": 8, "gradient_accumulation": 1}
        argv = training.flags(script=training.DATA_PARALLEL, small=False, COMPILE=compiles, fp16=None, **values)
        result = fork_ranks.run(training.DATA_PARALLEL, [*argv, "--plan", "h100", "--world_size", "1"])
        assert result.codes == [0], str(result)
        (said,) = result.stdout
        best = re.search(r"^data 1 .*?  +([\d,]+)  ", said, re.MULTILINE)
        return said, int(best[1].replace(",", ""))

    return planned


def test_compiled_steps_are_planned_where_compile_is_on_and_this_torch_can_be_taken_apart(plan):
    """They take fewer launches, which is all that this small model takes."""
    eager, slow = plan(False)
    assert "COMPILE = " not in eager
    compiled, fast = plan("auto")
    assert "COMPILE = 'auto': computing is that of the kernels" in compiled
    assert fast > slow
    other, same = plan("auto", "2.9.1")
    assert "but steps are planned as eager ones: torch 2.9.1 in float32 cannot be lowered, torch 2.10 or 2.14" in other
    assert same == slow


def test_rates_of_stochastic_depth_are_the_configs_on_fake_tensors():
    """timm asks a tensor for its own, which has no values there."""
    argv = training.flags(script=training.DATA_PARALLEL, DEPTH=3, DROP_PATH_RATE=0.2)
    config = training.config_of(argv, training.DATA_PARALLEL)

    def rates():
        fakes.fake_tensors(torch.device("cpu"))
        return [getattr(block.drop_path1, "rate", None) for block in build_timm_vit(config).blocks]

    assert fork_ranks.call(rates) == [[0.0, 0.1, 0.2]]
