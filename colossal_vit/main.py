"""How every train script is run: `Script`, `start`. The only module that knows all others."""

import inspect
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit.checkpoint import run_directory
from colossal_vit.checkpoint.checkpointer import Checkpointer
from colossal_vit.compat import cpu
from colossal_vit.config.schema import SCHEMA
from colossal_vit.config.settings import Settings
from colossal_vit.data.loaders import expected_classes, find_loader, import_file, import_loader
from colossal_vit.engine import Training, precision
from colossal_vit.errors import UserError
from colossal_vit.hooks import wandb_run
from colossal_vit.launch import parent
from colossal_vit.launch.agreement import common
from colossal_vit.launch.elastic import ExitStore, wait_without_work
from colossal_vit.launch.exits import Exits
from colossal_vit.launch.flags import Arguments, parse
from colossal_vit.launch.groups import check_granted, choose_backend, launch_groups, prepare_device
from colossal_vit.launch.launchers import Rendezvous, find_rendezvous, ignored_flags, launched_rank, planned_rendezvous
from colossal_vit.launch.rendezvous import join_store
from colossal_vit.launch.watchdog import time_limit
from colossal_vit.parallel import elastic
from colossal_vit.parallel.collectives import RankLogger, all_gather_object
from colossal_vit.parallel.layout import Layout
from colossal_vit.run import Run
from colossalai.context import Config

__all__ = ["Arguments", "Run", "Script", "load_script", "start"]

Build = Callable[[Run], Training]
Check = Callable[[Config, Layout], None]
Notes = Callable[[Config, Path, int], list[str]]


