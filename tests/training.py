"""Train in tests: a script, its config, values, a number of ranks; what it then printed and recorded.

    run = training.train(tmp_path / "run", 2, steps=5, DEPTH=2, **{"parallel.pipeline": 2})
    assert run.steps[-1]["loss"] < run.steps[0]["loss"]
    assert "resuming from" in training.train(tmp_path / "run", 2, "--accept-changes", steps=9, DEPTH=2).said
    line = training.refused(tmp_path / "new", 1, "--resume", "nowhere", script=training.CALTECH101)

Ranks are forks of this process (`fork_ranks`). Whoever needs them while they run calls `fork_ranks.start` with
`flags`, and reads what they leave with `steps`, `evaluations` and `records`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from colossal_vit import config as configs
from colossal_vit import launch
from colossal_vit.checkpoint import lock
from colossal_vit.config import settings
from colossal_vit.results import METRICS, read_metrics
from colossalai.context import Config
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import fork_ranks
import layouts
from layouts import CONFIG, MODEL, set_flags

HYBRID, DATA_PARALLEL = settings.PATHS[settings.HYBRID], settings.PATHS[settings.DP]
CALTECH101, IMAGENET = settings.PATHS[settings.CALTECH101], settings.PATHS[settings.IMAGENET]
CONFIGS = {  # the config of each script, unless another one is given
    HYBRID: CONFIG,
    DATA_PARALLEL: "configs/config_data_parallel.py",
    CALTECH101: "config/config_fp32.py",
    IMAGENET: "config_sample.py",
}
# Values that make it small: a run of train_hybrid.py takes about a second, in fp32 on one stage.
TINY = dict(IMG_SIZE=16, PATCH_SIZE=8, HIDDEN_SIZE=32, DEPTH=1, NUM_HEADS=4, NUM_CLASSES=10, fp16=None)
TINY |= dict(BATCH_SIZE=32, NUM_EPOCHS=1, WARMUP_EPOCHS=0, gradient_accumulation=1, COMPILE=False)
SMALL: dict[str, dict[str, Any]] = {
    HYBRID: {"parallel.pipeline": 1, **MODEL},
    DATA_PARALLEL: TINY,
    CALTECH101: {**TINY, "CACHE_SIZE": 18},
    IMAGENET: TINY,
}
# Mixing, with draws for each image, so that the wrong place in a batch shows; and by script. Only one example mixes: in
# others a loader of the tests does, since what is mixed has to be the same in every layout.
MIX: dict[str, Any] = {"mix.mixup": 0.8, "mix.cutmix": 1.0, "mix.mode": "elem"}
MIXED_CIFAR10: dict[str, Any] = {**MIX, "LOADER": str(fork_ranks.ROOT / "tests/mixed_cifar10.py")}
MIXED = {HYBRID: MIXED_CIFAR10, DATA_PARALLEL: MIXED_CIFAR10, CALTECH101: {}, IMAGENET: MIX}
RANDOM = {**layouts.RANDOM, **MIXED[HYBRID]}  # all that a training of train_hybrid.py may draw at random
TIMES = {"images_per_s", "data_s", "step_s", "memory_gb", "reserved_gb"}  # metrics that may differ between equal runs


def arguments(main: Callable, argv: Sequence[str]) -> launch.Arguments:
    """What `launch.run` would give to a train script's `main` for a command line."""
    return sys.modules[main.__module__].SCRIPT.parse(argv)


@dataclass
class Run(fork_ranks.Result):
    """What a command that has ended left: exit codes and output by rank, and its run directory.

    Attributes:
        said: what rank 0 printed, on stdout and then on stderr.
        steps: the records of optimizer steps.
        evaluations: the records of evaluations.
        records: both in their order, without times and memory.
    """

    output: Path

    @property
    def said(self) -> str:
        return self.stdout[0] + self.stderr[0]

    @property
    def steps(self) -> list[dict]:
        return read_metrics(self.output)[0]

    @property
    def evaluations(self) -> list[dict]:
        return read_metrics(self.output)[1]

    @property
    def records(self) -> list[dict]:
        return records(self.output)


