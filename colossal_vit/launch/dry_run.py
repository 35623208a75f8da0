"""`--dry-run`: what a train script builds on fake tensors, and the report of it."""

from functools import partial

from colossal_vit.dry_run import pictures, report
from colossal_vit.dry_run.fakes import fake_tensors
from colossal_vit.dry_run.meter import StepPlan
from colossal_vit.engine import Training
from colossal_vit.launch.flags import Arguments, Build
from colossal_vit.launch.startup import find_output, start_alone
from colossalai.context import Config
from torch.testing._internal.distributed.fake_pg import FakeStore  # and torch's backend "fake"


def build_fake(build: Build, args: Arguments, rank: int = 0) -> Training:
    """What a script builds for one rank of any layout, on fake tensors, which compute nothing."""
    return build(start_alone(args, rank, FakeStore(), fake_tensors))


def plan_rank(build: Build, args: Arguments, rank: int) -> StepPlan:
    """The plan of what a train script builds, for one rank."""
    return report.plan_rank(partial(build_fake, build, args), rank)


def plan(build: Build, args: Arguments) -> list[StepPlan]:
    """The plans for the first rank of each pipeline stage."""
    return report.plan_stages(partial(build_fake, build, args))


def run(build: Build, args: Arguments) -> None:
    """Print the report of a train script, and draw the layout in the run directory."""
    plans, output = plan(build, args), find_output(args)
    notes = args.notes(Config(plans[0].config), output, plans[0].layout.data) if args.notes else []
    print(report.format_report(plans, notes))
    print(f"\n{pictures.write(report.draw_layout(plans), output / 'layout.png')}")
