"""From the command line to running process groups, and back to one clear line when something is wrong.

Every train script is `launch.run(main)`, and `main` begins with `launch.start(...)`.
"""

import argparse
import errno
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import colossalai.legacy as colossalai
import torch
import torch.distributed as dist
from colossal_vit import config as configs
from colossal_vit import dry_run, host, lock, parent, patches, precision, run_directory
from colossal_vit.errors import Preempted, TrainingError, UserError
from colossal_vit.peers import Peers
from colossal_vit.ranks import RankLogger, from_rank_0, on_one_rank, say
from colossal_vit.rendezvous import (
    LAUNCHERS,
    Rendezvous,
    find_rendezvous,
    interface_towards,
    meet,
    own_place,
    stranger_at,
)
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.context.random import add_seed, reset_seeds, set_mode
from colossalai.legacy.core import global_context as gpc

DEFAULT_TIMEOUT = 300.0  # seconds that a rank waits for another one before it gives up
STRANGER_GRACE = 6.0  # seconds after which a rank that cannot join looks who it is talking to
PEER_GRACE = 5.0  # seconds that a rank which lost a connection waits to be told who died

_peers: Peers | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the flags)")


def get_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Colossal-AI's own flags and those that every train script here adds."""
    parser = _Parser(
        description=description,
        parents=[colossalai.get_default_parser()],
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(backend=None)
    parser.add_argument("--local-rank", dest="local_rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--launcher",
        choices=("auto", *LAUNCHERS),
        default="auto",
        help="who started the processes; none: by hand, with --rank --world_size --host --port, or a single one",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the config with a Python literal; repeatable, nested keys with dots",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long a rank waits for another one, at the start and later (default %(default)g)",
    )
    parser.add_argument(
        "--output", type=Path, help="run directory (default: runs/<example>/<script>/<config>,KEY=VALUE,...)"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on from the newest checkpoint in the run directory that holds (the default), begin anew, or go on "
        "from this one",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume a checkpoint with other data, or other values that change what is learned; it is put on record",
    )
    parser.add_argument("--eval-only", action="store_true", help="evaluate a checkpoint, and train nothing")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N optimizer steps, with a checkpoint")
    parser.add_argument(
        "--on-save-error",
        choices=("go-on", "stop"),
        default="go-on",
        help="what to do when a checkpoint cannot be written; the last one of a run always has to be",
    )
    parser.add_argument("--compile", action="store_true", help="the same as --set COMPILE=True: use torch.compile")
    parser.add_argument("--profile", action="store_true", help="time the parts of steps, and trace one")
    parser.add_argument("--debug-nan", action="store_true", help="name the first module whose output is not finite")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print what each rank of the layout (on --world_size processes) would hold and send",
    )
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Start
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A started run: what `main` needs to know.

    Attributes:
        config: the resolved config, also `gpc.config`.
        layout: how the processes share the work.
        output: the run directory; exists.
        max_steps: optimizer steps to stop after, or None.
        checkpoint: to resume, or None; only rank 0 reads it.
        started_from: the `--resume PATH` that this run began with, or None.
        data: what identifies the images, once they are read; see `data.identify`.
        accept_changes: whether other data, or values that change what is learned, may resume a checkpoint.
        changes: those that were accepted, and after which step.
        best: accuracy and step of the best evaluation so far, once `state.resume` knows of one.
        eval_only: whether to evaluate that checkpoint and no more.
        stop_on_save_error: whether a checkpoint that cannot be written ends the run.
        device: this rank's device.
        log: see `RankLogger`.
        profile: whether to add `hooks.ProfileHook`.
        debug_nan: whether to add `hooks.DebugNanHook`.
        dry_run: whether there are no data, no tensors and no other ranks, and `main` is to return what
            `dry_run.measure` says of its engine.
    """

    config: Config
    layout: configs.Layout
    output: Path
    max_steps: int | None
    device: torch.device
    log: RankLogger
    checkpoint: Path | None = None
    started_from: str | None = None
    data: dict[str, Any] | None = None
    accept_changes: bool = False
    changes: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    eval_only: bool = False
    stop_on_save_error: bool = False
    profile: bool = False
    debug_nan: bool = False
    dry_run: bool = False


def _backend(args: argparse.Namespace, meeting: Rendezvous) -> str:
    available = torch.cuda.is_available()
    backend = args.backend or ("nccl" if available else "gloo")
    if backend not in ("nccl", "gloo"):
        raise UserError(f"--backend {backend}: must be nccl (with CUDA) or gloo")
    if backend == "nccl" and not available:
        raise UserError("--backend nccl needs CUDA, which this machine lacks: leave the flag out or use gloo")
    if available and _device_number(meeting) >= torch.cuda.device_count():
        raise UserError(
            f"rank {meeting.rank} would be process {meeting.local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPU(s): start one process a GPU"
        )
    return backend


def _device_number(meeting: Rendezvous) -> int:
    """Which of the GPUs that this process sees is its own."""
    bound = meeting.launcher in ("slurm", "openmpi") and torch.cuda.device_count() == 1
    return 0 if bound else meeting.local_rank  # a launcher may show each process its own GPU only


def _device(meeting: Rendezvous) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", _device_number(meeting)) if torch.cuda.is_available() else torch.device("cpu")


def _end_at_strangers(meeting: Rendezvous, joined: threading.Event) -> None:
    """End this process if joining takes suspiciously long, and something that is not rank 0 is why."""
    if not joined.wait(timeout=STRANGER_GRACE):
        error = stranger_at(meeting)
        if error is not None and not joined.is_set():
            _print(error)
            os._exit(error.exit_code)


def _join(meeting: Rendezvous, timeout: float) -> dist.Store:
    """Meet the other ranks.

    Raises:
        UserError: if they are not all there in time, or not as they should be.
    """
    place = f"{meeting.host}:{meeting.port}"
    if (interface := interface_towards(meeting.host)) is not None:
        for library in ("GLOO", "NCCL"):  # which else take the first interface, or what the machine's name means
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    joined = threading.Event()
    if meeting.rank > 0 and meeting.launcher != "torch":  # torchrun itself keeps the store of its workers
        threading.Thread(target=_end_at_strangers, args=(meeting, joined), daemon=True).start()
    try:
        return meet(meeting, timeout)
    except dist.DistNetworkError as error:
        reason = str(error).splitlines()[0]
    except dist.DistStoreError as error:
        reason = f"{str(error).splitlines()[0]} (--timeout {timeout:g})"
    except OSError as error:
        reason = "the port is already in use" if error.errno == errno.EADDRINUSE else error.strerror
    finally:
        joined.set()
    raise UserError(
        f"rank {meeting.rank} of {meeting.world_size} cannot meet the others at {place}: {reason}", own=True
    )


def _launch(
    config: Config, meeting: Rendezvous, backend: str, store: dist.Store, timeout: float, device: torch.device
) -> None:
    """Have Colossal-AI make the process groups, with the launch function that fits the launcher."""
    common = {"config": config, "backend": backend, "seed": config.SEED, "verbose": False}
    where = {"host": meeting.host, "port": meeting.port}
    with patches.groups(store, timeout, device):
        if meeting.launcher == "torch":
            os.environ.update(MASTER_ADDR=meeting.host, MASTER_PORT=str(meeting.port))
            colossalai.launch_from_torch(**common)
        elif meeting.launcher == "slurm":
            os.environ.setdefault("SLURM_NPROCS", os.environ["SLURM_NTASKS"])
            colossalai.launch_from_slurm(**common, **where)
        elif meeting.launcher == "openmpi":
            colossalai.launch_from_openmpi(**common, **where)
        else:
            place = dict(rank=meeting.rank, world_size=meeting.world_size, local_rank=meeting.local_rank)
            colossalai.launch(**common, **where, **place)


def seed_ranks(seed: int) -> None:
    """Seed every rank, on CPU and CUDA alike.

    Two streams of random numbers: DATA for activations that the tensor-parallel ranks hold in common, TENSOR for those
    they split. Both differ between data-parallel ranks and pipeline stages. In 2.5D the ranks of one depth split the
    activations, and those of another depth hold the same once more.
    """
    tensor = gpc.config.parallel.tensor
    part = gpc.get_local_rank(ParallelMode.TENSOR) % (tensor.size // tensor.get("depth", 1))
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if gpc.is_initialized(ParallelMode.PIPELINE) else 0
    replica = gpc.get_local_rank(ParallelMode.DATA)
    reset_seeds()
    base = seed + 1_000_003 * (stage * gpc.get_world_size(ParallelMode.DATA) + replica)
    add_seed(ParallelMode.DATA, base)
    add_seed(ParallelMode.TENSOR, base + 1009 * (1 + part))
    set_mode(ParallelMode.DATA)


def start(
    description: str | None = None,
    required: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    check: Callable[[Config, configs.Layout], None] | None = None,
) -> Run:
    """Parse the command line, load and check the config, join the process groups, seed, make the run directory.

    Args:
        description: for `--help`; the first lines of the script's docstring.
        required: config keys that the script cannot do without.
        defaults: config keys it has a default for.
        check: raises `UserError` if config and layout do not fit the script's model.

    Raises:
        UserError: for everything that is wrong with what the user gave.
    """
    script = Path(sys.argv[0]).resolve()
    args = get_parser(description).parse_args()
    meeting = None if args.dry_run else find_rendezvous(args)
    if args.config is None:
        raise UserError(
            "--config FILE is missing: the Python file with the hyper-parameters, for example from configs/"
        )
    if args.max_steps is not None and args.max_steps < 1:
        raise UserError(f"--max-steps {args.max_steps}: must be at least 1")
    if not args.timeout > 0:
        raise UserError(f"--timeout {args.timeout:g}: must be a number of seconds above 0")
    overrides = [*args.set, "COMPILE=True"] if args.compile else args.set
    config = configs.load(args.config, overrides, required, {"SEED": 1024, **(defaults or {})}, script)
    if args.eval_only and args.resume == "never":
        raise UserError(
            "--eval-only evaluates a checkpoint, and --resume never says to take none: leave one of them out"
        )
    if args.debug_nan and config.get("COMPILE"):
        raise UserError("--debug-nan looks into the model, which COMPILE merges into one piece: leave one of them out")
    meeting = meeting or dry_run.place(args, config)
    layout = configs.Layout.of(config, meeting.world_size)
    if check is not None:
        check(config, layout)
    backend = _backend(args, meeting)
    output = args.output or run_directory.default(script, Path(args.config), overrides, args.resume)

    if not torch.cuda.is_available():
        host.enable()
    patches.apply()
    device = _device(meeting)
    if args.dry_run:
        config.pop("COMPILE", None)  # does not change what is held and sent
        with dry_run.no_peers():
            _launch(config, meeting, backend, dist.HashStore(), args.timeout, device)
        seed_ranks(config.SEED)
        dry_run.no_tensors(device)
        return Run(config, layout, output, 1, device, RankLogger(0), dry_run=True)
    parent.watch(meeting.launcher != "none", args.timeout)
    _launch(config, meeting, backend, _join(meeting, args.timeout), args.timeout, device)
    global _peers
    _peers = Peers(meeting.rank, meeting.world_size, meeting.host)
    seed_ranks(config.SEED)
    log = RankLogger(meeting.rank)
    log.info(
        f"rank {meeting.rank} of {meeting.world_size} on {socket.gethostname()} ({device}, {backend}), started by "
        f"{meeting.found}, meeting at {meeting.host}:{meeting.port}",
        ranks=None,
    )
    if device.type == "cpu" and (warning := host.idle_gpus()):
        log.info(warning)
    global_batch = config.BATCH_SIZE * config.gradient_accumulation * layout.data
    log.info(
        f"{layout}; global batch {global_batch} = BATCH_SIZE {config.BATCH_SIZE} × gradient_accumulation "
        f"{config.gradient_accumulation} × data parallel {layout.data}"
    )
    if config.fp16:
        log.info(f"mixed precision: {precision.describe(config.fp16, device)} on this device")
    found = []
    on_one_rank(lambda: found.extend(run_directory.prepare(args, output, log)))
    checkpoint, started_from = from_rank_0(found or None)
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
        stop_on_save_error=args.on_save_error == "stop",
        profile=args.profile,
        debug_nan=args.debug_nan,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


def _may_speak(error: Exception) -> bool:
    """Whether this rank is the one that prints an error that others may have too.

    Once the ranks have met, the first to ask their common store is. Before, rank 0 is; another rank waits, and then
    speaks unless nobody listens where rank 0 would, so that it seems to have ended of the same error.
    """
    if dist.is_initialized():
        with suppress(Exception):  # the store is gone with rank 0, which has spoken
            return dist.distributed_c10d._get_default_store().add("error-printed", 1) == 1
        return False
    rank, host_name, port = own_place()
    if rank == 0 or getattr(error, "own", False):
        return True
    time.sleep(5)  # a launcher that ends all ranks with the first does it now
    if not host_name or not port or not port.isdigit():
        return True
    try:
        socket.create_connection((host_name, int(port)), timeout=2).close()
        return True
    except (OSError, OverflowError):
        return False


def _print(error: Exception) -> None:
    say(f"{Path(sys.argv[0]).name}: error: {error}", sys.stderr)


def _lost_connection(error: BaseException) -> bool:
    """Whether an error may only be the echo of another rank's end."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection reset by peer" in str(error)


def run(main: Callable[[], None]) -> None:
    """Call `main` and end the process: exit code 0, 2 for a user's mistake, 75 when told to stop, 130 by Ctrl-C, 1 for
    anything else.

    A `UserError`, `TrainingError` or `Preempted` becomes one line on stderr, printed by one rank. When one rank ends
    early, all do.
    """
    if "--dry-run" in sys.argv[1:]:
        main = functools.partial(dry_run.report, main)
    code = 0
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
            _peers.leave()
            gpc.destroy()
    except (UserError, TrainingError, Preempted) as error:
        code = error.exit_code
        lock.leave_nothing()
        if _peers is not None:
            _peers.leaving.set()  # another rank's goodbye must not cut the line off
        if _may_speak(error):
            _print(error)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = 1
        if _peers is not None and _lost_connection(error):
            time.sleep(PEER_GRACE)  # if it is, `peers` ends this process now
        traceback.print_exc()
    if code:
        if _peers is not None:
            _peers.leave(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # destructors of a process group whose other members are gone may hang
