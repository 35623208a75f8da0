"""What a train script does with `--plan` and `--dry-run`."""

from functools import cache

import torch
from colossal_vit.config.settings import HYBRID
from colossal_vit.errors import UserError, multiples_near
from colossal_vit.launch.flags import Arguments
from colossal_vit.main import Build, find_output
from colossal_vit.plan import calibration, lowering, pictures, report
from colossal_vit.plan.machines import HERE, Gpus, Machine
from colossal_vit.plan.request import Request, request_of
from colossal_vit.plan.search import LOWERED_WITHIN, Plan, Predictor, search
from colossal_vit.results import format_table


def run(build: Build, args: Arguments) -> None:
    """Print what a script's command line asks for, and draw it; its `build` is called in forks.

    Raises:
        UserError: if flags or config are not usable, or no layout fits.
    """
    if args.plan is None:
        report.report(build, args)
        return
    request, output = request_of(build, args), find_output(args)
    plan, machine = make_plan(request)
    print(format_plan(plan, machine, request))
    layouts = {
        str(each.choice): {key: getattr(each, key) for key in ("seconds", *pictures.SHARES)} for each in plan.best
    }
    figure = pictures.draw_plan(layouts, request.images, f"{request.world_size} ranks, {args.plan}")
    print(f"\n{pictures.write(figure, output / 'plan.png')}")
    print("\nthe first one:", plan.best[0].choice.flags(args.script == HYBRID), sep="\n")


def make_plan(request: Request) -> tuple[Plan, Machine]:
    """The best layouts, on the machine that is asked for.

    Raises:
        UserError: if the machine is not known, the model has fewer than two blocks or frozen ones, or no layout makes
            as many images per step, or fits the memory.
    """
    config, name, images = request.config, request.args.plan, request.images
    if not config.get("DEPTH", 0) > 1:
        raise UserError("--plan is for models whose config has a DEPTH of at least 2")
    if (finetune := config.finetune) and (finetune.frozen_blocks or finetune.linear_probe):
        raise UserError(
            "--plan is for models that are trained as a whole, but finetune freezes a part: add --set finetune=None, "
            "and it plans at least the memory and time that this takes"
        )
    choices = request.choices()
    if not choices:
        fits = request.world_size * (2 if config.mix else 1)  # images are mixed in pairs
        key = "GLOBAL_BATCH" if config.get("GLOBAL_BATCH") else "BATCH_SIZE × gradient_accumulation × data parallel"
        raise UserError(
            f"--plan: no layout of {request.world_size} ranks makes {key} = {images} images per step: make them "
            f"{multiples_near(images, fits)} (a multiple of {fits})"
        )
    timed = name == HERE or name.endswith(".json")
    trace = cache(request.trace)
    machine: Machine = calibration.measured(request, choices, trace) if timed else request.machine()
    compiled = config.COMPILE and isinstance(machine, Gpus) and lowering.can_lower(config)
    lower = request.lower_layout if compiled else None
    plan = search(Predictor(config, machine, trace, lower), choices)
    if not plan.best:
        raise UserError(
            f"--plan {name}: none of {plan.num_layouts} layouts fits the memory of a rank, {machine.memory_gb:.1f} GB "
            f"less {machine.reserved_gb:.1f} GB for what is no tensor; the smallest takes {plan.smallest / 1e9:.1f} GB"
        )
    return plan, machine


def format_plan(plan: Plan, machine: Machine, request: Request) -> str:
    """The table of the best layouts."""
    config, images, where = request.config, request.images, f"{request.world_size} ranks, {request.args.plan}"
    lines = [f"{where}, {images} images per step: {plan.num_layouts} layouts; predicted, not measured"]
    if plan.num_too_large:
        lines.append(
            f"{plan.num_too_large} of them do not fit the {plan.limit / 1e9:.1f} GB that a rank has for tensors; the "
            f"smallest takes {plan.smallest / 1e9:.1f} GB"
        )
    if plan.compiled:
        lines.append(
            f"COMPILE = {config.COMPILE!r}: computing is that of the kernels that torch.compile makes, memory that of "
            f"eager steps; layouts that eagerly take over {LOWERED_WITHIN:g} times as long as the best are left out"
        )
    elif config.COMPILE and isinstance(machine, Gpus):
        lines.append(
            f"COMPILE = {config.COMPILE!r}, but steps are planned as eager ones: torch {torch.__version__} in "
            f"{config.DTYPE} cannot be lowered, torch {' or '.join(lowering.VERSIONS)} in float32 can"
        )
    if machine.warning:
        lines.append(machine.warning)
    if machine.noise and plan.num_equal > 1:
        lines.append(
            f"{plan.num_equal} are equal within the noise of {machine.noise:.1%}: the simplest of them is first"
        )
    rows = [
        [
            str(each.choice),
            f"{images / each.seconds:,.0f}",
            f"{each.memory / 1e9:.1f}",
            *(f"{share:.0%}" for share in (each.computing, each.communicating, each.bubble)),
        ]
        for each in plan.best
    ]
    header = ["layout", "images/s", "GB per rank", "computing", "communicating", "bubble"]
    return "\n".join([*lines, "", *format_table(header, rows)])
