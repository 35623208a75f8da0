"""How often the host waits for the device in an optimizer step, and how many operators it dispatches: here and at an
earlier commit, by the numbers that a CPU shows too.

    python scripts/bench_waits.py BASE [--output results/cpu_waits]

Runs the train scripts with small models, in each mode of precision, and counts from the end of one optimizer step to
the end of the next: values that the host asks for (in PyTorch's operators, and where losses are recorded), calls of
Colossal-AI's `synchronize`, and all operators. An optimizer's step counts are on the host anyway, and do not count. The
bare loop is plain PyTorch: the same timm model, optimizer and clipping.

Writes waits.md (the table), waits.json, log.txt and provenance.json.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from colossal_vit.models import build_timm_vit
from colossal_vit.results import provenance, write_benchmark
from colossalai.context import Config
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
SIZE = dict(IMG_SIZE=32, PATCH_SIZE=8, HIDDEN_SIZE=64, DEPTH=4, NUM_HEADS=4, BATCH_SIZE=8, DROP_RATE=0.0)
TIMM = ("vit_caltech101_amp/train.py", "config/config_fp32.py", 1, dict(SIZE, SYNTHETIC=True, OPTIMIZER="'adamw'"))
PIPELINE = (
    "vit_cifar10_hybrid/train_hybrid.py",
    "configs/config_pipeline_parallel.py",
    2,
    dict(SIZE, CHECKPOINT=False, NUM_MICRO_BATCHES=4),
)
DALI = ("vit_imagenet_dali/train.py", "config_sample.py", 1, dict(SIZE, gradient_accumulation=8))
PRECISION = {
    "fp32": {"fp16": "None"},
    **{f"{m} bf16": {"fp16.mode": f"AMP_TYPE.{m}", "fp16.dtype": "'bf16'"} for m in ("TORCH", "NAIVE")},
    # a scale that no step overflows with
    "TORCH fp16": {"fp16.mode": "AMP_TYPE.TORCH", "fp16.dtype": "'fp16'", "fp16.init_scale": 2.0**8},
    "NAIVE fp16": {"fp16.mode": "AMP_TYPE.NAIVE", "fp16.dtype": "'fp16'", "fp16.initial_scale": 2.0**8},
}
CASES = {f"one process, {name}": (TIMM, values) for name, values in PRECISION.items()}
CASES |= {f"DALI and Mixup, 8 micro-batches, {name}": (DALI, PRECISION[name]) for name in ("fp32", "NAIVE fp16")}
CASES |= {f"pipeline, 4 micro-batches, {name}": (PIPELINE, PRECISION[name]) for name in ("fp32", "NAIVE fp16")}

# Runs a train script of the working directory's repository and prints what its third step took, as a line of JSON.
CHILD = """
import json, os, runpy, sys
import colossal_vit, torch
from collections import Counter
from colossal_vit import engine, hooks, host
from colossal_vit.engine import Engine
from torch.utils._python_dispatch import TorchDispatchMode

ASKS = ("_local_scalar_dense", "is_nonzero", "nonzero")
waits, operators, state = Counter(), Counter(), dict(steps=0, mode=None, reading=False)

class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        operators[name] += 1
        if name in ASKS and not state["reading"] and id(args[0]) not in state["on_host"]:
            waits[name] += 1
        return function(*args, **(kwargs or {}))

def counted(owner, name, what):
    original = getattr(owner, name)
    def call(*args, **options):
        if state["mode"] is None or state["reading"]:
            return original(*args, **options)
        waits[what] += 1
        state["reading"] = True
        try:
            return original(*args, **options)
        finally:
            state["reading"] = False
    setattr(owner, name, call)

counted(hooks, "_sum_over", "losses")
counted(host.HostAccelerator, "synchronize", "synchronize")
if hasattr(engine, "read"):  # the earlier commit has none
    counted(engine, "read", "read")
step = Engine.step

