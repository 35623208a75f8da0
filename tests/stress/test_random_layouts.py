"""Random models in random layouts, compared with one process: losses, gradient norms, evaluation, change of layout.

    python -m pytest tests/stress/test_random_layouts.py -k own_precision --cases 500 --result results/random_layouts
    python -m pytest tests/stress/test_random_layouts.py -k float64 --cases 1000 --result results/random_float64

A seed's case is always the same: a small ViT with random sizes, number of classes, loss, augmentation, optimizer,
precision, clipping, label smoothing, weight average, accumulation, micro-batches and recomputation, including odd token
counts, uneven stages and partial test batches, on the digits or SYNTHETIC. A third of the cases has dropout, drop path,
mixing and augmentation at once, the others have some of them. It makes three steps in one layout, and three more from
the checkpoint in another one. Each step and the evaluation must agree with one process that makes all six: in fp32
within 1e-4 (1e-5 in the first step); in bf16 losses within 2 % and norms within 10 % or, if the training itself
amplifies rounding, within three times the difference between one process in bf16 and in fp32; in float64, with weights,
moments and averages at the end, within 1e-11. A case that fails is printed as commands.
"""

import random
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from colossal_vit.checkpoint import storage
from colossal_vit.data.batches import SyntheticLoader
from colossal_vit.errors import UserError
from colossal_vit.parallel.layout import Layout

import conftest
import layouts
import training
from vit_settings import check_vit

HALF, WHOLE = 3, 6  # optimizer steps
NUM_TEST_IMAGES = 27
TOLERANCE = {  # relative
    "fp32": {"loss": layouts.ANY_STEP, "grad_norm": layouts.ANY_STEP},
    "bf16": {"loss": 2e-2, "grad_norm": 1e-1},
}
EXACT = 1e-11  # relative, in float64
AMPLIFIED = 3  # times the difference between bf16 and fp32 in one process
TENSOR = [(None, 1, {}), ("1d", 2, {}), ("1d", 3, {}), ("1d", 4, {}), ("2d", 4, {})]
TENSOR += [("2.5d", 4, {"depth": 1}), ("2.5d", 8, {"depth": 2}), ("3d", 8, {})]
MAX_RANKS = 8
LARGE = [("2d", 9, {}), ("2.5d", 9, {"depth": 1}), ("2.5d", 12, {"depth": 3}), ("2.5d", 18, {"depth": 2})]
LARGE += [("3d", 27, {})]  # a case in 25 begins in one of these

# The first updates of AdamW, and of Muon outside of hidden matrices, are g / (|g| + ε). With ε = 1e-8, rounding decides
# the sign where |g| is that small; the whole learning rate in another direction has moved a loss by 1.5e-4 although the
# layout was correct.
OPTIMIZERS = layouts.OPTIMIZERS | {name: {**layouts.OPTIMIZERS[name], "EPSILON": 1e-5} for name in ("adamw", "muon")}

ONE_PROCESS = {"mode": None, "size": 1, "data": 1, "pipeline": 1, "chunks": 1, "micro_batches": 1, "accumulation": 1}
ONE_PROCESS |= {"zero": None}

Case = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def prepared(tmp_path_factory):
    """Few test images, and weights that are all random."""
    folder = tmp_path_factory.mktemp("digits")
    conftest.small_digits(folder, NUM_TEST_IMAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA", str(folder))
        conftest.random_start(patch)
        yield


def draw_layout(draw: random.Random) -> Case:
    """Parallel sizes, micro-batches and accumulation."""
    while True:
        mode, size, more = draw.choice(TENSOR)
        pipeline, data, chunks = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2])
        if size * pipeline * data > MAX_RANKS or (chunks > 1 and pipeline == 1):
            continue
        micro_batches = pipeline * draw.choice([1, 2]) if chunks > 1 else draw.choice([1, 2, 3])
        where = {"mode": mode, "size": size, **more, "pipeline": pipeline, "data": data, "chunks": chunks}
        how = {"micro_batches": micro_batches if pipeline > 1 else 1, "accumulation": draw.randint(1, 3)}
        return where | how | {"zero": draw.choice([None, 1, 2, 3]) if data > 1 else None}


