"""Make the tables of plans that pages show.

    python -m colossal_vit.plan tables [memory|recipes|zero|layouts ...] [--output results]

Minutes each on 2 CPU cores. Each goes into a folder of its own, with every number, the log and provenance.json:

memory_plan    what each shipped config takes of a GPU's memory, on the GPUs of its docstring's command, and what to set
               where a GPU has 24 GB: half the BATCH_SIZE, and twice the gradient_accumulation, until 22 GB are enough.
               The rest is for what a dry run does not count: CUDA's context, NCCL's buffers, fragments.
recipes_plan   what the recipes in vit_imagenet_dali/configs take on 4 and on 8 GPUs, and the hours at published rates
zero_plan      memory and messages of a rank with and without split optimizer state, for four models
layouts_plan   the fastest layouts of five models on 4 to 1,024 H100s, and the runs whose hours are published
lean_step      what a micro-batch of each shipped config launches and moves, eager and compiled, and images/s and MFU
cubins         the kernels that Inductor makes of the shipped configs, compiled for six compute capabilities
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from colossal_vit import config as configs
from colossal_vit.config.settings import HYBRID, IMAGENET, PATHS
from colossal_vit.errors import Parser
from colossal_vit.launch.exits import Exits
from colossal_vit.plan.enumeration import Choice, own_layout
from colossal_vit.plan.lowering import compile_kernel, num_bytes, num_flops, num_generated
from colossal_vit.plan.machines import MACHINES, RESERVED_GB
from colossal_vit.plan.meter import StepPlan
from colossal_vit.plan.report import format_report, in_fork, plan, plan_rank
from colossal_vit.plan.request import request_of
from colossal_vit.plan.search import Prediction, Predictor, search
from colossal_vit.plan.trace import KINDS, PARTS, Pass, Trace
from colossal_vit.provenance import ROOT, ResultFolder

ASSUMPTIONS = """Counted and predicted; nothing here was measured. Launches and GB (read and written) are those of a
forward and a backward pass of a micro-batch of so many images through the whole model, on one tensor-parallel rank,
without the optimizer.

- Host operators: what Python and autograd call in an eager step, views included.
- Eager: PyTorch's operators, without views.
- Compiled: the kernels that Inductor makes for an H100, library calls included, also in the columns of the A100. Under
  tensor parallelism they are counted with fewer images, and their bytes taken in proportion.
- Images/s: of one GPU, in the layout and with the batches of the config, as `--plan` predicts them. A launch takes the
  longest of three times: its FLOPs at the peak × a share, its bytes at the memory's rate × a share, and 5 µs.
- The shares are those of `--plan`: 0.63 of the peak and 0.6 of the memory's rate, as found on an H200.
- Not counted: data, the host's waits, sums of gradients in accumulation.
- MFU: FLOPs of the model's products, of all tokens in the last block too, ÷ the peak of their type."""
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LIMIT = 22  # GB that a rank may take of a GPU with 24
IMAGES = 4096  # make a step in the table of layouts
RANKS = (4, 8, 64, 1024)
COMMON = {"parallel.pipeline": 1, "NUM_MICRO_BATCHES": 1, "IMG_SIZE": 224, "CHECKPOINT": False, "NUM_CLASSES": 1000}
COMMON |= {"OPTIMIZER": "lamb", "gradient_accumulation": 1, "fp16.initial_scale": 1.0}
MODELS = {
    "B/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 768, "DEPTH": 12, "NUM_HEADS": 12},
    "L/16": {"PATCH_SIZE": 16, "HIDDEN_SIZE": 1024, "DEPTH": 24, "NUM_HEADS": 16},
    "H/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1280, "DEPTH": 32, "NUM_HEADS": 16},
    "g/14": {"PATCH_SIZE": 14, "HIDDEN_SIZE": 1408, "DEPTH": 40, "NUM_HEADS": 16, "MLP_RATIO": 6144 / 1408},
}
# Width, depth and heads of ViT-22B: M. Dehghani et al., arXiv:2302.05442, table 1.
LARGEST = {"PATCH_SIZE": 14, "HIDDEN_SIZE": 6144, "DEPTH": 48, "NUM_HEADS": 48, "MLP_RATIO": 4.0}
# Configs of the published runs, on 4 A100s. It is not published whether these have 40 or 80 GB.
PUBLISHED = {"B/32": "config_vit_b32.py", "B/16": "config.py", "L/32": "config_vit_l32.py"}
# Trainings that somebody has timed: epochs, hours, GPUs. H. Touvron et al., arXiv:2012.12877; FINETUNE.md of MAE.
DEIT_S = 300, 72, 4, "DeiT-S in less than 3 days on 4 GPUs"
DEIT_B = 300, 53, 8, "DeiT-B in 53 h on 8 GPUs"
TIMED = {
    "deit3_s16": DEIT_S,
    "deit3_b16": (*DEIT_B[:3], f"{DEIT_B[3]}, but at 224 px"),
    "deit3_b16_finetune": DEIT_B,
    "big_vision_s16": DEIT_S,
    "mae_b16_finetune": (100, 7 + 11 / 60, 32, "the same on 32 V100s"),
    "mae_l16_finetune": (50, 8 + 52 / 60, 32, "the same on 32 V100s"),
}


