"""A process of dropout.py: training steps of one model, as many as each line on stdin says.

    python dropout_steps.py ours|timm CHECKOUT DROP_RATE [KEY=VALUE ...]

Imports nothing from here, since PYTHONPATH may be that of an earlier commit. The first line on stdout is the loss of
the first step; further ones are seconds of a step, and CPU seconds.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable

import timm
import torch
from colossal_vit import launch
from colossal_vit.engine import build_criterion, build_optimizer, initialize
from colossal_vit.models import SHAPE, build_timm_vit
from colossal_vit.run import Run
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


def our_step(run: Run) -> Step:
    model = build_timm_vit(run.config)
    engine = initialize(model, build_optimizer(run.config, model), build_criterion(run.config))[0]
    engine.train()

    def step(images: Tensor, labels: Tensor) -> Tensor:
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(images, labels)]))[2]
        engine.step()
        return loss

    return step


def timm_step(run: Run) -> Step:
    """Model, optimizer, loss and step of timm's train.py."""
    config = run.config
    torch.manual_seed(config.SEED)
    shape = {name: config[key] for key, name in SHAPE.items() if key in config}
    shape |= dict(num_classes=config.NUM_CLASSES, img_size=config.IMG_SIZE)
    shape |= dict(pos_drop_rate=config.DROP_RATE, proj_drop_rate=config.DROP_RATE)
    model = timm.create_model(config.MODEL, **shape).train()
    options = dict(lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY, filter_bias_and_bn=False)
    optimizer = create_optimizer_v2(model, config.OPTIMIZER, **options)
    criterion = LabelSmoothingCrossEntropy(config.LABEL_SMOOTHING)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main(which: str, checkout: str, rate: str, *values: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what runs log
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--config", f"{checkout}/vit_caltech101_amp/config/config_fp32.py", "--output", f"{folder}/run"]
        for value in (f"DROP_RATE={rate}", "clip_grad_norm=0.0", "OPTIMIZER='adamw'", "NUM_CLASSES=101", *values):
            argv += ["--set", value]
        run = launch.start(launch.parse(argv, script="caltech101"))
        config, generator = run.config, torch.Generator().manual_seed(0)
        step = {"ours": our_step, "timm": timm_step}[which](run)
        images = torch.randn(config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE, generator=generator)
        labels = torch.randint(config.NUM_CLASSES, (config.BATCH_SIZE,), generator=generator)
        print(step(images, labels).item(), file=answers)
        step(images, labels)  # with all memory and state there is
        for line in sys.stdin:
            number, started, cpu_started = int(line), time.perf_counter(), time.process_time()
            for _ in range(number):
                step(images, labels)
            print((time.perf_counter() - started) / number, (time.process_time() - cpu_started) / number, file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
