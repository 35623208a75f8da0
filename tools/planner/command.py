"""What the planner prints."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from colossal_vit.checkpoint import run_directory
from colossal_vit.dry_run.pictures import write
from colossal_vit.errors import UserError, multiples_near
from colossal_vit.main import load_script
from colossal_vit.results import format_table

from tools.planner import pictures, timing
from tools.planner.enumeration import is_hybrid
from tools.planner.machines import HERE, find_machine, this_machine
from tools.planner.request import Request, request_of
from tools.planner.search import Plan, Prediction, Predictor, search


def run(path: Path, name: str, specs: Mapping[str, float], words: list[str]) -> None:
    """Print the best layouts of a training, and draw them.

    Args:
        path: of the train script.
        name: of the machine.
        specs: see `machines.parse_specs`.
        words: the train script's command line.

    Raises:
        UserError: if flags, config or machine are not usable, or no layout fits.
    """
    script = load_script(path)
    args = script.parse([*words, "--dry-run"])
    if args.output is None and args.config:
        default = run_directory.default(path, Path(args.config), args.set, args.resume)
        runs = default.parents[2]
        args = args.replace(output=runs / "planner" / default.relative_to(runs))
    request = request_of(script, args)
    plan = make_plan(request, name, specs)
    where = f"{request.world_size} ranks, {name}"
    if name == HERE:
        timed = sorted(((timing.time_layout(path, request, each.choice), each) for each in plan.best), key=_seconds)
        best = [each for _, each in timed]
        print(format_timings(timed, where, request))
    else:
        best = plan.best
        print(format_plan(plan, where, request))
        layouts = {
            str(each.choice): {key: getattr(each, key) for key in ("seconds", *pictures.SHARES)} for each in best
        }
        figure = pictures.draw_plan(layouts, request.images, where)
        print(f"\n{write(figure, args.output / 'plan.png')}")
    print("\nthe first one:", best[0].choice.flags(is_hybrid(request.config)), sep="\n")


def _seconds(timed: tuple[float, Prediction]) -> float:
    return timed[0]


def make_plan(request: Request, name: str, specs: Mapping[str, float]) -> Plan:
    """Return the best layouts, on the machine that is asked for.

    Raises:
        UserError: if the machine is not known, the model has fewer than two blocks or frozen ones, or its weights are
            split over replicas, or no layout makes as many images per step, or fits the memory.
    """
    config, images = request.config, request.images
    if not config.get("DEPTH", 0) > 1:
        raise UserError("the planner is for models whose config has a DEPTH of at least 2")
    if (finetune := config.finetune) and (finetune.frozen_blocks or finetune.linear_probe):
        raise UserError(
            "the planner is for models that are trained as a whole, but finetune freezes a part: add --set "
            "finetune=None, and it plans at least the memory and time that this takes"
        )
    if config.zero and config.zero.stage == 3:
        raise UserError("the planner does not know zero.stage = 3: plan with another one; a dry run says what 3 takes")
    choices = request.choices()
    if not choices:
        fits = request.world_size * (2 if config.get("mix") else 1)  # images are mixed in pairs
        key = "GLOBAL_BATCH" if config.get("GLOBAL_BATCH") else "BATCH_SIZE × gradient_accumulation × data parallel"
        raise UserError(
            f"no layout of {request.world_size} ranks makes {key} = {images} images per step: make them "
            f"{multiples_near(images, fits)} (a multiple of {fits})"
        )
    half = bool(config.fp16)
    if name == HERE:
        machine = this_machine(request.world_size, half, config.TF32)
    else:
        machine = find_machine(name, specs, half, config.TF32)
    plan = search(Predictor(config, machine, cache(request.trace)), choices, request.memory)
    if not plan.best:
        raise UserError(
            f"--machine {name}: none of {plan.num_layouts} layouts fits the memory of a rank, {machine.memory_gb:.1f} "
            f"GB less {machine.reserved_gb:.1f} GB for what is no tensor; the smallest takes at least "
            f"{plan.smallest / 1e9:.1f} GB"
        )
    return plan


def format_plan(plan: Plan, where: str, request: Request) -> str:
    """Return the table of the best layouts, as predicted."""
    images = request.images
    lines = [f"{where}, {images} images per step: {plan.num_layouts} layouts; predicted, not measured"]
    if plan.num_too_large:
        lines.append(
            f"{plan.num_too_large} that would be as fast do not fit the {plan.limit / 1e9:.1f} GB that a rank has for "
            f"tensors"
        )
    if request.config.COMPILE:
        lines.append(f"COMPILE = {request.config.COMPILE!r}, but times are those of eager steps")
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


def format_timings(timed: list[tuple[float, Prediction]], where: str, request: Request) -> str:
    """Return the table of the layouts that were timed, the fastest first."""
    images = request.images
    line = f"{where}, {images} images per step: {len(timed)} layouts, each timed for {timing.COUNTED} steps"
    rows = [[str(each.choice), f"{images / s:,.1f}", f"{each.memory / 1e9:.1f}"] for s, each in timed]
    return "\n".join([line, "", *format_table(["layout", "images/s, measured", "GB per rank"], rows)])
