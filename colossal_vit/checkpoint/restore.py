"""Loads a checkpoint in any layout.

In the layout that wrote the checkpoint, a run resumes bit for bit; in another one, random number generators and the
order of DALI's images start from scratch.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from colossal_vit import config
from colossal_vit.checkpoint import run_directory, storage
from colossal_vit.checkpoint.broadcast import Distributed, from_file, load_model
from colossal_vit.checkpoint.start_from import start_from
from colossal_vit.checkpoint.state import load_random_state, parameter_slots, rank_layout
from colossal_vit.config.schema import is_default
from colossal_vit.data.identity import differences
from colossal_vit.engine.engine import Engine
from colossal_vit.engine.lamb import Lamb
from colossal_vit.engine.loop import Trainer
from colossal_vit.engine.micro_batches import MicroBatches
from colossal_vit.errors import UserError
from colossal_vit.parallel.ranks import all_gather_object, raise_on_all_ranks, run_on_rank_0
from colossal_vit.parallel.seeds import seed_ranks
from colossal_vit.run import Run
from colossalai.legacy.core import global_context as gpc

OTHER_SHAPE = "change the config back, or fit the weights with `python -m colossal_vit.checkpoint import`"


@torch.no_grad()
def _load_averages(path: Path, engine: Engine) -> None:
    """Load the moving averages of the weights; if the checkpoint has none, they start from the weights."""
    slots, averages = {slot.shard.name: slot for slot in parameter_slots(engine)}, engine.ema.averages
    engine.ema.restart()
    if run_on_rank_0(lambda: storage.readable(path / storage.EMA).exists()):
        for name, tensor in Distributed(partial(from_file, path / storage.EMA)).tensors():
            if name in slots and slots[name].owned:
                averages[slots[name].master].copy_(slots[name].shard.split(tensor))


@torch.no_grad()
def _load_moments(path: Path, engine: Engine, moments_step: int) -> None:
    """Load this rank's shards of the optimizer moments; `moments_step` is the number of updates in them."""
    slots, optimizer = {slot.shard.name: slot for slot in parameter_slots(engine)}, engine.optimizer.optim
    lamb = isinstance(optimizer, Lamb)
    for key, tensor in Distributed(partial(from_file, path / storage.OPTIMIZER)).tensors():
        moment, _, name = key.partition(".")
        if name in slots and slots[name].owned and slots[name].working.requires_grad:
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
    *("cudnn_benchmark", "cudnn_deterministic", "NUM_EPOCHS", "DATA", "checkpoint", "IMAGES_PER_S", "GLOBAL_BATCH"),
    *("zero", "machine"),
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
    if (learned or other_data) and not run.args.accept_changes:
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
    """Load `run.checkpoint` if there is one, else the weights of the block `finetune`, and prepare the run directory.

    Collective, before `Trainer.fit`.

    Until here, only the lock and DALI's index files are written to the run directory.

    Raises:
        UserError: on every rank, if the ranks' data differ, or the checkpoint is of another model or optimizer, or its
            data or config values that affect learning differ from this run's.
    """
    if not run.args.eval_only and any(data != run.data for data in all_gather_object(run.data)):
        raise UserError("the ranks read different data: DATA must be the same on all machines")
    if run.checkpoint is not None:
        _resume(run, trainer, train_dataloader, lr_scheduler)
    elif run.config.get("finetune"):
        start_from(run, trainer.engine, train_dataloader.normalization)
    storage.release()
    if not run.args.eval_only:
        made = trainer.cur_epoch * len(train_dataloader) + train_dataloader.start  # micro-steps
        last = run.config.NUM_EPOCHS * len(train_dataloader)
        if run.args.max_steps:
            last = min(last, run.args.max_steps * trainer.engine.accumulation)
        run_on_rank_0(lambda: run_directory.begin(run.output, run.checkpoint, run.config, run.log, made >= last))


def _resume(run: Run, trainer: Trainer, train_dataloader: MicroBatches, lr_scheduler: Any) -> None:
    path, engine = run.checkpoint, trainer.engine
    state = run_on_rank_0(lambda: storage.read_state(path))
    own = type(engine.optimizer.optim).__name__
    trained = state["optimizer"] is not None and not run.args.eval_only
    if trained and state["optimizer"] != own:
        raise UserError(
            f"{path}: was trained with {state['optimizer']}, but this run's optimizer is {own}: change it back, or "
            f"start from its weights alone: `python -m colossal_vit.checkpoint import`"
        )
    if trained and state["ranks"]:  # not imported from timm
        _check_continues(run, state)
    if state["step"] and not run.args.eval_only:
        engine.settle_buckets((run.config.BATCH_SIZE, 3, run.config.IMG_SIZE, run.config.IMG_SIZE))
    load_model(str(path), Distributed(partial(from_file, path / storage.MODEL)), engine, OTHER_SHAPE)
    if engine.ema:
        _load_averages(path, engine)
    if trained:
        _load_moments(path, engine, state["moments_step"])
    engine.num_steps = state["step"]
    if run.args.eval_only:
        run.log.info(f"the weights are those of {path}, step {state['step']}")
        return

    # The position in the epoch is stored in images, which does not depend on the layout.
    steps, rest = divmod(state["images"], run.layout.global_batch(run.config))
    steps_per_epoch = len(train_dataloader) // engine.accumulation
    start = min(steps, steps_per_epoch) * engine.accumulation
    ranks, rank = state["ranks"], gpc.get_global_rank()
    same = state["layout"] == rank_layout() and len(ranks) == rank_layout()["world_size"] and not rest
    if ranks:
        with raise_on_all_ranks():
            same_data = train_dataloader.seek(state["epoch"], start, ranks[rank % len(ranks)]["data"])
            if same:
                load_random_state(ranks[rank]["rng"], f"{path / storage.STATE}: ranks.{rank}.rng")
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