def step_and_count(self):
    step(self)
    if not self.finished_step:
        return
    state["steps"] += 1
    if state["steps"] == 2:
        states = self.optimizer.optim.state.values()
        state["on_host"] = {id(values["step"]) for values in states if "step" in values}
        state["mode"] = Counting()
        state["mode"].__enter__()
    elif state["steps"] == 3:
        state["mode"].__exit__(None, None, None)
        state["mode"] = None
        if os.environ.get("RANK", "0") == "0":
            print("COUNTED", json.dumps([waits, sum(operators.values())]), flush=True)

Engine.step = step_and_count
sys.argv = sys.argv[1:]
sys.path[0] = os.getcwd()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def count(tree: Path, script: str, config: str, processes: int, values: dict) -> tuple[dict[str, int], int, str]:
    """Waits by kind and operators of a step at the commit in `tree`, and what the run printed."""
    with tempfile.TemporaryDirectory() as scratch:
        child = Path(scratch) / "child.py"
        child.write_text(CHILD)
        path = tree / script
        flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), str(child), path.name, "--config", config]
        command += ["--output", str(Path(scratch) / "run"), "--max-steps", "3", *flags]
        environment = {**os.environ, "PYTHONPATH": f"{tree}:{path.parent}", "OMP_NUM_THREADS": "1"}
        environment.pop("DATA", None)
        done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    lines = [line for line in said.splitlines() if "COUNTED " in line]
    if done.returncode or not lines:
        sys.exit(f"{shlex.join(command)} failed:\n{said}")
    waits, operators = json.loads(lines[0].split("COUNTED ")[1])
    return waits, operators, said


class Operators(TorchDispatchMode):
    """Counts by name the operators that are dispatched inside the block."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def in_second_call(step: Callable[[], object]) -> int:
    """How many operators the second call of `step` dispatches: the first one of an optimizer makes its state."""
    step()
    with Operators() as operators:
        step()
    return operators.names.total()


def bare_step(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, half: bool) -> float:
    """A step of plain PyTorch, clipped, under autocast to bf16 if asked for; returns the loss."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def bare_operators(half: bool) -> int:
    """Operators of a step of plain PyTorch on the model of the `one process` cases."""
    model = build_timm_vit(Config(dict(SIZE, MODEL="vit_base_patch16_224", NUM_CLASSES=101, SEED=0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(SIZE["BATCH_SIZE"], 3, 32, 32), torch.arange(SIZE["BATCH_SIZE"])
    return in_second_call(partial(bare_step, model, optimizer, images, labels, half))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--output", type=Path, default=ROOT / "results/cpu_waits", help="where the result goes")
    args = parser.parse_args()
    origin = provenance(shlex.join(["python", *sys.argv]))
    bare = {"one process, fp32": bare_operators(False), "one process, TORCH bf16": bare_operators(True)}
    table = [
        "| | waits before | after | operators before | after | of a bare loop |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    results, log = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(base)], check=True)
        subprocess.run(["git", "checkout", "--quiet", args.base], cwd=base, check=True)
        for name, ((script, config, processes, values), more) in CASES.items():
            rows = {}
            for commit, tree in (("before", base), ("after", ROOT)):
                waits, operators, said = count(tree, script, config, processes, {**values, **more})
                rows[commit] = {"waits": waits, "operators": operators}
                log.append(f"===== {name}, {commit} =====\n{said.replace(scratch, 'SCRATCH')}")
            before, after = rows["before"], rows["after"]
            results[name] = {**rows, "bare": bare.get(name)}
            table.append(
                f"| {name} | {sum(before['waits'].values())} | {sum(after['waits'].values())} | {before['operators']} "
                f"| {after['operators']} | {bare.get(name, '')} |"
            )
            print(table[-1], flush=True)
    write_benchmark(args.output, "waits", table, results, origin, "\n".join(log))


if __name__ == "__main__":
    main()
