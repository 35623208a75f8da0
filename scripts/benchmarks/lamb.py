"""Time of a LAMB step on ViT-B/16: ours, Colossal-AI's and timm's, with the same update rule and gradients.

A minute on 2 CPU cores. A round is one step of each optimizer. Their weights must be the same before they are timed.
"""

import argparse
import sys
from functools import partial

import timm
import torch
from colossal_vit.engine.lamb import Lamb
from colossalai.nn.optimizer import Lamb as ColossalLamb
from timm.optim import Lamb as TimmLamb
from torch.optim import Optimizer

from benchmarks.harness import Benchmark, Case, Side
from benchmarks.training import device, seconds

OPTIONS = dict(lr=1e-3, weight_decay=0.1)
NUM_WARM_UP = 3  # the first step creates the state, the next ones fill the allocator's cache
TOLERANCE = 1e-4  # a parameter's weights may differ from ours by so much, relatively, in L2 norm

_timm = partial(TimmLamb, bias_correction=False, max_grad_norm=None)  # the rule of the other two
OPTIMIZERS = {
    "ours": Lamb,
    "Colossal-AI": ColossalLamb,
    "timm, foreach=False": partial(_timm, foreach=False),
    "timm, foreach=True": partial(_timm, foreach=True),
}


def timed_step(optimizer: Optimizer, number: int) -> dict[str, float]:
    return {"ms a step": 1e3 * seconds(optimizer.step)}


def sides(args: argparse.Namespace) -> dict[str, Side]:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224" if args.small else "vit_base_patch16_224")
    weights = [parameter.detach().to(device()) for parameter in model.parameters()]
    gradients = [torch.randn_like(weight) * 1e-3 for weight in weights]
    parameters, found = {}, {}
    for name, build in OPTIMIZERS.items():
        parameters[name] = [weight.clone().requires_grad_() for weight in weights]
        optimizer = build(parameters[name], **OPTIONS)
        for parameter, gradient in zip(parameters[name], gradients, strict=True):
            parameter.grad = gradient
        for _ in range(NUM_WARM_UP):
            optimizer.step()
        found[name] = partial(timed_step, optimizer)
    for name, theirs in parameters.items():
        pairs = zip(parameters["ours"], theirs, strict=True)
        furthest = max(((a - b).norm() / a.norm().clamp(min=1e-12)).item() for a, b in pairs)
        print(f"{name}: weights differ by {furthest:.0e} from ours", flush=True)
        if furthest > TOLERANCE:
            sys.exit(f"{name} does not make the same update")
    return found


BENCHMARK = Benchmark(lambda args: {"LAMB": Case(sides)}, rounds=20)