def draw_case(seed: int) -> Case:
    """A random model, training and two layouts; draws again until the case is legal."""
    draw = random.Random(seed)
    all_on, large = draw.random() < 1 / 3, draw.choice(LARGE) if draw.random() < 1 / 25 else None
    off, zero = ([], []) if all_on else ([None] * 3, [0.0] * 2)
    while True:
        heads, patch = draw.choice([2, 3, 4, 6, 8, 12]), draw.choice([2, 4, 5, 8])
        case = {
            "PATCH_SIZE": patch,
            "IMG_SIZE": patch * draw.randint(1, 4),
            "NUM_HEADS": heads,
            "HIDDEN_SIZE": heads * draw.choice([2, 3, 4, 8]),
            "DEPTH": draw.randint(1, 6),
            "MLP_RATIO": draw.choice([0.5, 1, 2, 2.5, 4]),
            "NUM_CLASSES": draw.randint(10, 24),
            "LABEL_SMOOTHING": draw.choice([0.0, 0.1]),
            "CHECKPOINT": draw.random() < 0.3,
            "clip_grad_norm": draw.choice([0.0, 0.1, 0.5, 5.0]),
            "SEED": draw.randrange(10**6),
            "DROP_RATE": draw.choice([*zero, 0.1, 0.5]),
            "DROP_PATH_RATE": draw.choice([*zero, 0.1, 0.5]),
            "optimizer": draw.choice(list(OPTIMIZERS)),
            "amp": draw.choice([None] * 9 + ["NAIVE"]),
            "global_batch": draw.choice([18, 36] if large else [4, 6, 8, 12, 16, 24, 32]),
            "ema": draw.choice([None, None, 0.9]),
            "first": draw_layout(draw),
            "second": draw_layout(draw),
            "REPEATS": draw.choice([1, 1, 1, 2, 3]),
            "mix": draw.choice([*off, "batch", "pair", "elem"]),
            "augment": draw.choice([*off, "rand", "three"]),
            "bce": draw.choice([None, None, 0.2]),
            "SYNTHETIC": draw.random() < 0.15,
        }
        if case["SYNTHETIC"]:
            case["mix"] = None  # the loader that mixes reads CIFAR-10
        if large:
            mode, size, more = large
            case["first"] = {**ONE_PROCESS, "mode": mode, "size": size, **more, "accumulation": draw.randint(1, 2)}
        if is_legal(case):
            return case


