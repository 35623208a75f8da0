"""Slips in engine, optimizers, precision, hooks, evaluation, launch signals and the plan."""

from slips import Slip

SLIPS: list[Slip] = [
    Slip(
        "SGD without its momentum",
        "colossal_vit/engine/optimizers.py",
        "groups, momentum=config.MOMENTUM",
        "groups",
        ("tests/test_optim.py::test_built_optimizer_has_epsilon_and_decays_of_the_config",),
    ),
    Slip(
        "schedule without warm-up",
        "colossal_vit/engine/schedules.py",
        "if step < warmup_steps:",
        "if step < 0:",
        ("tests/test_optim.py::test_schedule_has_the_warm_up_in_epochs",),
    ),
]