def module_of(path: Path) -> ModuleType:
    """A train script, or what stands beside it; some have the same name."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def request_for(script: str, config: Path, ranks: int, flags: list[str], values: dict[str, Any]) -> tuple:
    """The `build` of a script, and its arguments with a config and some values."""
    train = module_of(ROOT / PATHS[script]).SCRIPT
    given = [word for key, value in values.items() for word in ("--set", f"{key}={value!r}")]
    argv = ["--config", str(config), "--world_size", str(ranks), "--output", "/nonexistent", *given, *flags]
    return train.build, train.parse(argv)


def hybrid(ranks: int, values: dict[str, Any], *flags: str) -> tuple:
    """`request_for` one of `MODELS`, in NAIVE half precision."""
    path = ROOT / PATHS[HYBRID]
    config = path.parent / "configs/config_pipeline_parallel.py"
    return request_for(HYBRID, config, ranks, [*flags, "--set", "fp16.mode=AMP_TYPE.NAIVE"], {**COMMON, **values})


def dry_run(result: ResultFolder, script: str, config: Path, ranks: int, values: dict[str, Any]) -> list[StepPlan]:
    """The plans of a config's stages, which the log gets, too."""
    plans = plan(*request_for(script, config, ranks, ["--dry-run"], values))
    result.log += f"===== {config.relative_to(ROOT)}, {ranks} ranks, {values} =====\n{format_report(plans)}\n\n"
    return plans


# ---- The tables ------------------------------------------------------------------------------------------------------


def shipped() -> Iterator[tuple[str, Path, int]]:
    """Script, path and number of processes of each config, as its docstring has them."""
    for path in sorted(ROOT.glob("vit_*/**/config*.py")):
        if path.name == "config_sample.py":  # which is for a CPU
            continue
        example = path.parents[path.parent.name.startswith("config")]
        processes, name = re.search(r"--nproc_per_node (\d+) (\w+\.py)", path.read_text()).groups()
        yield next(key for key, known in PATHS.items() if known == f"{example.name}/{name}"), path, int(processes)


def memory(result: ResultFolder) -> None:
    header = "| config | GPUs | `BATCH_SIZE` | peak, GB | with 24 GB add | peak, GB |"
    table, details = [header, "| --- | ---: | ---: | ---: | --- | ---: |"], []
    for script, path, processes in shipped():
        config, values, peaks = configs.load(path), {}, []
        batch, accumulation = config.BATCH_SIZE, config.get("gradient_accumulation", 1)
        while True:
            plans = dry_run(result, script, path, processes, values)
            peaks.append(max(each.memory["peak"] for each in plans) / 1e9)
            if peaks[-1] <= LIMIT:
                break
            batch, accumulation = batch // 2, accumulation * 2
            values = {"BATCH_SIZE": batch, "gradient_accumulation": accumulation}
        hint = " ".join(f"`--set {key}={value}`" for key, value in values.items()) or "nothing"
        name = f"{path.relative_to(ROOT).parts[0]}/{path.stem}"
        row = f"{name} | {processes} | {config.BATCH_SIZE} | {peaks[0]:.1f} | {hint}"
        table.append(f"| {row} | {peaks[-1]:.1f} |")
        details.append(dict(config=str(path.relative_to(ROOT)), gpus=processes, peaks=peaks, values=values))
    result.finish("memory", table, details)