def arguments(case: Case, layout: Case) -> tuple[int, dict[str, Any]]:
    """Number of ranks, and config values with `amp`, of a case in a layout.

    Raises:
        UserError: if the global batch cannot be split over the layout.
    """
    share = layout["data"] * layout["accumulation"]
    if case["global_batch"] % share:
        raise UserError("the batch cannot be split")
    values = {key: value for key, value in case.items() if key.isupper() or key in ("clip_grad_norm", "amp")}
    values |= OPTIMIZERS[case["optimizer"]]
    values |= {**training.MIXED[training.HYBRID], "mix.mode": case["mix"]} if case["mix"] else {}
    values |= {"augment.policy": case["augment"], "augment.erase": 0.3} if case["augment"] else {}
    values |= {"bce.threshold": case["bce"]} if case["bce"] else {}
    values |= {"ema.decay": case["ema"]} if case["ema"] else {}
    values |= {"DTYPE": case["DTYPE"]} if "DTYPE" in case else {}
    values |= {"BATCH_SIZE": case["global_batch"] // share, "gradient_accumulation": layout["accumulation"]}
    values |= {"parallel.pipeline": layout["pipeline"], "NUM_MICRO_BATCHES": layout["micro_batches"], "NUM_EPOCHS": 2}
    sizes = {key: layout[key] for key in ("mode", "size", "depth") if layout["mode"] and key in layout}
    values |= {f"parallel.tensor.{key}": value for key, value in sizes.items()}
    values |= {"model.num_chunks": layout["chunks"]} if layout["chunks"] > 1 else {}
    values |= {"zero.stage": layout["zero"]} if layout["zero"] else {}
    return layout["size"] * layout["pipeline"] * layout["data"], values


def is_legal(case: Case) -> bool:
    try:
        for layout in (ONE_PROCESS, case["first"], case["second"]):
            ranks, values = arguments(case, layout)
            config = training.config_of(training.flags(**values))
            check_vit(config, Layout.of(config, ranks))
            if config.get("mix") and (config.BATCH_SIZE % 2 or case["global_batch"] < 2 * config.REPEATS):
                return False
    except UserError:
        return False
    return True


def as_commands(case: Case) -> str:
    """Shell commands that reproduce the case in vit_cifar10_hybrid/."""
    lines = []
    for layout, name, steps in (
        (ONE_PROCESS, "one", WHOLE),
        (case["first"], "two", HALF),
        (case["second"], "two", WHOLE),
    ):
        ranks, values = arguments(case, layout)
        flags = [*training.flags(**values), "--output", f"/tmp/{name}", "--max-steps", str(steps)]
        lines.append(f"torchrun --standalone --nproc_per_node {ranks} train_hybrid.py {shlex.join(flags)}")
    return "\n".join(lines)


def farthest(steps: list[dict], expected: list[dict], key: str) -> float:
    """The largest relative difference of one metric in any step."""
    return max(layouts.errors(steps, expected, [key]))


def describe(layout: Case) -> str:
    """The sizes of a layout that are not 1, and its stage of ZeRO."""
    sizes = {"DP": layout["data"], "PP": layout["pipeline"], layout["mode"]: layout["size"]}
    words = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
    return words + (f" stage {layout['zero']}" if layout["zero"] else "")


def train_both(case: Case, folder: Path, *more: str) -> tuple[training.Run, training.Run]:
    """Train a case in one process, and in its two layouts one after the other, with `more` flags in the second."""
    ranks, values = arguments(case, ONE_PROCESS)
    one = training.train(folder / "one", ranks, steps=WHOLE, **values)
    ranks, values = arguments(case, case["first"])
    training.train(folder / "two", ranks, steps=HALF, **values)
    ranks, values = arguments(case, case["second"])
    two = training.train(folder / "two", ranks, *more, steps=WHOLE, **values)
    num_images = SyntheticLoader.DISTINCT if case["SYNTHETIC"] else NUM_TEST_IMAGES
    assert two.evaluations[-1]["eval_images"] == one.evaluations[-1]["eval_images"] == num_images
    return one, two


def check(case: Case, folder: Path, *more: str) -> tuple[float, float]:
    """Train a case, with `more` flags in its second layout.

    Returns:
        The largest relative errors of a loss or gradient norm in the first step and in any.

    Raises:
        AssertionError: if it does not agree with one process.
    """
    one, two = train_both(case, folder, *more)
    limits = TOLERANCE["bf16" if case["amp"] else "fp32"]
    if case["amp"]:
        _, values = arguments({**case, "amp": None}, ONE_PROCESS)
        exact = training.train(folder / "fp32", steps=WHOLE, **values).steps
        limits = {key: max(limit, AMPLIFIED * farthest(one.steps, exact, key)) for key, limit in limits.items()}
    for key, limit in limits.items():
        assert farthest(two.steps, one.steps, key) <= limit, f"{key} is off"
    errors = layouts.errors(two.steps, one.steps)
    assert case["amp"] or errors[0] <= layouts.FIRST_STEP, "the first step is off"
    here, there = two.evaluations[-1], one.evaluations[-1]
    assert here["eval_loss"] == pytest.approx(there["eval_loss"], rel=limits["loss"]), "the evaluation is off"
    return errors[0], max(errors)


def check_in_float64(case: Case, folder: Path) -> tuple[float, float]:
    """Train a case that is in float64.

    Returns:
        The largest relative errors of a loss, gradient norm or evaluation; and of a tensor in the last checkpoint,
        relative to the largest value of all tensors of its kind.

    Raises:
        AssertionError: if it does not agree with one process.
    """
    one, two = train_both(case, folder)
    losses = [key for key in one.evaluations[-1] if key.endswith("_loss")]
    recorded = max(
        *layouts.errors(two.steps, one.steps), *layouts.errors(two.evaluations[-1:], one.evaluations[-1:], losses)
    )
    assert recorded <= EXACT, "a loss or gradient norm is off"
    ours, theirs = (tensors_by_kind(run.output) for run in (two, one))
    assert ours.keys() == theirs.keys()
    errors = {}
    for kind, expected in theirs.items():
        largest = max(tensor.abs().max().item() for tensor in expected.values())
        assert ours[kind].keys() == expected.keys()
        for name, tensor in ours[kind].items():
            errors[kind, name] = (tensor - expected[name]).abs().max().item() / (largest or 1.0)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= EXACT, f"{worst} is off"
    return recorded, errors[worst]


def tensors_by_kind(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a run's newest checkpoint: weights, averages, and each kind of moments."""
    checkpoint, _ = storage.newest(run / "checkpoints")
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for file in checkpoint.files:
        if file.endswith(".safetensors"):
            for name, tensor in checkpoint.tensors(file).items():
                moment = name.split(".")[0] if file.startswith("optimizer") else ""
                found[f"{file} {moment}"][name] = tensor
    return found


def described(case: Case) -> str:
    """A case in a few words."""
    both = " → ".join(describe(case[which]) for which in ("first", "second"))
    some = ("DROP_RATE", "DROP_PATH_RATE", "mix", "augment", "ema", "SYNTHETIC")
    return ", ".join([both, case["optimizer"], *(key for key in some if case[key])])


def check_and_report(checked: Callable, seed: int, case: Case, words: str, folder: Path, report: Callable) -> None:
    """Report what a check returns, in these words; or that the case has failed, with its commands."""
    precision = "fp64" if "DTYPE" in case else "bf16" if case["amp"] else "fp32"
    name = f"seed {seed}: {described(case)}, {precision}"
    try:
        errors = checked(case, folder)
    except AssertionError:
        report(f"{name}: failed\n{as_commands(case)}")
        raise
    report(f"{name}: {words.format(*errors)}")


@pytest.mark.cases(3)
def test_two_random_layouts_train_what_one_process_does_in_its_own_precision(seed, tmp_path, report):
    check_and_report(check, seed, draw_case(seed), "{:.1e} in the first step, {:.1e} in any", tmp_path, report)


@pytest.mark.cases(3)
def test_two_random_layouts_train_what_one_process_does_in_float64(seed, tmp_path, report):
    case = {**draw_case(seed), "amp": None, "DTYPE": "float64"}
    check_and_report(check_in_float64, seed, case, "{:.1e} in losses and norms, {:.1e} in tensors", tmp_path, report)


def test_a_case_with_another_rate_in_its_second_layout_is_off(tmp_path):
    case = {**draw_case(1), "first": ONE_PROCESS, "second": ONE_PROCESS, "amp": None}
    with pytest.raises(AssertionError, match=r"^(loss|grad_norm) is off"):
        check(case, tmp_path, "--set", "LEARNING_RATE=0.5", "--accept-changes")


def test_a_case_is_what_its_seed_says():
    assert draw_case(37) == draw_case(37) != draw_case(38)
