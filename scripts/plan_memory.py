"""What each shipped config takes of a GPU's memory, and what to set where a GPU has 24 GB, by `--dry-run`.

    python scripts/plan_memory.py [--limit 22] [--output results/memory_plan]

Takes about 6 minutes on a CPU. Each config is planned on the number of processes in its docstring's command. Where a
rank needs more than the limit, BATCH_SIZE is halved and gradient_accumulation doubled until it does not, which keeps
the global batch. The limit leaves at least 2 GB of such a card for what a dry run does not count: CUDA's context,
NCCL's buffers, the allocator's fragments.

Writes memory.md (the table), memory.json, log.txt (every dry run) and provenance.json.
"""

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from colossal_vit import config as configs
from colossal_vit import launch
from colossal_vit.config.settings import PATHS
from colossal_vit.plan import report
from colossal_vit.provenance import ResultFolder

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("vit_cifar10_hybrid", "vit_imagenet_dali", "vit_caltech101_amp")
sys.path.extend(str(ROOT / example) for example in EXAMPLES)
HEADER = "| config | GPUs | `BATCH_SIZE` | peak, GB | with 24 GB add | peak, GB |"


def shipped() -> list[Path]:
    """The configs that are for GPUs, by example."""
    found = [path for example in EXAMPLES for path in sorted((ROOT / example).glob("**/config*.py"))]
    return [path for path in found if path.name != "config_sample.py"]


def module_of(script: Path) -> ModuleType:
    """A train script; two of them have the same name."""
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak(path: Path, smaller: int, result: ResultFolder) -> tuple[int, float, list[str]]:
    """Plan a config with its batch divided by `smaller`, and its accumulation multiplied.

    Returns:
        Number of processes, memory of the fullest rank in GB, and the flags that do it.
    """
    processes, script = re.search(r"--nproc_per_node (\d+) (\w+\.py)", path.read_text()).groups()
    config = configs.load(path)
    values = {
        "BATCH_SIZE": config.BATCH_SIZE // smaller,
        "gradient_accumulation": config.get("gradient_accumulation", 1) * smaller,
    }
    flags = [f"{key}={value}" for key, value in values.items()] if smaller > 1 else []
    given = [word for flag in flags for word in ("--set", flag)]
    argv = ["--config", str(path), *given, "--output", "/nonexistent", "--dry-run", "--world_size", processes]
    folder = path.parents[path.parent.name.startswith("config")]
    module, place = module_of(folder / script), f"{folder.name}/{script}"
    name = next(name for name, known in PATHS.items() if known == place)
    check = getattr(module, "check_vit", None) or module.check_timm_vit
    plans = report.plan(module.main, launch.parse(argv, script=name, check=check))
    result.print(f"===== {path.relative_to(ROOT)} {' '.join(flags)} =====\n{report.format_report(plans)}\n")
    return int(processes), max(plan.memory["peak"] for plan in plans) / 1e9, flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=22, help="GB that a rank may take (default %(default)g)")
    parser.add_argument("--only", nargs="+", help="only these names of config files, without .py")
    parser.add_argument("--output", type=Path, default=ROOT / "results/memory_plan", help="where the result goes")
    args = parser.parse_args()
    result = ResultFolder(args.output)
    table, details = [HEADER, "| --- | ---: | ---: | ---: | --- | ---: |"], []
    for path in shipped():
        if args.only and path.stem not in args.only:
            continue
        processes, whole, _ = peak(path, 1, result)
        smaller, needed, flags = 1, whole, []
        while needed > args.limit:
            smaller *= 2
            _, needed, flags = peak(path, smaller, result)
        batch_size = configs.load(path).BATCH_SIZE
        hint = " ".join(f"`--set {flag}`" for flag in flags) or "nothing"
        name = f"{path.parents[path.parent.name.startswith('config')].name}/{path.stem}"
        table.append(f"| {name} | {processes} | {batch_size} | {whole:.1f} | {hint} | {needed:.1f} |")
        details.append(dict(config=name, gpus=processes, peak=whole, flags=flags, peak_with_flags=needed))
    result.finish("memory", table, details)


if __name__ == "__main__":
    launch.call(main)