def accumulation_of(path: Path, num_gpus: int) -> int:
    """The accumulation that keeps a recipe's global batch on so many GPUs.

    Raises:
        ValueError: if there is none.
    """
    config = configs.load(path, script=IMAGENET)
    accumulation, rest = divmod(config.GLOBAL_BATCH, config.BATCH_SIZE * num_gpus)
    if rest or not accumulation:
        raise ValueError(f"{num_gpus} GPUs cannot make {config.GLOBAL_BATCH} images of batches of {config.BATCH_SIZE}")
    return accumulation


def recipes(result: ResultFolder) -> None:
    folder = (ROOT / PATHS[IMAGENET]).parent
    num_images = module_of(folder / "planning.py").NUM_IMAGES
    header = (
        "| recipe | GPUs | images of a GPU × accumulation | memory, GB | hours | at images/s a GPU, published for |"
    )
    table, details = [header, "| --- |" + " ---: |" * 4 + " --- |"], []
    for name, (epochs, hours, gpus, what) in TIMED.items():
        rate = epochs * num_images / (hours * 3600 * gpus)
        path = folder / "configs" / f"config_{name}.py"
        for number in (4, 8):
            values = {"gradient_accumulation": accumulation_of(path, number), "IMAGES_PER_S": round(rate)}
            (found,) = dry_run(result, IMAGENET, path, number, values)
            takes = found.config["NUM_EPOCHS"] * num_images / (rate * number * 3600)
            size = f"{found.config['BATCH_SIZE']} × {found.config['gradient_accumulation']}"
            row = [name, number, size, f"{found.memory['peak'] / 1e9:.1f}", f"{takes:.0f}", f"{rate:.0f}, {what}"]
            table.append(f"| {' | '.join(map(str, row))} |")
            details.append(dict(recipe=name, gpus=number, memory=found.memory, hours=takes, published=TIMED[name]))
    result.finish("plan", table, details)


def zero(result: ResultFolder) -> None:
    header = "| | parameters | ranks | not split: optimizer, GB | peak, GB | stage 1: optimizer, GB | peak, GB |"
    table, details = [header + " sent, stage 1 ÷ not split |", "| --- |" + " ---: |" * 7], {}
    for model, values in MODELS.items():
        for ranks in RANKS[:3]:
            kinds = {"not split": {}, "stage 1": {"zero.stage": 1}}
            plans = {
                kind: plan_rank(*hybrid(ranks, {**values, "BATCH_SIZE": 16, **more}), 0) for kind, more in kinds.items()
            }
            sent = [sum(each.sent.values()) for each in plans.values()]
            cells = [f"{each.memory[part] / 1e9:.2f}" for each in plans.values() for part in ("optimizer", "peak")]
            millions = f"{plans['not split'].parameters / 1e6:,.0f} M"
            table.append(f"| {model} | {millions} | {ranks} | {' | '.join(cells)} | {sent[1] / sent[0]:.3f} |")
            details[f"{model}, {ranks} ranks"] = {
                kind: {"memory": each.memory, "calls": each.calls, "sent": each.sent} for kind, each in plans.items()
            }
    result.finish("zero", table, details)


