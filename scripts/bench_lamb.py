"""Time of a LAMB step on ViT-B/16: ours, Colossal-AI's and timm's, with the same update rule and gradients.

    python scripts/bench_lamb.py [--device cpu] [--model NAME] [--rounds 20] [--output results/lamb_cpu]

A round is one step of each optimizer, in an order that changes from round to round, so that other load on the machine
affects all alike. The table has each optimizer's median step time, the median over rounds of its ratio to ours, and
the difference of its final weights from ours.

Writes lamb.md (the table), lamb.json (every round) and provenance.json.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import colossal_vit  # noqa: F401 silences the import of Colossal-AI
import timm
import torch
from colossal_vit.engine.lamb import Lamb
from colossal_vit.provenance import ResultFolder
from colossalai.nn.optimizer import Lamb as ColossalLamb
from timm.optim import Lamb as TimmLamb
from torch.optim import Optimizer

from turns import in_turns

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = dict(lr=1e-3, weight_decay=0.1)
NUM_WARM_UP = 3  # the first step creates the state, the next ones fill the allocator's cache

_timm = partial(TimmLamb, bias_correction=False, max_grad_norm=None)  # the rule of the other two
OURS = "colossal_vit"
CONTENDERS = {
    OURS: Lamb,
    "Colossal-AI": ColossalLamb,
    "timm, foreach=False": partial(_timm, foreach=False),
    "timm, foreach=True": partial(_timm, foreach=True),
}


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]


def timed(optimizer: Optimizer, device: torch.device) -> float:
    """Seconds that a step takes, including its work on the device."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    started = time.perf_counter()
    optimizer.step()
    finish()
    return time.perf_counter() - started


def measure(device: torch.device, model: str, num_rounds: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Time `num_rounds` rounds.

    Returns:
        The seconds of each round, by optimizer; and by optimizer, the largest relative difference in L2 norm of a
        parameter's final weights from ours.
    """
    torch.manual_seed(0)
    weights = [p.detach().to(device) for p in timm.create_model(model).parameters()]
    gradients = [torch.randn_like(w) * 1e-3 for w in weights]
    optimizers = {}
    for name, make in CONTENDERS.items():
        optimizers[name] = make([w.clone().requires_grad_() for w in weights], **OPTIONS)
        for parameter, gradient in zip(parameters_of(optimizers[name]), gradients, strict=True):
            parameter.grad = gradient
    rounds = []
    for number in range(NUM_WARM_UP + num_rounds):
        rounds.append({name: timed(optimizers[name], device) for name in in_turns(CONTENDERS, number)})
    ours = parameters_of(optimizers[OURS])
    differences = {
        name: max(
            ((here - there).norm() / here.norm().clamp(min=1e-12)).item()
            for here, there in zip(ours, parameters_of(optimizer), strict=True)
        )
        for name, optimizer in optimizers.items()
    }
    return rounds[NUM_WARM_UP:], differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="vit_base_patch16_224", help="of timm (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="how many steps to time (default %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for the result (default results/lamb_<device>)")
    args = parser.parse_args()
    benchmark = ResultFolder(args.output or ROOT / "results" / f"lamb_{args.device}")

    rounds, differences = measure(torch.device(args.device), args.model, args.rounds)
    result = {
        name: {
            "step_ms": 1e3 * statistics.median(r[name] for r in rounds),
            "times_ours": statistics.median(r[name] / r[OURS] for r in rounds),
            "weights_differ_by": differences[name],
        }
        for name in CONTENDERS
    }
    table = ["| LAMB | step, ms | times ours | weights differ by |", "| --- | ---: | ---: | ---: |"]
    for name, r in result.items():
        table.append(f"| {name} | {r['step_ms']:.1f} | {r['times_ours']:.2f} | {r['weights_differ_by']:.0e} |")
    details = {
        "device": args.device,
        "model": args.model,
        "threads": torch.get_num_threads(),
        "result": result,
        "seconds": rounds,
    }
    benchmark.finish("lamb", table, details)


if __name__ == "__main__":
    main()
