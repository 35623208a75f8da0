"""What is to be planned: a train script with its command line, and its model as forks of this process see it."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from colossal_vit.config.settings import HYBRID
from colossal_vit.launch.flags import Arguments
from colossal_vit.launch.launchers import planned_rendezvous
from colossal_vit.main import Build, read_config
from colossal_vit.models import build_timm_vit
from colossal_vit.parallel.layout import Layout
from colossal_vit.plan import lowering
from colossal_vit.plan.enumeration import Choice, enumerate_layouts
from colossal_vit.plan.fakes import build_alone, build_fake
from colossal_vit.plan.lowering import Lowered, Lowering
from colossal_vit.plan.machines import Gpus, find_machine
from colossal_vit.plan.report import in_fork, in_forks
from colossal_vit.plan.trace import TensorParallel, Trace, trace
from colossalai.context import Config

TRACED_IMAGES = 8  # per part of a batch; traces have half of it, too


class Request(NamedTuple):
    """What a command line with `--plan` asks for.

    Attributes:
        build: of the train script.
        args: its command line.
        config: loaded from it, with the DEPTH of the model.
        world_size: number of ranks.
    """

    build: Build
    args: Arguments
    config: Config
    world_size: int

    @property
    def images(self) -> int:
        """Of a step: GLOBAL_BATCH, or what the config's own layout makes of BATCH_SIZE.

        Raises:
            UserError: if that layout does not fit the number of ranks.
        """
        config = self.config
        return config.get("GLOBAL_BATCH") or Layout.of(config, self.world_size).global_batch(config)

    def choices(self) -> list[Choice]:
        """Every layout of the model that makes as many images.

        Raises:
            UserError: if model or config do not fit.
        """
        config = self.config
        check = None if "MODEL" in config else self.args.check  # timm's are the same in all layouts
        found = enumerate_layouts(config, self.world_size, self.images, self.args.script, check)
        if check and not found:
            check(config, Layout.of(config, self.world_size))
        return found

    def model(
        self,
        tensor: TensorParallel,
        observe: Callable[..., Any],
        images: int | None = None,
        device: int = 0,
        depth: int = 2,
    ) -> Callable[[], Any]:
        """A function, for a fork, that builds a small training, and returns what is observed of it.

        Args:
            tensor: tensor parallelism of the model, which has neither data parallelism nor a pipeline.
            observe: called with engine and batches.
            images: of a batch; with them, tensors are real and only the other ranks are fake.
            device: index of the GPU, if there are any.
            depth: number of blocks.
        """
        mode, size, tensor_depth = tensor
        deep = {"depth": tensor_depth} if tensor_depth else {}
        parallel = {"pipeline": 1, "tensor": {"mode": mode, "size": size, **deep}}
        parts = Layout.of(Config({"parallel": parallel}), size).batch_parts
        values: dict[str, Any] = {"BATCH_SIZE": images or TRACED_IMAGES * parts, "gradient_accumulation": 1}
        values |= {"zero": None, "DEPTH": depth}
        if "MODEL" in self.config and self.config.get("DROP_PATH_RATE"):
            values["DROP_PATH_UNIFORM"] = True  # the first of two blocks would have none, and it stands for all
        if self.args.script == HYBRID:
            values |= {"parallel": parallel, "NUM_MICRO_BATCHES": 1, "model": {"num_chunks": 1}, "CHECKPOINT": False}
        overrides = [*self.args.set, *(f"{key}={value!r}" for key, value in values.items())]
        args = self.args.replace(set=overrides, world_size=size, rank=None, local_rank=device, backend=None)

        def of_model() -> Any:
            if images and self.world_size > 1:
                torch.set_num_threads(1)  # as torchrun has it
            training = (build_alone if images else build_fake)(self.build, args)
            return observe(training.engine, training.train_dataloader)

        return of_model

    def machine(self) -> Gpus:
        """The machine that is asked for, by its data sheet.

        Raises:
            UserError: if neither the planner nor the config knows it.
        """
        return find_machine(self.args.plan, self.config.machine, bool(self.config.fp16), self.config.TF32)

    def trace(self, tensor: TensorParallel) -> Trace:
        """What a rank does with this tensor parallelism, recorded in a fork."""
        return in_fork(self.model(tensor, trace))

    def lower(self, tensor: TensorParallel, by_block: bool, images: int) -> Lowering:
        """What a rank runs of a compiled micro-batch on the GPU that is asked for, found in forks without one.

        Args:
            tensor: see `model`.
            by_block: see `lowering.lower`.
            images: of the micro-batch.
        """
        capability = lowering.A100 if self.args.plan.lower().startswith("a100") else lowering.H100
        observe = partial(lowering.lower, by_block=by_block, capability=capability)

        def without_gpu(depth: int) -> Lowered:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the model is on the CPU
            return self.model(tensor, observe, images, depth=depth)()

        found = in_forks([partial(without_gpu, depth) for depth in lowering.DEPTHS])
        return Lowering(images, dict(zip(lowering.DEPTHS, found, strict=True)))

    def lower_layout(self, tensor: TensorParallel, by_block: bool) -> Lowering:
        """`lower` for layouts of any batch; layers that communicate are computed, so that of them few images do."""
        images = self.config.BATCH_SIZE // self.config.get("NUM_MICRO_BATCHES", 1)
        return self.lower(tensor, by_block, images if tensor[1] == 1 else TRACED_IMAGES * tensor[1])


def request_of(build: Build, args: Arguments) -> Request:
    """What a script and its command line ask for.

    Raises:
        UserError: if flags or config are not usable.
    """
    config, _ = read_config(args)
    world_size = planned_rendezvous(args, config).world_size
    own = Layout.of(config, world_size)
    if "MODEL" in config:
        if args.check:
            args.check(config, own)
        with torch.device("meta"):
            config = Config({**config, "DEPTH": len(build_timm_vit(config).blocks)})
    return Request(build, args, config, world_size)
