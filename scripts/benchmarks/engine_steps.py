"""A process of engine.py: training steps of one side, as many as each line on stdin says.

    python engine_steps.py ours|bare|timm|products CHECKOUT [KEY=VALUE ...]

Imports nothing from here, since PYTHONPATH may be that of an earlier commit. The first line on stdout is the loss of
the first step; each further one is seconds of a step, and CPU seconds.

All train on one batch, with a learning rate too small to memorise it: the gradients of a memorised batch are so small
that a CPU takes several times as long for each product.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import timm
import torch
from colossal_vit.data.batches import Loader
from colossal_vit.engine import build_criterion, build_optimizer, initialize
from colossal_vit.engine.loop import Trainer
from colossal_vit.hooks.standard import standard_hooks
from colossal_vit.main import start
from colossal_vit.model.timm_vit import SHAPE, build_timm_vit
from colossalai.context import Config
from colossalai.legacy.trainer.hooks import BaseHook
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from train import SCRIPT

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 1e-9


class Turns(Loader):
    """The same batch twice, and then as often as each line on stdin says.

    A step ends when the loop asks for the next batch.

    Args:
        config: of the training.
        device: of the batch.
        answers: the stream that times are written to.

    Attributes:
        loss: of the first step, which the loop sets.
    """

    def __init__(self, config: Config, device: torch.device, answers: IO[str]):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(config.BATCH_SIZE, 3, config.IMG_SIZE, config.IMG_SIZE, generator=generator)
        labels = torch.randint(config.NUM_CLASSES, (config.BATCH_SIZE,), generator=generator)
        self.batch, self.answers = (images.to(device), labels.to(device)), answers
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.loss: Tensor | None = None

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Batch]:
        yield self.batch
        print(self.loss.item(), file=self.answers)
        yield self.batch  # with all memory and state there is
        for line in sys.stdin:
            self.wait()
            number, started, cpu_started = int(line), time.perf_counter(), time.process_time()
            for _ in range(number):
                yield self.batch
            self.wait()
            seconds = time.perf_counter() - started, time.process_time() - cpu_started
            print(*(value / number for value in seconds), file=self.answers)
        sys.exit()


class LossHook(BaseHook):
    """Keeps the loss of a step."""

    def __init__(self, turns: Turns):
        super().__init__(priority=10)
        self.turns = turns

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        self.turns.loss = loss.detach()


class Products(TorchDispatchMode):
    """Keeps the calls of matrix products and of attention, forward and backward."""

    NAME = re.compile(r"aten::(addmm|mm|baddbmm|bmm|convolution|_scaled_dot_product)(_|$)")

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.NAME.match(function._schema.name):
            self.calls.append((function, args, kwargs))
        return function(*args, **kwargs)


def train_ours(argv: list[str], answers: IO[str], products_only: bool) -> None:
    """Launch, engine, loop and hooks of the train scripts; or the products of a step only, again and again."""
    run = start(SCRIPT.parse(argv))
    turns = Turns(run.config, run.device, answers)
    model = build_timm_vit(run.config).to(run.device)
    optimizer = build_optimizer(run.config, model)
    engine, loader, *_ = initialize(model, optimizer, build_criterion(run.config), turns, None)
    if products_only:
        engine.train()
        with Products() as products:
            turns.loss = engine.execute_schedule(iter([turns.batch]))[2].detach()
        for _ in turns:
            for function, args, kwargs in products.calls:
                function(*args, **kwargs)
    else:
        Trainer(engine, None, run.log).fit(loader, 1, hooks=[*standard_hooks(run, loader), LossHook(turns)])


def train_plainly(config: Config, answers: IO[str], timms_own: bool) -> None:
    """A loop in plain PyTorch, in a process as it starts: with its loss and AdamW, or with those of timm's train.py."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    turns = Turns(config, device, answers)
    torch.manual_seed(config.SEED)
    shape = {name: config[key] for key, name in SHAPE.items() if key in config}
    shape |= dict(num_classes=config.NUM_CLASSES, img_size=config.IMG_SIZE)
    shape |= dict(pos_drop_rate=config.DROP_RATE, proj_drop_rate=config.DROP_RATE)
    model = timm.create_model(config.MODEL, **shape).to(device).train()
    options = dict(lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY)
    if timms_own:
        criterion = LabelSmoothingCrossEntropy(config.LABEL_SMOOTHING)
        optimizer = create_optimizer_v2(model, "adamw", filter_bias_and_bn=False, **options)
    else:
        criterion = nn.CrossEntropyLoss(label_smoothing=config.LABEL_SMOOTHING)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    forward = torch.compile(model) if config.COMPILE else model
    half = bool(config.fp16)
    scaler = torch.GradScaler(device.type, enabled=half)
    for images, labels in turns:
        with torch.autocast(device.type, torch.float16, enabled=half):
            loss = criterion(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        turns.loss = loss.detach()


def main(which: str, checkout: str, *values: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what runs log
    path = f"{checkout}/vit_caltech101_amp/config/config_fp32.py"
    values = (f"LEARNING_RATE={LEARNING_RATE}", "clip_grad_norm=0.0", "OPTIMIZER='adamw'", "NUM_CLASSES=101", *values)
    if which in ("ours", "products"):
        with tempfile.TemporaryDirectory() as folder:
            argv = ["--config", path, "--output", f"{folder}/run", *(f"--set={value}" for value in values)]
            train_ours(argv, answers, which == "products")
    else:
        train_plainly(SCRIPT.load(path, values), answers, which == "timm")


if __name__ == "__main__":
    main(*sys.argv[1:])
