"""Compare layouts with one process: train three steps in each, and name the first tensor that differs.

    python -m tools.parity SCRIPT --config FILE [FLAG ...] [--own-precision] [LAYOUT ...]

SCRIPT is a train script, FILE and FLAG are what it takes. A LAYOUT is a product such as "PP 2 × 1D 2"; without any, the
commonest are tried. All train in float64, or with --own-precision in the precision of the config.
"""

import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from colossal_vit.checkpoint import storage
from colossal_vit.config.schema import TENSOR_MODES
from colossal_vit.errors import TrainingError, UserError
from colossal_vit.launch.flags import Arguments, get_parser
from colossal_vit.main import Build, load_script, read_config
from colossal_vit.parallel.layout import Layout, arrange
from colossalai.context import Config

from tools.parity.compare import Difference, compare, largest_of
from tools.parity.ranks import Ranks
from tools.parity.records import ACCURACIES, Key

DOUBLE = {"fp16": None, "DTYPE": "float64"}  # the config values of float64
STEPS, RESUMED = 3, 2  # steps, and the one after which a run is resumed
EXACT = 1e-11  # relative difference of any tensor in fp64
# In the config's own precision a tensor may differ by so many times what it differs by from fp64, in one process.
ROUNDINGS, EPSILON = 10.0, 1e-6
# In a single number rounding may cancel out, by chance. It may differ as much as one process's tensors do from which it
# is computed: outputs of layers, gradients.
COMPUTED_FROM = {"loss": "output", "eval_loss": "output", "ema_loss": "output", "grad_norm": "gradient of"}
DATA_PARALLEL = ["DP 2", "DP 2 × accumulation 2", "DP 2 × zero 1", "DP 2 × zero 3"]
LAYOUTS = [*DATA_PARALLEL, "PP 2", "PP 2 × micro-batches 4", "1D 2", "2D 4", "2.5D 8", "3D 8", "DP 2 × PP 2 × 1D 2"]
TENSOR = tuple(mode.upper() for mode in TENSOR_MODES)
PROCESSES = ("DP", "PP", *TENSOR)
FACTORS = (*PROCESSES, "chunks", "zero", "accumulation", "micro-batches")  # chunks: of an interleaved pipeline


def parse_layout(name: str) -> dict[str, int]:
    """Return the factors of a layout such as "DP 2 × PP 2 × 1D 2".

    Raises:
        UserError: if the name is none.
    """
    factors: dict[str, int] = {}
    for part in re.split(r"\s*[×x*]\s*", name):
        word, _, number = part.partition(" ")
        if word not in FACTORS or word in factors or not re.fullmatch("[1-9][0-9]*", number):
            raise UserError(f"layout {name!r}: must be like 'PP 2' or 'DP 2 × PP 2 × 1D 2', of {', '.join(FACTORS)}")
        factors[word] = int(number)
    if len(factors.keys() & set(TENSOR)) > 1:
        raise UserError(f"layout {name!r}: only one kind of tensor parallelism at a time")
    return factors


def num_processes(factors: dict[str, int]) -> int:
    """Return how many processes a layout has."""
    return math.prod(number for word, number in factors.items() if word in PROCESSES)