@dataclass(frozen=True)
class Script:
    """A train script, for its own command line and for whatever else looks at what it trains.

    Attributes:
        main: trains or evaluates.
        build: builds what trains.
        description: for `--help`; usually the script's docstring.
        settings, check, notes: those of its `Arguments`.
        loader: the file beside the script that reads data, unless the config has LOADER.
    """

    main: Callable[[Arguments], Any]
    build: Build
    description: str | None = None
    settings: Settings = field(default_factory=dict)
    check: Check | None = None
    notes: Notes | None = None
    loader: str | None = None

    def parse(self, words: Sequence[str] | None = None) -> Arguments:
        """Return the arguments in a command line, by default this process's.

        Raises:
            UserError: if a flag is wrong.
        """
        loader = Path(inspect.getfile(self.main)).resolve().with_name(self.loader) if self.loader else None
        of_script = dict(settings=self.settings, check=self.check, notes=self.notes, loader=loader)
        return parse(words, self.description, **of_script)

    def load(self, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Return the config in a file, as the script resolves it.

        Raises:
            UserError: if it is not usable, see `config.load`.
        """
        args = self.parse(["--config", str(path), *(f"--set={text}" for text in overrides)])
        return configs.load(path, overrides, schema_of(args, configs.written(path, overrides, "LOADER")))

    def run(self) -> None:
        """Do what this process's command line says, and end the process if it fails, see `Exits.call`."""
        exits = Exits()

        def act() -> None:
            args = self.parse().replace(exits=exits)
            if not args.dry_run:
                self.main(args)
            elif launched_rank() == 0:  # under a launcher, one process answers for all
                self._dry_run(args)

        exits.call(act)

    def build_fake(self, args: Arguments, rank: int = 0) -> Training:
        """Return what the script builds for one rank of any layout, on fake tensors, which compute nothing."""
        # No training needs these.
        from colossal_vit.dry_run.fakes import fake_tensors
        from torch.testing._internal.distributed.fake_pg import FakeStore  # and torch's backend "fake"

        return self.build(start_alone(args, rank, FakeStore(), fake_tensors))

    def _dry_run(self, args: Arguments) -> None:
        """Print what each rank would hold and send, and draw the layout in the run directory."""
        from colossal_vit.dry_run import report  # no training needs it

        report.run(partial(self.build_fake, args), find_output(args), args.notes)


def load_script(path: str | Path) -> Script:
    """Return the `SCRIPT` of a train script. Its folder comes first on `sys.path`, as when Python runs it.

    Raises:
        UserError: if there is no such file, or it is no train script.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such train script")
    sys.path.insert(0, str(path.parent))
    script = getattr(import_file(path), "SCRIPT", None)
    if not isinstance(script, Script):
        raise UserError(f"{path}: has no SCRIPT = Script(...), as train scripts have")
    return script


def schema_of(args: Arguments, loader: str | None = None) -> Settings:
    """Return all keys that the config of a command line may have: common ones, those of the script and those of its
    loaders.

    Args:
        args: the command line.
        loader: the value of LOADER, if it has one.

    Raises:
        UserError: if there is no file that LOADER names.
    """
    loaders = [args.loader, find_loader(args, {"LOADER": loader})]
    found = [getattr(import_file(path), "SETTINGS", {}) for path in loaders if path]
    return {key: setting for settings in (SCHEMA, args.settings, *found) for key, setting in settings.items()}


def read_config(args: Arguments, more: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """Return the config of a command line, checked against its other flags; and the keys that it leaves out, with
    reasons.

    Args:
        args: the command line.
        more: overrides as in `--set`, after those.

    Raises:
        UserError: if flags or config are not usable.
    """
    if args.config is None:
        raise UserError(
            "--config FILE is missing: the Python file with the hyper-parameters, for example from configs/"
        )
    if args.wandb:
        wandb_run.check_installed()
    overrides = [*args.set, *more]
    loader = configs.written(args.config, overrides, "LOADER")
    schema = schema_of(args, loader)
    config = configs.load(args.config, overrides, schema)
    if config.get("LOADER") != loader:
        raise UserError(
            f"LOADER = {config.get('LOADER')}: must be written as a string, since it brings keys of its own"
        )
    idle = configs.idle_keys(config, schema)
    for key in idle:
        del config[key]
    if args.dry_run or config.get("SYNTHETIC"):
        _resolve_num_classes(args, config)
    if args.eval_only and args.resume == "never" and not (config.finetune or {}).get("weights"):
        raise UserError(
            "--eval-only evaluates a checkpoint, and --resume never says to take none: leave one of them out"
        )
    if args.eval_only:
        config.gradient_accumulation = 1  # so many images may be more than the training set has, on more processes
    if config.COMPILE == "auto" and (args.debug_nan or args.eval_only):
        config.COMPILE = False  # it would merge the layers that the one looks into, and take longer than the other
    if args.debug_nan and config.COMPILE:
        raise UserError("--debug-nan looks into the model, which COMPILE merges into one piece: leave one of them out")
    return config, idle


def _resolve_num_classes(args: Arguments, config: Config) -> None:
    """Set NUM_CLASSES, unless the config has it, where no data say it."""
    if "NUM_CLASSES" not in config:
        config.NUM_CLASSES = expected_classes(config, import_loader(args, config))


def find_output(args: Arguments) -> Path:
    """Return the run directory of a command line.

    Raises:
        UserError: if its name is not in UTF-8.
    """
    output = args.output or run_directory.default(Path(sys.argv[0]), Path(args.config), args.set, args.resume)
    output = Path(os.path.realpath(output))  # has a name, whatever way leads to it
    try:
        str(output).encode()
    except UnicodeEncodeError:  # TensorBoard would crash once training begins
        raise UserError(f"the run directory {output}: is not in UTF-8; give another --output") from None
    return output


def _choose_layout(args: Arguments, config: Config, size: int) -> tuple[Config, Layout]:
    """Return the layout of `size` processes, and the config for it, which only ELASTIC changes.

    Raises:
        UserError: if they do not fit each other.
    """
    if config.ELASTIC:
        return elastic.choose_layout(config, size, lambda more: read_config(args, more)[0], args.check)
    layout = Layout.of(config, size)
    if args.check is not None:
        args.check(config, layout)
    return config, layout


def start_alone(args: Arguments, rank: int, store: dist.Store, prepare: Callable[[torch.device], None]) -> Run:
    """Start one rank of a layout whose other ranks do not exist: messages go nowhere, and there are no data.

    Args:
        args: of the train script.
        rank: that this process plays.
        store: of the process groups, whose backend is torch's "fake".
        prepare: called with the device, once they exist.

    Raises:
        UserError: if flags, config or layout are not usable.
    """
    config, _ = read_config(args)
    _resolve_num_classes(args, config)
    rendezvous = planned_rendezvous(args, config, rank)
    config, layout = _choose_layout(args, config, rendezvous.world_size)
    rendezvous.world_size = layout.world_size
    choose_backend(args, rendezvous, layout)  # refuses what the run itself would
    device = prepare_device(config.DTYPE, rendezvous)
    config.COMPILE = False  # does not change memory and messages
    config = launch_groups(config, rendezvous, "fake", store, args.timeout, device)
    prepare(device)
    return Run(args, config, layout, find_output(args), device, RankLogger(0), args.exits, alone=True)


def _log_places(log: RankLogger, rendezvous: Rendezvous, devices: str) -> None:
    """Log where the ranks run, and who started them: one line for ranks in a row that have the same to say."""
    places = enumerate(all_gather_object((socket.gethostname(), devices, rendezvous.found)))
    for (host, its_devices, found), members in groupby(places, key=itemgetter(1)):
        first, *others = (rank for rank, _ in members)
        ranks = f"ranks {first} to {others[-1]}" if others else f"rank {first}"
        log.info(
            f"{ranks} of {rendezvous.world_size} on {host} ({its_devices}), started by {found}, rendezvous at "
            f"{rendezvous.host}:{rendezvous.port}"
        )


def start(args: Arguments) -> Run:
    """Load and check the config, create the process groups, seed, lock the run directory.

    Args:
        args: as a script's `main` gets them.

    Raises:
        UserError: if flags, environment, config, layout, device or run directory are not usable.
    """
    rendezvous = find_rendezvous(args)
    config, idle = read_config(args)
    output = find_output(args)
    wanted, size = config, rendezvous.world_size
    if config.ELASTIC and args.resume == "never" and rendezvous.launcher == "torch":  # which counts no restart then
        raise UserError(
            "--resume never would start from scratch whenever a machine joins: give another --output instead"
        )
    config, layout = _choose_layout(args, config, size)
    backend = choose_backend(args, rendezvous, layout)
    check_granted(args)
    parent.watch(rendezvous.launcher != "none", args.timeout)
    store = join_store(rendezvous, args.timeout, common(args, wanted, backend, find_loader(args, wanted)))
    if rendezvous.rank >= layout.world_size:
        wait_without_work(store, rendezvous, args.timeout)
    rendezvous.world_size = layout.world_size
    device = prepare_device(config.DTYPE, rendezvous)
    if config.ELASTIC and rendezvous.rank == 0:
        args.exits.add(ExitStore(store, range(layout.world_size, size)).announce)
    with time_limit(2 * args.timeout):
        config = launch_groups(config, rendezvous, backend, store, args.timeout, device)
    args.exits.watch(rendezvous.rank, rendezvous.world_size, rendezvous.host)
    log = RankLogger(rendezvous.rank)
    _log_places(log, rendezvous, f"{device.type}, {backend}")
    if ignored := ignored_flags(args, rendezvous):
        log.info(f"{', '.join(ignored)} ignored: {rendezvous.found} says where the ranks meet")
    if device.type == "cpu" and (warning := cpu.idle_gpus()):
        log.info(warning)
    if config.ELASTIC:
        log.info(elastic.describe(wanted, config, size, layout))
    log.info(
        f"{layout}; global batch {layout.global_batch(config)} = BATCH_SIZE {config.BATCH_SIZE} × "
        f"gradient_accumulation {config.gradient_accumulation} × data parallel {layout.data}"
    )
    log.info(
        f"recipe: {config.OPTIMIZER}, LEARNING_RATE {config.LEARNING_RATE}, WEIGHT_DECAY {config.WEIGHT_DECAY}, "
        f"{config.SCHEDULE} schedule, {config.WARMUP_EPOCHS} of {config.NUM_EPOCHS} epochs of warm-up, "
        f"LABEL_SMOOTHING {config.LABEL_SMOOTHING}"
    )  # a config may leave some of it to defaults
    for key, reason in idle.items():
        log.info(f"{key} does nothing in this script: {reason}")
    if config.fp16:
        log.info(f"mixed precision: {precision.describe(config.fp16, device)} on this device")

    run = Run(args, config, layout, output, device, log, args.exits, schema_of(args, config.get("LOADER")))
    run.checkpointer = Checkpointer(run)
    run.checkpointer.prepare()
    if args.output is None:
        log.info(f"run directory: {run.output}")
    return run