def records(output: Path) -> list[dict]:
    """All records of a run directory's `metrics.jsonl`, without times and memory."""
    lines = (output / METRICS).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def _whole_lines(path: Path) -> list[bytes]:
    """Those of a file that a run may be writing, or not yet."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def lines_of(path: Path) -> list[dict]:
    """The objects in a JSON Lines file, see `_whole_lines`."""
    return list(map(json.loads, _whole_lines(path)))


def last_step(output: Path) -> int:
    """The last step that a run has recorded in its run directory, or 0."""
    lines = _whole_lines(output / METRICS)
    return json.loads(lines[-1])["step"] if lines else 0


def flags(
    amp: str | None = None, *, script: str = HYBRID, config: str | Path | None = None, small: bool = True, **values: Any
) -> list[str]:
    """The command line of a run, without its run directory.

    Args:
        amp: a name of `AMP_TYPE`, in place of the fp32 of `SMALL`.
        script: the train script, a key of `CONFIGS`.
        config: the config file, absolute or in the script's folder; by default that of `CONFIGS`.
        small: whether the values are on top of those of `SMALL`, or of the config file's own.
        values: config values; of nested keys as `**{"parallel.pipeline": 2}`.
    """
    values = {**(SMALL[script] if small else {}), **values}
    if amp:
        values.pop("fp16", None)
    amp_flags = ["--set", f"fp16.mode=AMP_TYPE.{amp}"] if amp else []
    path = (fork_ranks.ROOT / script).parent / (config or CONFIGS[script])
    return ["--config", str(path), *set_flags(values), *amp_flags]


def config_of(argv: Sequence[str], script: str = HYBRID) -> Config:
    """The resolved config of a command line from `flags`."""
    _, file, *rest = argv
    (name,) = (name for name, path in settings.PATHS.items() if path == script)
    return configs.load(file, rest[1::2], name)


def call(function: Callable, world_size: int = 1, amp: str | None = None, **values: Any) -> list:
    """Call `function()` on every rank, as `fork_ranks.call`, with the config of `flags(amp, **values)`."""
    return fork_ranks.call(function, world_size, **config_of(flags(amp, **values)))


def train(
    output: Path,
    world_size: int = 1,
    *more: str,
    steps: int | None = 20,
    code: int = 0,
    amp: str | None = None,
    script: str = HYBRID,
    config: str | Path | None = None,
    small: bool = True,
    **values: Any,
) -> Run:
    """Train, or whatever else the command line says, until every rank has ended.

    Args:
        output: the run directory; a run that is in it resumes.
        world_size: number of ranks.
        more: more flags of the command line.
        steps: optimizer steps in all; None for all that the config has.
        code: the exit code that every rank must have.
        amp, script, config, small, values: as in `flags`.
    """
    argv = [*flags(amp, script=script, config=config, small=small, **values), "--output", str(output)]
    argv += ["--max-steps", str(steps)] if steps is not None else []
    result = fork_ranks.run(script, [*argv, *more], world_size)
    assert result.codes == [code] * world_size, str(result)
    return Run(result.codes, result.stdout, result.stderr, output)


def timms_logits(weights: Path, data: Path, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What timm's model answers about the test images of CIFAR-10, and what they are; in sizes of `SMALL[HYBRID]`.

    Args:
        weights: of the model, a file of a checkpoint.
        data: the folder above that of the images.
        depth: blocks of the model.

    Returns:
        Logits (N, 10), labels (N,).
    """
    records = np.fromfile(data / "cifar-10-batches-bin/test_batch.bin", np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)) / 255
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=depth, num_heads=4, num_classes=10).eval()
    model.load_state_dict(load_file(weights))
    with torch.no_grad():
        return model((images - mean) / std), torch.from_numpy(records[:, 0]).long()


def refused(output: Path, world_size: int = 1, *more: str, **options: Any) -> str:
    """The one line on stderr of a command that is a user's mistake, and that has changed nothing in `output`.

    Args:
        output, world_size, more, options: as in `train`.
    """
    before = contents(output)
    run = train(output, world_size, *more, code=2, **options)
    (line,) = "".join(run.stderr).splitlines()
    assert contents(output) == before
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder; that of its lock, which says who has looked, does not count."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != lock.NAME)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