def layouts(result: ResultFolder) -> None:
    kinds: dict[str, Callable[[Choice], bool]] = {
        "fastest": lambda choice: True,
        "plain data parallel": lambda c: c.layout.pipeline * c.layout.tensor == 1 and not c.zero,
        "fastest with a split model": lambda c: c.layout.pipeline * c.layout.tensor > 1,
    }
    head = " | ".join(f"{kind} | images/s | GB" for kind in kinds)
    table = [f"| | H100s | {head} |", "| --- | ---: |" + " --- | ---: | ---: |" * len(kinds)]
    details: dict[str, Any] = {"images": IMAGES, "reserved_gb": RESERVED_GB}
    for model, values in {**MODELS, "22B/14": LARGEST}.items():
        settings = {ranks: {**values, "BATCH_SIZE": IMAGES // ranks} for ranks in RANKS}
        requests = {ranks: request_of(*hybrid(ranks, each, "--plan", "h100")) for ranks, each in settings.items()}
        trace = cache(requests[RANKS[0]].trace)
        for ranks, request in requests.items():
            choices = request.choices()
            predictor = Predictor(request.config, request.machine(), trace)
            plans = {kind: search(predictor, filter(of_kind, choices)) for kind, of_kind in kinds.items()}
            table.append(f"| {model} | {ranks:,} | {' | '.join(cells(found.best) for found in plans.values())} |")
            result.print(table[-1])
            details[f"{model}, {ranks} ranks"] = {
                kind: {
                    "layouts": found.num_layouts,
                    "do not fit": found.num_too_large,
                    "best": [{**best._asdict(), "choice": str(best.choice)} for best in found.best],
                }
                for kind, found in plans.items()
            }
    table += ["", "| published, 4 A100s | hours | predicted | error | GB per rank |", "| --- |" + " ---: |" * 4]
    folder = (ROOT / PATHS[IMAGENET]).parent
    published = module_of(folder / "planning.py")
    for model, name in PUBLISHED.items():
        request = request_of(*request_for(IMAGENET, folder / name, 4, ["--plan", "a100"], {}))
        own = own_layout(request.config, 4)
        seen = Predictor(request.config, request.machine(), request.trace).predict(own)
        hours = published.PUBLISHED_HOURS[request.config.MODEL]
        steps = request.config.NUM_EPOCHS * published.NUM_IMAGES / own.layout.global_batch(request.config)
        predicted = steps * seen.seconds / 3600
        error = f"{predicted / hours - 1:+.0%}"
        table.append(f"| {model} | {hours} | {predicted:.2f} | {error} | {seen.memory / 1e9:.1f} |")
        details[f"published {model}"] = dict(config=name, hours=hours, predicted=predicted, bytes=seen.memory)
    result.finish("layouts", table, details)


def eager_totals(traced: Trace, depth: int, images: int) -> tuple[int, int, float, float]:
    """Host operators, launches, FLOPs and bytes of a pass through the model and back, on a tensor-parallel rank.

    The FLOPs are the model's as in `mfu.training_flops`: the last block counts as the others.
    """

    def total(measure: Callable[[Pass], float], blocks: int, last: int) -> float:
        times = {"embed": 1, "block": blocks, "last": last, "head": 1}
        return sum(times[part] * measure(traced.part(part, kind, images)) for part in PARTS for kind in KINDS)

    flops = total(lambda each: each.operations[:, 0].sum(), depth, 0)
    measures = (lambda each: each.calls, lambda each: len(each.operations), lambda each: each.operations[:, 1].sum())
    calls, launches, nbytes = (total(measure, depth - 1, 1) for measure in measures)
    return calls, launches, flops, nbytes


def lean(result: ResultFolder) -> None:
    machines = {name: MACHINES[name] for name in ("h100", "a100")}
    heads = [f"{kind} {name}: images/s, MFU" for name in machines for kind in ("eager", "compiled")]
    columns = ["config", "images", "host operators, eager", *("launches, eager", "compiled", "GB, eager", "compiled")]
    columns += heads
    table = [ASSUMPTIONS, "", f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    details = {}
    for script, path, processes in shipped():
        request = request_of(*request_for(script, path, processes, ["--plan", "h100"], {}))
        config, own = request.config, own_layout(request.config, processes)
        traced, lowered = request.trace(own.tensor), request.lower_layout(own.tensor, own.by_block)
        calls, launches, flops, nbytes = eager_totals(traced, config.DEPTH, own.images)
        compiled = [
            sum(lowered.of_model(kind, measure, config.DEPTH) for kind in KINDS) for measure in (len, num_bytes)
        ]
        moved = compiled[1] * own.images / lowered.images
        counts = {"host operators": calls, "launches": [launches, compiled[0]], "bytes": [nbytes, moved]}
        speeds = {}
        for name, machine in machines.items():
            machine = replace(machine, half=bool(config.fp16))
            for kind, lower in (("eager", None), ("compiled", lambda *_, lowered=lowered: lowered)):
                seen = Predictor(config, machine, lambda _, traced=traced: traced, lower).predict(own)
                images = own.layout.global_batch(config) / seen.seconds / processes
                peak = (machine.half_tflops if machine.half else machine.single_tflops) * 1e12
                speeds[f"{kind} {name}"] = images, images * own.tensor[1] * flops / own.images / peak
        row = [f"{path.relative_to(ROOT).parts[0]}/{path.stem}", f"{own.images}", f"{calls:,}"]
        row += [f"{each:,.0f}" for each in counts["launches"]] + [f"{each / 1e9:.1f}" for each in counts["bytes"]]
        row += [f"{images:,.0f}, {mfu:.0%}" for images, mfu in speeds.values()]
        table.append(f"| {' | '.join(row)} |")
        result.print(table[-1])
        measures = {"launches": len, "generated": num_generated, "bytes": num_bytes, "flops": num_flops}
        block = {kind: {name: lowered.of_block(kind, measure) for name, measure in measures.items()} for kind in KINDS}
        details[str(path.relative_to(ROOT))] = dict(
            counts=counts, speeds=speeds, block=block, block_images=lowered.images, layout=str(own)
        )
    result.finish("lean_step", table, details)


def cells(best: list[Prediction]) -> str:
    """Layout, images/s and memory of the first prediction."""
    if not best:
        return "none fits | |"
    return f"{best[0].choice.short} | {IMAGES / best[0].seconds:,.0f} | {best[0].memory / 1e9:.1f}"


def compiled(sources: list[str], capability: tuple[int, int]) -> list[list[bytes]]:
    return [compile_kernel(source, capability) for source in sources]


def cubins(result: ResultFolder) -> None:
    sources: set[str] = set()
    for script, path, processes in shipped():
        request = request_of(*request_for(script, path, processes, ["--plan", "h100"], {}))
        own = own_layout(request.config, processes)
        for lowered in request.lower_layout(own.tensor, own.by_block).depths.values():
            sources |= lowered.sources
        result.print(f"{path.relative_to(ROOT)}: {len(sources)} kernels with those before")
    table, details = ["| compute capability | kernels | cubins | MB |", "| ---: | ---: | ---: | ---: |"], {}
    for major, minor in CAPABILITIES:
        made = in_fork(partial(compiled, sorted(sources), (major, minor)))
        details[f"{major}.{minor}"] = sizes = [len(cubin) for cubins in made for cubin in cubins]
        table.append(f"| {major}.{minor} | {len(made)} | {len(sizes)} | {sum(sizes) / 1e6:.1f} |")
        result.print(table[-1])
    result.finish("cubins", table, details)


TABLES = {"memory": memory, "recipes": recipes, "zero": zero, "layouts": layouts, "lean": lean, "cubins": cubins}
FOLDERS = {"lean": "lean_step", "cubins": "cubins"}


def main() -> None:
    parser = Parser(prog="python -m colossal_vit.plan", description=__doc__)
    tables = parser.add_subparsers(required=True, metavar="tables").add_parser("tables", description=__doc__)
    tables.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TABLES)}; all by default")
    tables.add_argument("--output", type=Path, default=ROOT / "results", help="where the folders go")
    args = parser.parse_args()
    if unknown := set(args.names) - TABLES.keys():
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    results = {
        name: ResultFolder(
            args.output / FOLDERS.get(name, f"{name}_plan"), command=f"python -m colossal_vit.plan tables {name}"
        )
        for name in args.names or TABLES
    }
    for name, result in results.items():
        TABLES[name](result)


if __name__ == "__main__":
    Exits().call(main)
