"""A checkpoint of ViT-g/14, 1.0 billion parameters, over 8 ranks that each have an eighth: time, and memory of each.

8 minutes a round on 2 CPU cores; needs 22 GB of memory, and 25 GB in the folder for temporary files (TMPDIR). In fp32
with AdamW and ZeRO stage 3, beside torch.distributed.checkpoint, which writes a file of each rank's pieces; ours is one
safetensors file with timm's names. Both are fsynced, and read again from the disk, after the page cache was dropped.
Peaks are those of private memory (RssAnon) above what a rank has with its whole state. Pages of files that are read
come on top, and the kernel can drop them. Ours has then to be verified and renamed, while training continues.

No model is whole anywhere: the ranks begin with pieces of random numbers, and with moments of a step of random
gradients. What is loaded must be what was saved, to the bit.
"""

import argparse
import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from colossal_vit.checkpoint import storage, tensors
from colossal_vit.checkpoint.full_tensors import FullTensors
from colossal_vit.engine import assembly
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.fully_sharded import pieces_of
from colossal_vit.engine.optimizers import build_optimizer
from colossal_vit.model.timm_vit import build_timm_vit
from colossal_vit.parallel.collectives import all_gather_object, run_on_rank_0
from colossal_vit.rng.dropout import Dropout
from colossal_vit.run import Run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint import forget
from benchmarks.harness import Benchmark, Case, Side, Values
from benchmarks.training import return_freed_memory, seconds, start_run
from layouts import FOLDER

SCRIPT, CONFIG = FOLDER / "train_dp.py", FOLDER / "configs/config_data_parallel.py"
VALUES = {"MODEL": "vit_giant_patch14_clip_224", "OPTIMIZER": "adamw", "zero.stage": 3, "fp16": None, "COMPILE": False}
VALUES |= {"BATCH_SIZE": 1, "gradient_accumulation": 1, "DROP_RATE": 0.0, "IMG_SIZE": 224, "PATCH_SIZE": 14}
STATE = dict(
    step=1, epoch=0, images=0, global_batch=8, optimizer="AdamW", moments_step=1, scaler={}, best=None, config={}
)
SMALL = {"MODEL": "vit_tiny_patch16_224", "DEPTH": 2, "PATCH_SIZE": 16}


def private_memory() -> int:
    """Bytes of this process's memory that is neither shared nor of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Watch:
    """Seconds of a `with` block, and by how much private memory rose in it, looked at every 2 ms."""

    def __enter__(self) -> "Watch":
        dist.barrier()
        self._before = self._most = private_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        dist.barrier()
        self.seconds = time.perf_counter() - self._started
        self._ended.set()
        self._thread.join()
        self.rise = self._most - self._before

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self._most = max(self._most, private_memory())


@contextmanager
def _no_sync() -> Iterator[None]:
    sync, assembly.sync_model_param = assembly.sync_model_param, lambda *_: None
    yield
    assembly.sync_model_param = sync


def build(run: Run) -> Engine:
    """Return an engine whose rank has random pieces, and moments of a step."""
    with torch.device("meta"):
        model = build_timm_vit(run.config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))  # which takes none before it is used
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape))
        if isinstance(module, Dropout):
            module.key = torch.zeros_like(module.key, device="cpu")
    optimizer = build_optimizer(run.config, model)
    with _no_sync():  # there is nothing to send yet
        engine = assembly.initialize(model, optimizer)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for piece in pieces_of(engine.bare_model):
            piece.normal_(generator=generator)
            piece.grad = torch.randn(piece.shape, generator=generator)
            engine.optimizer.optim.step()  # of this one; gradients of all at once would be a third more
            piece.grad = None
    return engine


def state_of(engine: Engine) -> list[Tensor]:
    """Return this rank's pieces of weights and moments."""
    optimizer, pieces = engine.optimizer.optim, pieces_of(engine.bare_model)
    moments = [value for piece in pieces for value in optimizer.state[piece].values() if value.ndim]
    return [piece.detach() for piece in pieces] + moments


def digests(engine: Engine) -> list[str]:
    """Return what tells one content of the pieces from another."""
    return [hashlib.blake2b(tensor.contiguous().numpy()).hexdigest() for tensor in state_of(engine)]


def in_dtensors(engine: Engine) -> dict[str, Tensor]:
    """Return weights and moments as torch.distributed.checkpoint takes them, in the same memory."""
    found = {}
    for name, parameter in engine.bare_model.named_parameters():
        found[name] = parameter.detach()
        for key, moment in engine.optimizer.optim.state[parameter.piece].items():
            if moment.ndim:
                where = parameter.device_mesh, parameter.placements
                size = dict(shape=parameter.shape, stride=parameter.stride())
                found[f"{key}.{name}"] = DTensor.from_local(moment, *where, run_check=False, **size)
    return found


def sides(args: argparse.Namespace) -> dict[str, Side]:
    run = start_run(args, SCRIPT, CONFIG, {**VALUES, **(SMALL if args.small else {})})
    return_freed_memory()
    engine = build(run)
    own, expected = sum(tensor.nbytes for tensor in state_of(engine)), digests(engine)

    def forget_all(folder: Path) -> None:
        run_on_rank_0(lambda: forget(folder))
        for tensor in state_of(engine):
            tensor.zero_()

    def values(folder: Path, save: Watch, load: Watch, **more: float) -> Values:
        assert digests(engine) == expected
        size = run_on_rank_0(lambda: sum(file.stat().st_size for file in folder.rglob("*")))
        run_on_rank_0(lambda: shutil.rmtree(folder))
        rises = all_gather_object((save.rise, load.rise))
        return {
            "save, s": save.seconds,
            "load, s": load.seconds,
            "a rank's state, MB": own / 1e6,
            "rise while saving, MB": max(saving for saving, _ in rises) / 1e6,
            "rise while loading, MB": max(loading for _, loading in rises) / 1e6,
            **more,
            "files, MB": size / 1e6,
        }

    def ours(number: int) -> Values:
        path, found = run.output / "step-00000001", []
        with Watch() as save:
            scratch = FullTensors(engine).write(path)
        finish = run_on_rank_0(lambda: seconds(lambda: storage.finish(scratch, path, STATE)))
        forget_all(path)
        verify = run_on_rank_0(lambda: seconds(lambda: found.append(storage.Checkpoint(path))))
        with Watch() as load:
            engine.optimizer.optim.state.clear()  # as in a run that begins
            tensors.scatter_weights(engine, lambda: found[0].tensors(storage.MODEL), "", "")
            tensors.scatter_moments(engine, lambda: found[0].tensors(storage.OPTIMIZER), 1, {}, "")
        return values(path, save, load, **{"rename, in the background, s": finish, "verify, s": verify})

    def theirs(number: int) -> Values:
        folder, held = run.output / "dcp", in_dtensors(engine)
        with Watch() as save:
            dcp.save(held, checkpoint_id=folder)
        forget_all(folder)
        with Watch() as load:
            dcp.load(held, checkpoint_id=folder)
        return values(folder, save, load)

    return {"ours": ours, "torch.distributed.checkpoint": theirs}


BENCHMARK = Benchmark(lambda args: {"ViT-g/14": Case(sides, 2 if args.small else 8)}, rounds=1, compared=2)
