"""What a train script does with `--parity`."""

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit.config.settings import HYBRID
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.hooks.record_tensors import Record
from colossal_vit.launch import watchdog
from colossal_vit.launch.flags import Arguments
from colossal_vit.launch.launchers import free_port
from colossal_vit.launch.startup import read_config
from colossal_vit.parity.compare import Recorded, by_key, compare
from colossal_vit.plan.report import in_forks
from colossalai.context import Config
from colossalai.legacy.core import global_context as gpc

STEPS = 3
EXACT = 1e-11  # relative difference of any tensor in fp64
# In the config's own precision a tensor may differ by so many times what it differs by from fp64, in one process.
ROUNDINGS, EPSILON = 10.0, 1e-6
LAYOUTS = ["DP 2", "PP 2", "1D 2", "2D 4", "2.5D 8", "3D 8", "DP 2 × PP 2 × 1D 2"]


def parse_layout(name: str, config: Config) -> tuple[int, dict[str, Any]]:
    """Number of processes and config values of a layout such as "DP 2 × PP 2 × 1D 2", for the config's global batch.

    Raises:
        UserError: if the name is none, or the layout does not fit the global batch.
    """
    sizes: dict[str, int] = {}
    for part in re.split(r"\s*[×x*]\s*", name):
        if not (found := re.fullmatch(r"(DP|PP|1D|2D|2\.5D|3D) (\d+)", part)) or found[1] in sizes:
            raise UserError(
                f"--parity {name!r}: must be like 'PP 2' or 'DP 2 × PP 2 × 1D 2', of DP, PP, 1D, 2D, 2.5D, 3D"
            )
        sizes[found[1]] = int(found[2])
    data, pipeline = sizes.pop("DP", 1), sizes.pop("PP", 1)
    if len(sizes) > 1:
        raise UserError(f"--parity {name!r}: only one kind of tensor parallelism at a time")
    kind, size = next(iter(sizes.items()), (None, 1))
    tensor: dict[str, Any] = {"mode": kind and kind.lower(), "size": size}
    if kind == "2.5D":
        tensor["depth"] = min((size // q**2 for q in range(2, size) if size % q**2 == 0), default=1)
    images = config.BATCH_SIZE
    if images % data:
        raise UserError(f"--parity {name!r}: BATCH_SIZE = {images} is not a multiple of {data} data-parallel ranks")
    values: dict[str, Any] = {"BATCH_SIZE": images // data, "parallel": {"pipeline": pipeline, "tensor": tensor}}
    if pipeline > 1:
        values["NUM_MICRO_BATCHES"] = config.get("NUM_MICRO_BATCHES", pipeline)
    return data * pipeline * size, values


def run(main: Callable[[Arguments], Any], args: Arguments) -> None:
    """Train a few steps in one process and in each layout that `--parity` names, and print where they part.

    Raises:
        UserError: if flags or config are not usable.
        TrainingError: if a layout differs.
    """
    config, _ = read_config(args)
    double = {"fp16": None, "DTYPE": "float64"}
    own = {} if args.own_precision else double
    hybrid = {"parallel": None, "model": None} if args.script == HYBRID else {}
    alone = {**hybrid, "gradient_accumulation": 1, "zero": None}
    with tempfile.TemporaryDirectory() as folder:
        train = partial(_train, main, args, Path(folder))
        one = train("one", 1, {**alone, **own})
        limits = dict.fromkeys(one, EXACT)
        if args.own_precision:
            exact = compare(train("exact", 1, {**alone, **double}), one)
            limits = {difference.key: ROUNDINGS * max(difference.error, EPSILON) for difference in exact}
        wrong = []
        for name in args.parity or (LAYOUTS if hybrid else LAYOUTS[:1]):
            try:
                world_size, values = parse_layout(name, config)
                if not hybrid and values.pop("parallel") != parse_layout("DP 1", config)[1]["parallel"]:
                    raise UserError(f"--parity {name!r}: this script is data parallel only")
                several = train(name, world_size, {**alone, **values, **own})
            except UserError as error:
                print(f"{name}: not tried: {error}")
                continue
            found = compare(one, several)
            first = next((each for each in found if not each.error <= limits[each.key]), None)
            if first:
                wrong.append(name)
                step, kind, layer = first.key
                print(f"{name}: differs first in step {step}, {kind} {layer}: {first.text}")
            else:
                print(f"{name}: all {len(found)} tensors of {STEPS} steps agree to {max(f.error for f in found):.0e}")
        if wrong:
            raise TrainingError(f"not what one process computes: {', '.join(wrong)}")


def _train(
    main: Callable[[Arguments], Any], args: Arguments, folder: Path, name: str, world_size: int, values: dict[str, Any]
) -> Recorded:
    """What the ranks record, each a fork of this process."""
    overrides = [*args.set, *(f"{key}={value!r}" for key, value in values.items())]
    place = dict(launcher="none", world_size=world_size, host="localhost", port=free_port(), output=folder / name)
    common = args.replace(**place, set=overrides, max_steps=STEPS, resume="never")

    def rank(number: int) -> list[Record]:
        records: list[Record] = []
        if world_size > 1:
            torch.set_num_threads(1)
        main(common.replace(rank=number, local_rank=number, record=records))
        dist.barrier()
        watchdog.current.leave()
        gpc.destroy()
        return records

    return by_key(in_forks([partial(rank, number) for number in range(world_size)]))
