"""`launch.start`: how every train script begins."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from colossal_vit import config as configs
from colossal_vit import parent
from colossal_vit.checkpoint import run_directory
from colossal_vit.compat import cpu, patches
from colossal_vit.config.check import nearest
from colossal_vit.config.settings import IMAGENET
from colossal_vit.engine import precision
from colossal_vit.errors import UserError
from colossal_vit.hooks import wandb_run
from colossal_vit.launch import watchdog
from colossal_vit.launch.flags import get_parser
from colossal_vit.launch.groups import check_granted, choose_backend, choose_device, launch_groups
from colossal_vit.launch.launchers import find_rendezvous, planned_rendezvous
from colossal_vit.launch.rendezvous import join_store
from colossal_vit.parallel.layout import Layout
from colossal_vit.parallel.ranks import RankLogger, run_on_rank_0
from colossal_vit.parallel.seeds import seed_ranks
from colossal_vit.plan import fakes
from colossal_vit.plan.search import PlanRequested
from colossal_vit.run import Run
from colossalai.context import Config
from torch.testing._internal.distributed.fake_pg import FakeStore  # and torch's backend "fake"


def start(
    description: str | None = None,
    script: str | None = None,
    check: Callable[[Config, Layout], None] | None = None,
) -> Run:
    """Parse the command line, load and check the config, create the process groups, seed, lock the run directory.

    Args:
        description: for `--help`; usually the script's docstring.
        script: one of `settings.SCRIPTS`, whose config keys and defaults apply; None allows any key.
        check: raises `UserError` if config and layout do not fit the script's model.

    Raises:
        PlanRequested: with `--plan`, once the config is loaded.
        UserError: if flags, environment, config, layout, device or run directory are not usable.
    """
    args = get_parser(description).parse_args()
    rendezvous = None if args.dry_run or args.plan is not None else find_rendezvous(args)
    if args.config is None:
        raise UserError(
            "--config FILE is missing: the Python file with the hyper-parameters, for example from configs/"
        )
    if args.wandb:
        wandb_run.check_installed()
    overrides = [*args.set, "COMPILE=True"] if args.compile else args.set
    config = configs.load(args.config, overrides, script)
    idle = configs.idle_keys(config, script)
    for key in idle:
        del config[key]
    starts_from = (config.get("finetune") or {}).get("weights")
    evaluating = "--eval-knn" if args.eval_knn else "--eval-only" if args.eval_only else None
    args.eval_only = evaluating is not None
    if evaluating and args.resume == "never" and not starts_from:
        raise UserError(
            f"{evaluating} evaluates a checkpoint, and --resume never says to take none: leave one of them out"
        )
    if args.eval_knn and script == IMAGENET:
        raise UserError("--eval-knn is for CIFAR-10 and Caltech101: DALI's loader has no training images in order")
    if args.debug_nan and config.get("COMPILE"):
        raise UserError("--debug-nan looks into the model, which COMPILE merges into one piece: leave one of them out")
    rendezvous = rendezvous or planned_rendezvous(args, config)
    output = args.output or run_directory.default(Path(sys.argv[0]), Path(args.config), overrides, args.resume)
    output = Path(os.path.realpath(output))  # relative, it would lead elsewhere once an earlier run there is renamed
    try:
        str(output).encode()
    except UnicodeEncodeError:  # TensorBoard would crash once training begins
        raise UserError(f"the run directory {output}: is not in UTF-8; give another --output") from None
    if args.plan is not None:
        world_size = rendezvous.world_size
        raise PlanRequested(args.plan, args.config, overrides, config, world_size, script, check, output)
    layout = Layout.of(config, rendezvous.world_size)
    if check is not None:
        check(config, layout)
    backend = choose_backend(args, rendezvous, layout)

    if not torch.cuda.is_available():
        cpu.enable()
    patches.apply()
    device = choose_device(rendezvous)
    if args.dry_run:
        config.pop("COMPILE", None)  # does not change memory and messages
        launch_groups(config, rendezvous, "fake", FakeStore(), args.timeout, device)
        seed_ranks(config.SEED)
        if not fakes.real_tensors:
            fakes.fake_tensors(device)
        return Run(config, layout, output, 1, device, RankLogger(0), dry_run=True)
    check_granted(args)
    parent.watch(rendezvous.launcher != "none", args.timeout)
    store = join_store(rendezvous, args.timeout)
    with watchdog.time_limit(2 * args.timeout):
        launch_groups(config, rendezvous, backend, store, args.timeout, device)
    watchdog.begin(rendezvous.rank, rendezvous.world_size, rendezvous.host)
    seed_ranks(config.SEED)
    log = RankLogger(rendezvous.rank)
    log.info(
        f"rank {rendezvous.rank} of {rendezvous.world_size} on {socket.gethostname()} ({device}, {backend}), started "
        f"by {rendezvous.found}, rendezvous at {rendezvous.host}:{rendezvous.port}",
        ranks=None,
    )
    if device.type == "cpu" and (warning := cpu.idle_gpus()):
        log.info(warning)
    log.info(
        f"{layout}; global batch {layout.global_batch(config)} = BATCH_SIZE {config.BATCH_SIZE} × "
        f"gradient_accumulation {config.gradient_accumulation} × data parallel {layout.data}"
    )
    for key, reason in idle.items():
        log.info(f"{key} does nothing in this script: {reason}")
    if config.fp16:
        log.info(f"mixed precision: {precision.describe(config.fp16, device)} on this device")

    def prepare() -> tuple[Path | None, str | None]:
        if args.resume not in ("auto", "never") and not Path(args.resume).exists():
            meant = nearest(args.resume, ("auto", "never"))
            raise UserError(f"--resume {args.resume}: no such path, and neither auto nor never{meant}")
        return run_directory.prepare(args, output, starts_from, log)

    checkpoint, started_from = run_on_rank_0(prepare)
    return Run(
        config,
        layout,
        output,
        args.max_steps,
        device,
        log,
        checkpoint=checkpoint,
        started_from=started_from,
        accept_changes=args.accept_changes,
        eval_only=args.eval_only,
        eval_knn=args.eval_knn,
        stop_on_save_error=args.on_save_error == "stop",
        wandb=args.wandb,
        profile=args.profile,
        debug_nan=args.debug_nan,
    )