def layout_values(factors: dict[str, int], config: Config) -> dict[str, Any]:
    """Return the config values of a layout, for the config's BATCH_SIZE as the global batch.

    Raises:
        UserError: if the layout does not fit that.
    """
    data, accumulation, pipeline = (factors.get(key, 1) for key in ("DP", "accumulation", "PP"))
    kind = next((key for key in TENSOR if key in factors), None)
    size = factors.get(kind, 1)
    tensor: dict[str, Any] = {"mode": kind and kind.lower(), "size": size}
    if kind == "2.5D":
        tensor["depth"] = min((size // q**2 for q in arrange("2.5d", size)), default=1)
    images = config.BATCH_SIZE
    if images % (data * accumulation):
        raise UserError(
            f"BATCH_SIZE = {images} is not a multiple of {data} data-parallel ranks × {accumulation} micro-steps"
        )
    values: dict[str, Any] = {
        "BATCH_SIZE": images // data // accumulation,
        "gradient_accumulation": accumulation,
        "zero": {"stage": factors["zero"]} if "zero" in factors else None,
        "parallel": {"pipeline": pipeline, "tensor": tensor},
    }
    if "chunks" in factors:
        values["model"] = {"num_chunks": factors["chunks"]}
    if pipeline > 1:
        values["NUM_MICRO_BATCHES"] = factors.get("micro-batches", config.get("NUM_MICRO_BATCHES", pipeline))
    return values


def parse(words: Sequence[str] | None = None) -> tuple[Build, Arguments]:
    """Return the `build` of the train script that a command line names, and its arguments with `layouts` and
    `own_precision`.

    Args:
        words: the command line, by default this process's.

    Raises:
        UserError: if the script or a flag is wrong.
    """
    parser = get_parser(__doc__)
    parser.prog = "python -m tools.parity"
    parser.add_argument("path", metavar="SCRIPT", help="a train script")
    parser.add_argument(
        "layouts", nargs="*", default=[], metavar="LAYOUT", help="such as 'PP 2 × 1D 2' (default: the commonest)"
    )
    parser.add_argument("--own-precision", action="store_true", help="the config's precision instead of float64")
    parsed = parser.check(parser.parse_intermixed_args(words, Arguments()))
    if parsed.dry_run or parsed.eval_only:
        raise UserError("parity compares layouts that train: leave out --dry-run and --eval-only")
    script = load_script(parsed.path)
    return script.build, script.parse([]).replace(**vars(parsed))


def run(build: Build, args: Arguments) -> None:
    """Train a few steps in one process and in each of `args.layouts`, and print where they part.

    Raises:
        UserError: if flags or config are not usable, or no layout can be tried.
        TrainingError: if a layout differs or fails.
    """
    config, _ = read_config(args)
    named = {name: parse_layout(name) for name in args.layouts}
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(build, args, config, Path(folder))
        outcomes = {}
        for name, factors in (named or comparison.default_layouts()).items():
            outcomes[name], text = comparison.outcome(factors)
            if comparison.ranks.launched.rank == 0:
                print(f"{name}: {text}", flush=True)
        comparison.ranks.leave()
    if wrong := [name for name, agrees in outcomes.items() if agrees is False]:
        raise TrainingError(f"not what one process computes: {', '.join(wrong)}")
    if not any(outcomes.values()):
        raise UserError("no layout could be tried")


class Comparison:
    """One process, which has trained, and the layouts that are compared with it.

    Args:
        build, args: of the train script.
        config: of the command line.
        folder: for run directories.

    Raises:
        UserError: if the config cannot be trained in one process, or makes too few steps.
    """

    def __init__(self, build: Build, args: Arguments, config: Config, folder: Path):
        self.config, self.folder, self.has_stages = config, folder, "model" in config
        self.own_precision = args.own_precision
        self.ranks = Ranks(build, args)
        self.alone = {
            "gradient_accumulation": 1,
            "zero": None,
            "parallel": None,
            "COMPILE": False,  # which merges layers into one piece
            "checkpoint": {"every_steps": 1, "keep": STEPS},
        }
        self.alone |= {"model": None} if self.has_stages else {}
        self.alone |= {} if self.own_precision else DOUBLE
        self.one = self.ranks.train(1, self.alone, folder / "one", STEPS)
        if self.one and (made := max(step for step, *_ in self.one)) < STEPS:
            raise UserError(f"parity compares {STEPS} steps, but this config makes {made}: raise NUM_EPOCHS")
        self.limits = self._limits_of_rounding() if self.own_precision else dict.fromkeys(self.one, EXACT)

    def _limits_of_rounding(self) -> dict[Key, float]:
        """Return how much each tensor may differ in the config's own precision, relative to its largest value."""
        exact = self.ranks.train(1, {**self.alone, **DOUBLE}, self.folder / "exact", STEPS)
        apart = {key: error for key, error, _ in compare(exact, self.one) if key in exact and key in self.one}
        limits = dict.fromkeys(self.one, ROUNDINGS * EPSILON)
        limits |= {key: ROUNDINGS * max(error, EPSILON) for key, error in largest_of(apart, self.one).items()}
        last = {key[:2]: limit for key, limit in limits.items()}
        for step, kind, _ in self.one:
            if kind in COMPUTED_FROM:
                limits[step, kind, ""] = max(last[step, kind], last[step, COMPUTED_FROM[kind]] / ROUNDINGS)
        # Rounding may put an image into another class.
        return limits | {key: math.inf for key in self.one if key[1] in ACCURACIES}

    def default_layouts(self) -> dict[str, dict[str, int]]:
        """Return the layouts that are tried if none is named; under a launcher, those with as many processes as it
        started.
        """
        names = LAYOUTS if self.has_stages else DATA_PARALLEL
        if self.ranks.store is not None:
            names = [Layout.of(self.config, self.ranks.launched.world_size).short, *names]
        layouts = {name: parse_layout(name) for name in names}
        return {name: factors for name, factors in layouts.items() if self._has_processes(factors)}

    def _has_processes(self, factors: dict[str, int]) -> bool:
        return self.ranks.store is None or num_processes(factors) == self.ranks.launched.world_size

    def outcome(self, factors: dict[str, int]) -> tuple[bool | None, str]:
        """Tell whether a layout agrees with one process, None if it cannot be tried; and what there is to say of it."""
        found: list[list[Difference]] = []
        try:
            if not self._has_processes(factors):
                raise UserError(
                    f"has {num_processes(factors)} processes, but {self.ranks.launched.world_size} were started"
                )
            values = {**self.alone, **layout_values(factors, self.config)}
            for how, differences in self._differences(num_processes(factors), values):
                if text := self.ranks.of_first(self._first(how, differences)):
                    return False, text
                found.append(differences)
        except UserError as error:
            return (False, f"cannot be resumed: {error}") if found else (None, f"not tried: {error}")
        except TrainingError as error:
            return False, str(error)
        everything = list(chain.from_iterable(found))
        largest = max((d.error for d in everything), default=0.0)
        text = f"all {len(everything)} tensors of {STEPS} steps agree to {largest:.0e}"
        if self.own_precision:
            times = max((ROUNDINGS * d.error / self.limits[d.key] for d in everything), default=0.0)
            text += f", at most {times:.1f} times as far apart as one process is from float64"
        return True, text

    def _first(self, how: str, differences: Iterable[Difference]) -> str:
        """Return the first tensor that differs by more than its limit, in words; empty if there is none."""
        for (step, kind, layer), error, text in differences:
            if not error <= self.limits.get((step, kind, layer), EXACT):
                return f"differs first in step {step}, {f'{kind} {layer}'.strip()}: {how}{text}"
        return ""

    def _differences(self, world_size: int, values: dict[str, Any]) -> Iterator[tuple[str, list[Difference]]]:
        """Yield how a layout differs that trains, then resumes one process's checkpoint; then one that resumes its."""
        train = self.ranks.train
        last = {key: pieces for key, pieces in self.one.items() if key[0] == STEPS}
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            whole = Path(own, "whole")
            yield "", compare(self.one, train(world_size, values, whole, STEPS))
            several = train(world_size, values, Path(own, "resumed"), STEPS, _checkpoint(self.folder / "one"))
            yield "resumed from the checkpoint of one process, ", compare(last, several)
            one = train(1, self.alone, Path(own, "one"), STEPS, _checkpoint(whole))
            yield "one process, resumed from this layout's checkpoint: ", compare(last, one)


def _checkpoint(output: Path) -> Path:
    return output / storage.FOLDER / f"step-{RESUMED:08d}"
