"""Loads a checkpoint in any layout.

Rank 0 broadcasts one full tensor at a time, and each rank keeps its shard. In the layout that wrote the checkpoint, a
run resumes bit for bit; in another one, random number generators and the order of DALI's images start from scratch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossal_vit import config
from colossal_vit.checkpoint import run_directory, storage
from colossal_vit.checkpoint.state import load_random_state, model_buffers, parameter_slots, rank_layout
from colossal_vit.config.schema import is_default
from colossal_vit.data.identity import differences
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.engine.trainer import Trainer
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossal_vit.parallel.seeds import seed_ranks
from colossal_vit.run import Run
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context as gpc
from safetensors import safe_open
from torch import Tensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64}


class _Distributed:
    """A safetensors file that rank 0 reads and broadcasts; all methods are collective."""

    def __init__(self, path: Path):
        self.path, self.file = path, None
        self.listing: dict[str, tuple[list[int], str]] = run_on_rank_0(self._open)

    def _open(self) -> dict[str, tuple[list[int], str]]:
        self.file = safe_open(self.path, "pt")
        pieces = {name: self.file.get_slice(name) for name in sorted(self.file.keys())}
        listing = {name: (piece.get_shape(), str(piece.get_dtype())) for name, piece in pieces.items()}
        for name, (_, dtype) in listing.items():
            if dtype not in _DTYPES:
                raise UserError(f"{self.path}: {name} is of type {dtype}, which no checkpoint here has")
        return listing

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors, on the CPU, one at a time."""
        for name, (shape, dtype) in self.listing.items():
            tensor = self.file.get_tensor(name) if self.file else torch.empty(shape, dtype=_DTYPES[dtype])
            dist.broadcast(tensor, 0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
            yield name, tensor


def _check_fits(path: Path, shapes: Mapping[str, list[int]], engine: Engine) -> None:
    """Check that a checkpoint's names and shapes are those of the model.

    Raises:
        UserError: on every rank, naming the first tensor that is missing, unknown or of another shape.
    """
    needed = {slot.shard.name: slot.shard.full_shape(slot.master.shape) for slot in parameter_slots(engine)}
    needed |= {name: list(buffer.shape) for name, buffer in model_buffers(engine).items()}
    everywhere = {name for names in all_gather_object(list(needed)) for name in names}
    with raise_on_all_ranks():
        for name, shape in needed.items():
            if name not in shapes:
                raise UserError(f"{path}: has no {name}, which this model needs: it is of another model")
            if shapes[name] != shape:
                raise UserError(
                    f"{path}: {name} is of shape {tuple(shapes[name])}, but this model's is {tuple(shape)}: change "
                    f"the config back, or fit the weights with `python -m colossal_vit.checkpoint import`"
                )
        for name in sorted(shapes.keys() - everywhere):
            raise UserError(f"{path}: has {name}, which this model lacks: it is of another model")


@torch.no_grad()
def _load_model(path: Path, engine: Engine) -> None:
    """Load this rank's part of the model, and the optimizer's master weights, from a checkpoint."""
    slots, buffers = {slot.shard.name: slot for slot in parameter_slots(engine)}, model_buffers(engine)
    file = _Distributed(path / storage.MODEL)
    _check_fits(path, {name: list(shape) for name, (shape, _) in file.listing.items()}, engine)
    for name, tensor in file.tensors():
        if name in buffers:
            buffers[name].copy_(tensor)
        elif name in slots:  # else another stage has it
            slots[name].master.copy_(slots[name].shard.split(tensor))
            slots[name].working.copy_(slots[name].master)


@torch.no_grad()
def _load_averages(path: Path, engine: Engine) -> None:
    """Load the moving averages of the weights; if the checkpoint has none, they start from the weights."""
    slots, averages = {slot.shard.name: slot for slot in parameter_slots(engine)}, engine.ema.averages
    for slot in slots.values():
        averages[slot.master].copy_(slot.master)
    if run_on_rank_0((path / storage.EMA).exists):
        for name, tensor in _Distributed(path / storage.EMA).tensors():
            if name in slots:
                averages[slots[name].master].copy_(slots[name].shard.split(tensor))


@torch.no_grad()
def _load_moments(path: Path, engine: Engine, moments_step: int) -> None:
    """Load this rank's shards of the optimizer moments; `moments_step` is the number of updates in them."""
    slots, optimizer = {slot.shard.name: slot for slot in parameter_slots(engine)}, engine.optimizer.optim
    lamb = isinstance(optimizer, Lamb)
    for key, tensor in _Distributed(path / storage.OPTIMIZER).tensors():
        moment, _, name = key.partition(".")
        if name in slots:
            master, shard = slots[name].master, slots[name].shard
            if list(tensor.shape) != shard.full_shape(master.shape):
                raise UserError(f"{path}: {key} is of shape {tuple(tensor.shape)}, which is not its parameter's")
            piece = shard.split(tensor)
            # PyTorch's optimizers need moments in the parameter's type; Lamb keeps fp32 ones, and saved them so.
            dtype = piece.dtype if lamb else master.dtype
            optimizer.state[master][moment] = piece.to(master.device, dtype, copy=True).contiguous()
            # PyTorch keeps the step count on the host, except for its fused kernels.
            device = master.device if optimizer.defaults.get("fused") else None
            count = moments_step if lamb else torch.tensor(float(moments_step), device=device)
            optimizer.state[master]["step"] = count


# Keys that may change between runs: layout, length, files. They change what is learned by rounding at most, as long as
# the global batch, which is compared separately, stays the same.
FREE_KEYS = {
    *("parallel", "model", "NUM_CHUNKS", "NUM_MICRO_BATCHES", "TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_MODE"),
    *("TENSOR_SHAPE", "SEQ_LENGTH", "BATCH_SIZE", "gradient_accumulation", "CHECKPOINT", "COMPILE", "torch_ddp"),
    *("cudnn_benchmark", "cudnn_deterministic", "NUM_EPOCHS", "DATA", "checkpoint", "IMAGES_PER_S"),
}


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values that differ between two plain configs: key -> [before, after]."""
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    # A new key at its default is no change.
    known = [key for key in keys if key in old or not is_default(key, new[key])]
    return {key: [old.get(key), new.get(key)] for key in known}


def _format_changes(changes: Mapping[str, list[Any]]) -> str:
    return ", ".join(f"{key} {before} → {after}" for key, (before, after) in changes.items())


def _check_continues(run: Run, state: Mapping[str, Any]) -> None:
    """Check that the data, and the config values that affect learning, are those of the checkpoint.

    Changes that `--accept-changes` allows are appended to `run.changes`.

    Raises:
        UserError: naming what differs.
    """
    changes = changed_values(state["config"], config.plain(run.config))
    learned = {key: change for key, change in changes.items() if key not in FREE_KEYS}
    global_batch = run.layout.global_batch(run.config)
    if state["global_batch"] != global_batch:
        learned["global batch"] = [state["global_batch"], global_batch]
    other_data = differences(state.get("data") or run.data or {}, run.data or {})
    run.changes = state.get("changes", [])
    if (learned or other_data) and not run.accept_changes:
        said = [f"other data ({other_data})"] if other_data else []
        said += [f"other values ({_format_changes(learned)})"] if learned else []
        raise UserError(
            f"{run.checkpoint}: was trained with {' and '.join(said)}: change that back, give another --output, or "
            f"resume it as it is with --accept-changes"
        )
    if learned or other_data:
        run.changes = [*run.changes, {"step": state["step"], "values": learned, "data": other_data}]
    said = [_format_changes(changes)] if changes else []
    said += [f"data ({other_data})"] if other_data else []
    if said:
        run.log.info(f"changed since then: {', '.join(said)}")


def resume(run: Run, trainer: Trainer, train_dataloader: MicroBatches, lr_scheduler: Any) -> None:
    """Load `run.checkpoint`, if there is one, and prepare the run directory. Collective, before `Trainer.fit`.

    Until here, only the lock and DALI's index files are written to the run directory.

    Raises:
        UserError: on every rank, if the ranks' data differ, or the checkpoint is of another model or optimizer, or its
            data or config values that affect learning differ from this run's.
    """
    if not run.eval_only and any(data != run.data for data in all_gather_object(run.data)):
        raise UserError("the ranks read different data: DATA must be the same on all machines")
    if run.checkpoint is not None:
        _resume(run, trainer, train_dataloader, lr_scheduler)
    if not run.eval_only:
        run_on_rank_0(lambda: run_directory.begin(run.output, run.checkpoint, run.config, run.log))


def _resume(run: Run, trainer: Trainer, train_dataloader: MicroBatches, lr_scheduler: Any) -> None:
    path, engine = run.checkpoint, trainer.engine
    state = run_on_rank_0(lambda: storage.read_state(path))
    own = type(engine.optimizer.optim).__name__
    trained = state["optimizer"] is not None and not run.eval_only
    if trained and state["optimizer"] != own:
        raise UserError(
            f"{path}: was trained with {state['optimizer']}, but this run's optimizer is {own}: change it back, or "
            f"start from its weights alone: `python -m colossal_vit.checkpoint import`"
        )
    if trained and state["ranks"]:  # not imported from timm
        _check_continues(run, state)
    if state["step"] and not run.eval_only:
        engine.settle_buckets((run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE))
    _load_model(path, engine)
    if engine.ema:
        _load_averages(path, engine)
    if trained:
        _load_moments(path, engine, state["moments_step"])
    engine.num_steps = state["step"]
    if run.eval_only:
        run.log.info(f"the weights are those of {path}, step {state['step']}")
        return

    # The position in the epoch is stored in images, which does not depend on the layout.
    steps, rest = divmod(state["images"], run.layout.global_batch(run.config))
    steps_per_epoch = len(train_dataloader) // engine.accumulation
    start = min(steps, steps_per_epoch) * engine.accumulation
    rank, same = gpc.get_global_rank(), state["layout"] == rank_layout() and not rest
    ranks = state["ranks"]
    if ranks:
        same_data = train_dataloader.seek(state["epoch"], start, ranks[rank % len(ranks)]["data"])
        if same:
            load_random_state(ranks[rank]["rng"])
        else:
            seed_ranks(run.config.SEED + state["step"])
        same = all(all_gather_object(same and same_data))
    trainer.cur_epoch, run.best = state["epoch"], state["best"]
    engine.optimizer.load_scaler_state(state["scaler"])
    _set_scheduler_step(lr_scheduler, state["epoch"] * steps_per_epoch + min(steps, steps_per_epoch))
    run.log.info(f"resuming from {path}: step {state['step']}, epoch {state['epoch']}, image {state['images']} of it")
    if ranks and not same:
        run.log.info(
            "the layout or the batches are others than before: random numbers (dropout, DALI's order) are new ones"
        )


def _set_scheduler_step(lr_scheduler: Any, steps: int) -> None:
    """Set a scheduler that computes its rates from its step to step `steps`, with the rates of this run's config."""
    if steps:
        lr_scheduler.load_state_dict({**lr_scheduler.state_dict(), "last_epoch": steps - 1, "_step_count": steps + 1})
        lr_scheduler.step()
